"""`dense`: a boolean tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.errors import MaskError
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Boxes, Lines, Points, grid
from tilefold.masks.intervals import Spans, spans

from ._checks import a_tensor
from ._tables import shared

# Elements looked at in one go while a dense mask is searched for intervals or classified.
_CHUNK = 2**22


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    t: Tensor

    def _arguments(self) -> Arguments:
        return (("", self.t),)

    @property
    def _table(self) -> Tensor:
        """The tensor with four dimensions."""
        return self.t[(None,) * (4 - self.t.dim())] if self.t.dim() < 4 else self.t

    def visible(self, p: Points) -> Tensor:
        table = self._table
        at, valid = [], None
        for size, index, guarded in zip(
            table.shape, (p.b, p.h, p.i, p.j), (False, False, True, True), strict=True
        ):
            if size == 1:
                at.append(0)
            elif guarded:
                # Inside `documents` a document may be longer than the table: what lies outside is hidden.
                within = (index >= 0) & (index < size)
                valid = within if valid is None else valid & within
                at.append(index.clamp(0, max(size - 1, 0)))
            else:
                at.append(index)
        if table.numel() == 0:
            return torch.zeros((), dtype=torch.bool, device=table.device)
        seen = table[tuple(at)]
        return seen if valid is None else seen & valid

    def row_spans(self, lines: Lines) -> Spans | None:
        return self._spans(self._table, lines, lines.k_length)

    def col_spans(self, lines: Lines) -> Spans | None:
        return self._spans(self._table.transpose(-1, -2), lines, lines.q_length)

    def _spans(self, table: Tensor, lines: Lines, across: int | Tensor) -> Spans | None:
        """Intervals along the last dimension of `table`, whose third one runs along the lines."""
        if table.numel() == 0:
            return spans(like=lines.at)
        bounds = _intervals(table)
        if bounds is None:
            return None
        B, H, n, _, _ = bounds.shape
        at = lines.at.clamp(0, n - 1)
        found = bounds[shared(lines.b, B), shared(lines.h, H), at]
        outside = torch.zeros_like(lines.at, dtype=torch.bool) if n == 1 else (lines.at < 0) | (lines.at >= n)
        pairs = []
        for start, end in zip(found[..., 0].unbind(-1), found[..., 1].unbind(-1), strict=True):
            # One shared position stands for all positions there are.
            end = end * across if table.shape[-1] == 1 else end
            pairs.append((start, torch.where(outside, 0, end)))
        return spans(*pairs, like=lines.at)

    def tiles(self, boxes: Boxes) -> Tensor:
        return torch.ones((1, 1, 1, 1), dtype=torch.int8, device=boxes.q0.device)

    def states(self, B: int, H: int, Lq: int, Lk: int, size: int, device: torch.device) -> Tensor:
        table = self._table
        nq, nk = -(-Lq // size), -(-Lk // size)
        if table.numel() == 0 or nq == 0 or nk == 0:
            return self.tiles(grid(B, H, Lq, Lk, size, device))
        some = _per_tile(table, size, any_of=True)
        every = _per_tile(table, size, any_of=False)
        return some.to(torch.int8) + every.to(torch.int8)

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        super().check(B, Hq, Lq, Lk, device)
        names = ("B", "Hq", "Lq", "Lk")
        wanted = (B, Hq, Lq, Lk)
        for name, size, want in zip(names, self._table.shape, wanted, strict=True):
            if want is not None and size != 1 and size != want:
                raise MaskError(
                    f"t of dense: expected a shape that broadcasts to [B, Hq, Lq, Lk] = {list(wanted)}, "
                    f"got {list(self.t.shape)}, which does not fit {name}"
                )


def _intervals(table: Tensor) -> Tensor | None:
    """int64 `[B, H, N, n, 2]`: the visible intervals of each line of a bool `[B, H, N, M]`, or None if some
    line has more than two.

    Reads the device once per chunk of lines, and stops at the first chunk that has too many.
    """
    B, H, N, M = table.shape
    step = max(1, _CHUNK // max(1, B * H * M))
    found = []
    for first in range(0, N, step):
        part = table[:, :, first : first + step]
        edges = torch.zeros((*part.shape[:-1], M + 1), dtype=torch.uint8, device=table.device)
        edges[..., 0] = part[..., 0]
        edges[..., M] = part[..., M - 1]
        edges[..., 1:M] = part[..., 1:] != part[..., :-1]
        count = edges.sum(-1, dtype=torch.int32)
        if int(count.amax()) > 4:
            return None
        # The edges of all lines in order; an edge's rank in its line is its rank overall less the edges of
        # earlier lines.
        before = count.flatten().cumsum(0) - count.flatten()
        edge = edges.flatten().nonzero().squeeze(-1)
        line, at = edge // (M + 1), edge % (M + 1)
        rank = torch.arange(edge.shape[0], device=table.device) - before[line]
        flips = torch.zeros((count.numel(), 4), dtype=torch.int64, device=table.device)
        flips[line, rank] = at
        found.append(flips.view(*count.shape, 2, 2))
    return torch.cat(found, dim=2)


def _per_tile(table: Tensor, size: int, any_of: bool) -> Tensor:
    """bool: any or all of each tile; a dimension of 1 stays 1."""
    reduce = torch.any if any_of else torch.all
    rows = _reduced(table, size, any_of)
    columns = rows.transpose(-1, -2)
    if table.shape[-2] == 1:
        return rows
    spare = -columns.shape[-1] % size
    columns = torch.nn.functional.pad(columns, (0, spare), value=not any_of)
    return reduce(columns.unflatten(-1, (-1, size)), dim=-1).transpose(-1, -2)


def _reduced(table: Tensor, size: int, any_of: bool) -> Tensor:
    """bool `[..., ceil(M / size)]` of `[..., M]`; M = 1 stays."""
    M = table.shape[-1]
    if M == 1:
        return table
    reduce = torch.any if any_of else torch.all
    whole = M // size * size
    parts = [reduce(table[..., :whole].unflatten(-1, (-1, size)), dim=-1)] if whole else []
    if whole < M:
        parts.append(reduce(table[..., whole:], dim=-1, keepdim=True))
    return torch.cat(parts, dim=-1)


def dense(t: Tensor) -> Mask:
    """A query sees what a boolean tensor shows: True = visible.

    Args:
        t: bool, broadcastable to `[B, Hq, Lq, Lk]`. Integer and floating-point tensors are refused: a 0/1
            mask wants `t.bool()`, an additive one is a bias.

    Raises:
        ArgumentTypeError: not a tensor.
        MaskError: another dtype, or more than four dimensions.
    """
    expected = "a bool mask broadcastable to [B, Hq, Lq, Lk]"
    return Dense(a_tensor("t", t, expected, (torch.bool,), (0, 1, 2, 3, 4)))
