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

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from tilefold.masks.band import Band
from tilefold.planning.backend import Work
from tilefold.problem import Problem

from .arguments import Kept, MaskArguments, in_units, of_mask, place_in_chain, traits
from .kernel import Kernel, Launch
from .lists import lists_of
from .sizes import kind_of, needed
from .tile import (
    BAND,
    LOG2E,
    add_product,
    band_tiles,
    begin_chained,
    end_chained,
    kept,
    load_bias,
    load_tile,
    probability,
    product,
    row_values,
    scored,
    slope_of,
    store_scores,
    visible,
    visited,
)
from .variant import PER_KEY, PER_ROW, PER_SCORE, Variant

#: Steps of a program, all sharers of all its tiles together: enough to make up for its beginning and end.
_STEPS = 32


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
    q, k, v, dout, logs, delta, dbias,
    q_b: tl.int64, q_h: tl.int64, q_l: tl.int32, k_b: tl.int64, k_h: tl.int64, k_l: tl.int32,
    v_b: tl.int64, v_h: tl.int64, v_l: tl.int32, g_b: tl.int64, g_h: tl.int64, g_l: tl.int32,
    chunks: tl.int32, chunk: tl.int32, q_lines: tl.int32, k_lines: tl.int32, sharing_batches: tl.int32,
    sharing_heads: tl.int32, bias_heads: tl.int32,
    heads: tl.int32, group: tl.int32, q_length: tl.int32, k_length: tl.int32,
    lo: tl.int32, hi: tl.int32, step: tl.int32,
    tiles, counts, order, capacity: tl.int32, table_b: tl.int32, table_h: tl.int32, bounds, index,
    scale: tl.float32, softcap: tl.float32, bias, bias_b: tl.int64, bias_h: tl.int64, bias_q: tl.int64,
    bias_k: tl.int64, slopes, slope_b: tl.int64, slope_h: tl.int64, sink, seed, threshold: tl.int32,
    keep_scale: tl.float32, row_table, key_table, q_origin: tl.int32, q_step: tl.int32, k_origin: tl.int32,
    k_step: tl.int32, base: tl.int32, batch_origin: tl.int32, head_origin: tl.int32,
    C: tl.constexpr,
):  # fmt: skip
    """`dbias [Bb, Hb, Lq, Lk]`, dense: the sum of dS over `sharing_batches` and `sharing_heads`. Tiles that
    are not visited are not written.

    Grid: `chunks * q_lines * Hb * Bb`; a program owns `chunk` of the tiles that a line visits.
    """
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    begin_chained(C)
    # Whether everybody who shares the tile sees the same of it.
    SAME: tl.constexpr = C.MASK == BAND or C.SHARED
    first = tl.program_id(0) % chunks * chunk
    line = tl.program_id(0) // chunks % q_lines
    owner = tl.program_id(0) // (chunks * q_lines)
    m0 = line * BM
    first_b, first_h = owner // bias_heads, owner % bias_heads
    rows = m0 + tl.arange(0, BM)[:, None]
    bias += first_b.to(tl.int64) * (bias_b * C.BIAS_UNIT) + first_h.to(tl.int64) * (bias_h * C.BIAS_UNIT)
    if C.DROPOUT:
        key_of_seed = tl.load(seed)
    begin, full_begin, full_stop, full, visits = 0, 0, 0, 0, k_lines
    if C.MASK == BAND:
        last = tl.minimum(m0 + BM, q_length) - 1
        begin, full_begin, full_stop, stop = band_tiles(
            m0, last, k_length - q_length, lo, hi, k_length, BN, C.STEPPED
        )
        full, visits = full_stop - full_begin, stop - begin
    elif SAME:
        tiles += line.to(tl.int64) * capacity
        full = tl.load(counts + line * 2)
        visits, full_stop = full + tl.load(counts + line * 2 + 1), full
    sharing = sharing_batches * sharing_heads
    total = tl.zeros([BM, BN], tl.float32)
    for j in tl.range(0, tl.maximum(tl.minimum(visits - first, chunk), 0) * sharing, num_stages=C.STAGES):
        turn, i = first + j // sharing, j % sharing
        tile = visited(turn, begin, full_begin, full_stop, tiles, C.MASK, 3) if SAME else turn
        n0 = tile * BN
        keys = n0 + tl.arange(0, BN)[None, :]
        b, h = first_b + i // sharing_heads, first_h + i % sharing_heads
        total = tl.where(i == 0, 0.0, total)
        share = 1
        seen = rows >= keys
        if not SAME:
            seen = visible(
                rows, keys, n0, q_length, k_length, lo, hi, step, b * table_b + h * table_h, bounds, index,
                rows, BAND, BN, C,
            )  # fmt: skip
            share = tl.max(tl.ravel(seen.to(tl.int32)), axis=0)
        if SAME or share > 0:
            b64, h64, hk64 = b.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
            q_at = q + b64 * (q_b * C.UNIT) + h64 * (q_h * C.UNIT)
            k_at = k + b64 * (k_b * C.UNIT) + hk64 * (k_h * C.UNIT)
            v_at = v + b64 * (v_b * C.UNIT) + hk64 * (v_h * C.UNIT)
            g_at = dout + b64 * (g_b * C.UNIT) + h64 * (g_h * C.UNIT)
            q0 = load_tile(q_at, m0, q_l * C.UNIT, q_length, BM, 0, C.D0, C.D, not C.EVEN)
            k0 = load_tile(k_at, n0, k_l * C.UNIT, k_length, BN, 0, C.D0, C.D, not C.EVEN)
            raw = product(q0, tl.trans(k0), C.TF32, C.WIDE)
            if C.D1 > 0:
                q1 = load_tile(q_at, m0, q_l * C.UNIT, q_length, BM, C.D0, C.D1, C.D, not C.EVEN)
                k1 = load_tile(k_at, n0, k_l * C.UNIT, k_length, BN, C.D0, C.D1, C.D, not C.EVEN)
                raw = add_product(raw, q1, tl.trans(k1), C.TF32, C.WIDE)
            g0 = load_tile(g_at, m0, g_l * C.UNIT, q_length, BM, 0, C.V0, C.DV, not C.EVEN)
            v0 = load_tile(v_at, n0, v_l * C.UNIT, k_length, BN, 0, C.V0, C.DV, not C.EVEN)
            dp = product(g0, tl.trans(v0), C.TF32, C.WIDE)
            if C.V1 > 0:
                g1 = load_tile(g_at, m0, g_l * C.UNIT, q_length, BM, C.V0, C.V1, C.DV, not C.EVEN)
                v1 = load_tile(v_at, n0, v_l * C.UNIT, k_length, BN, C.V0, C.V1, C.DV, not C.EVEN)
                dp = add_product(dp, g1, tl.trans(v1), C.TF32, C.WIDE)
            slope = 0.0
            if C.ALIBI:
                slope = slope_of(
                    slopes, slope_b, slope_h, b, h, rows, q_length, row_table, batch_origin, C.SLOPE_ROWS
                )
            bias_tile = load_bias(bias, bias_q, bias_k, rows, keys, q_length, k_length, C, not C.EVEN)
            s, _ = scored(
                raw, rows, keys, scale, softcap, bias_tile, slope, q_length, k_length, row_table, key_table,
                base, q_step, k_step, C,
            )  # fmt: skip
            logs_i = row_values(logs, b, h, heads, m0, q_length, BM, float("inf"), not C.EVEN, C.EVEN)[
                :, None
            ]
            delta_i = row_values(delta, b, h, heads, m0, q_length, BM, 0.0, not C.EVEN, C.EVEN)[:, None]
            p = probability(s, logs_i, LOG2E, C)
            if C.DROPOUT:
                keep = kept(
                    rows, keys, n0, b + batch_origin, h + head_origin, q_length, k_length, row_table,
                    key_table,
                    q_origin, q_step, k_origin, k_step, key_of_seed, threshold, BN, C.TABLES, C.QUADS,
                )  # fmt: skip
                dp = tl.where(keep, dp * keep_scale, 0.0)
            ds = p * (dp - delta_i)
            total += ds if SAME else tl.where(seen, ds, 0.0)
        if i == sharing - 1:
            if SAME and turn >= full:
                # What a tile does not show may be NaN.
                seen = visible(
                    rows, keys, n0, q_length, k_length, lo, hi, step, 0 * first_b, bounds, index, rows, BAND,
                    BN, C,
                )  # fmt: skip
                total = tl.where(seen, total, 0.0)
            at_first = owner.to(tl.int64) * q_length + m0
            store_scores(dbias, at_first, n0, total, rows, keys, q_length, k_length, C)
    end_chained(C)


class _Made(NamedTuple):
    """What one kind of call needs of the host, worked out once."""

    launch: Launch
    mask: MaskArguments
    chunks: int
    chunk: int
    q_lines: int
    k_lines: int


def _make(work: Work, _: str, chain: Any) -> _Made:
    p, form, bias = work.problem, work.form, work.scores.bias
    assert bias is not None
    sizes, lists = needed("bias", p, kind_of(p, form)), None
    if form.kind != "band":
        lists = lists_of(form, p.q_length, p.k_length, sizes.rows, sizes.keys, by_key=False)
    C = Variant(
        **sizes.constants(p),
        CHAIN=chain,
        SHARED=form.kind != "band" and form.tensors()[0].shape[:2].numel() == 1,
        **(traits(work) | {"CAREFUL": False}),
    )
    launch = Launch(bias_kernel, C, sizes.warps, sizes.registers)
    b, h, _, _ = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    q_lines, k_lines = -(-p.q_length // sizes.rows), -(-p.k_length // sizes.keys)
    chunk = chunk_of(p.batch // max(b, 1) * (p.q_heads // max(h, 1)), k_lines)
    return _Made(launch, of_mask(form, lists), -(-k_lines // chunk), chunk, q_lines, k_lines)


def chunk_of(sharing: int, lines: int) -> int:
    """How many of a line's tiles a program has, where so many batch elements and heads share each."""
    return max(1, min(_STEPS // max(sharing, 1), lines))


_kept = Kept(_make)


def bias_gradient(
    work: Work, dout: Tensor, logs: Tensor, deltas: Tensor, scores: list[Any], follows: bool
) -> Tensor:
    """The gradient of a bias `[.., Lq, Lk]` in its shape.

    Args:
        work, dout: q, k, v and dout as `dense_rows` leaves them.
        logs, deltas: as `delta.fill` leaves them.
        scores: what `of_scores(work)` gave.
        follows: whether the launch before was that of a kernel of the same chain.
    """
    p, bias = work.problem, work.scores.bias
    assert bias is not None
    b, h, _, _ = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    # Tiles that nobody sees are not visited, nor is anything where nobody is.
    full = isinstance(work.form, Band) and work.form.is_full and p.batch * p.q_heads > 0
    dbias = (torch.empty if full else torch.zeros)(
        (b, h, p.q_length, p.k_length), dtype=bias.dtype, device=bias.device
    )
    made: _Made = _kept.get(work, "", place_in_chain(bias.device, follows and full))
    unit = 16 // work.q.element_size()
    arguments = [
        work.q, work.k, work.v, dout, logs, deltas, dbias,
        *(n for x in (work.q, work.k, work.v, dout) for n in in_units(x, unit)),
        made.chunks, made.chunk, made.q_lines, made.k_lines,
        p.batch // max(b, 1), p.q_heads // max(h, 1), h, p.q_heads, max(p.group, 1), p.q_length, p.k_length,
        *made.mask, *scores,
    ]  # fmt: skip
    made.launch(made.chunks * made.q_lines * h * b, arguments, bias.device)
    return dbias.reshape(bias.shape)
