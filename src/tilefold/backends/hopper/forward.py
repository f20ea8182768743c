"""Forward attention for Hopper (compute capability 9.0) in Gluon: FlashAttention-3's roles (Shah et al. 2024,
section 3) with a softmax whose reference is fixed.

A persistent program per core: one warp (`producer`) copies tiles by TMA and runs ahead of the consumers over
the program's whole list of work, so that the next tile's q, k and v come in while this one's results go out.
Each consumer warp group has 64 rows. It issues `q k^T` of one tile of keys, then `p v` of the tile before,
and takes the softmax of the one while the other runs.

**Fixed reference.** A softmax does not depend on the number that a row's scores are shifted by, and bfloat16
has the exponents of float32. So the maximum of a row over its first tile, if all rows see that, stays its
reference: no later maximum, no rescaling. Lines with a row whose sum reaches 2^64 (or is not a number) are
computed again with the usual online softmax, by the same program after its list, and those whose results are
still not finite, where a mask may hide what is not, a last time by `careful`.
"""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from .attend import attend
from .careful import attend_carefully, keep
from .dialect import copy_in, copy_out_wait, fence_async_shared, gl, gluon, mbarrier
from .machine import begin_beside, settle
from .program import (
    BAND,
    LINES,
    WORDS,
    Shared,
    advance,
    any_broken,
    entry_at,
    entry_words,
    got,
    how_many_again,
    is_broken,
    key_of,
    piece_at,
    put,
    slot_of,
    tile_at,
    tiles_told,
    words_of,
)


@gluon.jit
def copy_keys(s, b, hk, n0, entry, stage, phase):
    C: gl.constexpr = s.C
    mbarrier.wait(s.k_empty.index(stage), phase ^ 1)
    mbarrier.expect(s.k_full.index(stage), s.k_desc.block_type.nbytes)
    copy_in(s.k_desc, [b, hk, n0, 0], s.k_full.index(stage), s.k_smem.index(stage))
    if C.MASK != BAND:
        s.entries.index(stage).store(entry)
        mbarrier.arrive(s.k_full.index(stage), count=1)


@gluon.jit
def copy_values(s, b, hk, n0, stage, phase):
    C: gl.constexpr = s.C
    if not C.JOINED:
        mbarrier.wait(s.v_empty.index(stage), phase ^ 1)
    mbarrier.expect(s.v_full.index(stage), s.v_desc.block_type.nbytes)
    copy_in(s.v_desc, [b, hk, n0, 0], s.v_full.index(stage), s.v_smem.index(stage))


@gluon.jit
def producer(s):
    """Tells the consumers about each piece of work, and copies its q and its tiles of k and v."""
    C: gl.constexpr = s.C
    GROUPS: gl.constexpr = C.GROUPS
    PASSES: gl.constexpr = 1 + C.FIXED + C.CAREFUL
    zero = gl.to_tensor(0)
    stage, phase, done = zero, zero, zero
    # What a piece of work is, and what to tell of it, is loaded one piece ahead.
    piece = piece_at(s.portion)
    told = words_of(s, 0, piece[3])
    first = entry_at(s, piece[3], 0)
    for i in range(s.items):
        now, words, entry = piece, told, first
        following = gl.minimum(i + 1, s.items - 1)
        piece = piece_at(s.work + following * 8)
        for w in gl.static_range(GROUPS):
            tell(s, now, words, entry, stage, phase, done, w, 0)
        tiles = first_keys(s, now, entry, stage, phase, done)
        told = words_of(s, following, piece[3])
        first = entry_at(s, piece[3], 0)
        stage, phase = copy_tiles(s, now, tiles, stage, phase)
        done += 1
    if PASSES > 1:
        produce_again(s, stage, phase, done, PASSES)


@gluon.jit
def produce_again(s, stage, phase, done, PASSES: gl.constexpr):
    """In further passes, those that have broken rows; in the last one, all for the first consumer."""
    C: gl.constexpr = s.C
    again = gl.to_tensor(0)
    while again + 1 < PASSES:
        again = gl.where(goes_on(s, again), again + 1, PASSES)
        alone = (again == PASSES - 1) & C.CAREFUL
        for i in range(gl.where(again < PASSES, s.items, 0)):
            piece = piece_at(s.work + i * 8)
            if is_broken(s, piece[0], piece[1], piece[5]):
                words, entry = words_of(s, i, piece[3]), entry_at(s, piece[3], 0)
                for part in range(gl.where(alone, C.GROUPS, 1)):
                    for w in range(gl.where(alone, 1, C.GROUPS)):
                        tell(s, piece, words, entry, stage, phase, done, w, part * LINES)
                    tiles = first_keys(s, piece, entry, stage, phase, done)
                    stage, phase = copy_tiles(s, piece, tiles, stage, phase)
                    done += 1


@gluon.jit
def goes_on(s, before):
    """Whether there is a further pass, of which the consumers are told."""
    C: gl.constexpr = s.C
    mbarrier.wait(s.ended.index(0), before & 1)
    found = any_broken(s, before, 1)
    if found:
        put(s.verdict.index(2 * C.GROUPS), how_many_again(s), gl.int32, 1)
        mbarrier.arrive(s.decided.index(0), count=1)
    return found


@gluon.jit
def tell(s, piece, words, entry, stage, phase, done, w, offset):
    """Tell a consumer of a piece of work, and copy its q: rows from `offset` on."""
    C: gl.constexpr = s.C
    b, h, hk, _, n0, row = piece
    # The first keys come before q where consumers read its place up to the end of the piece before.
    if comes_first(C) and (n0 >= 0) & (w == 0):
        copy_keys(s, b, hk, n0, entry, stage, phase)
    slot, parity = slot_of(done, C)
    full = s.q_full.index(slot + w)
    mbarrier.wait(s.q_empty.index(slot + w), parity ^ 1)
    mbarrier.expect(full, s.q_desc.block_type.nbytes)
    copy_in(s.q_desc, [b, h, row + offset + w * LINES, 0], full, s.q_smem.index(slot + w))
    s.words.index(slot + w).store(words)
    mbarrier.arrive(full, count=1)


@gluon.constexpr_function
def comes_first(C):
    """Whether a piece's first tile of keys is copied before its q."""
    return not C.HELD and C.SLOTS == 1


@gluon.jit
def first_keys(s, piece, entry, stage, phase, done):
    """Copy them, if that has not been done; the tiles of the piece of work that consumers were told of."""
    C: gl.constexpr = s.C
    b, _, hk, _, n0, _ = piece
    if not comes_first(C) and n0 >= 0:
        copy_keys(s, b, hk, n0, entry, stage, phase)
    slot, _ = slot_of(done, C)
    return tiles_told(s, slot)


@gluon.jit
def copy_tiles(s, piece, tiles, stage, phase):
    """All tiles of a piece of work but the first keys."""
    C: gl.constexpr = s.C
    b, _, hk, _, n0, _ = piece
    base, whole, masked, count = tiles
    # Where a tile of a list lies is loaded one ahead.
    next = gl.maximum(gl.minimum(1, count - 1), 0)
    coming, about = tile_at(s, base, whole, masked, next), entry_at(s, base, next)
    for j in range(count):
        copy_values(s, b, hk, n0, stage, phase)
        stage, phase = advance(stage, phase, C.STAGES)
        n0, entry = key_of(s, coming), about
        next = gl.minimum(j + 2, count - 1)
        coming, about = tile_at(s, base, whole, masked, next), entry_at(s, base, next)
        if j + 1 < count:
            copy_keys(s, b, hk, n0, entry, stage, phase)
    return stage, phase


@gluon.jit
def consumer(w: gl.constexpr, s):
    """Results of 64 of the rows of each piece of work."""
    C: gl.constexpr = s.C
    layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
    none = gl.full([LINES], 0, gl.int32, layout)
    zero = gl.to_tensor(0)
    stage, phase, turn, broken = zero, zero, zero, none
    if not (C.FIXED or C.CAREFUL):
        for i in range(s.items):
            stage, phase, turn, broken = attend(w, s, i, zero, stage, phase, turn, broken)
    else:
        # With the last one, which selects, there is one more.
        PASSES: gl.constexpr = 1 + C.FIXED
        done, count, again, going = zero, s.items, zero, zero == 0
        # (As a loop over a range, Triton 3.6 takes the number of pieces for the same in every pass.)
        while going:
            for _ in range(count):
                stage, phase, turn, broken = attend(w, s, done, again, stage, phase, turn, broken)
                done += 1
            count = zero
            if (again == 0) | C.CAREFUL:
                count = coming_again(w, s, broken, again)
                broken = none
            again += 1
            going = (count > 0) & (again < PASSES)
        if C.CAREFUL and count > 0:
            consume_carefully(w, s, done, count, stage, phase)
    copy_out_wait(0)


@gluon.jit
def coming_again(w: gl.constexpr, s, broken, before):
    """How many pieces of work come again: none unless a consumer of the program has `broken` rows."""
    C: gl.constexpr = s.C
    put(s.verdict.index(before * C.GROUPS + w), gl.max(broken, 0), gl.int32, 4)
    mbarrier.arrive(s.ended.index(0), count=1)
    mbarrier.wait(s.ended.index(0), before & 1)
    count = gl.to_tensor(0)
    if any_broken(s, before, 4):
        # The same rows are written again.
        settle()
        mbarrier.wait(s.decided.index(0), before & 1)
        count = got(s.verdict.index(2 * C.GROUPS), 4)
    return count


@gluon.jit
def consume_carefully(w: gl.constexpr, s, done, count, stage, phase):
    """The first consumer does it alone, for the sake of the others' registers."""
    C: gl.constexpr = s.C
    # The others' rows, too: when their own results are there.
    mbarrier.arrive(s.settled.index(0), count=1)
    if w == 0:
        mbarrier.wait(s.settled.index(0), 0)
        for i in range(count * C.GROUPS):
            stage, phase = attend_carefully(s, done + i, i % C.GROUPS * LINES, stage, phase)


@gluon.jit(
    do_not_specialize=[
        "heads", "q_length", "k_length", "lo", "hi", "step", "capacity", "slope_b", "slope_h", "q_step",
        "k_step", "base", "batch_origin", "bias_b", "bias_h", "bias_q", "bias_k",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, values, lse, work, portions, lines, heads, q_length, k_length, lo, hi,
    step, tiles, capacity, bounds, bias, bias_b: gl.int64, bias_h: gl.int64, bias_q: gl.int64,
    bias_k: gl.int64, sink, slopes, slope_b, slope_h, cap, q_step, k_step, base, row_table, key_table,
    batch_origin, scale, C: gl.constexpr,
):  # fmt: skip
    """Shapes: q `[B, Hq, Lq, D]`, k `[B, Hk, Lk, D]`, v `[B, Hk, Lk, DV]` and where its `values` lie, out
    like q with DV, lse `[B, Hq, Lq]` in the memory order B, Lq, Hq. `work, portions, lines`: of
    `schedule.Schedule`.
    """
    dtype: gl.constexpr = q_desc.dtype
    program = gl.program_id(0)
    Q_TILES: gl.constexpr = C.GROUPS * C.SLOTS
    q_smem = gl.allocate_shared_memory(dtype, [Q_TILES, 1, 1, LINES, C.D], q_desc.layout)
    COLUMNS: gl.constexpr = C.DV // 2 if C.HALVES else C.DV
    o_smem = gl.allocate_shared_memory(dtype, [C.GROUPS, 1, 1, LINES, COLUMNS], o_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [C.STAGES, 1, 1, C.BN, C.D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [C.STAGES, 1, 1, C.BN, C.DV], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], barrier)
    turn = gl.allocate_shared_memory(gl.int64, [C.GROUPS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], barrier)
    ended = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    decided = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    settled = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    words = gl.allocate_shared_memory(gl.int32, [Q_TILES, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ENTRY: gl.constexpr = entry_words(C.MASK)
    entries = gl.allocate_shared_memory(gl.int32, [C.STAGES, ENTRY], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    verdict = gl.allocate_shared_memory(
        gl.int32, [2 * C.GROUPS + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    cold = gl.allocate_shared_memory(gl.int64, [5, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    GROUPS: gl.constexpr = C.GROUPS
    STAGES: gl.constexpr = C.STAGES
    for n in gl.static_range(Q_TILES):
        # What is told, and what is copied.
        mbarrier.init(q_full.index(n), count=2)
        mbarrier.init(q_empty.index(n), count=1)
    for n in gl.static_range(GROUPS):
        mbarrier.init(turn.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(k_full.index(n), count=1 if C.MASK == BAND else 2)
        mbarrier.init(v_full.index(n), count=1)
        mbarrier.init(k_empty.index(n), count=C.GROUPS)
        mbarrier.init(v_empty.index(n), count=C.GROUPS)
    mbarrier.init(ended.index(0), count=C.GROUPS)
    mbarrier.init(decided.index(0), count=1)
    mbarrier.init(settled.index(0), count=C.GROUPS)
    fence_async_shared()
    begin_beside()
    portion = portions + program * 16
    own = work + gl.load(portion + 8).to(gl.int64) * 8
    s = Shared(
        q_desc, k_desc, v_desc, o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full,
        k_empty, v_full, v_empty, turn, ended, decided, settled, words, entries, verdict, cold, lse,
        own, gl.load(portion + 9), portion, tiles, bounds, bias, bias_b, bias_h, bias_q, bias_k,
        sink, slopes, slope_b, slope_h, cap, q_step, k_step, base, row_table, key_table,
        batch_origin, heads, q_length, k_length, lines, lo, hi, step, capacity, scale, C,
    )  # fmt: skip
    if C.CAREFUL:
        keep(s, values)
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
