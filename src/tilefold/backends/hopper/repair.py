"""What a mask hides may be NaN: rows whose result holds one are computed again, by the Triton backend's
repair, which selects. The forward kernel leaves a flag for each 64 rows; where none is set, this launch does
nothing.
"""

# The functions of Triton are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from typing import Any

import triton.language as tl
from torch import Tensor

from tilefold.backends.triton.arguments import (
    in_units,
    of_mask,
    of_scores,
    place_in_chain,
    rows_of,
    span_of,
    traits,
)
from tilefold.backends.triton.forward import forward_again
from tilefold.backends.triton.kernel import Kernel, Launch
from tilefold.backends.triton.lists import lists_of
from tilefold.backends.triton.tile import begin_chained, item, place
from tilefold.backends.triton.variant import Variant
from tilefold.masks.band import Band
from tilefold.planning.backend import Work

from .tails import Tails
from .variant import LINES

#: Rows of a program, so many that all programs look at their flags at once, and keys of the tiles whose lists
#: it reads. It computes its rows again in small pieces.
_ROWS, _KEYS = 512, 64
_LINES = tl.constexpr(LINES)


@Kernel
def repair_kernel(
    flags, q, k, v, out, lse, parts, part_lse, slots: tl.int32,
    q_b: tl.int64, q_h: tl.int64, q_l: tl.int32, k_b: tl.int64, k_h: tl.int64, k_l: tl.int32,
    v_b: tl.int64, v_h: tl.int64, v_l: tl.int32, o_b: tl.int64, o_h: tl.int64, o_l: tl.int32,
    l_b: tl.int64, l_h: tl.int64, l_l: tl.int32,
    heads: tl.int32, group: tl.int32, pairs: tl.int32, q_length: tl.int32, k_length: tl.int32,
    lines: tl.int32, span: tl.int32, reverse: tl.int32,
    lo: tl.int32, hi: tl.int32, step: tl.int32,
    tiles, counts, order, capacity: tl.int32, table_b: tl.int32, table_h: tl.int32, bounds, index,
    scale: tl.float32, softcap: tl.float32, bias, bias_b: tl.int64, bias_h: tl.int64, bias_q: tl.int64,
    bias_k: tl.int64, slopes, slope_b: tl.int64, slope_h: tl.int64, sink, seed, threshold: tl.int32,
    keep_scale: tl.float32, row_table, key_table, q_origin: tl.int32, q_step: tl.int32, k_origin: tl.int32,
    k_step: tl.int32, base: tl.int32, batch_origin: tl.int32, head_origin: tl.int32,
    C: tl.constexpr,
):  # fmt: skip
    """The arguments of the Triton backend's forward kernel, and `flags`, int32 `[B * Hq, ceil(Lq / 64)]`.

    Grid: `lines * pairs`.
    """
    AGAIN: tl.constexpr = C.AGAIN
    OWN: tl.constexpr = C.BM // _LINES
    begin_chained(C)
    line, pair = place(tl.program_id(0), lines, pairs, span, reverse, heads, C)
    table = pair // heads * table_b + pair % heads * table_h
    line, _, _ = item(order, table, lines, line, C)
    granules = tl.cdiv(q_length, _LINES)
    at = line * OWN + tl.arange(0, OWN)
    found = tl.load(flags + pair.to(tl.int64) * granules + at, mask=at < granules, other=0)
    if tl.max(found, axis=0) > 0:
        forward_again(
            q, k, v, out, lse, parts, part_lse, slots, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h,
            o_l, l_b, l_h, l_l, heads, group, pairs, q_length, k_length, lines, span, reverse, lo, hi, step,
            tiles, counts, order, capacity, table_b, table_h, bounds, index, scale, softcap, bias, bias_b,
            bias_h, bias_q, bias_k, slopes, slope_b, slope_h, sink, seed, threshold, keep_scale, row_table,
            key_table, q_origin, q_step, k_origin, k_step, base, batch_origin, head_origin, AGAIN,
        )  # fmt: skip


class Repair:
    """What one kind of call needs of the host to repair its results, worked out once."""

    def __init__(self, work: Work) -> None:
        p, form, lists = work.problem, work.form, None
        if not isinstance(form, Band):
            lists = lists_of(form, p.q_length, p.k_length, _ROWS, _KEYS, by_key=False)
        self._unit = 8 if p.v_head_dim % 8 == 0 else 1
        C = Variant(
            BM=_ROWS, BN=_KEYS, STAGES=1, EVEN=p.q_length % _ROWS == 0 and p.k_length % _KEYS == 0,
            OUT_UNIT=self._unit, CHAIN=place_in_chain(work.q.device, False), **traits(work),
        )  # fmt: skip
        self._launch = Launch(repair_kernel, C, 4)
        lines, pairs = -(-p.q_length // _ROWS), p.batch * p.q_heads
        self._programs = lines * pairs
        shape = [p.q_heads, max(p.group, 1), pairs, p.q_length, p.k_length, lines, span_of(work), 0]
        self._shape = [*shape, *of_mask(form, lists)]
        self._tails: Tails[list[Any]] = Tails()

    def _tail(self, work: Work) -> list[Any]:
        """The kernel's arguments behind the strides."""

        def make() -> list[Any]:
            return [*self._shape, *of_scores(work)]

        return self._tails.get(work.scores, make) if self._launch.variant.BARE else make()

    def __call__(self, work: Work, flags: Tensor, out: Tensor, lse: Tensor) -> None:
        """Compute flagged rows again, with what is hidden selected away; overwrites `out` and `lse` there."""
        (q, *q_strides), (k, *k_strides), (v, *v_strides) = (rows_of(x) for x in (work.q, work.k, work.v))
        arguments = [
            flags, q, k, v, out, lse, None, None, 0, *q_strides, *k_strides, *v_strides,
            *in_units(out, self._unit), *lse.stride(), *self._tail(work),
        ]  # fmt: skip
        self._launch(self._programs, arguments, out.device)
