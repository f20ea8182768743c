"""Forward: FlashAttention-2's scheme (Dao 2023, algorithm 1) in Triton.

One program per tile of query rows. It folds the key tiles which its rows see into an un-normalised
accumulator, full tiles first and without mask code, then the partial ones, and writes `out` and one `lse` per
row. NaN or infinities behind the mask change nothing: where a result is NaN although tiles mix what is seen
with what is hidden, the program folds its tile again, selecting hidden entries away.
"""

# The functions of Triton are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from tilefold.planning.backend import Work

from .arguments import Kept, MaskArguments, of_mask, of_scores, rows_of, span_of, traits
from .kernel import Kernel, Launch
from .lists import Split, lists_of
from .parts import join, room
from .sizes import kind_of, needed
from .tile import (
    BAND,
    LN2,
    LOG2E,
    ROWS,
    add_chosen,
    add_product,
    any_nan,
    band_tiles,
    edges_of,
    in_base2,
    item,
    kept,
    load_bias,
    load_tile,
    part_of,
    place,
    product,
    scored,
    slope_of,
    store_blocks,
    visible,
    visited,
)
from .variant import Variant


@Kernel
def forward_kernel(
    q, k, v, out, lse, parts, part_lse, slots: tl.int32,
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
    """Shapes: q `[B, Hq, Lq, D]`, k `[B, Hk, Lk, D]`, v `[B, Hk, Lk, DV]`, out like q with DV, lse `[B, Hq,
    Lq]`.

    Grid: `lines * pairs`, with `lines` tiles of rows and `pairs = B * Hq`.
    """
    OWN: tl.constexpr = C.BM
    BM: tl.constexpr = min(C.BM, C.LINES)
    TILE: tl.constexpr = C.BN
    BN: tl.constexpr = min(C.BN, C.CHUNK)
    PARTS: tl.constexpr = TILE // BN
    D0: tl.constexpr = C.D0
    D1: tl.constexpr = C.D1
    V0: tl.constexpr = C.V0
    V1: tl.constexpr = C.V1
    PLAIN: tl.constexpr = C.PLAIN
    BIAS: tl.constexpr = C.BIAS
    FIRST: tl.constexpr = 2 if C.REPAIR else 3 if C.LOOPS == 1 else 0
    PHASES: tl.constexpr = FIRST + 1 if FIRST > 0 else 2

    STEPS: tl.constexpr = OWN // BM
    line, pair = place(tl.program_id(0), lines, pairs, span, reverse, heads, C)
    b, h = pair // heads, pair % heads
    table = b * table_b + h * table_h
    line, first_tile, slot = item(order, table, lines, line, C)
    b64, h64, hk64 = b.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
    # As they came, for whoever repairs this program's results.
    all_q, all_k, all_v, all_out, all_lse, all_tiles, all_bias = q, k, v, out, lse, tiles, bias
    q += b64 * (q_b * C.UNIT) + h64 * (q_h * C.UNIT)
    k += b64 * (k_b * C.UNIT) + hk64 * (k_h * C.UNIT)
    v += b64 * (v_b * C.UNIT) + hk64 * (v_h * C.UNIT)
    out += b64 * (o_b * C.OUT_UNIT) + h64 * (o_h * C.OUT_UNIT)
    lse += b64 * l_b + h64 * l_h
    k_row, v_row = k_l * C.UNIT, v_l * C.UNIT
    if BIAS:
        bias += b64 * (bias_b * C.BIAS_UNIT) + h64 * (bias_h * C.BIAS_UNIT)
    dtype = v.dtype.element_ty
    # In base 2 the scale and the change of base are one factor.
    factor = scale * LOG2E if PLAIN else LOG2E
    if C.DROPOUT:
        key_of_seed = tl.load(seed)
    if C.MASK != BAND:
        at = table.to(tl.int64) * tl.cdiv(q_length, OWN) + tl.maximum(line, 0)
        tiles += at * capacity
        listed_full, listed_partial = tl.load(counts + at * 2), tl.load(counts + at * 2 + 1)

    # One step, but for a repair, which takes its lines in smaller pieces.
    steps = STEPS
    if C.SPLIT > 0:
        steps *= line >= 0
    for own in tl.range(0, steps, num_stages=1):
        m0 = line * OWN + own * BM
        rows = m0 + tl.arange(0, BM)[:, None]
        slope = 0.0
        if C.ALIBI:
            slope = slope_of(
                slopes, slope_b, slope_h, b, h, rows, q_length, row_table, batch_origin, C.SLOPE_ROWS
            )
        if C.MASK == BAND:
            last = tl.minimum(m0 + BM, q_length) - 1
            begin, full_begin, full_stop, stop = band_tiles(
                m0, last, k_length - q_length, lo, hi, k_length, TILE, C.STEPPED
            )
            full, partial = full_stop - full_begin, full_begin - begin + stop - full_stop
        else:
            full, partial = listed_full, listed_partial
            begin, full_begin, full_stop = 0, 0, full

        edges = edges_of(bounds, table, rows, q_length, C.MASK == ROWS, C.INTERVALS)
        q0 = load_tile(q, m0, q_l * C.UNIT, q_length, BM, 0, D0, C.D, True)
        if D1 > 0:
            q1 = load_tile(q, m0, q_l * C.UNIT, q_length, BM, D0, D1, C.D, True)
        m_i = tl.full([BM], -float("inf"), tl.float32)
        l_i = tl.zeros([BM], tl.float32)
        acc0 = tl.zeros([BM, V0], tl.float32)
        if V1 > 0:
            acc1 = tl.zeros([BM, V1], tl.float32)

        for PHASE in tl.static_range(FIRST, PHASES):
            if PHASE == 0:
                count = full
            elif PHASE == 1:
                count = partial
            else:
                count = full + partial
            start, count = part_of(first_tile, count, full if PHASE == 1 else 0, C)
            for i in tl.range(start * PARTS, count * PARTS, num_stages=1 if PHASE == 2 else C.STAGES):
                tile = visited(i // PARTS, begin, full_begin, full_stop, tiles, C.MASK, PHASE)
                n0 = tile * TILE + i % PARTS * BN
                keys = n0 + tl.arange(0, BN)[None, :]
                k0 = load_tile(k, n0, k_row, k_length, BN, 0, D0, C.D, PHASE >= C.CLIP_FROM)
                s = product(q0, tl.trans(k0), C.TF32, C.WIDE)
                if D1 > 0:
                    k1 = load_tile(k, n0, k_row, k_length, BN, D0, D1, C.D, PHASE >= C.CLIP_FROM)
                    s = add_product(s, q1, tl.trans(k1), C.TF32, C.WIDE)
                if not PLAIN:
                    bias_tile = s
                    if BIAS:
                        bias_tile = load_bias(
                            bias, bias_q, bias_k, rows, keys, q_length, k_length, C, PHASE >= C.CLIP_FROM
                        )
                    s, _ = scored(
                        s, rows, keys, scale, softcap, bias_tile, slope, q_length, k_length, row_table,
                        key_table, base, q_step, k_step, C,
                    )  # fmt: skip
                seen = s
                if PHASE == 3 and C.MASKED:
                    if i >= full:
                        inside = visible(
                            rows, keys, n0, q_length, k_length, lo, hi, step, table, bounds, index, edges,
                            ROWS, BN, C,
                        )  # fmt: skip
                        s = tl.where(inside, s, -float("inf"))
                elif PHASE == 1 or PHASE == 2:
                    seen = visible(
                        rows, keys, n0, q_length, k_length, lo, hi, step, table, bounds, index, edges,
                        ROWS, BN, C,
                    )  # fmt: skip
                    s = tl.where(seen, s, -float("inf"))

                m_new = tl.maximum(m_i, tl.max(s, 1))
                # A row that has seen nothing has no maximum; any finite reference gives the right zeros.
                reference = m_new if PHASE == 0 and not BIAS else tl.where(m_new == -float("inf"), 0.0, m_new)
                if C.BASE2:
                    reference = in_base2(reference, factor)
                    p = tl.exp2(tl.fma(s, factor, -reference[:, None]))
                    alpha = tl.exp2(in_base2(m_i, factor) - reference)
                else:
                    p = tl.exp2((s - reference[:, None]) * factor)
                    alpha = tl.exp2((m_i - reference) * factor)
                l_i = l_i * alpha + tl.sum(p, 1)
                m_i = m_new
                if C.DROPOUT:
                    keep = kept(
                        rows, keys, n0, b + batch_origin, h + head_origin, q_length, k_length, row_table,
                        key_table,
                        q_origin, q_step, k_origin, k_step, key_of_seed, threshold, BN, C.TABLES, C.QUADS,
                    )  # fmt: skip
                    p = tl.where(keep, p, 0.0)
                v0 = load_tile(v, n0, v_row, k_length, BN, 0, V0, C.DV, PHASE >= C.CLIP_FROM)
                acc0 = acc0 * alpha[:, None]
                acc0 = add_chosen(acc0, p, seen, v0, dtype, False, C.TF32, C.WIDE, PHASE == 2)
                if V1 > 0:
                    v1 = load_tile(v, n0, v_row, k_length, BN, V0, V1, C.DV, PHASE >= C.CLIP_FROM)
                    acc1 = acc1 * alpha[:, None]
                    acc1 = add_chosen(acc1, p, seen, v1, dtype, False, C.TF32, C.WIDE, PHASE == 2)

        # Back to natural units, without the rounding of the reference in base 2.
        slip = tl.zeros([BM], tl.float32)
        if C.BASE2:
            slip = tl.where(m_i == -float("inf"), 0.0, tl.fma(m_i, factor, -in_base2(m_i, factor)))
        if PLAIN:
            m_i = m_i * scale
        if C.SINK:
            logit = tl.load(sink + h).to(tl.float32)
            if C.SPLIT > 0:
                logit = tl.where(first_tile == 0, logit, -float("inf"))
            top = tl.maximum(m_i, logit)
            top = tl.where(top == -float("inf"), 0.0, top)
            alpha = tl.exp2((m_i - top) * LOG2E)
            l_i = l_i * alpha + tl.exp2((logit - top) * LOG2E)
            acc0 = acc0 * alpha[:, None]
            if V1 > 0:
                acc1 = acc1 * alpha[:, None]
            m_i = top
        alive = l_i != 0.0
        total = tl.where(alive, l_i, 1.0)
        lse_i = tl.where(alive, m_i + (tl.log2(total) - slip) * LN2, -float("inf"))
        weight = tl.where(alive, 1.0 / total, 0.0)
        if C.DROPOUT:
            weight *= keep_scale
        acc0 *= weight[:, None]
        if V1 > 0:
            acc1 *= weight[:, None]
        acc1 = acc1 if V1 > 0 else 0
        whole = q_length
        if C.SPLIT > 0 and slot >= 0:
            # One of several parts of a line, which `parts.join` puts together.
            whole, at_part = 0, (pair.to(tl.int64) * slots + slot) * OWN
            tl.store(part_lse + at_part + own * BM + tl.arange(0, BM), lse_i)
            store_blocks(parts + at_part * C.DV, m0 - line * OWN, C.DV, OWN, acc0, acc1, BM, V0, V1, C.DV)
        row = m0 + tl.arange(0, BM)
        tl.store(lse + row.to(tl.int64) * l_l, lse_i, mask=row < whole)
        store_blocks(out, m0, o_l * C.OUT_UNIT, whole, acc0, acc1, BM, V0, V1, C.DV)
        if C.CAREFUL:
            AGAIN: tl.constexpr = C.AGAIN
            broken = any_nan(acc0)
            if V1 > 0:
                broken = tl.maximum(broken, any_nan(acc1))
            if broken > 0:
                forward_again(
                    all_q, all_k, all_v, all_out, all_lse, parts, part_lse, slots, q_b, q_h, q_l, k_b, k_h,
                    k_l, v_b, v_h, v_l, o_b, o_h, o_l, l_b, l_h, l_l, heads, group, pairs, q_length, k_length,
                    lines, span, reverse, lo, hi, step, all_tiles, counts, order, capacity, table_b, table_h,
                    bounds, index, scale, softcap, all_bias, bias_b, bias_h, bias_q, bias_k, slopes, slope_b,
                    slope_h, sink, seed, threshold, keep_scale, row_table, key_table, q_origin, q_step,
                    k_origin, k_step, base, batch_origin, head_origin, AGAIN,
                )  # fmt: skip


#: The same, in a function of its own, whose needs of registers are not those of the kernel.
forward_again = forward_kernel.apart


#: Kinds of scores whose arguments are kept; a model has one or two.
_MOST_TAILS = 16


class _Made(NamedTuple):
    """What one kind of call needs of the host, worked out once."""

    launch: Launch
    programs: int
    split: Split | None
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_strides: tuple[int, ...]
    rest: list[Any]
    mask: MaskArguments
    tails: dict[tuple[float, float | None], list[Any]]

    def tail(self, work: Work) -> list[Any]:
        """The kernel's arguments behind the strides of q, k and v; kept where they are but numbers."""
        scores = work.scores
        if not self.launch.variant.BARE:
            return [*self.rest, *self.mask, *of_scores(work)]
        found = self.tails.get((scores.scale, scores.softcap))
        if found is None:
            if len(self.tails) >= _MOST_TAILS:
                self.tails.clear()
            found = [*self.rest, *self.mask, *of_scores(work)]
            self.tails[scores.scale, scores.softcap] = found
        return found


def _make(work: Work, _: str, heads_outside: Any) -> _Made:
    p, form = work.problem, work.form
    sizes, lists = needed("forward", p, kind_of(p, form)), None
    if form.kind != "band":
        lists = lists_of(form, p.q_length, p.k_length, sizes.rows, sizes.keys, by_key=False, may_split=True)
    split = None if lists is None else lists.split
    B, H, L, Dv = p.batch, p.q_heads, p.q_length, p.v_head_dim
    out_unit = 8 if Dv % 8 == 0 else 1
    C = Variant(
        **sizes.constants(p),
        SPLIT=0 if split is None else split.size,
        OUT_UNIT=out_unit,
        **traits(work),
    )
    lines, pairs = -(-L // sizes.rows) if lists is None else lists.programs, B * H
    # Rows with most work first: the last ones of a causal mask.
    reverse = form.kind == "band" and form.hi is not None
    h, n, d = max(H, 1), max(L, 1), max(Dv, 1)
    strides = (h * n * d, n * d, d, 1) if heads_outside else (n * h * d, d, h * d, 1)
    lse_strides = (n * h, 1, h)
    rest = [
        *(stride // out_unit for stride in strides[:3]), *lse_strides,
        H, max(p.group, 1), pairs, L, p.k_length, lines, span_of(work), int(reverse),
    ]  # fmt: skip
    launch = Launch(forward_kernel, C, sizes.warps, sizes.registers)
    mask = of_mask(form, lists)
    return _Made(launch, lines * pairs, split, (B, H, L, Dv), strides, lse_strides, rest, mask, {})


_kept = Kept(_make)


def forward(work: Work) -> tuple[Tensor, Tensor]:
    """`(out, lse)`: out with its heads outside or inside its rows as q has them, lse in order B, L, H."""
    q, *q_strides = rows_of(work.q)
    k, *k_strides = rows_of(work.k)
    v, *v_strides = rows_of(work.v)
    made: _Made = _kept.get(work, "", work.q.stride(1) >= work.q.stride(2))
    launch, device = made.launch, q.device
    out = torch.empty_strided(made.out_shape, made.out_strides, dtype=q.dtype, device=device)
    lse = torch.empty_strided(made.out_shape[:3], made.lse_strides, dtype=torch.float32, device=device)
    split, own = made.split, launch.variant.BM
    parts = room(split, work.problem.batch * work.problem.q_heads, own, work.problem.v_head_dim, q)
    part_lse = None if parts is None else parts.new_empty(parts.shape[:3])
    arguments = [
        q, k, v, out, lse, parts, part_lse, split.slots if split else 0,
        *q_strides, *k_strides, *v_strides, *made.tail(work),
    ]  # fmt: skip
    launch(made.programs, arguments, device)
    join(split, made.mask, parts, out, launch.variant.OUT_UNIT, part_lse, lse)
    return out, lse
