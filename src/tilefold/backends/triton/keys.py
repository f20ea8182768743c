"""The kernel of dK and dV (Dao 2023, algorithm 2), together or apart: a program per tile of keys loops over
the query heads of its group and the tiles of rows which see it.
"""

# The functions of Triton are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

import triton.language as tl

from .kernel import Kernel
from .tile import (
    BAND,
    COLS,
    LOG2E,
    add_chosen,
    add_product,
    any_nan,
    band_tiles,
    begin_chained,
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
    slope_of,
    store_blocks,
    visible,
    visited,
)
from .variant import PER_KEY

_PER_KEY = tl.constexpr(PER_KEY)


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

    begin_chained(C)
    k_heads = heads // group
    line, pair = place(tl.program_id(0), lines, pairs, span, reverse, k_heads, C)
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
                        p = probability(raw, logs_i, factor, C)
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
                        p = probability(s, logs_i, LOG2E, C)
                    seen = p
                    if PHASE == 3 and C.MASKED:
                        if i >= full:
                            inside = visible(
                                rows, keys, n0, q_length, k_length, lo, hi, step, table, bounds, index, edges,
                                COLS, BN, C,
                            )  # fmt: skip
                            p = tl.where(inside, p, 0.0)
                    elif PHASE == 1 or PHASE == 2:
                        seen = visible(
                            rows, keys, n0, q_length, k_length, lo, hi, step, table, bounds, index, edges,
                            COLS, BN, C,
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
    end_chained(C)


#: The same, in a function of its own, whose needs of registers are not those of the kernel.
keys_again = keys_kernel.apart
