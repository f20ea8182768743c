"""What the backward kernels need of each row: `delta = rowsum(dout * out) - dlse` (Dao 2023, algorithm 2,
line 4), and with it the gradient of the sink.
"""

# The functions of Triton are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from typing import Any

import triton.language as tl
from torch import Tensor

from tilefold.planning.backend import Work

from .arguments import Kept, chains, in_units
from .kernel import Kernel, Launch
from .tile import LOG2E, add_product, begin_chained, load_tile, product
from .variant import APART, HEAD, Variant


@Kernel
def delta_kernel(
    out, dout, lse, dlse, delta, logs, sink, sink_sums,
    o_b: tl.int64, o_h: tl.int64, o_l: tl.int32, g_b: tl.int64, g_h: tl.int64, g_l: tl.int32,
    l_b: tl.int64, l_h: tl.int64, l_l: tl.int64, e_b: tl.int64, e_h: tl.int64, e_l: tl.int64,
    heads: tl.int32, q_length: tl.int32, lines: tl.int32,
    C: tl.constexpr,
):  # fmt: skip
    """`delta = rowsum(dout * out) - dlse` and `logs`, the lse, fp32 `[B, Hq, Lq]` dense, and each tile's
    share of the gradient of the sink, fp32 `[B, Hq, lines]`. Rows that saw nothing have delta 0 and +inf in
    logs, so that their probabilities are 0. Logs are in base 2 where `Variant.BASE2` says so.

    Grid: `lines * B * Hq`.
    """
    begin_chained(C)
    BM: tl.constexpr = C.BM
    EXACT: tl.constexpr = C.UNIT == 4
    line, pair = tl.program_id(0) % lines, tl.program_id(0) // lines
    b, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    m0 = line * BM
    row = m0 + tl.arange(0, BM)
    inside = row < q_length
    out += b * (o_b * C.UNIT) + h * (o_h * C.UNIT)
    dout += b * (g_b * C.UNIT) + h * (g_h * C.UNIT)
    o0 = load_tile(out, m0, o_l * C.UNIT, q_length, BM, 0, C.V0, C.DV, True).to(tl.float32)
    g0 = load_tile(dout, m0, g_l * C.UNIT, q_length, BM, 0, C.V0, C.DV, True).to(tl.float32)
    if EXACT:
        pairs = product(g0, tl.trans(o0), C.TF32, False)
    total = tl.sum(o0 * g0, 1)
    if C.V1 > 0:
        o1 = load_tile(out, m0, o_l * C.UNIT, q_length, BM, C.V0, C.V1, C.DV, True).to(tl.float32)
        g1 = load_tile(dout, m0, g_l * C.UNIT, q_length, BM, C.V0, C.V1, C.DV, True).to(tl.float32)
        total += tl.sum(o1 * g1, 1)
        if EXACT:
            pairs = add_product(pairs, g1, tl.trans(o1), C.TF32, False)
    if EXACT:
        # Summed in the order of `dout @ v^T`, so that a row which sees one key only has exactly no gradient.
        own = tl.arange(0, BM)
        total = tl.sum(tl.where(own[:, None] == own[None, :], pairs, 0.0), 1)
    lse_i = tl.load(lse + b * l_b + h * l_h + row * l_l, mask=inside, other=-float("inf"))
    if C.LSE_GRADIENT:
        total -= tl.load(dlse + b * e_b + h * e_h + row * e_l, mask=inside, other=0.0).to(tl.float32)
    alive = lse_i != -float("inf")
    total = tl.where(alive, total, 0.0)
    tl.store(delta + pair.to(tl.int64) * q_length + row, total, mask=inside)
    logs_i = tl.where(alive, lse_i * LOG2E if C.BASE2 else lse_i, float("inf"))
    tl.store(logs + pair.to(tl.int64) * q_length + row, logs_i, mask=inside)
    if C.SINK:
        logit = tl.load(sink + h).to(tl.float32)
        share = tl.where(alive, tl.exp2((logit - lse_i) * LOG2E) * total, 0.0)
        tl.store(sink_sums + tl.program_id(0), -tl.sum(share, 0))


def _make(work: Work, _: str, more: Any) -> tuple[Launch, int]:
    p = work.problem
    rows = 64 if p.v_head_dim <= 128 else 16
    unit = 16 // p.dtype.itemsize
    biased = work.scores.bias is not None
    C = Variant(p.head_dim, p.v_head_dim, rows, rows, UNIT=unit, BIAS=biased, STAGES=1, **dict(more))
    return Launch(delta_kernel, C, 4), -(-p.q_length // rows)


_kept = Kept(_make)


def fill(
    deltas: Tensor,
    logs: Tensor,
    work: Work,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    sink_wanted: bool,
) -> Tensor | None:
    """Write `deltas` and `logs`, fp32 `[B, Hq, Lq]`; the gradient of the sink, if it is wanted. `dout` and
    `out` as `dense_rows` leaves them.
    """
    p, sink = work.problem, work.scores.sink if sink_wanted else None
    sink = None if sink is None else sink.contiguous()
    more = (
        ("SINK", sink is not None), ("LSE_GRADIENT", dlse is not None),
        ("CHAIN", HEAD if chains(out.device) else APART),
    )  # fmt: skip
    launch, lines = _kept.get(work, str(None if dlse is None else dlse.dtype), more)
    sums = None if sink is None else deltas.new_empty(p.batch, p.q_heads, lines)
    unit = 16 // out.element_size()
    arguments = [
        out, dout, lse, dlse, deltas, logs, sink, sums,
        *in_units(out, unit), *in_units(dout, unit), *lse.stride(),
        *((0, 0, 0) if dlse is None else dlse.stride()), p.q_heads, p.q_length, lines,
    ]  # fmt: skip
    launch(lines * p.batch * p.q_heads, arguments, out.device)
    return None if sums is None or sink is None else sums.sum((0, 2)).to(sink.dtype)
