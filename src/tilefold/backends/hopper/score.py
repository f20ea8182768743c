"""The score of a tile beyond a scaled product: softcap and ALiBi."""

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


@gluon.jit
def slope_of(s, b, h, rows):
    """The ALiBi slope of a head, or of each of the rows of packed documents, in base 2."""
    C: gl.constexpr = s.C
    if C.SLOPE_ROWS:
        document = gl.load(s.row_table + 2 * s.q_length + gl.minimum(rows, s.q_length - 1))
        at = s.slopes + (document + s.batch_origin) * s.slope_b + h * s.slope_h
        return gl.load(at).to(gl.float32)[:, None] * LOG2E
    elif C.ALIBI:
        return gl.load(s.slopes + b * s.slope_b + h * s.slope_h).to(gl.float32) * LOG2E
    else:
        return 0.0


@gluon.jit
def scored(s, raw, m0, n0, slope, S_LAYOUT: gl.constexpr):
    """Scores in base 2, `[64, BN]`, of products. Plain ones are left as they are: their scale goes into the
    exponent.
    """
    C: gl.constexpr = s.C
    if C.SOFTCAP:
        # `scale` is that of the argument of tanh, `cap` holds the cap and the change of base.
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
    return raw


@gluon.jit
def in_base2(s, top):
    """The largest score of each row in base 2. Rounded: what weighs a tile must be, to the last bit, what the
    next one starts from, so no compiler may fuse the product with a difference behind it.
    """
    C: gl.constexpr = s.C
    if C.PLAIN:
        none = gl.full([LINES], 0.0, gl.float32, top.type.layout)
        return gl.fma(top, none + s.scale, none)
    else:
        return top


@gluon.jit
def weights_of(s, scores, base):
    """`2^(score - base)`, scores as `scored` leaves them."""
    C: gl.constexpr = s.C
    if C.PLAIN:
        return gl.exp2(scores * s.scale - base[:, None])
    else:
        return gl.exp2(scores - base[:, None])
