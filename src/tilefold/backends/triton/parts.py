"""Putting together what several programs have computed of one line of tiles (see `lists.Split`)."""

# The functions of Triton are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor

from .arguments import MaskArguments, in_units
from .kernel import Kernel, Launch
from .lists import Split
from .tile import LN2, LOG2E, store_blocks, tile_pointers
from .variant import Variant

#: Rows of a program.
_ROWS = 16


@Kernel
def join_kernel(
    parts, part_lse, out, lse, joins,
    slots: tl.int32, splits: tl.int32, table_b: tl.int32, table_h: tl.int32, heads: tl.int32, step: tl.int32,
    length: tl.int32, o_b: tl.int64, o_h: tl.int64, o_l: tl.int32, l_b: tl.int64, l_h: tl.int64,
    l_l: tl.int32,
    C: tl.constexpr,
):  # fmt: skip
    """Lines of `out [B, heads, length, DV]` from fp32 `parts [B * heads, slots, BN, DV]`: their sum, or with
    `part_lse [B * heads, slots, BN]` their average by weights of the softmax, and `lse`.

    Grid: `BN / BM * splits * B * heads`.
    """
    BM: tl.constexpr = C.BM
    OWN: tl.constexpr = C.BN
    V0: tl.constexpr = C.V0
    V1: tl.constexpr = C.V1
    piece = tl.program_id(0) % (OWN // BM)
    split = tl.program_id(0) // (OWN // BM) % splits
    pair = tl.program_id(0) // (OWN // BM * splits)
    b, h = pair // heads, pair % heads
    table = b * table_b + h * step * table_h
    record = joins + (table.to(tl.int64) * splits + split) * 3
    line, first, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    row = piece * BM + tl.arange(0, BM)
    at = (pair.to(tl.int64) * slots + first) * OWN
    acc0 = tl.zeros([BM, V0], tl.float32)
    if V1 > 0:
        acc1 = tl.zeros([BM, V1], tl.float32)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for part in tl.range(0, count):
        base = parts + (at + part * OWN) * C.DV
        x0 = tl.load(tile_pointers(base, piece * BM, C.DV, BM, 0, V0), mask=tl.arange(0, V0)[None, :] < C.DV)
        if V1 > 0:
            columns = tl.arange(0, V1)[None, :] < C.DV - V0
            x1 = tl.load(tile_pointers(base, piece * BM, C.DV, BM, V0, V1), mask=columns)
        if C.WEIGHTED:
            lse_i = tl.load(part_lse + at + part * OWN + row)
            higher = tl.maximum(top, lse_i)
            reference = tl.where(higher == -float("inf"), 0.0, higher)
            alpha, weight = tl.exp2((top - reference) * LOG2E), tl.exp2((lse_i - reference) * LOG2E)
            total = total * alpha + weight
            acc0, x0 = acc0 * alpha[:, None], x0 * weight[:, None]
            if V1 > 0:
                acc1, x1 = acc1 * alpha[:, None], x1 * weight[:, None]
            top = higher
        acc0 += x0
        if V1 > 0:
            acc1 += x1
    limit = tl.where(count > 0, length, 0)
    start = line * OWN + piece * BM
    if C.WEIGHTED:
        alive = total != 0.0
        inverse = tl.where(alive, 1.0 / total, 0.0)
        acc0 *= inverse[:, None]
        if V1 > 0:
            acc1 *= inverse[:, None]
        lse_i = tl.where(alive, top + tl.log2(total) * LN2, -float("inf"))
        at_lse = lse + b.to(tl.int64) * l_b + h.to(tl.int64) * l_h + (line * OWN + row).to(tl.int64) * l_l
        tl.store(at_lse, lse_i, mask=line * OWN + row < limit)
    out += b.to(tl.int64) * (o_b * C.OUT_UNIT) + h.to(tl.int64) * (o_h * C.OUT_UNIT)
    store_blocks(out, start, o_l * C.OUT_UNIT, limit, acc0, acc1 if V1 > 0 else 0, BM, V0, V1, C.DV)


def room(split: Split | None, pairs: int, own: int, width: int, like: Tensor) -> Tensor | None:
    """Where parts go, fp32 `[pairs, slots, own, width]`; `own` rows or keys are a tile's."""
    if split is None:
        return None
    return torch.empty((pairs, split.slots, own, width), dtype=torch.float32, device=like.device)


def join(
    split: Split | None,
    mask: MaskArguments,
    parts: Tensor | None,
    out: Tensor | None,
    unit: int,
    part_lse: Tensor | None = None,
    lse: Tensor | None = None,
    group: int = 1,
) -> None:
    """Fill the long lines of `out`, and of `lse` if `part_lse` weighs the parts.

    Args:
        unit: the strides of `out` are multiples of so many elements.
        group: query heads of each head of `out`.
    """
    if split is None or parts is None or out is None:
        return
    own, width = parts.shape[2:]
    launch = _launch(own, width, unit, lse is not None, out.dtype)
    splits, (batch, heads, length, _) = split.joins.shape[1], out.shape
    strides = (0, 0, 0) if lse is None else lse.stride()
    arguments = [
        parts, part_lse, out, lse, split.joins, split.slots, splits, mask.table_b, mask.table_h, heads, group,
        length, *in_units(out, unit), *strides,
    ]  # fmt: skip
    launch(own // launch.variant.BM * splits * batch * heads, arguments, out.device)


@functools.cache
def _launch(own: int, width: int, unit: int, weighted: bool, _: torch.dtype) -> Launch:
    variant = Variant(width, width, min(_ROWS, own), own, WEIGHTED=weighted, OUT_UNIT=unit, STAGES=1)
    return Launch(join_kernel, variant, 4)
