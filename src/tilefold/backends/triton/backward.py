"""Backward: FlashAttention-2's scheme (Dao 2023, algorithm 2) in Triton, without atomic operations.

`delta = rowsum(dO * O) - dlse` first (`delta.py`), then dQ (`queries.py`), then dK and dV (`keys.py`), then
what is left of the gradient of a bias (`bias.py`). Probabilities are recomputed from the saved lse. Every sum
is taken in a fixed order, so all gradients are bit-stable. NaN behind the mask is treated as in the forward
pass.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.masks.band import Band
from tilefold.planning.backend import Gradients, Work
from tilefold.problem import Problem
from tilefold.scores import Places

from . import delta
from .arguments import (
    Kept,
    MaskArguments,
    chains,
    dense_rows,
    in_units,
    of_mask,
    of_scores,
    place_in_chain,
    rows_of,
    span_of,
    traits,
    unit_of_bias,
)
from .bias import bias_gradient, way_of
from .kernel import Launch
from .keys import keys_kernel
from .lists import Split, lists_of
from .parts import join, room
from .queries import queries_kernel
from .sizes import kind_of, needed, sizes_of
from .variant import PER_KEY, PER_ROW, PER_SCORE, Variant


def backward(
    work: Work, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
) -> Gradients:
    """Gradients of the arguments that `needs` marks, under the global `out` and `lse`."""
    p, scores = work.problem, work.scores
    wanted = [
        need and x is not None
        for need, x in zip(needs[3:], (scores.bias, scores.sink, scores.alibi_slopes), strict=True)
    ]
    way = way_of(scores.bias, p) if wanted[0] else 0
    dout, out, lse = dout.to(work.q.dtype), out.to(work.q.dtype), lse.to(torch.float32)
    call = _Call(work, dense_rows(dout))
    shared = call.work.scores
    sink = delta.fill(call.deltas, call.logs, call.work, call.dout, dense_rows(out), lse, dlse, wanted[1])
    dq = dk = dv = dbias = dslopes = None
    if needs[0] or wanted[2] or way in (PER_ROW, PER_SCORE):
        dq, dbias, dslopes = call.queries(way, wanted[2])
    if needs[1] or needs[2] or way == PER_KEY:
        dk, dv, sums = call.keys(way, needs[1] or way == PER_KEY, needs[2])
        dbias = sums if way == PER_KEY else dbias
    if wanted[0] and way == 0:
        dbias = bias_gradient(call.work, call.dout, call.logs, call.deltas, call.scores, call.follows)
    elif dbias is not None and shared.bias is not None:
        dbias = dbias.sum_to_size((1,) * (4 - shared.bias.dim()) + tuple(shared.bias.shape))
        dbias = dbias.reshape(shared.bias.shape).to(shared.bias.dtype)
    three = (x if need else None for x, need in zip((dq, dk, dv), needs, strict=False))
    return Gradients(*three, bias=dbias, sink=sink, alibi_slopes=dslopes)


#: Of a bias: one beyond those that the pipeline of three stages has loaded or is loading.
_TILES_AHEAD = 3


class _Made(NamedTuple):
    """What one kernel of one kind of call needs of the host, worked out once."""

    launch: Launch
    programs: int
    shape: list[Any]
    mask: MaskArguments
    split: Split | None


def _make(work: Work, kernel: str, more: Any) -> _Made:
    """The kernel "keys", "dk", "dv" or "queries"; `more` are further traits."""
    p, form, by_key = work.problem, work.form, kernel != "queries"
    sizes, lists = needed(kernel, p, kind_of(p, form)), None
    if form.kind != "band":
        # Sums that lines write themselves are not put together from parts, nor tables that differ in a group.
        sums = dict(more).get("BIAS_GRADIENT", 0) in (PER_ROW, PER_KEY) or dict(more).get("SLOPE_GRADIENT")
        mixed = by_key and p.group > 1 and form.tensors()[0].shape[1] > 1
        lists = lists_of(
            form, p.q_length, p.k_length, sizes.rows, sizes.keys, by_key, may_split=not (sums or mixed)
        )
    split = None if lists is None else lists.split
    C = Variant(
        **sizes.constants(p),
        SPLIT=0 if split is None else split.size,
        OUT_UNIT=_out_unit(p),
        AHEAD=_ahead(work, dict(more).get("BIAS_GRADIENT", 0)),
        **traits(work),
        **dict(more),
    )
    lines = -(-p.k_length // sizes.keys) if by_key else -(-p.q_length // sizes.rows)
    lines = lines if lists is None else lists.programs
    pairs = p.batch * (p.k_heads if by_key else p.q_heads)
    # Lines with most work first: the last rows of a causal mask, or its first keys.
    reverse = form.kind == "band" and (form.hi is None if by_key else form.hi is not None)
    shape = [
        p.q_heads, max(p.group, 1), pairs, p.q_length, p.k_length, lines, span_of(work, by_key),
        int(reverse),
    ]  # fmt: skip
    function = keys_kernel if by_key else queries_kernel
    launch = Launch(function, C, sizes.warps, sizes.registers)
    made = _Made(launch, lines * pairs, shape, of_mask(form, lists), split)
    if lists is not None and chains(work.q.device):
        _settle(work.q.device)
    return made


def _ahead(work: Work, gradient: int) -> int:
    """`Variant.AHEAD`: where dS goes to memory beside the bias that comes from there, both wait for it. Wider
    heads work long enough on a tile, and nobody has measured other dtypes.
    """
    p, bias = work.problem, work.scores.bias
    if gradient != PER_SCORE or bias is None or not chains(work.q.device):
        return 0
    narrow = max(p.head_dim, p.v_head_dim) <= 64 and bias.dtype.itemsize == p.dtype.itemsize == 2
    return _TILES_AHEAD if narrow and unit_of_bias(bias) == 8 else 0


@functools.cache
def _nothing(device: torch.device) -> Tensor:
    """One element, for `_settle`."""
    return torch.zeros(1, device=device)


def _settle(device: torch.device) -> None:
    """Order what was written on this stream before what comes: a kernel that does not wait for the one ahead
    (`variant.BESIDE`) must find its lists in memory. A launch without that attribute begins when all before
    is done.
    """
    _nothing(device).zero_()


_kept = Kept(_make)


def _out_unit(p: Problem) -> int:
    return 8 if p.head_dim % 8 == 0 and p.v_head_dim % 8 == 0 else 1


class _Call:
    """One backward pass: its tensors, and a method per kernel."""

    def __init__(self, work: Work, dout: Tensor) -> None:
        q, *q_strides = rows_of(work.q)
        k, *k_strides = rows_of(work.k)
        v, *v_strides = rows_of(work.v)
        self.work = Work(work.problem, q, k, v, work.form, work.scores, work.tables)
        self.dout = dout
        p = work.problem
        unit = 16 // q.element_size()
        self.inputs = [*q_strides, *k_strides, *v_strides, *in_units(dout, unit)]
        self.scores = of_scores(self.work)
        self.deltas = torch.empty((p.batch, p.q_heads, p.q_length), dtype=torch.float32, device=q.device)
        self.logs = torch.empty_like(self.deltas)
        #: Whether the last thing done on the stream is a kernel of this pass, which no copy of data followed.
        self.follows = False

    def keys(
        self, way: int, want_k: bool, want_v: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dk, dv, and the sums of dS over rows `[B, Hq, 1, Lk]` if they are the gradient of the bias."""
        w, p = self.work, self.work.problem
        dk, dv = (
            w.q.new_empty(p.batch, p.k_length, p.k_heads, size).transpose(1, 2) if wanted else None
            for size, wanted in ((p.head_dim, want_k), (p.v_head_dim, want_v))
        )
        sums = self.deltas.new_empty(p.batch, p.q_heads, 1, p.k_length) if way == PER_KEY else None
        if want_k and want_v and sizes_of("keys", p, kind_of(p, w.form)) is not None:
            self._keys("keys", dk, dv, sums)
        else:
            # Wide heads leave no registers for two accumulators: then dk and dv take a kernel each.
            if dk is not None:
                self._keys("dk", dk, None, sums)
            if dv is not None:
                self._keys("dv", None, dv, None)
        return dk, dv, sums

    def _keys(self, kernel: str, dk: Tensor | None, dv: Tensor | None, sums: Tensor | None) -> None:
        w, unit = self.work, _out_unit(self.work.problem)
        more = (
            ("BIAS_GRADIENT", 0 if sums is None else PER_KEY), ("WANT_K", dk is not None),
            ("WANT_V", dv is not None), ("CHAIN", place_in_chain(w.q.device, self.follows)),
        )  # fmt: skip
        made: _Made = _kept.get(w, kernel, more)
        split, own, p = made.split, made.launch.variant.BN, w.problem
        dk_parts, dv_parts = (
            None if x is None else room(split, p.batch * p.k_heads, own, x.shape[-1], w.q) for x in (dk, dv)
        )
        arguments = [
            w.q, w.k, w.v, self.dout, self.logs, self.deltas, dk, dv, sums,
            dk_parts, dv_parts, split.slots if split else 0,
            *self.inputs,
            *((0, 0, 0) if dk is None else in_units(dk, unit)),
            *((0, 0, 0) if dv is None else in_units(dv, unit)), *made.shape, *made.mask, *self.scores,
        ]  # fmt: skip
        made.launch(made.programs, arguments, w.q.device)
        for parts, x in ((dk_parts, dk), (dv_parts, dv)):
            join(split, made.mask, parts, x, unit, group=max(p.group, 1))
        self.follows = split is None and made.programs > 0

    def queries(self, way: int, slopes_wanted: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dq, what of the gradient of the bias comes by rows or scores, and the gradient of the slopes."""
        w, p, scores = self.work, self.work.problem, self.work.scores
        dq = w.q.new_empty(p.batch, p.q_length, p.q_heads, p.head_dim).transpose(1, 2)
        way = 0 if way == PER_KEY else way
        slope_sums = torch.empty_like(self.deltas) if slopes_wanted else None
        bias_sums = torch.empty_like(self.deltas) if way == PER_ROW else None
        dbias = None
        if way == PER_SCORE and scores.bias is not None:
            # Tiles that nobody sees are not visited.
            full = isinstance(w.form, Band) and w.form.is_full
            make = scores.bias.new_empty if full else scores.bias.new_zeros
            dbias = make(p.batch, p.q_heads, p.q_length, p.k_length)
        chain = place_in_chain(w.q.device, self.follows)
        more = (("BIAS_GRADIENT", way), ("SLOPE_GRADIENT", slopes_wanted), ("CHAIN", chain))
        made: _Made = _kept.get(w, "queries", more)
        split, own = made.split, made.launch.variant.BM
        parts = room(split, p.batch * p.q_heads, own, p.head_dim, w.q)
        arguments = [
            w.q, w.k, w.v, self.dout, self.logs, self.deltas, dq, slope_sums, bias_sums, dbias,
            parts, split.slots if split else 0, *self.inputs,
            *in_units(dq, _out_unit(p)),
            *made.shape,
            *made.mask, *self.scores,
        ]  # fmt: skip
        made.launch(made.programs, arguments, w.q.device)
        join(split, made.mask, parts, dq, _out_unit(p))
        self.follows = split is None and not slopes_wanted and made.programs > 0
        dslopes = None
        if slope_sums is not None and scores.alibi_slopes is not None:
            places = Places.of(p, w.tables, w.q.device)
            dslopes = places.collect_slopes(slope_sums, slice(None), scores.alibi_slopes)
            dslopes = dslopes.to(scores.alibi_slopes.dtype)
        return dq, dbias if bias_sums is None else bias_sums[..., None], dslopes
