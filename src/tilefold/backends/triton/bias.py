"""The gradient of an additive bias, in its own broadcast shape and without atomic operations.

A bias with one value per row or per key takes sums that the other kernels have at hand, and a bias with a
value for every score takes dS as it is. This kernel serves what lies between: a bias `[.., Lq, Lk]` shared by
batch elements or heads. A program owns one tile of the gradient and loops over everybody who shares it, so
that no more memory than the gradient itself is needed.
"""

# The functions of Triton are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tilefold.planning.backend import Work
from tilefold.problem import Problem

from .arguments import Kept, MaskArguments, in_units, of_mask, of_scores, traits
from .kernel import Kernel, Launch
from .lists import lists_of
from .sizes import kind_of, needed
from .tile import (
    LOG2E,
    add_product,
    kept,
    load_tile,
    lse_of,
    product,
    row_values,
    scored,
    slope_of,
    visible,
)
from .variant import PER_KEY, PER_ROW, PER_SCORE, Variant


def way_of(bias: Tensor | None, problem: Problem) -> int:
    """How its gradient leaves the kernels; 0: through `bias_gradient`."""
    assert bias is not None
    b, h, q, k = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if k == 1:
        return PER_ROW
    if q == 1:
        return PER_KEY
    return PER_SCORE if (b, h) == (problem.batch, problem.q_heads) else 0


@Kernel
def bias_kernel(
    q, k, v, dout, lse, delta, dbias,
    q_b: tl.int64, q_h: tl.int64, q_l: tl.int32, k_b: tl.int64, k_h: tl.int64, k_l: tl.int32,
    v_b: tl.int64, v_h: tl.int64, v_l: tl.int32, g_b: tl.int64, g_h: tl.int64, g_l: tl.int32,
    l_b: tl.int64, l_h: tl.int64, l_l: tl.int64,
    q_lines: tl.int32, k_lines: tl.int32, sharing_batches: tl.int32, sharing_heads: tl.int32,
    bias_heads: tl.int32,
    heads: tl.int32, group: tl.int32, q_length: tl.int32, k_length: tl.int32,
    lo: tl.int32, hi: tl.int32, step: tl.int32,
    tiles, counts, order, capacity: tl.int32, table_b: tl.int32, table_h: tl.int32, bounds, index,
    scale: tl.float32, softcap: tl.float32, bias, bias_b: tl.int64, bias_h: tl.int64, bias_q: tl.int64,
    bias_k: tl.int64, slopes, slope_b: tl.int64, slope_h: tl.int64, sink, seed, threshold: tl.int32,
    keep_scale: tl.float32, row_table, key_table, q_origin: tl.int32, q_step: tl.int32, k_origin: tl.int32,
    k_step: tl.int32, base: tl.int32, batch_origin: tl.int32, head_origin: tl.int32,
    C: tl.constexpr,
):  # fmt: skip
    """`dbias [Bb, Hb, Lq, Lk]`, dense: the sum of dS over `sharing_batches` and `sharing_heads`.

    Grid: `k_lines * q_lines * Hb * Bb`.
    """
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    tile = tl.program_id(0)
    n0 = tile % k_lines * BN
    m0 = tile // k_lines % q_lines * BM
    owner = tile // (k_lines * q_lines)
    first_b, first_h = owner // bias_heads, owner % bias_heads
    rows = m0 + tl.arange(0, BM)[:, None]
    keys = n0 + tl.arange(0, BN)[None, :]
    if C.DROPOUT:
        key_of_seed = tl.load(seed)
    total = tl.zeros([BM, BN], tl.float32)
    for i in tl.range(0, sharing_batches * sharing_heads, num_stages=1):
        b, h = first_b + i // sharing_heads, first_h + i % sharing_heads
        table = b * table_b + h * table_h
        seen = visible(
            rows, keys, n0, q_length, k_length, lo, hi, step, table, bounds, index,
            BN, C.MASK, C.INTERVALS, C.STEPPED,
        )  # fmt: skip
        if tl.max(tl.max(seen.to(tl.int32), axis=1), axis=0) > 0:
            b64, h64, hk64 = b.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
            q_at = q + b64 * (q_b * C.UNIT) + h64 * (q_h * C.UNIT)
            k_at = k + b64 * (k_b * C.UNIT) + hk64 * (k_h * C.UNIT)
            v_at = v + b64 * (v_b * C.UNIT) + hk64 * (v_h * C.UNIT)
            g_at = dout + b64 * (g_b * C.UNIT) + h64 * (g_h * C.UNIT)
            q0 = load_tile(q_at, m0, q_l * C.UNIT, q_length, BM, 0, C.D0, C.D, True)
            k0 = load_tile(k_at, n0, k_l * C.UNIT, k_length, BN, 0, C.D0, C.D, True)
            raw = product(q0, tl.trans(k0), C.TF32, C.WIDE)
            if C.D1 > 0:
                q1 = load_tile(q_at, m0, q_l * C.UNIT, q_length, BM, C.D0, C.D1, C.D, True)
                k1 = load_tile(k_at, n0, k_l * C.UNIT, k_length, BN, C.D0, C.D1, C.D, True)
                raw = add_product(raw, q1, tl.trans(k1), C.TF32, C.WIDE)
            g0 = load_tile(g_at, m0, g_l * C.UNIT, q_length, BM, 0, C.V0, C.DV, True)
            v0 = load_tile(v_at, n0, v_l * C.UNIT, k_length, BN, 0, C.V0, C.DV, True)
            dp = product(g0, tl.trans(v0), C.TF32, C.WIDE)
            if C.V1 > 0:
                g1 = load_tile(g_at, m0, g_l * C.UNIT, q_length, BM, C.V0, C.V1, C.DV, True)
                v1 = load_tile(v_at, n0, v_l * C.UNIT, k_length, BN, C.V0, C.V1, C.DV, True)
                dp = add_product(dp, g1, tl.trans(v1), C.TF32, C.WIDE)
            slope = 0.0
            if C.ALIBI:
                slope = slope_of(
                    slopes, slope_b, slope_h, b, h, rows, q_length, row_table, batch_origin, C.SLOPE_ROWS
                )
            bias_at = bias + b64 * (bias_b * C.BIAS_UNIT) + h64 * (bias_h * C.BIAS_UNIT)
            s, _ = scored(
                raw, rows, keys, scale, softcap, bias_at, bias_q, bias_k, slope, q_length, k_length,
                row_table, key_table, base, q_step, k_step, C, True,
            )  # fmt: skip
            lse_i = lse_of(lse + b64 * l_b + h64 * l_h, m0, l_l, q_length, BM, True)[:, None]
            delta_i = row_values(delta + (b64 * heads + h64) * q_length, m0, q_length, BM, 0.0, True)[:, None]
            p = tl.exp2((s - lse_i) * LOG2E)
            if C.DROPOUT:
                keep = kept(
                    rows, keys, n0, b + batch_origin, h + head_origin, q_length, k_length, row_table,
                    key_table,
                    q_origin, q_step, k_origin, k_step, key_of_seed, threshold, BN, C.TABLES, C.QUADS,
                )  # fmt: skip
                dp = tl.where(keep, dp * keep_scale, 0.0)
            total += tl.where(seen, p * (dp - delta_i), 0.0)
    corner = dbias + (owner.to(tl.int64) * q_length + m0) * k_length + n0
    at = corner + (tl.arange(0, BM)[:, None].to(tl.int64) * k_length + tl.arange(0, BN)[None, :])
    tl.store(at, total.to(dbias.dtype.element_ty), mask=(rows < q_length) & (keys < k_length))


def _make(work: Work, _: str, __: Any) -> tuple[Launch, MaskArguments, int, int]:
    p, form = work.problem, work.form
    sizes, lists = needed("bias", p, kind_of(form)), None
    if form.kind != "band":
        lists = lists_of(form, p.q_length, p.k_length, sizes.rows, sizes.keys, by_key=False)
    C = Variant(BM=sizes.rows, BN=sizes.keys, STAGES=sizes.stages, **(traits(work) | {"CAREFUL": False}))
    launch = Launch(bias_kernel, C, sizes.warps)
    return launch, of_mask(form, lists), -(-p.q_length // sizes.rows), -(-p.k_length // sizes.keys)


_kept = Kept(_make)


def bias_gradient(work: Work, dout: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of a bias `[.., Lq, Lk]` in its shape. q, k, v and dout as `dense_rows` leaves them."""
    p, bias = work.problem, work.scores.bias
    assert bias is not None
    launch, mask, q_lines, k_lines = _kept.get(work)
    b, h, _, _ = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    dbias = torch.empty((b, h, p.q_length, p.k_length), dtype=bias.dtype, device=bias.device)
    unit = 16 // work.q.element_size()
    arguments = [
        work.q, work.k, work.v, dout, lse, delta, dbias,
        *(n for x in (work.q, work.k, work.v, dout) for n in in_units(x, unit)), *lse.stride(), q_lines,
        k_lines,
        p.batch // max(b, 1), p.q_heads // max(h, 1), h, p.q_heads, max(p.group, 1), p.q_length, p.k_length,
        *mask, *of_scores(work),
    ]  # fmt: skip
    launch(k_lines * q_lines * h * b, arguments, bias.device)
    return dbias.reshape(bias.shape)
