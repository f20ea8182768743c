"""Forward attention for Hopper (compute capability 9.0) in Gluon: FlashAttention-3's roles (Shah et al. 2024,
section 3) with a softmax whose reference is fixed.

A persistent program per core: one warp (`producer`) copies tiles by TMA and runs ahead of the consumers over
the program's whole list of work, so that the next tile's q, k and v come in while this one's results go out.
Each consumer warp group has 64 rows. It issues `q k^T` of one tile of keys, then `p v` of the tile before, and
takes the softmax of the one while the other runs.

**Fixed reference.** A softmax does not depend on the number that a row's scores are shifted by, and bfloat16
has the exponents of float32. So the maximum of a row over the first tiles that it sees stays its reference: no
later maximum, no rescaling. A row whose sum reaches 2^64 (or is not a number) is computed again with the usual
online softmax, by the same program after its list.
"""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from . import variant
from .dialect import (
    aggregate,
    copy_in,
    copy_out,
    copy_out_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BAND = gl.constexpr(variant.BAND)
ROWS = gl.constexpr(variant.ROWS)
COLS = gl.constexpr(variant.COLS)
BITS = gl.constexpr(variant.BITS)
#: Rows and keys of a granule of BITS.
GRANULE = gl.constexpr(64)
LINES = gl.constexpr(variant.LINES)
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
#: Sums from here on may have lost what is small: 2^64.
LARGEST_SUM = gl.constexpr(1.8446744073709552e19)


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
    verdict: gl.shared_memory_descriptor
    lse: gl.tensor
    work: gl.tensor
    items: gl.tensor
    tiles: gl.tensor
    counts: gl.tensor
    order: gl.tensor
    bounds: gl.tensor
    index: gl.tensor
    sink: gl.tensor
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
        self, q_desc, k_desc, v_desc, o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty,
        v_full, v_empty, turn, ended, verdict, lse, work, items, tiles, counts, order, bounds, index, sink, heads, group, q_length, k_length, lines, lo, hi, step, capacity, table_b, table_h, scale, C,
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
        self.verdict = verdict
        self.lse = lse
        self.work = work
        self.items = items
        self.tiles = tiles
        self.counts = counts
        self.order = order
        self.bounds = bounds
        self.index = index
        self.sink = sink
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
    """The program's i-th piece of work: its place `pair * lines + line`, and of lists its line and how many of
    the line's tiles are full and partial. Loaded one piece ahead, since each load waits for the one before.
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
def producer(s):
    """Copies q, and tiles of k and v in the order of the consumers."""
    C: gl.constexpr = s.C
    zero = gl.to_tensor(0)
    stage, phase, parity = produce_all(s, zero, zero, zero, False)
    if C.FIXED:
        again = any_to_repeat(s, 1)
        if again:
            produce_all(s, stage, phase, parity, True)


@gluon.jit
def produce_all(s, stage, phase, parity, AGAIN: gl.constexpr):
    C: gl.constexpr = s.C
    GROUPS: gl.constexpr = C.GROUPS
    work = load_work(s, 0)
    for i in range(s.items):
        b, h, line, table = place_of(s, work)
        where, full, count = tiles_of(s, work, line, table)
        work = load_work(s, i + 1)
        wanted = True
        if AGAIN:
            wanted = to_repeat(s, b, h, line, 1)
        if wanted:
            m0 = line * (LINES * C.GROUPS)
            for w in gl.static_range(GROUPS):
                mbarrier.wait(s.q_empty.index(w), parity ^ 1)
                mbarrier.expect(s.q_full.index(w), s.q_desc.block_type.nbytes)
                copy_in(s.q_desc, [b, h, m0 + w * LINES, 0], s.q_full.index(w), s.q_smem.index(w))
            parity ^= 1
            hk = h // s.group
            for j in range(count):
                n0 = tile_at(s, where, full, count, j) * C.BN
                mbarrier.wait(s.k_empty.index(stage), phase ^ 1)
                mbarrier.expect(s.k_full.index(stage), s.k_desc.block_type.nbytes)
                copy_in(s.k_desc, [b, hk, n0, 0], s.k_full.index(stage), s.k_smem.index(stage))
                if not C.JOINED:
                    mbarrier.wait(s.v_empty.index(stage), phase ^ 1)
                mbarrier.expect(s.v_full.index(stage), s.v_desc.block_type.nbytes)
                copy_in(s.v_desc, [b, hk, n0, 0], s.v_full.index(stage), s.v_smem.index(stage))
                stage, phase = advance(stage, phase, C.STAGES)
    return stage, phase, parity


@gluon.jit
def any_to_repeat(s, WARPS: gl.constexpr):
    """Whether some consumer of this program has rows to compute again, once all are at the end of the list."""
    C: gl.constexpr = s.C
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(s.ended.index(0), 0)
    found = gl.max(s.verdict.index(0).load(layout), 0)
    GROUPS: gl.constexpr = C.GROUPS
    for w in gl.static_range(1, GROUPS):
        found = gl.maximum(found, gl.max(s.verdict.index(w).load(layout), 0))
    return found > 0


@gluon.jit
def to_repeat(s, b, h, line, WARPS: gl.constexpr):
    """Whether a row of a line of tiles has to be computed again: its lse says so."""
    C: gl.constexpr = s.C
    BM: gl.constexpr = LINES * C.GROUPS
    SIZE: gl.constexpr = 256 if BM > 128 else 128
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    rows = line * BM + gl.arange(0, SIZE, layout)
    inside = (rows < s.q_length) & (rows < line * BM + BM)
    at = s.lse + ((b * s.q_length + rows).to(gl.int64) * s.heads + h)
    lse = gl.load(at, mask=inside, other=0.0, volatile=True)
    return gl.max(gl.where(lse < float("inf"), 0, 1), 0) > 0


@gluon.jit
def consumer(w: gl.constexpr, s):
    """Results of 64 of the rows of each piece of work."""
    C: gl.constexpr = s.C
    layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
    broken = gl.full([LINES], 0, gl.int32, layout)
    zero = gl.to_tensor(0)
    stage, phase, parity, broken = consume_all(w, s, zero, zero, zero, broken, C.FIXED, False)
    if C.FIXED:
        s.verdict.index(w).store(broken)
        mbarrier.arrive(s.ended.index(0), count=1)
        if any_to_repeat(s, 4):
            consume_all(w, s, stage, phase, parity, broken, False, True)
    copy_out_wait(0)


@gluon.jit
def consume_all(w: gl.constexpr, s, stage, phase, parity, broken, FIXED: gl.constexpr, AGAIN: gl.constexpr):
    turn = gl.to_tensor(0)
    work = load_work(s, 0)
    for i in range(s.items):
        b, h, line, table = place_of(s, work)
        tiles = tiles_of(s, work, line, table)
        work = load_work(s, i + 1)
        wanted = True
        if AGAIN:
            wanted = to_repeat(s, b, h, line, 4)
        if wanted:
            stage, phase, turn, broken = attend(
                w, s, b, h, line, table, tiles, stage, phase, parity, turn, broken, FIXED, AGAIN
            )
            parity ^= 1
    return stage, phase, parity, broken


@gluon.jit
def skip(s, stage, phase, count):
    """Give back tiles of keys that these rows do not see."""
    C: gl.constexpr = s.C
    for _ in range(count):
        mbarrier.wait(s.k_full.index(stage), phase)
        if not C.JOINED:
            mbarrier.arrive(s.k_empty.index(stage), count=1)
        mbarrier.wait(s.v_full.index(stage), phase)
        mbarrier.arrive((s.k_empty if C.JOINED else s.v_empty).index(stage), count=1)
        stage, phase = advance(stage, phase, C.STAGES)
    return stage, phase


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
    """The bits of a tile: its rows are those of one granule, each of its granules has two words of 32 bits per
    row. The index has -1 for an empty granule and -2 for a full one.
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


@gluon.jit
def row_sums(p, BN: gl.constexpr):
    """Sums over what each thread holds of a row, `[64, 4, 2]`; its lanes are added once, at the end."""
    return gl.sum(p.reshape([64, BN // 8, 4, 2]), 1)


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


@gluon.jit
def step(
    w: gl.constexpr, s, q, p, o, reference, sums, stage, phase, last_stage, last_phase, turn, more, m0, n0,
    table, edges, MASKED: gl.constexpr, ONLINE: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """`q k^T` of one tile of keys, `p v` of the one before, and the softmax of this one."""
    C: gl.constexpr = s.C
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = s.q_desc.dtype
    if TURNS:
        mbarrier.wait(s.turn.index(w), (turn & 1) ^ (1 if w == 0 else 0))
        turn += 1
    zeros = gl.full([64, C.BN], 0.0, gl.float32, s_layout)
    k = s.k_smem.index(stage).reshape([C.BN, C.D])
    scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(s.v_full.index(last_stage), last_phase)
    added = warpgroup_mma(p, s.v_smem.index(last_stage).reshape([C.BN, C.DV]), o, is_async=True)
    if TURNS:
        mbarrier.arrive(s.turn.index((w + 1) % C.GROUPS), count=1)
    scores = warpgroup_mma_wait(1, [scores])
    if not C.JOINED:
        mbarrier.arrive(s.k_empty.index(stage), count=1)
    if MASKED:
        scores = gl.where(visible(s, m0, n0, table, edges, s_layout), scores, float("-inf"))
    if ONLINE:
        found = gl.maximum(reference, gl.max(scores, 1) * s.scale)
        base = gl.where(found == float("-inf"), 0.0, found)
        alpha = gl.exp2(reference - base)
        reference = found
        spread = gl.convert_layout(alpha, gl.SliceLayout(1, gl.SliceLayout(2, sums.type.layout)))
        sums = sums * spread[:, None][:, :, None]
    else:
        base = reference
    weights = gl.exp2(scores * s.scale - base[:, None])
    sums = sums + row_sums(weights, C.BN)
    new = gl.convert_layout(weights.to(dtype), p_layout)
    next_stage, next_phase = advance(stage, phase, C.STAGES)
    # Beside the next keys, this wait brings an edge of a basic block, without which the compiler of the
    # machine's code moves every exponential behind the wait for `p v`.
    mbarrier.wait(s.k_full.index(next_stage), next_phase, pred=more)
    o = warpgroup_mma_wait(0, [added])
    mbarrier.arrive((s.k_empty if C.JOINED else s.v_empty).index(last_stage), count=1)
    if ONLINE:
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
    return new, o, reference, sums, next_stage, next_phase, stage, phase, turn


@gluon.jit
def attend(
    w: gl.constexpr, s, b, h, line, table, tiles, stage, phase, parity, turn, broken, FIXED: gl.constexpr,
    AGAIN: gl.constexpr,
):  # fmt: skip
    """Results of the w-th 64 rows of a line of tiles; `tiles` of `tiles_of`."""
    C: gl.constexpr = s.C
    TURNS: gl.constexpr = C.TURNS and not AGAIN
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    r_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = s.q_desc.dtype
    where, full, count = tiles[0], tiles[1], tiles[2]
    before, above, whole, below, after = shares_of(s, w, line, where, full, count)
    m0 = line * (LINES * C.GROUPS) + w * LINES
    edges = edges_of(s, m0 + gl.arange(0, LINES, r_layout), table)
    o = gl.full([LINES, C.DV], 0.0, gl.float32, o_layout)
    reference = gl.full([LINES], float("-inf"), gl.float32, r_layout)
    sums = row_sums(gl.full([LINES, C.BN], 0.0, gl.float32, s_layout), C.BN)
    own = above + whole + below
    mbarrier.wait(s.q_full.index(w), parity)
    if C.MASKED:
        stage, phase = skip(s, stage, phase, before)
    if own > 0:
        at = before
        held = s.q_smem.index(w).reshape([LINES, C.D])
        if C.HELD:
            q = held.load(gl.DotOperandLayout(0, s_layout, 2))
        else:
            q = held
        mbarrier.wait(s.k_full.index(stage), phase)
        k = s.k_smem.index(stage).reshape([C.BN, C.D])
        zeros = gl.full([LINES, C.BN], 0.0, gl.float32, s_layout)
        scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        if not C.JOINED:
            mbarrier.arrive(s.k_empty.index(stage), count=1)
        if C.MASKED:
            n0 = tile_at(s, where, full, count, at) * C.BN
            scores = gl.where(visible(s, m0, n0, table, edges, s_layout), scores, float("-inf"))
        reference = gl.max(scores, 1) * s.scale
        base = reference
        if C.MASKED:
            base = gl.where(reference == float("-inf"), 0.0, reference)
        weights = gl.exp2(scores * s.scale - base[:, None])
        sums = row_sums(weights, C.BN)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        last_stage = stage
        last_phase = phase
        stage, phase = advance(stage, phase, C.STAGES)
        mbarrier.wait(s.k_full.index(stage), phase, pred=own > 1)
        # The first tile is done.
        if C.MASKED:
            for j in range(1, above):
                n0 = tile_at(s, where, full, count, at + j) * C.BN
                p, o, reference, sums, stage, phase, last_stage, last_phase, turn = step(
                    w, s, q, p, o, reference, sums, stage, phase, last_stage, last_phase, turn, j + 1 < own,
                    m0, n0, table, edges, True, True, False,
                )  # fmt: skip
        for j in range(gl.maximum(above, 1), above + whole):
            p, o, reference, sums, stage, phase, last_stage, last_phase, turn = step(
                w, s, q, p, o, reference, sums, stage, phase, last_stage, last_phase, turn, j + 1 < own, m0,
                0, table, edges, False, not FIXED, TURNS,
            )  # fmt: skip
        if C.BELOW:
            for j in range(gl.maximum(above + whole, 1), own):
                n0 = tile_at(s, where, full, count, at + j) * C.BN
                p, o, reference, sums, stage, phase, last_stage, last_phase, turn = step(
                    w, s, q, p, o, reference, sums, stage, phase, last_stage, last_phase, turn, j + 1 < own,
                    m0, n0, table, edges, True, not FIXED, False,
                )  # fmt: skip
        if C.OWN_OUT:
            mbarrier.arrive(s.q_empty.index(w), count=1)
        mbarrier.wait(s.v_full.index(last_stage), last_phase)
        o = warpgroup_mma(p, s.v_smem.index(last_stage).reshape([C.BN, C.DV]), o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive((s.k_empty if C.JOINED else s.v_empty).index(last_stage), count=1)
    elif C.OWN_OUT:
        mbarrier.arrive(s.q_empty.index(w), count=1)
    if C.MASKED:
        stage, phase = skip(s, stage, phase, after)
    total = gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), r_layout)
    broken = finish(w, s, b, h, m0, o, reference, total, broken, FIXED, AGAIN)
    return stage, phase, turn, broken


@gluon.jit
def finish(
    w: gl.constexpr, s, b, h, m0, o, reference, total, broken, FIXED: gl.constexpr, AGAIN: gl.constexpr
):
    """Write `out` and `lse` of 64 rows."""
    C: gl.constexpr = s.C
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    r_layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
    dtype: gl.constexpr = s.q_desc.dtype
    rows = m0 + gl.arange(0, LINES, r_layout)
    inside = rows < s.q_length
    lost = (total < LARGEST_SUM) == 0
    if C.SINK:
        logit = gl.load(s.sink + h).to(gl.float32) * LOG2E
        top = gl.maximum(reference, logit)
        top = gl.where(top == float("-inf"), 0.0, top)
        alpha = gl.exp2(reference - top)
        total = total * alpha + gl.exp2(logit - top)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
        reference = top
    alive = total != 0.0
    divisor = gl.where(alive, total, 1.0)
    lse = gl.where(alive, (reference + gl.log2(divisor)) * LN2, float("-inf"))
    o = o * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, o_layout))[:, None]
    if FIXED:
        # Weights up to 2^64 times a large value may be infinite where the result is not.
        spoiled = gl.convert_layout(gl.sum(o * 0.0, 1), r_layout)
        lost = lost | (spoiled != 0.0)
        lse = gl.where(lost, float("nan"), lse)
        broken = broken | gl.where(lost & inside, 1, 0)
    if C.OWN_OUT:
        copy_out_wait(0)
        buffer = s.o_smem.index(w)
    else:
        buffer = s.q_smem.index(w)
    buffer.reshape([LINES, C.DV]).store(o.to(dtype))
    fence_async_shared()
    copy_out(s.o_desc, [b, h, m0, 0], buffer)
    at = s.lse + ((b * s.q_length + rows).to(gl.int64) * s.heads + h)
    gl.store(at, lse, mask=inside)
    if not C.OWN_OUT:
        copy_out_wait(0)
        mbarrier.arrive(s.q_empty.index(w), count=1)
    return broken


@gluon.jit(
    do_not_specialize=[
        "longest", "heads", "group", "q_length", "k_length", "lines", "lo", "hi", "step",
        "capacity", "table_b", "table_h",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, work, amounts, longest, heads, group, q_length, k_length,
    lines, lo, hi, step, tiles, counts, order, capacity, table_b, table_h, bounds, index, sink,
    scale, C: gl.constexpr,
):  # fmt: skip
    """Shapes: q `[B, Hq, Lq, D]`, k `[B, Hk, Lk, D]`, v `[B, Hk, Lk, DV]`, out like q with DV, lse `[B, Hq,
    Lq]` in the memory order B, Lq, Hq; `work [programs, longest]` with `amounts [programs]` are the places of each program.
    """
    dtype: gl.constexpr = q_desc.dtype
    program = gl.program_id(0)
    q_smem = gl.allocate_shared_memory(dtype, [C.GROUPS, 1, 1, LINES, C.D], q_desc.layout)
    if C.OWN_OUT:
        o_smem = gl.allocate_shared_memory(dtype, [C.GROUPS, 1, 1, LINES, C.DV], o_desc.layout)
    else:
        o_smem = q_smem
    k_smem = gl.allocate_shared_memory(dtype, [C.STAGES, 1, 1, C.BN, C.D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [C.STAGES, 1, 1, C.BN, C.DV], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [C.GROUPS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [C.GROUPS, 1], barrier)
    turn = gl.allocate_shared_memory(gl.int64, [C.GROUPS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], barrier)
    ended = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    verdict = gl.allocate_shared_memory(gl.int32, [C.GROUPS, LINES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    GROUPS: gl.constexpr = C.GROUPS
    STAGES: gl.constexpr = C.STAGES
    for n in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(q_empty.index(n), count=1)
        mbarrier.init(turn.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(v_full.index(n), count=1)
        mbarrier.init(k_empty.index(n), count=C.GROUPS)
        mbarrier.init(v_empty.index(n), count=C.GROUPS)
    mbarrier.init(ended.index(0), count=C.GROUPS)
    fence_async_shared()
    s = Shared(
        q_desc, k_desc, v_desc, o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full,
        v_empty, turn, ended, verdict, lse, work + program * longest, gl.load(amounts + program), tiles, counts,
        order, bounds, index, sink, heads, group, q_length, k_length, lines, lo, hi, step, capacity,
        table_b, table_h, scale, C,
    )  # fmt: skip
    if C.GROUPS == 2:
        gl.warp_specialize(
            [(consumer, (0, s)), (consumer, (1, s)), (producer, (s,))], [4, 1], [C.REGISTERS, 24]
        )
    else:
        gl.warp_specialize(
            [(consumer, (0, s)), (consumer, (1, s)), (consumer, (2, s)), (producer, (s,))],
            [4, 4, 1],
            [C.REGISTERS, C.REGISTERS, 24],
        )
