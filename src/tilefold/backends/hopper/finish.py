"""Results of 64 rows on their way out."""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from .dialect import copy_out, copy_out_wait, fence_async_shared, gl, gluon
from .machine import log2
from .program import LINES, lse_of
from .score import power, unit_of

LN2 = gl.constexpr(0.6931471805599453)
#: Sums from here on may have lost what is small: 2^64.
LARGEST_SUM = gl.constexpr(1.8446744073709552e19)


@gluon.jit
def send(s, buffer, values, at):
    """Copy values to `out` by way of shared memory. (Stores from registers are 3 to 5 % slower.)"""
    copy_out_wait(0)
    buffer.reshape(values.shape).store(values)
    fence_async_shared()
    copy_out(s.o_desc, at, buffer)


@gluon.jit
def finish(w: gl.constexpr, s, b, h, m0, o, reference, total, broken, again, MARKS: gl.constexpr):
    """Write `out` and `lse` of 64 rows, which come `again` or not. If they may come once more, which `MARKS`
    are for, rows are `broken` whose `total` is not a number or has outgrown a fixed reference; their lse is
    not a number.
    """
    C: gl.constexpr = s.C
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    r_layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
    dtype: gl.constexpr = s.q_desc.dtype
    rows = m0 + gl.arange(0, LINES, r_layout)
    inside = rows < s.q_length
    if MARKS:
        lost = (total < (gl.where(again > 0, float("inf"), LARGEST_SUM) if C.FIXED else float("inf"))) == 0
        if not C.CAREFUL:
            lost = lost & (again == 0)
    if C.SINK:
        own_sink = gl.load(s.sink + h).to(gl.float32)
        logit = own_sink * unit_of(C)
        lonely = (reference == float("-inf")) & (total == 0.0)
        top = gl.maximum(reference, logit)
        top = gl.where(top == float("-inf"), 0.0, top)
        alpha = power(s, reference - top)
        total = total * alpha + power(s, logit - top)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
        reference = top
    alive = total != 0.0
    divisor = gl.where(alive, total, 1.0)
    if C.BIAS:
        lse = reference + log2(divisor) * LN2
    else:
        lse = (reference + log2(divisor)) * LN2
    lse = gl.where(alive, lse, float("-inf"))
    if C.SINK:
        # Rows that see nothing have the sink itself, not rounded on the way through base 2.
        lse = gl.where(lonely, own_sink, lse)
    o = o * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, o_layout))[:, None]
    if MARKS:
        lse = gl.where(lost, float("nan"), lse)
        broken = broken | gl.where(lost & inside, 1, 0)
    if C.HALVES:
        halves = gl.permute(o.to(dtype).reshape([LINES, 2, C.DV // 2]), (0, 2, 1))
        left, right = gl.split(halves)
        send(s, s.o_smem.index(w), left, [b, h, m0, 0])
        send(s, s.o_smem.index(w), right, [b, h, m0, C.DV // 2])
    else:
        send(s, s.o_smem.index(w), o.to(dtype), [b, h, m0, 0])
    gl.store(lse_of(s, b, h, rows), lse, mask=inside)
    return broken
