"""What the roles of a program share, and their common view of its work: which lines of tiles it has, and
which tiles of keys each of them visits.
"""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from . import variant
from .dialect import aggregate, gl, gluon, tma

BAND = gl.constexpr(variant.BAND)
LINES = gl.constexpr(variant.LINES)


@aggregate
class Shared:
    """What all roles of a program share: arguments, shared memory, barriers."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    q_smem: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    v_smem: gl.shared_memory_descriptor
    o_smem: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    ended: gl.shared_memory_descriptor
    decided: gl.shared_memory_descriptor
    verdict: gl.shared_memory_descriptor
    lse: gl.tensor
    flags: gl.tensor
    work: gl.tensor
    items: gl.tensor
    tiles: gl.tensor
    counts: gl.tensor
    order: gl.tensor
    bounds: gl.tensor
    index: gl.tensor
    sink: gl.tensor
    slopes: gl.tensor
    slope_b: gl.tensor
    slope_h: gl.tensor
    cap: gl.tensor
    q_step: gl.tensor
    k_step: gl.tensor
    base: gl.tensor
    row_table: gl.tensor
    key_table: gl.tensor
    batch_origin: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    q_length: gl.tensor
    k_length: gl.tensor
    lines: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    step: gl.tensor
    capacity: gl.tensor
    table_b: gl.tensor
    table_h: gl.tensor
    scale: gl.tensor
    C: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q_desc, k_desc, v_desc, o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full,
        k_empty, v_full, v_empty, turn, ended, decided, verdict, lse, flags, work, items, tiles, counts,
        order, bounds, index, sink, slopes, slope_b, slope_h, cap, q_step, k_step, base, row_table, key_table,
        batch_origin, heads, group, q_length, k_length, lines, lo, hi, step, capacity, table_b, table_h,
        scale, C,
    ):  # fmt: skip
        self.q_desc = q_desc
        self.k_desc = k_desc
        self.v_desc = v_desc
        self.o_desc = o_desc
        self.q_smem = q_smem
        self.k_smem = k_smem
        self.v_smem = v_smem
        self.o_smem = o_smem
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.turn = turn
        self.ended = ended
        self.decided = decided
        self.verdict = verdict
        self.lse = lse
        self.flags = flags
        self.work = work
        self.items = items
        self.tiles = tiles
        self.counts = counts
        self.order = order
        self.bounds = bounds
        self.index = index
        self.sink = sink
        self.slopes = slopes
        self.slope_b = slope_b
        self.slope_h = slope_h
        self.cap = cap
        self.q_step = q_step
        self.k_step = k_step
        self.base = base
        self.row_table = row_table
        self.key_table = key_table
        self.batch_origin = batch_origin
        self.heads = heads
        self.group = group
        self.q_length = q_length
        self.k_length = k_length
        self.lines = lines
        self.lo = lo
        self.hi = hi
        self.step = step
        self.capacity = capacity
        self.table_b = table_b
        self.table_h = table_h
        self.scale = scale
        self.C = gl.constexpr(C)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next place of a ring, and the parity of its barriers."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def load_work(s, i):
    """The program's i-th piece of work: its place `pair * lines + line`, and of lists its line and how many
    of the line's tiles are full and partial. Loaded one piece ahead, since each load waits for another.
    """
    C: gl.constexpr = s.C
    BM: gl.constexpr = LINES * C.GROUPS
    place = gl.load(s.work + gl.minimum(i, s.items - 1))
    if C.MASK == BAND:
        return place, place, place, place
    else:
        table = table_of(s, place // s.lines)
        line = gl.load(s.order + table.to(gl.int64) * s.lines + place % s.lines)
        at = s.counts + (table * ((s.q_length + BM - 1) // BM) + line).to(gl.int64) * 2
        return place, line, gl.load(at), gl.load(at + 1)


@gluon.jit
def table_of(s, pair):
    """The table of a pair (batch element, head)."""
    return pair // s.heads * s.table_b + pair % s.heads * s.table_h


@gluon.jit
def place_of(s, work):
    """Batch element, head, line of tiles and table of a piece of work."""
    C: gl.constexpr = s.C
    pair = work[0] // s.lines
    line = work[1]
    if C.MASK == BAND:
        line = work[0] % s.lines
    return pair // s.heads, pair % s.heads, line, table_of(s, pair)


@gluon.jit
def keys_of(s, first, last):
    """The tiles of keys `[begin, stop)` that rows from `first` to `last` of a band see."""
    C: gl.constexpr = s.C
    away = s.k_length - s.q_length
    start = gl.minimum(gl.maximum(first + away + s.lo, 0), s.k_length)
    end = gl.maximum(gl.minimum(last + away + s.hi + 1, s.k_length), start)
    begin = start // C.BN
    return begin, gl.where(end > start, (end + C.BN - 1) // C.BN, begin)


@gluon.jit
def tiles_of(s, work, line, table):
    """How the tiles of keys of a line of tiles are found: for a band from the last one down, `(last, 0, how
    many)`; for lists, whose partial tiles come first, `(where, how many are full, how many in all)`.
    """
    C: gl.constexpr = s.C
    BM: gl.constexpr = LINES * C.GROUPS
    if C.MASK == BAND:
        begin, stop = keys_of(s, line * BM, gl.minimum(line * BM + BM, s.q_length) - 1)
        return stop - 1, 0, stop - begin
    else:
        return table * ((s.q_length + BM - 1) // BM) + line, work[2], work[2] + work[3]


@gluon.jit
def tile_at(s, where, full, count, j):
    """The j-th tile of keys that a line visits."""
    C: gl.constexpr = s.C
    if C.MASK == BAND:
        return where - j
    else:
        partial = count - full
        nth = gl.where(j < partial, full + j, j - partial)
        return gl.load(s.tiles + where.to(gl.int64) * s.capacity + nth)


@gluon.jit
def shares_of(s, w: gl.constexpr, line, where, full, count):
    """How the tiles that a line visits fall to these rows: `(skipped, above, whole, below, skipped)` in the
    order of visits, where all of `above` and `below` need the mask.
    """
    C: gl.constexpr = s.C
    if C.MASK != BAND:
        partial = count - full
        # Rows that see nothing of the partial tiles find their reference in the first full one.
        above = gl.minimum(count, partial + gl.where(partial > 0, 1, 0))
        return 0, above, count - above, 0, 0
    elif not C.MASKED:
        return 0, 0, count, 0, 0
    else:
        first = line * (LINES * C.GROUPS) + w * LINES
        last = first + LINES - 1
        away = s.k_length - s.q_length
        begin = where + 1 - count
        stop = where + 1
        own_begin, own_stop = keys_of(s, first, last)
        own_begin = gl.minimum(gl.maximum(own_begin, begin), stop)
        own_stop = gl.maximum(gl.minimum(own_stop, stop), own_begin)
        edge = gl.minimum(gl.maximum(first + away + s.hi + 1, 0), s.k_length)
        full_stop = edge // C.BN
        full_begin = (gl.maximum(last + away + s.lo, 0) + C.BN - 1) // C.BN
        if C.STEPPED:
            full_stop = own_begin
        full_begin = gl.minimum(gl.maximum(full_begin, own_begin), own_stop)
        full_stop = gl.maximum(gl.minimum(full_stop, own_stop), full_begin)
        none = full_begin >= full_stop
        full_begin = gl.where(none, own_begin, full_begin)
        full_stop = gl.where(none, own_begin, full_stop)
        above = own_stop - full_stop
        whole = full_stop - full_begin
        # The first row may see nothing of the partial tiles; then its reference is in the next one.
        more = (above > 0) & (whole > 0) & (edge <= full_stop * C.BN)
        above += gl.where(more, 1, 0)
        whole -= gl.where(more, 1, 0)
        return stop - own_stop, above, whole, full_begin - own_begin, own_begin - begin
