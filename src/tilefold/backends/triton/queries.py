"""The kernel of dQ (Dao 2023, algorithm 2): a program per tile of rows loops over the tiles of keys that it
sees.
"""

# The functions of Triton are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

import triton.language as tl

from .kernel import Kernel
from .tile import (
    BAND,
    LOG2E,
    ROWS,
    add_chosen,
    add_product,
    any_nan,
    band_tiles,
    begin_chained,
    distance,
    edges_of,
    end_chained,
    item,
    kept,
    load_bias,
    load_tile,
    part_of,
    place,
    probability,
    product,
    row_values,
    scored,
    send_for_bias,
    slope_of,
    store_blocks,
    store_scores,
    visible,
    visited,
)
from .variant import PER_ROW, PER_SCORE

_PER_ROW = tl.constexpr(PER_ROW)
_PER_SCORE = tl.constexpr(PER_SCORE)


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

    begin_chained(C)
    line, pair = place(tl.program_id(0), lines, pairs, span, reverse, heads, C)
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
                    p = probability(raw, logs_i, factor, C)
                else:
                    bias_tile = raw
                    if C.AHEAD > 0 and PHASE != 2:
                        soon = visited(
                            tl.minimum(i + C.AHEAD, count - 1), begin, full_begin, full_stop, tiles, C.MASK,
                            PHASE,
                        )  # fmt: skip
                        send_for_bias(bias, bias_q, m0, soon * TILE, q_length, k_length, C)
                    if C.BIAS:
                        bias_tile = load_bias(
                            bias, bias_q, bias_k, rows, keys, q_length, k_length, C, PHASE >= C.CLIP_FROM
                        )
                    s, slope_of_cap = scored(
                        raw, rows, keys, scale, softcap, bias_tile, slope, q_length, k_length, row_table,
                        key_table, base, q_step, k_step, C,
                    )  # fmt: skip
                    p = probability(s, logs_i, LOG2E, C)
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
                            ROWS, BN, C,
                        )  # fmt: skip
                        ds = tl.where(inside, ds, 0.0)
                elif PHASE == 1 or PHASE == 2:
                    seen = visible(
                        rows, keys, n0, q_length, k_length, lo, hi, step, table, bounds, index, edges,
                        ROWS, BN, C,
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
    end_chained(C)


queries_again = queries_kernel.apart
