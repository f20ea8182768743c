"""What the roles of a program share: their arguments and barriers, and what one of them tells the others of
the program's work.
"""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from . import variant
from .dialect import aggregate, gl, gluon, tma

BAND = gl.constexpr(variant.BAND)
LINES = gl.constexpr(variant.LINES)
_HIDDEN, _MIXED = gl.constexpr(variant.HIDDEN), gl.constexpr(variant.MIXED)
_TILE = gl.constexpr((1 << variant.HIDDEN) - 1)
entry_words = gluon.constexpr_function(variant.entry_words)


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
    settled: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    entries: gl.shared_memory_descriptor
    verdict: gl.shared_memory_descriptor
    cold: gl.shared_memory_descriptor
    lse: gl.tensor
    work: gl.tensor
    items: gl.tensor
    portion: gl.tensor
    tiles: gl.tensor
    bounds: gl.tensor
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
    q_length: gl.tensor
    k_length: gl.tensor
    lines: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    step: gl.tensor
    capacity: gl.tensor
    scale: gl.tensor
    C: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q_desc, k_desc, v_desc, o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty,
        k_full, k_empty, v_full, v_empty, turn, ended, decided, settled, words, entries, verdict, cold, lse,
        work, items, portion, tiles, bounds, bias, bias_b, bias_h, bias_q, bias_k, sink, slopes,
        slope_b, slope_h, cap, q_step, k_step, base, row_table, key_table, batch_origin, heads,
        q_length, k_length, lines, lo, hi, step, capacity, scale, C,
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
        self.settled = settled
        self.words = words
        self.entries = entries
        self.verdict = verdict
        self.cold = cold
        self.lse = lse
        self.work = work
        self.items = items
        self.portion = portion
        self.tiles = tiles
        self.bounds = bounds
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
        self.q_length = q_length
        self.k_length = k_length
        self.lines = lines
        self.lo = lo
        self.hi = hi
        self.step = step
        self.capacity = capacity
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


# Tiles of keys. Those of a band follow from three numbers of the line. Other masks have lists, which only
# the producer reads, and puts what they say beside the keys: a consumer that loads a number, of which the
# compiler knows that it is the same for all threads, waits for it there and then.


@gluon.jit
def tile_at(s, base, whole, masked, j):
    """The j-th tile of keys that a line visits; `base, whole, masked` of `lines`. Where there are lists, for
    the producer alone.
    """
    C: gl.constexpr = s.C
    if C.MASK == BAND:
        return base + gl.where(j < whole, -1 - j, gl.where(j < whole + masked, j - whole, masked - 1 - j))
    else:
        return gl.load(entry_of(s, base, j))


@gluon.jit
def entry_of(s, line, j):
    """Where a list speaks of the j-th tile of a line."""
    C: gl.constexpr = s.C
    ENTRY: gl.constexpr = entry_words(C.MASK)
    return s.tiles + (line.to(gl.int64) * s.capacity + j) * ENTRY


@gluon.jit
def entry_at(s, line, j):
    """What it says, one word for each thread, or nothing where there is no list."""
    C: gl.constexpr = s.C
    ENTRY: gl.constexpr = entry_words(C.MASK)
    n = gl.arange(0, ENTRY, gl.BlockedLayout([1], [32], [1], [0]))
    if C.MASK == BAND:
        return n
    else:
        return gl.load(entry_of(s, line, j) + n)


@gluon.jit
def told_tile(s, stage):
    """What a list, if there is one, says of the tile whose keys are in a stage."""
    C: gl.constexpr = s.C
    if C.MASK == BAND:
        return gl.to_tensor(0)
    else:
        return read(s.entries.index(stage), 0, 4)


@gluon.jit
def told_code(w: gl.constexpr, s, stage):
    """What the index of BITS says of the tile there and the rows of warp group `w`."""
    return read(s.entries.index(stage), w + 1, 4)


@gluon.jit
def key_of(s, tile):
    """The first key of a tile."""
    C: gl.constexpr = s.C
    if C.MASK == BAND:
        return tile * C.BN
    else:
        return (tile & _TILE) * C.BN


@gluon.jit
def is_hidden(w: gl.constexpr, tile):
    """Whether the rows of warp group `w` see nothing of a tile of a list."""
    return ((tile >> (_HIDDEN + w)) & 1) != 0


@gluon.jit
def is_mixed(w: gl.constexpr, tile):
    """Whether they do not see all of it."""
    return ((tile >> (_MIXED + w)) & 1) != 0


@gluon.jit
def piece_at(at):
    """A piece of work of the schedule: batch element, query head and key head, line of tiles, first key,
    first row.
    """
    heads = gl.load(at + 1)
    line, key, row = gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)
    return gl.load(at), heads & 0xFFFF, (heads >> 16) & 0xFFFF, line, key, row


# What the producer tells the consumers.

#: Words of 32 bits for each q in shared memory: what `lines` says of up to three warp groups, and the piece
#: of work.
WORDS = gl.constexpr(32)
_PIECE = gl.constexpr(24)


@gluon.jit
def words_of(s, i, line):
    """What to tell of the program's i-th piece of work, which is this line: one word for each thread."""
    C: gl.constexpr = s.C
    n = gl.arange(0, WORDS, gl.BlockedLayout([1], [32], [1], [0]))
    OWN: gl.constexpr = C.GROUPS * 8
    own = gl.load(s.lines + line * OWN + n, mask=n < OWN, other=0)
    return own + gl.load(s.work + i * 8 + (n - _PIECE), mask=n >= _PIECE, other=0)


@gluon.jit
def put(place, number, dtype: gl.constexpr, WARPS: gl.constexpr):
    """One number into shared memory, `[1]`, by a role of so many warps."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    place.store(gl.full([1], 0, dtype, layout) + number)


@gluon.jit
def got(place, WARPS: gl.constexpr):
    """The number that lies there."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def read(words, at: gl.constexpr, WARPS: gl.constexpr):
    return got(words.slice(at, 1), WARPS)


@gluon.jit
def tiles_told(s, place):
    """`(base, whole, masked, count)` of the line that the producer has told of: its tiles, and how many."""
    words = s.words.index(place)
    # The first warp group skips nothing before its own tiles.
    count = read(words, 6, 1) + read(words, 7, 1)
    return read(words, 0, 1), read(words, 1, 1), read(words, 2, 1), count


@gluon.jit
def told(w: gl.constexpr, s, place):
    """`(batch element, query head, key head, first row, table)`, `(base, whole, masked)` of the tiles, and
    what of them is for the rows of warp group `w`, `(before, from, to, own, after)`, as in `lines`.
    """
    words = s.words.index(place)
    OWN: gl.constexpr = w * 8
    heads = read(words, _PIECE + 1, 4)
    row = read(words, _PIECE + 4, 4) + w * LINES
    return (
        (read(words, _PIECE, 4), heads & 0xFFFF, (heads >> 16) & 0xFFFF, row, read(words, _PIECE + 5, 4)),
        (read(words, OWN, 4), read(words, OWN + 1, 4), read(words, OWN + 2, 4)),
        (
            read(words, OWN + 3, 4),
            read(words, OWN + 4, 4),
            read(words, OWN + 5, 4),
            read(words, OWN + 6, 4),
            read(words, OWN + 7, 4),
        ),
    )


# Further passes over the list: of lines with rows that have outgrown their reference, or whose results are
# not finite.


@gluon.jit
def any_broken(s, before, WARPS: gl.constexpr):
    """Whether a consumer of this program has found such rows, in the pass with so many `before` it."""
    C: gl.constexpr = s.C
    GROUPS: gl.constexpr = C.GROUPS
    found = gl.to_tensor(0)
    for w in gl.static_range(GROUPS):
        found = gl.maximum(found, got(s.verdict.index(before * C.GROUPS + w), WARPS))
    return found > 0


@gluon.jit
def is_broken(s, b, h, row):
    """Whether a line of tiles, of rows from this one on, has such rows: their lse is not a number."""
    C: gl.constexpr = s.C
    BM: gl.constexpr = LINES * C.GROUPS
    SIZE: gl.constexpr = 256 if BM > 128 else 128
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rows = row + gl.arange(0, SIZE, layout)
    inside = (rows < s.q_length) & (rows < row + BM)
    lse = gl.load(lse_of(s, b, h, rows), mask=inside, other=0.0, volatile=True)
    return gl.max(gl.where(lse < float("inf"), 0, 1), 0) > 0


@gluon.jit
def how_many_again(s):
    """Of the program's pieces of work, those with such lines."""
    count = gl.to_tensor(0)
    for i in range(s.items):
        b, h, _, _, _, row = piece_at(s.work + i * 8)
        if is_broken(s, b, h, row):
            count += 1
    return count
