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
    words: gl.shared_memory_descriptor
    verdict: gl.shared_memory_descriptor
    values: gl.tensor
    lse: gl.tensor
    work: gl.tensor
    items: gl.tensor
    first: gl.tensor
    tiles: gl.tensor
    counts: gl.tensor
    bounds: gl.tensor
    index: gl.tensor
    bias: gl.tensor
    bias_b: gl.tensor
    bias_h: gl.tensor
    bias_q: gl.tensor
    bias_k: gl.tensor
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
        k_empty, v_full, v_empty, turn, ended, decided, words, verdict, values, lse, work, items,
        first, tiles, counts, bounds, index, bias, bias_b, bias_h, bias_q, bias_k, sink, slopes, slope_b, slope_h, cap,
        q_step, k_step, base, row_table, key_table, batch_origin, heads, group, q_length, k_length, lines, lo,
        hi, step, capacity, table_b, table_h, scale, C,
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
        self.words = words
        self.verdict = verdict
        self.values = values
        self.lse = lse
        self.work = work
        self.items = items
        self.first = first
        self.tiles = tiles
        self.counts = counts
        self.bounds = bounds
        self.index = index
        self.bias = bias
        self.bias_b = bias_b
        self.bias_h = bias_h
        self.bias_q = bias_q
        self.bias_k = bias_k
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
def slot_of(done, C: gl.constexpr):
    """Where q of the piece of work after `done` others lie, and the parity of their barriers."""
    return done % C.SLOTS * C.GROUPS, done // C.SLOTS & 1


@gluon.jit
def load_work(s, i):
    """The program's i-th piece of work, or the last one."""
    return work_at(s, gl.load(s.work + gl.minimum(i, s.items - 1)))


@gluon.jit
def work_at(s, place):
    """A piece of work: its place `pair * lines + line`, and of lists how many of the line's tiles are full and
    partial. Loaded one piece ahead, since the one load waits for the other.
    """
    C: gl.constexpr = s.C
    if C.MASK == BAND:
        return place, place, place
    else:
        table = table_of(s, place // s.lines)
        at = s.counts + (table * s.lines + place % s.lines).to(gl.int64) * 2
        return place, gl.load(at), gl.load(at + 1)


@gluon.jit
def table_of(s, pair):
    """The table of a pair (batch element, head)."""
    return pair // s.heads * s.table_b + pair % s.heads * s.table_h


@gluon.jit
def place_of(s, work):
    """Batch element, head, line of tiles and table of a piece of work."""
    pair = work[0] // s.lines
    return pair // s.heads, pair % s.heads, work[0] % s.lines, table_of(s, pair)


@gluon.jit
def away_of(s):
    """How far the diagonal is to the right of that of a square."""
    C: gl.constexpr = s.C
    if C.PERIOD:
        return s.k_length - C.PERIOD
    else:
        return s.k_length - s.q_length


@gluon.jit
def lse_of(s, b, h, rows):
    """Where the lse of rows lies."""
    C: gl.constexpr = s.C
    if C.PERIOD:
        group = s.q_length // C.PERIOD
        row = b.to(gl.int64) * C.PERIOD + rows % C.PERIOD
        return s.lse + (row * (s.heads * group) + h * group + rows // C.PERIOD)
    else:
        return s.lse + ((b.to(gl.int64) * s.q_length + rows) * s.heads + h)


@gluon.jit
def keys_of(s, first, last):
    """The tiles of keys `[begin, stop)` that rows from `first` to `last` of a band see."""
    C: gl.constexpr = s.C
    away = away_of(s)
    if C.PERIOD:
        first, last = 0, C.PERIOD - 1
    start = gl.minimum(gl.maximum(first + away + s.lo, 0), s.k_length)
    end = gl.maximum(gl.minimum(last + away + s.hi + 1, s.k_length), start)
    begin = start // C.BN
    return begin, gl.where(end > start, (end + C.BN - 1) // C.BN, begin)


@gluon.jit
def tiles_of(s, work, line, table):
    """Which tiles of keys a line of tiles visits: `(base, whole, masked, count)`, `count` in all. The first
    `whole` are visible to all rows: without a mask, and each row has something to take its reference from.
    The next `masked` need the mask; so do those that are left, on the other side of a band. See `tile_at`.
    """
    C: gl.constexpr = s.C
    BM: gl.constexpr = LINES * C.GROUPS
    if C.MASK != BAND:
        return table * s.lines + line, work[1], work[2], work[1] + work[2]
    else:
        first = line * BM
        last = gl.minimum(first + BM, s.q_length) - 1
        if C.PERIOD:
            first, last = 0, C.PERIOD - 1
        begin, stop = keys_of(s, first, last)
        whole_begin, whole_stop = begin, stop
        if C.MASKED:
            away = away_of(s)
            edge = gl.minimum(gl.maximum(first + away + s.hi + 1, 0), s.k_length)
            whole_stop = edge // C.BN
            if C.STEPPED:
                whole_stop = begin
            whole_begin = (gl.maximum(last + away + s.lo, 0) + C.BN - 1) // C.BN
            whole_begin = gl.minimum(gl.maximum(whole_begin, begin), stop)
            whole_stop = gl.maximum(gl.minimum(whole_stop, stop), whole_begin)
            none = whole_begin == whole_stop
            whole_begin = gl.where(none, begin, whole_begin)
            whole_stop = gl.where(none, begin, whole_stop)
        return whole_stop, whole_stop - whole_begin, stop - whole_stop, stop - begin


@gluon.jit
def tile_at(s, base, whole, masked, j):
    """The j-th tile of keys that a line visits; `base, whole, masked` of `tiles_of`. Of a band: whole ones
    from `base` down, those over its upper edge from `base` up, those over its lower edge down.
    """
    C: gl.constexpr = s.C
    if C.MASK == BAND:
        return base + gl.where(j < whole, -1 - j, gl.where(j < whole + masked, j - whole, masked - 1 - j))
    else:
        return gl.load(s.tiles + base.to(gl.int64) * s.capacity + j)


@gluon.jit
def shares_of(s, w: gl.constexpr, line, tiles):
    """What of a line's tiles is for the rows of a warp group: `(before, from, to, own, after)`. They skip
    `before` tiles, then `own` are theirs but for those `from` one place `to` another, then they skip the
    rest.
    """
    C: gl.constexpr = s.C
    base, whole, masked, count = tiles
    if C.MASK != BAND or not C.MASKED:
        return 0, count, count, count, 0
    else:
        first = line * (LINES * C.GROUPS) + w * LINES
        begin = base - whole - (count - whole - masked)
        stop = base + masked
        own_begin, own_stop = keys_of(s, first, first + LINES - 1)
        own_begin = gl.minimum(gl.maximum(own_begin, begin), stop)
        own_stop = gl.maximum(gl.minimum(own_stop, stop), own_begin)
        # Where no tile is whole, all of them lie in a row.
        before = gl.where(whole > 0, 0, own_begin - begin)
        above = whole + gl.maximum(own_stop - base, 0)
        below = gl.maximum(base - whole - own_begin, 0)
        from_ = gl.where(whole > 0, above, own_stop - own_begin)
        to = gl.where(whole > 0, whole + masked, from_)
        own = gl.where((whole > 0) & (below > 0), to + below, from_)
        own = gl.where(first < s.q_length, own, 0)
        return before, from_, to, own, count - before - own


# What the producer tells the consumers.

#: Words of 32 bits for each q in shared memory.
WORDS = gl.constexpr(16)


@gluon.jit
def write(s, at, word):
    """Of the producer."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    s.words.index(at).store(gl.full([1], word, gl.int32, layout))


@gluon.jit
def read(s, at, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(s.words.index(at).load(layout), 0)


@gluon.jit
def tell(s, place, b, h, row, table, tiles, shares):
    """Which rows come next for a warp group, and which tiles of keys: what `told` returns there."""
    at = place * WORDS
    base, whole, masked, _ = tiles
    before, from_, to, own, after = shares
    write(s, at, b)
    write(s, at + 1, h)
    write(s, at + 2, row)
    write(s, at + 3, table)
    write(s, at + 4, base + before)
    write(s, at + 5, whole)
    write(s, at + 6, masked)
    write(s, at + 7, before)
    write(s, at + 8, from_)
    write(s, at + 9, to)
    write(s, at + 10, own)
    write(s, at + 11, after)


@gluon.jit
def told(s, place):
    """`(batch element, head, first row, table)`, `(base, whole, masked)` of the tiles, and their shares."""
    at = place * WORDS
    return (
        (read(s, at, 4), read(s, at + 1, 4), read(s, at + 2, 4), read(s, at + 3, 4)),
        (read(s, at + 4, 4), read(s, at + 5, 4), read(s, at + 6, 4)),
        (
            read(s, at + 7, 4),
            read(s, at + 8, 4),
            read(s, at + 9, 4),
            read(s, at + 10, 4),
            read(s, at + 11, 4),
        ),
    )


# Further passes over the list: of lines with rows that have outgrown their reference, or whose results are not
# finite.


@gluon.jit
def any_broken(s, BEFORE: gl.constexpr, WARPS: gl.constexpr):
    """Whether a consumer of this program has found such rows, in the pass with `BEFORE` others before it."""
    C: gl.constexpr = s.C
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    GROUPS: gl.constexpr = C.GROUPS
    found = gl.to_tensor(0)
    for w in gl.static_range(GROUPS):
        found = gl.maximum(found, gl.max(s.verdict.index(BEFORE * C.GROUPS + w).load(layout), 0))
    return found > 0


@gluon.jit
def is_broken(s, b, h, line):
    """Whether a line of tiles has such rows: their lse is not a number."""
    C: gl.constexpr = s.C
    BM: gl.constexpr = LINES * C.GROUPS
    SIZE: gl.constexpr = 256 if BM > 128 else 128
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rows = line * BM + gl.arange(0, SIZE, layout)
    inside = (rows < s.q_length) & (rows < line * BM + BM)
    lse = gl.load(lse_of(s, b, h, rows), mask=inside, other=0.0, volatile=True)
    return gl.max(gl.where(lse < float("inf"), 0, 1), 0) > 0


@gluon.jit
def how_many_again(s):
    """Of the program's pieces of work, those with such lines."""
    count = gl.to_tensor(0)
    for i in range(s.items):
        b, h, line, _ = place_of(s, work_at(s, gl.load(s.work + i)))
        if is_broken(s, b, h, line):
            count += 1
    return count
