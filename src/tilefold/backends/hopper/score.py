"""The score of a tile beyond a scaled product: softcap, ALiBi and a bias.

Scores are in base 2, but beside a bias: the least number of its dtype, which many masks are made of, would
overflow there.
"""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from . import variant
from .dialect import gl, gluon

LINES = gl.constexpr(variant.LINES)
LOG2E = gl.constexpr(variant.LOG2E)


@gluon.jit
def tanh(x):
    """tanh by one exponential, and by a polynomial near zero where that one cancels (Moshier, Cephes)."""
    square = x * x
    near = -5.70498872745e-3 * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    e = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    far = gl.where(x < 0.0, -far, far)
    return gl.where(gl.abs(x) < 0.625, near, far)


@gluon.constexpr_function
def unit_of(C):
    """What a score in natural units is multiplied by."""
    return 1.0 if C.BIAS else variant.LOG2E


@gluon.jit
def power(s, x):
    """The exponential of a difference of scores."""
    C: gl.constexpr = s.C
    if C.BIAS:
        return gl.exp2(x * LOG2E)
    else:
        return gl.exp2(x)


@gluon.jit
def bias_of(s, b, h):
    """Where the bias of a head begins."""
    C: gl.constexpr = s.C
    if C.BIAS:
        return s.bias + (b.to(gl.int64) * s.bias_b + h.to(gl.int64) * s.bias_h)
    else:
        return s.bias


@gluon.jit
def slope_of(s, b, h, rows):
    """The ALiBi slope of a head, or of each of the rows of packed documents, in the units of scores."""
    C: gl.constexpr = s.C
    UNIT: gl.constexpr = unit_of(C)
    if C.SLOPE_ROWS:
        document = gl.load(s.row_table + 2 * s.q_length + gl.minimum(rows, s.q_length - 1))
        at = s.slopes + (document + s.batch_origin) * s.slope_b + h * s.slope_h
        return gl.load(at).to(gl.float32)[:, None] * UNIT
    elif C.ALIBI:
        return gl.load(s.slopes + b * s.slope_b + h * s.slope_h).to(gl.float32) * UNIT
    else:
        return 0.0


@gluon.jit
def scored(s, raw, m0, n0, slope, bias, S_LAYOUT: gl.constexpr):
    """Scores, `[64, BN]`, of products. Plain ones stay as they are: their scale goes into the exponent."""
    C: gl.constexpr = s.C
    if C.SOFTCAP:
        # `scale` is that of the argument of tanh, `cap` holds the cap and the change of units.
        raw = tanh(raw * s.scale) * s.cap
    elif not C.PLAIN:
        raw = raw * s.scale
    if C.ALIBI:
        rows = m0 + gl.arange(0, LINES, gl.SliceLayout(1, S_LAYOUT))
        keys = n0 + gl.arange(0, C.BN, gl.SliceLayout(0, S_LAYOUT))
        if C.TABLES:
            row = gl.load(s.row_table + s.q_length + gl.minimum(rows, s.q_length - 1))
            key = gl.load(s.key_table + gl.minimum(keys, s.k_length - 1))
        else:
            row = rows * s.q_step + s.base
            key = keys * s.k_step
        away = row[:, None] - key[None, :]
        raw = raw - slope * gl.abs(away).to(gl.float32)
    if C.BIAS:
        rows = m0 + gl.arange(0, LINES, gl.SliceLayout(1, S_LAYOUT))
        keys = n0 + gl.arange(0, C.BN, gl.SliceLayout(0, S_LAYOUT))
        at = rows.to(gl.int64)[:, None] * s.bias_q + keys.to(gl.int64)[None, :] * s.bias_k
        inside = (rows < s.q_length)[:, None] & (keys < s.k_length)[None, :]
        raw = raw + gl.load(bias + at, mask=inside, other=0.0).to(gl.float32)
    return raw


@gluon.jit
def in_base2(s, top):
    """The largest score of each row, in the units of `power`. Rounded: what weighs a tile must be, to the
    last bit, what the next one starts from, so no compiler may fuse the product with a difference behind it.
    """
    C: gl.constexpr = s.C
    if C.PLAIN:
        none = gl.full([LINES], 0.0, gl.float32, top.type.layout)
        return gl.fma(top, none + s.scale, none)
    else:
        return top


@gluon.jit
def weights_of(s, scores, base):
    """What scores weigh beside a base; scores as `scored` leaves them."""
    C: gl.constexpr = s.C
    if C.PLAIN:
        return gl.exp2(scores * s.scale - base[:, None])
    else:
        return power(s, scores - base[:, None])
