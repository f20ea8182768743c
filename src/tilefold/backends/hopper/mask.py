"""The mask of a tile."""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from . import variant
from .dialect import gl, gluon

BAND = gl.constexpr(variant.BAND)
ROWS = gl.constexpr(variant.ROWS)
COLS = gl.constexpr(variant.COLS)
LINES = gl.constexpr(variant.LINES)
#: Rows and keys of a granule of BITS.
GRANULE = gl.constexpr(64)


@gluon.jit
def visible(s, m0, n0, table, edges, S_LAYOUT: gl.constexpr):
    """Which elements of a tile are visible, `[64, BN]`. `edges` are the intervals of the rows, for ROWS."""
    C: gl.constexpr = s.C
    # Ends are worked out once per row, beside the tile's first key; an element takes one comparison for each.
    keys = gl.arange(0, C.BN, gl.SliceLayout(0, S_LAYOUT))
    if C.MASK == BAND:
        rows = m0 + gl.arange(0, LINES, gl.SliceLayout(1, S_LAYOUT))
        away = s.k_length - s.q_length - n0
        end = gl.minimum(rows + (away + s.hi + 1), s.k_length - n0)
        seen = keys[None, :] < end[:, None]
        if C.BELOW:
            seen = seen & (keys[None, :] >= (rows + (away + s.lo))[:, None])
        if C.STEPPED:
            seen = seen & ((keys[None, :] - (rows + away)[:, None]) % s.step == 0)
        return seen
    elif C.MASK == ROWS:
        seen = between(keys[None, :], (edges[0] - n0)[:, None], (edges[1] - n0)[:, None])
        if C.INTERVALS > 1:
            seen = seen | between(keys[None, :], (edges[2] - n0)[:, None], (edges[3] - n0)[:, None])
        return seen
    elif C.MASK == COLS:
        rows = gl.arange(0, LINES, gl.SliceLayout(1, S_LAYOUT))
        at = table.to(gl.int64) * s.k_length + gl.minimum(n0 + keys, s.k_length - 1)
        at = s.bounds + at * (2 * C.INTERVALS)
        hidden = between(rows[:, None], (gl.load(at) - m0)[None, :], (gl.load(at + 1) - m0)[None, :])
        if C.INTERVALS > 1:
            start, end = gl.load(at + 2) - m0, gl.load(at + 3) - m0
            hidden = hidden | between(rows[:, None], start[None, :], end[None, :])
        return (hidden == 0) & (keys < s.k_length - n0)[None, :]
    else:
        return bits(s, m0, n0, table, keys, S_LAYOUT) & (keys < s.k_length - n0)[None, :]


@gluon.jit
def between(x, start, end):
    return (x >= start) & (x < end)


@gluon.jit
def bits(s, m0, n0, table, keys, S_LAYOUT: gl.constexpr):
    """The bits of a tile: its rows are those of one granule, each of its granules has two words of 32 bits
    per row. The index has -1 for an empty granule and -2 for a full one.
    """
    C: gl.constexpr = s.C
    GRANULES: gl.constexpr = C.BN // 64
    rows = gl.arange(0, LINES, gl.SliceLayout(1, S_LAYOUT))
    k_granules = (s.k_length + GRANULE - 1) // GRANULE
    q_granules = (s.q_length + GRANULE - 1) // GRANULE
    line = gl.minimum(m0 // GRANULE, q_granules - 1)
    corner = (table * q_granules + line).to(gl.int64) * k_granules
    word = gl.full([LINES, C.BN], 0, gl.int32, S_LAYOUT)
    for granule in gl.static_range(GRANULES):
        found = gl.load(s.index + corner + gl.minimum(n0 // GRANULE + granule, k_granules - 1))
        at = s.bounds + (gl.maximum(found, 0).to(gl.int64) * GRANULE + rows) * 2
        for half in gl.static_range(2):
            own = gl.load(at + half)
            own = gl.where(found == -2, -1, gl.where(found == -1, 0, own))
            here = (keys // 32 == 2 * granule + half)[None, :]
            word = gl.where(here, own[:, None], word)
    return ((word >> (keys % 32)[None, :]) & 1) != 0


@gluon.jit
def edges_of(s, rows, table):
    """The intervals of rows in a table of ROWS; four times the rows otherwise."""
    C: gl.constexpr = s.C
    if C.MASK == ROWS:
        at = table.to(gl.int64) * s.q_length + gl.minimum(rows, s.q_length - 1)
        at = s.bounds + at * (2 * C.INTERVALS)
        start = gl.load(at)
        end = gl.load(at + 1)
        if C.INTERVALS > 1:
            return start, end, gl.load(at + 2), gl.load(at + 3)
        else:
            return start, end, end, end
    else:
        return rows, rows, rows, rows
