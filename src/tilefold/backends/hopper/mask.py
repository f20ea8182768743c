"""The mask of a tile."""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from . import variant
from .dialect import gl, gluon
from .program import away_of, told_code

BAND = gl.constexpr(variant.BAND)
ROWS = gl.constexpr(variant.ROWS)
COLS = gl.constexpr(variant.COLS)
BITS = gl.constexpr(variant.BITS)
LINES = gl.constexpr(variant.LINES)
#: Rows and keys of a granule of BITS.
GRANULE = gl.constexpr(64)


@gluon.jit
def visible(s, m0, n0, table, edges, S_LAYOUT: gl.constexpr):
    """Which elements of a tile are visible, `[64, BN]`. `edges`: for ROWS the intervals of the rows, for
    BITS the tile's code.
    """
    C: gl.constexpr = s.C
    # Ends are worked out once per row, beside the tile's first key; an element takes one comparison for each.
    keys = gl.arange(0, C.BN, gl.SliceLayout(0, S_LAYOUT))
    if C.MASK == BAND:
        rows = m0 + gl.arange(0, LINES, gl.SliceLayout(1, S_LAYOUT))
        if C.PERIOD:
            rows = rows % C.PERIOD
        away = away_of(s) - n0
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
        return bits(s, edges[0], keys, S_LAYOUT) & (keys < s.k_length - n0)[None, :]


@gluon.jit
def between(x, start, end):
    return (x >= start) & (x < end)


@gluon.jit
def bits(s, code, keys, S_LAYOUT: gl.constexpr):
    """The bits of a tile with this code: -1 if it is empty, -2 if it is full, else where its bits are, two
    words of 32 for each of its rows.
    """
    rows = gl.arange(0, LINES, gl.SliceLayout(1, S_LAYOUT))
    at = s.bounds + (gl.maximum(code, 0).to(gl.int64) * GRANULE + rows) * 2
    low, high = gl.load(at), gl.load(at + 1)
    word = gl.where((keys < 32)[None, :], low[:, None], high[:, None])
    word = gl.where(code == -2, -1, gl.where(code == -1, 0, word))
    return ((word >> (keys % 32)[None, :]) & 1) != 0


@gluon.jit
def edges_of(s, rows, table):
    """The intervals of rows in a table of ROWS; else four times what counts for nothing."""
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
    elif C.MASK == BITS:
        return table, table, table, table
    else:
        return rows, rows, rows, rows


@gluon.jit
def marks_of(w: gl.constexpr, s, stage, edges):
    """`edges` of `visible` for the tile in a stage: those of its rows, or for BITS the code of the tile."""
    C: gl.constexpr = s.C
    if C.MASK == BITS:
        code = told_code(w, s, stage)
        return code, code, code, code
    else:
        return edges
