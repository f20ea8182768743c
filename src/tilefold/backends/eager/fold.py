"""The tiled fold in PyTorch: every option, every mask, any device, O(N) extra memory.

Query stripes outside, key tiles inside, un-normalised accumulator, one lse out (FlashAttention-2, Dao 2023,
algorithms 1 and 2). The
backward recomputes each tile's probabilities from the saved lse. Empty tiles are never visited, full tiles
run no mask code. Masked
scores are selected away, so NaN or inf behind the mask changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.cost.tiles import EMPTY, FULL
from tilefold.planning.backend import Gradients, Work
from tilefold.planning.tuned import look_up
from tilefold.problem import Problem
from tilefold.scores import Places, bias_tile
from tilefold.select import Selected, finite


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of the score matrix; `mixed` means that its mask has to be applied."""

    rows: slice
    keys: slice
    mixed: bool


class _Fold:
    """One call's tensors, split into tiles, with the score of a tile."""

    def __init__(self, work: Work) -> None:
        problem, scores = work.problem, work.scores
        self.work, self.problem, self.scores = work, problem, scores
        self.dtype = problem.accumulator
        self.device = work.q.device
        self.group = problem.group
        options = problem.options
        self.places = (
            Places.of(problem, work.tables, self.device) if {"alibi", "dropout"} & set(options) else None
        )
        self.block = block_of(problem)

    def stripes(self) -> Iterator[tuple[slice, list[Tile]]]:
        """Query stripes, each with the tiles that anybody in it sees."""
        rows, keys, block = self.problem.q_length, self.problem.k_length, self.block
        states = self.work.form.tile_states(rows, keys, block, block, self.device)
        low, high = (x.tolist() for x in (states.amin((0, 1)), states.amax((0, 1))))
        for m, r in enumerate(range(0, rows, block)):
            stripe = slice(r, min(r + block, rows))
            tiles = [
                Tile(stripe, slice(c, min(c + block, keys)), mixed=low[m][n] != FULL)
                for n, c in enumerate(range(0, keys, block))
                if high[m][n] != EMPTY
            ]
            yield stripe, tiles

    def visible(self, tile: Tile) -> Tensor | None:
        """The tile's mask `[1 or B, 1 or Hq, rows, keys]`, or None where all of it is visible."""
        if not tile.mixed:
            return None
        r, c, p = tile.rows, tile.keys, self.problem
        return self.work.form.tile(r.start, r.stop, c.start, c.stop, p.q_length, p.k_length, self.device)

    def raw(self, tile: Tile) -> Tensor:
        """`scale * q.k` of a tile, `[B, Hq, rows, keys]`; grouped heads share their keys without repeating
        them.
        """
        return self.times_keys(self.work.q[:, :, tile.rows], self.work.k[:, :, tile.keys]) * self.scores.scale

    def times_keys(self, rows: Tensor, keys: Tensor) -> Tensor:
        """`[B, Hq, r, X] x [B, Hk, c, X] -> [B, Hq, r, c]`."""
        product = self.pack(rows.to(self.dtype)) @ keys.to(self.dtype).transpose(-1, -2)
        return self.unpack(product)

    def pack(self, x: Tensor) -> Tensor:
        """`[B, Hq, r, X] -> [B, Hk, G * r, X]`: the rows of a group's query heads under one another."""
        return x if self.group == 1 else x.unflatten(1, (-1, self.group)).flatten(2, 3)

    def unpack(self, x: Tensor) -> Tensor:
        """`[B, Hk, G * r, X] -> [B, Hq, r, X]`."""
        return x if self.group == 1 else x.unflatten(2, (self.group, -1)).flatten(1, 2)

    def score(self, raw: Tensor, tile: Tile) -> Tensor:
        """The score before the mask, from `scale * q.k`."""
        scores, s = self.scores, raw
        if scores.softcap is not None:
            s = scores.softcap * torch.tanh(s / scores.softcap)
        if scores.alibi_slopes is not None:
            assert self.places is not None
            slopes = self.places.slopes(scores.alibi_slopes, tile.rows, self.dtype)
            s = s - slopes * self.places.distance(tile.rows, tile.keys)
        if scores.bias is not None:
            s = s + bias_tile(scores.bias, tile.rows, tile.keys).to(self.dtype)
        return s

    def kept(self, tile: Tile) -> Tensor | None:
        """Which probabilities survive dropout, or None without dropout."""
        if self.scores.dropout_p == 0.0:
            return None
        assert self.places is not None
        return self.places.kept(self.scores, tile.rows, tile.keys)

    def drop(self, p: Tensor, kept: Tensor | None) -> Tensor:
        """Probabilities (or their gradients) after dropout."""
        return p if kept is None else torch.where(kept, p / (1.0 - self.scores.dropout_p), 0.0)


def block_of(problem: Problem) -> int:
    """Rows and keys of a tile: a power of two from 16 to 1024 that keeps its elements, over all batch
    elements and heads, within the budget of the tuned table. So the extra memory is bounded too.
    """
    pairs, budget = max(problem.batch * problem.q_heads, 1), look_up("fold_tile_elements", problem.device)
    block = 1024
    while block > 16 and pairs * block * block > budget:
        block //= 2
    return block


def forward(work: Work) -> tuple[Tensor, Tensor]:
    """`(out [B, Hq, Lq, Dv], lse [B, Hq, Lq])`; out with its heads outside or inside its rows as q has them,
    lse in memory order B, Lq, Hq.
    """
    fold, p = _Fold(work), work.problem
    if work.q.stride(1) >= work.q.stride(2):
        out = work.q.new_zeros(p.batch, p.q_heads, p.q_length, p.v_head_dim)
    else:
        out = work.q.new_zeros(p.batch, p.q_length, p.q_heads, p.v_head_dim).transpose(1, 2)
    lse = work.q.new_full((p.batch, p.q_length, p.q_heads), -torch.inf, dtype=fold.dtype).transpose(1, 2)
    if 0 in (p.batch, p.q_heads, p.q_length):
        return out, lse
    values = finite(work.v)
    for rows, tiles in fold.stripes():
        _stripe_forward(fold, rows, tiles, values, out, lse)
    return out, lse


def _stripe_forward(
    fold: _Fold, rows: slice, tiles: list[Tile], values: Selected, out: Tensor, lse: Tensor
) -> None:
    shape = (fold.problem.batch, fold.problem.q_heads, rows.stop - rows.start, 1)
    sink = fold.scores.sink
    m_i = out.new_full(shape, -torch.inf, dtype=fold.dtype)
    if sink is not None:
        m_i = sink.to(fold.dtype)[None, :, None, None].expand(shape)
    l_i = (m_i > -torch.inf).to(fold.dtype) if sink is not None else torch.zeros_like(m_i)
    acc = out.new_zeros((*shape[:3], fold.problem.v_head_dim), dtype=fold.dtype)
    for tile in tiles:
        s = fold.score(fold.raw(tile), tile)
        visible = fold.visible(tile)
        s = s if visible is None else torch.where(visible, s, -torch.inf)
        m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))
        reference = torch.where(m_new == -torch.inf, 0.0, m_new)
        p = torch.exp(s - reference)
        alpha = torch.exp(m_i - reference)
        l_i = l_i * alpha + p.sum(-1, keepdim=True)
        weights = fold.drop(p, fold.kept(tile))
        acc = acc * alpha + fold.unpack(
            values.weighted(fold.pack(weights), tile.keys, _packed(fold, visible, p), fold.dtype)
        )
        m_i = m_new
    alive = l_i != 0
    out[:, :, rows] = torch.where(alive, acc / torch.where(alive, l_i, 1.0), 0.0).to(out.dtype)
    lse[:, :, rows] = torch.where(alive, m_i + torch.log(torch.where(alive, l_i, 1.0)), -torch.inf)[..., 0]


def _packed(fold: _Fold, visible: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask of a tile beside packed rows; only `Selected` tensors with non-finite entries read it."""
    return None if visible is None else fold.pack(visible.expand(like.shape))


def backward(
    work: Work, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
) -> Gradients:
    """Gradients of the arguments marked by `needs` (q, k, v, bias, sink, alibi_slopes), under the global
    `out` and `lse`.
    """
    fold = _Fold(work)
    sums = _Sums(fold, needs)
    if 0 not in (work.problem.batch, work.problem.q_heads, work.problem.q_length):
        for rows, tiles in fold.stripes():
            _stripe_backward(fold, rows, tiles, sums, dout, dlse, out, lse)
    return sums.gradients(work)


class _Sums:
    """The gradients while they accumulate, in the accumulator's dtype; None where none is needed."""

    def __init__(self, fold: _Fold, needs: tuple[bool, ...]) -> None:
        work, scores = fold.work, fold.scores
        arguments = (work.q, work.k, work.v, scores.bias, scores.sink, scores.alibi_slopes)
        self.q, self.k, self.v, self.bias, self.sink, self.slopes = (
            _blank(x, fold.dtype, by_row=index < 3) if need and x is not None else None
            for index, (x, need) in enumerate(zip(arguments, needs, strict=True))
        )
        self.any_score = any(x is not None for x in (self.q, self.k, self.bias, self.slopes))
        self.queries, self.keys = finite(work.q), finite(work.k)

    def gradients(self, work: Work) -> Gradients:
        """The sums in the dtypes and layouts of their arguments."""
        scores = work.scores
        pairs = (
            (self.q, work.q),
            (self.k, work.k),
            (self.v, work.v),
            (self.bias, scores.bias),
            (self.sink, scores.sink),
        )
        pairs = (*pairs, (self.slopes, scores.alibi_slopes))
        return Gradients(*(None if total is None else total.to(like.dtype) for total, like in pairs))


def _blank(like: Tensor, dtype: torch.dtype, by_row: bool) -> Tensor:
    """Zeros in the shape of `like`; `[B, H, L, D]` in memory order B, L, H, which is that of the results."""
    if not by_row:
        return torch.zeros(like.shape, dtype=dtype, device=like.device)
    B, H, L, D = like.shape
    return torch.zeros(B, L, H, D, dtype=dtype, device=like.device).transpose(1, 2)


def _stripe_backward(
    fold: _Fold,
    rows: slice,
    tiles: list[Tile],
    sums: _Sums,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    alive = lse[:, :, rows, None] != -torch.inf
    # Rows that see nothing take no part: whatever stands in their upstream gradient must not reach a sum.
    do = torch.where(alive, dout[:, :, rows].to(fold.dtype), 0.0)
    delta = (do * out[:, :, rows].to(fold.dtype)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - torch.where(alive, dlse[:, :, rows, None].to(fold.dtype), 0.0)
    reference = torch.where(alive, lse[:, :, rows, None].to(fold.dtype), 0.0)
    if sums.sink is not None:
        sink = fold.scores.sink.to(fold.dtype)[None, :, None, None]
        sums.sink -= torch.where(alive, torch.exp(sink - reference) * delta, 0.0).sum((0, 2, 3))
    upstream = finite(do)
    for tile in tiles:
        visible = fold.visible(tile)
        _tile_backward(fold, tile, sums, visible, alive, do, upstream, delta, reference)


def _tile_backward(
    fold: _Fold,
    tile: Tile,
    sums: _Sums,
    visible: Tensor | None,
    alive: Tensor,
    do: Tensor,
    upstream: Selected,
    delta: Tensor,
    reference: Tensor,
) -> None:
    """One tile's share of every sum: dV = P^T dO, dS = P * (dP - delta), dQ = dS K, dK = dS^T Q."""
    selected = alive if visible is None else alive & visible
    raw = fold.raw(tile)
    p = torch.where(selected, torch.exp(fold.score(raw, tile) - reference), 0.0)
    kept = fold.kept(tile)
    seen = fold.pack(selected.expand(p.shape))
    if sums.v is not None:
        weights = fold.pack(fold.drop(p, kept))
        sums.v[:, :, tile.keys] += upstream.map(fold.pack).gathered(weights, seen)
    if not sums.any_score:
        return
    dp = fold.drop(fold.times_keys(do, fold.work.v[:, :, tile.keys]), kept)
    ds = torch.where(selected, p * (dp - delta), 0.0)
    if sums.bias is not None:
        part = bias_tile(sums.bias, tile.rows, tile.keys)
        part += ds.sum_to_size(part.shape)
    if sums.slopes is not None:
        assert fold.places is not None
        per_row = -(ds * fold.places.distance(tile.rows, tile.keys)).sum(-1)
        sums.slopes += fold.places.collect_slopes(per_row, tile.rows, sums.slopes)
    if fold.scores.softcap is not None:
        ds = torch.where(selected, ds * (1.0 - torch.tanh(raw / fold.scores.softcap).square()), 0.0)
    ds = fold.pack(ds * fold.scores.scale)
    if sums.q is not None:
        sums.q[:, :, tile.rows] += fold.unpack(sums.keys.weighted(ds, tile.keys, seen, fold.dtype))
    if sums.k is not None:
        queries = sums.queries.map(lambda x: fold.pack(x[:, :, tile.rows].to(fold.dtype)))
        sums.k[:, :, tile.keys] += queries.gathered(ds, seen)
