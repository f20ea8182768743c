"""Backward: FlashAttention-2's scheme (Dao 2023, algorithm 2) in Triton, without atomic operations.

`delta = rowsum(dO * O) - dlse` first (`delta.py`); then one kernel for dK and dV, with a program per tile of
keys that loops over the query heads of its group and the tiles of rows which see it, and one for dQ, with a
program per tile of rows. Probabilities are recomputed from the saved lse. Every sum is taken in a fixed
order, so all gradients are bit-stable. NaN behind the mask is treated as in the forward pass.
"""

# The functions of Triton are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from tilefold.masks.band import Band
from tilefold.planning.backend import Gradients, Work
from tilefold.problem import Problem
from tilefold.scores import Places

from . import delta
from .arguments import Kept, MaskArguments, dense_rows, in_units, of_mask, of_scores, rows_of, span_of, traits
from .bias import bias_gradient, way_of
from .kernel import Kernel, Launch
from .lists import Split, lists_of
from .parts import join, room
from .sizes import kind_of, needed, sizes_of
from .tile import (
    BAND,
    COLS,
    LOG2E,
    ROWS,
    add_chosen,
    add_product,
    any_nan,
    band_tiles,
    distance,
    edges_of,
    item,
    kept,
    load_bias,
    load_tile,
    part_of,
    place,
    product,
    row_values,
    scored,
    slope_of,
    store_blocks,
    store_scores,
    visible,
    visited,
)
from .variant import PER_KEY, PER_ROW, PER_SCORE, Variant

_PER_ROW = tl.constexpr(PER_ROW)
_PER_KEY = tl.constexpr(PER_KEY)
_PER_SCORE = tl.constexpr(PER_SCORE)


@Kernel
def keys_kernel(
    q, k, v, dout, logs, delta, dk, dv, key_sums, dk_parts, dv_parts, slots: tl.int32,
    q_b: tl.int64, q_h: tl.int64, q_l: tl.int32, k_b: tl.int64, k_h: tl.int64, k_l: tl.int32,
    v_b: tl.int64, v_h: tl.int64, v_l: tl.int32, g_b: tl.int64, g_h: tl.int64, g_l: tl.int32,
    dk_b: tl.int64, dk_h: tl.int64, dk_l: tl.int32, dv_b: tl.int64, dv_h: tl.int64, dv_l: tl.int32,
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
    """dk and dv of one tile of keys, `[B, Hk, Lk, D]` and `[.., DV]`; `key_sums` fp32 `[B, Hq, Lk]` are the
    sums of dS over rows (the gradient of a bias per key).

    Tiles are transposed, `[BN, BM]`, so that P and dS are first operands of their products as they stand.
    Grid: `lines * pairs`, with `lines` tiles of keys and `pairs = B * Hk`.
    """
    TILE: tl.constexpr = C.BM
    BM: tl.constexpr = min(C.BM, C.CHUNK)
    PARTS: tl.constexpr = TILE // BM
    OWN: tl.constexpr = C.BN
    BN: tl.constexpr = min(C.BN, C.LINES)
    STEPS: tl.constexpr = OWN // BN
    D0: tl.constexpr = C.D0
    D1: tl.constexpr = C.D1
    V0: tl.constexpr = C.V0
    V1: tl.constexpr = C.V1
    PLAIN: tl.constexpr = C.PLAIN
    WANT_K: tl.constexpr = C.WANT_K
    WANT_V: tl.constexpr = C.WANT_V
    FIRST: tl.constexpr = 2 if C.REPAIR else 3 if C.LOOPS == 1 else 0
    PHASES: tl.constexpr = FIRST + 1 if FIRST > 0 else 2

    line, pair = place(tl.program_id(0), lines, pairs, span, reverse)
    k_heads = heads // group
    b, hk = pair // k_heads, pair % k_heads
    line, first_tile, slot = item(order, b * table_b + hk * group * table_h, lines, line, C)
    b64, hk64 = b.to(tl.int64), hk.to(tl.int64)
    # As they came, for whoever repairs this program's results.
    all_k, all_v, all_dk, all_dv = k, v, dk, dv
    k += b64 * (k_b * C.UNIT) + hk64 * (k_h * C.UNIT)
    v += b64 * (v_b * C.UNIT) + hk64 * (v_h * C.UNIT)
    q_row, g_row = q_l * C.UNIT, g_l * C.UNIT
    if WANT_K:
        dk += b64 * (dk_b * C.OUT_UNIT) + hk64 * (dk_h * C.OUT_UNIT)
    if WANT_V:
        dv += b64 * (dv_b * C.OUT_UNIT) + hk64 * (dv_h * C.OUT_UNIT)
    dtype = q.dtype.element_ty
    if C.DROPOUT:
        key_of_seed = tl.load(seed)
    factor = scale * LOG2E

    # One step, but for a repair, which takes its lines in smaller pieces.
    steps = STEPS
    if C.SPLIT > 0:
        steps *= line >= 0
    for own in tl.range(0, steps, num_stages=1):
        n0 = line * OWN + own * BN
        keys = n0 + tl.arange(0, BN)[:, None]
        k0 = load_tile(k, n0, k_l * C.UNIT, k_length, BN, 0, D0, C.D, True)
        if D1 > 0:
            k1 = load_tile(k, n0, k_l * C.UNIT, k_length, BN, D0, D1, C.D, True)
        if WANT_K:
            v0 = load_tile(v, n0, v_l * C.UNIT, k_length, BN, 0, V0, C.DV, True)
            dk0 = tl.zeros([BN, D0], tl.float32)
            if D1 > 0:
                dk1 = tl.zeros([BN, D1], tl.float32)
            if V1 > 0:
                v1 = load_tile(v, n0, v_l * C.UNIT, k_length, BN, V0, V1, C.DV, True)
        if WANT_V:
            dv0 = tl.zeros([BN, V0], tl.float32)
            if V1 > 0:
                dv1 = tl.zeros([BN, V1], tl.float32)

        for PHASE in tl.static_range(FIRST, PHASES):
            for member in tl.range(0, group):
                h = hk * group + member
                h64 = h.to(tl.int64)
                if C.MASK == BAND:
                    table = b * 0
                    last = tl.minimum(n0 + BN, k_length) - 1
                    begin, full_begin, full_stop, stop = band_tiles(
                        n0, last, q_length - k_length, -hi, -lo, q_length, TILE, C.STEPPED
                    )
                    full, partial = full_stop - full_begin, full_begin - begin + stop - full_stop
                    listed = tiles
                else:
                    table = b * table_b + h * table_h
                    at = table.to(tl.int64) * tl.cdiv(k_length, OWN) + tl.maximum(line, 0)
                    listed = tiles + at * capacity
                    full, partial = tl.load(counts + at * 2), tl.load(counts + at * 2 + 1)
                    begin, full_begin, full_stop = 0, 0, full
                if PHASE == 0:
                    count = full
                elif PHASE == 1:
                    count = partial
                else:
                    count = full + partial
                start, count = part_of(first_tile, count, full if PHASE == 1 else 0, C)
                edges = edges_of(bounds, table, keys, k_length, C.MASK == COLS, C.INTERVALS)
                q_at = q + b64 * (q_b * C.UNIT) + h64 * (q_h * C.UNIT)
                g_at = dout + b64 * (g_b * C.UNIT) + h64 * (g_h * C.UNIT)
                bias_at = bias
                if C.BIAS:
                    bias_at = bias + b64 * (bias_b * C.BIAS_UNIT) + h64 * (bias_h * C.BIAS_UNIT)
                if C.BIAS_GRADIENT == _PER_KEY:
                    key_sum = tl.zeros([BN], tl.float32)

                for i in tl.range(start * PARTS, count * PARTS, num_stages=1 if PHASE == 2 else C.STAGES):
                    tile = visited(i // PARTS, begin, full_begin, full_stop, listed, C.MASK, PHASE)
                    m0 = tile * TILE + i % PARTS * BM
                    rows = m0 + tl.arange(0, BM)[None, :]
                    q0 = load_tile(q_at, m0, q_row, q_length, BM, 0, D0, C.D, PHASE >= C.CLIP_FROM)
                    raw = product(k0, tl.trans(q0), C.TF32, C.WIDE)
                    if D1 > 0:
                        q1 = load_tile(q_at, m0, q_row, q_length, BM, D0, D1, C.D, PHASE >= C.CLIP_FROM)
                        raw = add_product(raw, k1, tl.trans(q1), C.TF32, C.WIDE)
                    logs_i = row_values(
                        logs, b, h, heads, m0, q_length, BM, float("inf"), PHASE >= C.CLIP_FROM, C.EVEN
                    )[None, :]
                    if PLAIN:
                        p = tl.exp2(raw * factor - logs_i)
                    else:
                        slope = 0.0
                        if C.ALIBI:
                            slope = slope_of(
                                slopes, slope_b, slope_h, b, h, rows, q_length, row_table, batch_origin,
                                C.SLOPE_ROWS,
                            )  # fmt: skip
                        bias_tile = raw
                        if C.BIAS:
                            bias_tile = load_bias(
                                bias_at, bias_q, bias_k, rows, keys, q_length, k_length, C, not C.EVEN
                            )
                        s, slope_of_cap = scored(
                            raw, rows, keys, scale, softcap, bias_tile, slope, q_length, k_length, row_table,
                            key_table, base, q_step, k_step, C,
                        )  # fmt: skip
                        p = tl.exp2((s - logs_i) * LOG2E)
                    seen = p
                    if PHASE == 3 and C.MASKED:
                        if i >= full:
                            inside = visible(
                                rows, keys, n0, q_length, k_length, lo, hi, step, table, bounds, index, edges,
                                COLS, BN, C.MASK, C.INTERVALS, C.STEPPED,
                            )  # fmt: skip
                            p = tl.where(inside, p, 0.0)
                    elif PHASE == 1 or PHASE == 2:
                        seen = visible(
                            rows, keys, n0, q_length, k_length, lo, hi, step, table, bounds, index, edges,
                            COLS, BN, C.MASK, C.INTERVALS, C.STEPPED,
                        )  # fmt: skip
                        p = tl.where(seen, p, 0.0)
                    weights = p
                    if C.DROPOUT:
                        keep = kept(
                            rows, keys, n0, b + batch_origin, h + head_origin, q_length, k_length,
                            row_table, key_table,
                            q_origin, q_step, k_origin, k_step, key_of_seed, threshold, BN, C.TABLES, C.QUADS,
                        )  # fmt: skip
                        weights = tl.where(keep, p * keep_scale, 0.0)
                    g0 = load_tile(g_at, m0, g_row, q_length, BM, 0, V0, C.DV, PHASE >= C.CLIP_FROM)
                    if V1 > 0:
                        g1 = load_tile(g_at, m0, g_row, q_length, BM, V0, V1, C.DV, PHASE >= C.CLIP_FROM)
                    if WANT_V:
                        dv0 = add_chosen(dv0, weights, seen, g0, dtype, False, C.TF32, C.WIDE, PHASE == 2)
                        if V1 > 0:
                            dv1 = add_chosen(dv1, weights, seen, g1, dtype, False, C.TF32, C.WIDE, PHASE == 2)
                    if WANT_K:
                        dp = product(v0, tl.trans(g0), C.TF32, C.WIDE)
                        if V1 > 0:
                            dp = add_product(dp, v1, tl.trans(g1), C.TF32, C.WIDE)
                        if C.DROPOUT:
                            dp = tl.where(keep, dp * keep_scale, 0.0)
                        delta_i = row_values(
                            delta, b, h, heads, m0, q_length, BM, 0.0, PHASE >= C.CLIP_FROM, C.EVEN
                        )[None, :]
                        ds = p * (dp - delta_i)
                        # A NaN behind the mask survives a zero in p; sums are not repaired, dk is.
                        if C.BIAS_GRADIENT == _PER_KEY:
                            key_sum += tl.sum(tl.where(p == 0.0, 0.0, ds), 1)
                        if C.SOFTCAP:
                            ds = ds * slope_of_cap
                        dk0 = add_chosen(dk0, ds, seen, q0, dtype, True, C.TF32, C.WIDE, PHASE == 2)
                        if D1 > 0:
                            dk1 = add_chosen(dk1, ds, seen, q1, dtype, True, C.TF32, C.WIDE, PHASE == 2)

                if C.BIAS_GRADIENT == _PER_KEY:
                    key = n0 + tl.arange(0, BN)
                    at_sums = key_sums + (b64 * heads + h64) * k_length + key
                    if PHASE == 1:
                        # Other threads may hold these elements now than those that stored them.
                        tl.debug_barrier()
                        key_sum += tl.load(at_sums, mask=key < k_length, other=0.0)
                    if PHASE != 2:
                        tl.store(at_sums, key_sum, mask=key < k_length)

        dk1 = dk1 if WANT_K and D1 > 0 else 0
        dv1 = dv1 if WANT_V and V1 > 0 else 0
        whole = k_length
        if C.SPLIT > 0 and slot >= 0:
            # One of several parts of a line, which `parts.join` adds up.
            whole, at_part, own_n0 = 0, (pair.to(tl.int64) * slots + slot) * OWN, n0 - line * OWN
            if WANT_K:
                at_k = dk_parts + at_part * C.D
                store_blocks(at_k, own_n0, C.D, OWN, dk0 * scale, dk1 * scale, BN, D0, D1, C.D)
            if WANT_V:
                store_blocks(dv_parts + at_part * C.DV, own_n0, C.DV, OWN, dv0, dv1, BN, V0, V1, C.DV)
        if WANT_K:
            store_blocks(dk, n0, dk_l * C.OUT_UNIT, whole, dk0 * scale, dk1 * scale, BN, D0, D1, C.D)
        if WANT_V:
            store_blocks(dv, n0, dv_l * C.OUT_UNIT, whole, dv0, dv1, BN, V0, V1, C.DV)
        if C.CAREFUL:
            AGAIN: tl.constexpr = C.AGAIN
            broken = 0
            if WANT_K:
                broken = any_nan(dk0)
                if D1 > 0:
                    broken = tl.maximum(broken, any_nan(dk1))
            if WANT_V:
                broken = tl.maximum(broken, any_nan(dv0))
                if V1 > 0:
                    broken = tl.maximum(broken, any_nan(dv1))
            if broken > 0:
                keys_again(
                    q, all_k, all_v, dout, logs, delta, all_dk, all_dv, key_sums, dk_parts, dv_parts, slots,
                    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dk_b, dk_h, dk_l, dv_b, dv_h,
                    dv_l, heads, group, pairs, q_length, k_length, lines, span, reverse, lo, hi, step, tiles,
                    counts, order, capacity, table_b, table_h, bounds, index, scale, softcap, bias, bias_b,
                    bias_h, bias_q, bias_k, slopes, slope_b, slope_h, sink, seed, threshold, keep_scale,
                    row_table, key_table, q_origin, q_step, k_origin, k_step, base, batch_origin, head_origin,
                    AGAIN,
                )  # fmt: skip


#: The same, in a function of its own, whose needs of registers are not those of the kernel.
keys_again = keys_kernel.apart


@Kernel
def queries_kernel(
    q, k, v, dout, logs, delta, dq, slope_sums, bias_sums, dbias, parts, slots: tl.int32,
    q_b: tl.int64, q_h: tl.int64, q_l: tl.int32, k_b: tl.int64, k_h: tl.int64, k_l: tl.int32,
    v_b: tl.int64, v_h: tl.int64, v_l: tl.int32, g_b: tl.int64, g_h: tl.int64, g_l: tl.int32,
    dq_b: tl.int64, dq_h: tl.int64, dq_l: tl.int32,
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
    """dq of one tile of rows, `[B, Hq, Lq, D]`; `slope_sums` and `bias_sums` fp32 `[B, Hq, Lq]` are the rows'
    shares of the gradients of slopes and of a bias per row; `dbias [B, Hq, Lq, Lk]`, dense, is dS itself.

    Grid: `lines * pairs`, with `lines` tiles of rows and `pairs = B * Hq`.
    """
    OWN: tl.constexpr = C.BM
    BM: tl.constexpr = min(C.BM, C.LINES)
    STEPS: tl.constexpr = OWN // BM
    TILE: tl.constexpr = C.BN
    BN: tl.constexpr = min(C.BN, C.CHUNK)
    PARTS: tl.constexpr = TILE // BN
    D0: tl.constexpr = C.D0
    D1: tl.constexpr = C.D1
    V0: tl.constexpr = C.V0
    V1: tl.constexpr = C.V1
    PLAIN: tl.constexpr = C.PLAIN
    REPAIR: tl.constexpr = C.REPAIR
    FIRST: tl.constexpr = 2 if C.REPAIR else 3 if C.LOOPS == 1 else 0
    PHASES: tl.constexpr = FIRST + 1 if FIRST > 0 else 2

    line, pair = place(tl.program_id(0), lines, pairs, span, reverse)
    b, h = pair // heads, pair % heads
    table = b * table_b + h * table_h
    line, first_tile, slot = item(order, table, lines, line, C)
    b64, h64, hk64 = b.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
    # As they came, for whoever repairs this program's results.
    all_q, all_k, all_v, all_dout, all_dq, all_tiles, all_bias = q, k, v, dout, dq, tiles, bias
    q += b64 * (q_b * C.UNIT) + h64 * (q_h * C.UNIT)
    k += b64 * (k_b * C.UNIT) + hk64 * (k_h * C.UNIT)
    v += b64 * (v_b * C.UNIT) + hk64 * (v_h * C.UNIT)
    dout += b64 * (g_b * C.UNIT) + h64 * (g_h * C.UNIT)
    dq += b64 * (dq_b * C.OUT_UNIT) + h64 * (dq_h * C.OUT_UNIT)
    k_row, v_row = k_l * C.UNIT, v_l * C.UNIT
    if C.BIAS:
        bias += b64 * (bias_b * C.BIAS_UNIT) + h64 * (bias_h * C.BIAS_UNIT)
    dtype = q.dtype.element_ty
    factor = scale * LOG2E
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
        g0 = load_tile(dout, m0, g_l * C.UNIT, q_length, BM, 0, V0, C.DV, True)
        dq0 = tl.zeros([BM, D0], tl.float32)
        if D1 > 0:
            q1 = load_tile(q, m0, q_l * C.UNIT, q_length, BM, D0, D1, C.D, True)
            dq1 = tl.zeros([BM, D1], tl.float32)
        if V1 > 0:
            g1 = load_tile(dout, m0, g_l * C.UNIT, q_length, BM, V0, V1, C.DV, True)
        logs_i = row_values(logs, b, h, heads, m0, q_length, BM, float("inf"), True, C.EVEN)[:, None]
        delta_i = row_values(delta, b, h, heads, m0, q_length, BM, 0.0, True, C.EVEN)[:, None]
        if C.SLOPE_GRADIENT:
            slope_sum = tl.zeros([BM], tl.float32)
        if C.BIAS_GRADIENT == _PER_ROW:
            bias_sum = tl.zeros([BM], tl.float32)

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
                v0 = load_tile(v, n0, v_row, k_length, BN, 0, V0, C.DV, PHASE >= C.CLIP_FROM)
                raw = product(q0, tl.trans(k0), C.TF32, C.WIDE)
                if D1 > 0:
                    k1 = load_tile(k, n0, k_row, k_length, BN, D0, D1, C.D, PHASE >= C.CLIP_FROM)
                    raw = add_product(raw, q1, tl.trans(k1), C.TF32, C.WIDE)
                dp = product(g0, tl.trans(v0), C.TF32, C.WIDE)
                if V1 > 0:
                    v1 = load_tile(v, n0, v_row, k_length, BN, V0, V1, C.DV, PHASE >= C.CLIP_FROM)
                    dp = add_product(dp, g1, tl.trans(v1), C.TF32, C.WIDE)
                if PLAIN:
                    p = tl.exp2(raw * factor - logs_i)
                else:
                    bias_tile = raw
                    if C.BIAS:
                        bias_tile = load_bias(
                            bias, bias_q, bias_k, rows, keys, q_length, k_length, C, PHASE >= C.CLIP_FROM
                        )
                    s, slope_of_cap = scored(
                        raw, rows, keys, scale, softcap, bias_tile, slope, q_length, k_length, row_table,
                        key_table, base, q_step, k_step, C,
                    )  # fmt: skip
                    p = tl.exp2((s - logs_i) * LOG2E)
                if C.DROPOUT:
                    keep = kept(
                        rows, keys, n0, b + batch_origin, h + head_origin, q_length, k_length, row_table,
                        key_table,
                        q_origin, q_step, k_origin, k_step, key_of_seed, threshold, BN, C.TABLES, C.QUADS,
                    )  # fmt: skip
                    dp = tl.where(keep, dp * keep_scale, 0.0)
                ds = p * (dp - delta_i)
                seen = ds
                if PHASE == 3 and C.MASKED:
                    if i >= full:
                        inside = visible(
                            rows, keys, n0, q_length, k_length, lo, hi, step, table, bounds, index, edges,
                            ROWS, BN, C.MASK, C.INTERVALS, C.STEPPED,
                        )  # fmt: skip
                        ds = tl.where(inside, ds, 0.0)
                elif PHASE == 1 or PHASE == 2:
                    seen = visible(
                        rows, keys, n0, q_length, k_length, lo, hi, step, table, bounds, index, edges,
                        ROWS, BN, C.MASK, C.INTERVALS, C.STEPPED,
                    )  # fmt: skip
                    ds = tl.where(seen, ds, 0.0)
                if PHASE != 2:
                    if C.BIAS_GRADIENT == _PER_ROW:
                        bias_sum += tl.sum(ds, 1)
                    if C.BIAS_GRADIENT == _PER_SCORE:
                        at_first = pair.to(tl.int64) * q_length + m0
                        store_scores(dbias, at_first, n0, ds, rows, keys, q_length, k_length, C)
                    if C.SLOPE_GRADIENT:
                        away = distance(
                            rows,
                            keys,
                            q_length,
                            k_length,
                            row_table,
                            key_table,
                            base,
                            q_step,
                            k_step,
                            C.TABLES,
                        )
                        slope_sum -= tl.sum(ds * away.to(tl.float32), 1)
                if C.SOFTCAP:
                    ds = ds * slope_of_cap
                dq0 = add_chosen(dq0, ds, seen, k0, dtype, True, C.TF32, C.WIDE, PHASE == 2)
                if D1 > 0:
                    dq1 = add_chosen(dq1, ds, seen, k1, dtype, True, C.TF32, C.WIDE, PHASE == 2)

        dq1 = dq1 if D1 > 0 else 0
        whole = q_length
        if C.SPLIT > 0 and slot >= 0:
            # One of several parts of a line, which `parts.join` adds up.
            whole, at_part = 0, (pair.to(tl.int64) * slots + slot) * OWN
            at_q = parts + at_part * C.D
            store_blocks(at_q, m0 - line * OWN, C.D, OWN, dq0 * scale, dq1 * scale, BM, D0, D1, C.D)
        store_blocks(dq, m0, dq_l * C.OUT_UNIT, whole, dq0 * scale, dq1 * scale, BM, D0, D1, C.D)
        row = m0 + tl.arange(0, BM)
        at_sums = pair.to(tl.int64) * q_length + row
        if C.SLOPE_GRADIENT and not REPAIR:
            tl.store(slope_sums + at_sums, slope_sum, mask=row < q_length)
        if C.BIAS_GRADIENT == _PER_ROW and not REPAIR:
            tl.store(bias_sums + at_sums, bias_sum, mask=row < q_length)
        if C.CAREFUL:
            AGAIN: tl.constexpr = C.AGAIN
            broken = any_nan(dq0)
            if D1 > 0:
                broken = tl.maximum(broken, any_nan(dq1))
            if broken > 0:
                queries_again(
                    all_q, all_k, all_v, all_dout, logs, delta, all_dq, slope_sums, bias_sums, dbias, parts,
                    slots, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, dq_b, dq_h, dq_l,
                    heads, group, pairs, q_length, k_length, lines, span, reverse, lo, hi, step, all_tiles,
                    counts, order, capacity, table_b, table_h, bounds, index, scale, softcap, all_bias,
                    bias_b, bias_h, bias_q, bias_k, slopes, slope_b, slope_h, sink, seed, threshold,
                    keep_scale, row_table, key_table, q_origin, q_step, k_origin, k_step, base, batch_origin,
                    head_origin, AGAIN,
                )  # fmt: skip


queries_again = queries_kernel.apart


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
        dbias = bias_gradient(call.work, call.dout, call.logs, call.deltas)
    elif dbias is not None and shared.bias is not None:
        dbias = dbias.sum_to_size((1,) * (4 - shared.bias.dim()) + tuple(shared.bias.shape))
        dbias = dbias.reshape(shared.bias.shape).to(shared.bias.dtype)
    three = (x if need else None for x, need in zip((dq, dk, dv), needs, strict=False))
    return Gradients(*three, bias=dbias, sink=sink, alibi_slopes=dslopes)


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
    sizes, lists = needed(kernel, p, kind_of(form)), None
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
    return _Made(launch, lines * pairs, shape, of_mask(form, lists), split)


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
        if want_k and want_v and sizes_of("keys", p, kind_of(w.form)) is not None:
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
            ("WANT_V", dv is not None),
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
        more = (("BIAS_GRADIENT", way), ("SLOPE_GRADIENT", slopes_wanted))
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
        dslopes = None
        if slope_sums is not None and scores.alibi_slopes is not None:
            places = Places.of(p, w.tables, w.q.device)
            dslopes = places.collect_slopes(slope_sums, slice(None), scores.alibi_slopes)
            dslopes = dslopes.to(scores.alibi_slopes.dtype)
        return dq, dbias if bias_sums is None else bias_sums[..., None], dslopes
