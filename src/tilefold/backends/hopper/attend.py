"""The main loop of a consumer: 64 rows of a line of tiles."""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from .dialect import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from .finish import LARGEST_SUM, finish
from .machine import packed, unpacked
from .mask import BITS, edges_of, marks_of, visible
from .program import (
    BAND,
    LINES,
    advance,
    is_hidden,
    is_mixed,
    key_of,
    slot_of,
    tile_at,
    told,
    told_tile,
)
from .score import bias_of, in_base2, power, scored, slope_of, weights_of

#: A line with more keys is a long one; those before the first look at its sums.
_MANY, _TRIAL = gl.constexpr(2048), gl.constexpr(512)


@gluon.jit
def skip(w: gl.constexpr, s, stage, phase, turn, count):
    """Give back tiles of keys that these rows do not see."""
    C: gl.constexpr = s.C
    for _ in range(count):
        mbarrier.wait(s.k_full.index(stage), phase)
        if not C.JOINED:
            mbarrier.arrive(s.k_empty.index(stage), count=1)
        mbarrier.wait(s.v_full.index(stage), phase)
        mbarrier.arrive((s.k_empty if C.JOINED else s.v_empty).index(stage), count=1)
        if C.TURNS:
            await_turn(w, s, turn)
            pass_turn(w, s)
            turn += 1
        stage, phase = advance(stage, phase, C.STAGES)
    return stage, phase, turn


@gluon.jit
def passed_over(w: gl.constexpr, s, tile, j, from_, to, passed):
    """Whether rows pass over the j-th tile of keys, of which they see nothing. In a list there may be many
    such tiles in a row: only while, after `passed` of them, the ring still has room for the next tile beside
    the last values in use.
    """
    C: gl.constexpr = s.C
    if C.MASK == BAND:
        return (j >= from_) & (j < to)
    else:
        return is_hidden(w, tile) & (passed < C.STAGES - 3)


@gluon.jit
def await_turn(w: gl.constexpr, s, turn):
    """At the matrix units, consumers take turns: one for each tile that their line visits."""
    mbarrier.wait(s.turn.index(w), (turn & 1) ^ (1 if w == 0 else 0))


@gluon.jit
def pass_turn(w: gl.constexpr, s):
    C: gl.constexpr = s.C
    mbarrier.arrive(s.turn.index((w + 1) % C.GROUPS), count=1)


@gluon.jit
def row_sums(p, BN: gl.constexpr):
    """Sums over what each thread holds of a row, `[64, 4, 2]`; its lanes are added once, at the end."""
    return gl.sum(p.reshape([64, BN // 8, 4, 2]), 1)


@gluon.jit
def product(w: gl.constexpr, s, q, stage, turn):
    """Send `q k^T`, in turn."""
    C: gl.constexpr = s.C
    if C.TURNS:
        await_turn(w, s, turn)
    return multiplied(s, q, stage)


@gluon.jit
def multiplied(s, q, stage):
    """Send `q k^T`."""
    C: gl.constexpr = s.C
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    zeros = gl.full([64, C.BN], 0.0, gl.float32, s_layout)
    k = s.k_smem.index(stage).reshape([C.BN, C.D])
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def opened(s, b, h, m0, table):
    """64 rows before their first tile: what their mask, slope and bias need, then their results, references
    and sums.
    """
    C: gl.constexpr = s.C
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    r_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows = m0 + gl.arange(0, LINES, r_layout)
    edges = edges_of(s, rows, table)
    slope = slope_of(s, b, h, rows)
    bias = bias_of(s, b, h)
    o = gl.full([LINES, C.DV], 0.0, gl.float32, o_layout)
    reference = gl.full([LINES], float("-inf"), gl.float32, r_layout)
    sums = row_sums(gl.full([LINES, C.BN], 0.0, gl.float32, s_layout), C.BN)
    return edges, slope, bias, o, reference, sums


@gluon.jit
def raised(s, scores, reference, sums):
    """The online softmax: references that are the largest scores so far, what the next weights are beside, by
    what earlier ones shrink, and their sums, shrunk.
    """
    found = gl.maximum(reference, in_base2(s, gl.max(scores, 1)))
    base = gl.where(found == float("-inf"), 0.0, found)
    alpha = power(s, reference - base)
    spread = gl.convert_layout(alpha, gl.SliceLayout(1, gl.SliceLayout(2, sums.type.layout)))
    return found, base, alpha, sums * spread[:, None][:, :, None]


@gluon.jit
def step(
    w: gl.constexpr, s, q, ready, p, o, reference, sums, stage, phase, last_stage, last_phase, turn, more, m0,
    n0, slope, bias, table, edges, hides, READY: gl.constexpr, MASKED: gl.constexpr, ONLINE: gl.constexpr,
):  # fmt: skip
    """`q k^T` of one tile of keys unless it is `ready`, `p v` of the one before, and the softmax of this one,
    under the mask where it `hides` something.
    """
    C: gl.constexpr = s.C
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = s.q_desc.dtype
    # Nothing may prepare what a product reads once the one before it is on its way.
    last = unpacked(p, dtype, p_layout)
    if not READY:
        sent = product(w, s, q, stage, turn)
    mbarrier.wait(s.v_full.index(last_stage), last_phase)
    added = warpgroup_mma(last, s.v_smem.index(last_stage).reshape([C.BN, C.DV]), o, is_async=True)
    if C.TURNS:
        pass_turn(w, s)
        turn += 1
    if READY:
        scores = ready
    else:
        scores = warpgroup_mma_wait(1, [sent])
    if not C.JOINED:
        mbarrier.arrive(s.k_empty.index(stage), count=1)
    scores = scored(s, scores, m0, n0, slope, bias, s_layout)
    if MASKED and hides:
        scores = gl.where(visible(s, m0, n0, table, edges, s_layout), scores, float("-inf"))
    if ONLINE:
        reference, base, alpha, sums = raised(s, scores, reference, sums)
    else:
        base = reference
    weights = weights_of(s, scores, base)
    sums = sums + row_sums(weights, C.BN)
    next_stage, next_phase = advance(stage, phase, C.STAGES)
    # This wait brings an edge of a basic block, without which the compiler of the machine's code moves every
    # exponential behind the wait for `p v`. Tiles that these rows do not see may lie between the last one and
    # this one: in a band the next keys may then come only when the last values are given back (of lists, rows
    # pass over no more tiles than leaves room for these keys).
    if C.BELOW and MASKED:
        mbarrier.wait(s.v_full.index(last_stage), last_phase)
    else:
        mbarrier.wait(s.k_full.index(next_stage), next_phase, pred=more)
    following = told_tile(s, next_stage)
    o = warpgroup_mma_wait(0, [added])
    new = packed(weights, dtype)
    mbarrier.arrive((s.k_empty if C.JOINED else s.v_empty).index(last_stage), count=1)
    if C.BELOW and MASKED:
        mbarrier.wait(s.k_full.index(next_stage), next_phase, pred=more)
    if ONLINE:
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
    return new, o, reference, sums, next_stage, next_phase, stage, phase, turn, following


@gluon.jit
def attend(w: gl.constexpr, s, done, again, stage, phase, turn, broken):
    """Results of the w-th 64 rows of a line of tiles, the piece of work after `done` others; if it comes
    `again`, with the online softmax.
    """
    C: gl.constexpr = s.C
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    r_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = s.q_desc.dtype
    EARLY: gl.constexpr = C.EARLY and not C.TURNS
    MARKS: gl.constexpr = C.FIXED or C.CAREFUL
    LISTS: gl.constexpr = C.MASK != BAND
    GAPS: gl.constexpr = C.BELOW or C.MASK == BITS
    slot, parity = slot_of(done, C)
    mbarrier.wait(s.q_full.index(slot + w), parity)
    place, tiles, shares = told(w, s, slot + w)
    b, h, _, m0, table = place
    base, whole, masked = tiles
    before, from_, to, own, after = shares
    edges, slope, bias, o, reference, sums = opened(s, b, h, m0, table)
    zero = gl.to_tensor(0)
    given_up, passed = zero, zero
    # Unless these rows see all of the first tile, it gives them no fixed reference.
    mixed = whole == 0
    online = (again > 0) | mixed
    if C.MASKED:
        stage, phase, turn = skip(w, s, stage, phase, turn, before)
    if own > 0:
        held = s.q_smem.index(slot + w).reshape([LINES, C.D])
        if C.HELD:
            q = held.load(gl.DotOperandLayout(0, s_layout, 2))
            # Those of the next piece of work may come.
            mbarrier.arrive(s.q_empty.index(slot + w), count=1)
        else:
            q = held
        mbarrier.wait(s.k_full.index(stage), phase)
        # What is said of a tile may be gone when its keys are given back.
        first = told_tile(s, stage)
        edges = marks_of(w, s, stage, edges)
        if LISTS:
            mixed = is_mixed(w, first)
            online = (again > 0) | mixed
        sent = product(w, s, q, stage, turn)
        if C.TURNS:
            pass_turn(w, s)
            turn += 1
        last_stage, last_phase = stage, phase
        stage, phase = advance(stage, phase, C.STAGES)
        if EARLY:
            # If the next tile is none of these rows' this product is for nothing.
            soon = (online == 0) & (own > 1) & ((from_ > 1) | (to <= 1))
            mbarrier.wait(s.k_full.index(stage), phase, pred=soon)
            second = told_tile(s, stage)
            if C.MASK == BITS:
                soon = soon & (passed_over(w, s, second, 1, from_, to, 0) == 0)
            sent_next = product(w, s, q, stage, turn)
            scores = warpgroup_mma_wait(1, [sent])
        else:
            scores = warpgroup_mma_wait(0, [sent])
        if not C.JOINED:
            mbarrier.arrive(s.k_empty.index(last_stage), count=1)
        n0 = key_of(s, first if LISTS else tile_at(s, base, whole, masked, 0))
        scores = scored(s, scores, m0, n0, slope, bias, s_layout)
        if C.MASKED and mixed:
            scores = gl.where(visible(s, m0, n0, table, edges, s_layout), scores, float("-inf"))
        reference = in_base2(s, gl.max(scores, 1))
        # Keys may be hidden, or infinite.
        shift = gl.where(reference == float("-inf"), 0.0, reference)
        weights = weights_of(s, scores, shift)
        sums = row_sums(weights, C.BN)
        p = packed(weights, dtype)
        start, about = 1, zero
        if EARLY:
            ready = warpgroup_mma_wait(0, [sent_next])
            if soon:
                start = 2
                n0 = key_of(s, second if LISTS else tile_at(s, base, whole, masked, 1))
                edges = marks_of(w, s, stage, edges)
                hides = is_mixed(w, second) if LISTS else whole == 1
                p, o, reference, sums, stage, phase, last_stage, last_phase, turn, about = step(
                    w, s, q, ready, p, o, reference, sums, stage, phase, last_stage, last_phase, turn,
                    own > 2, m0, n0, slope, bias, table, edges, hides, True, C.MASKED, not C.FIXED,
                )  # fmt: skip
            else:
                mbarrier.wait(s.k_full.index(stage), phase, pred=own > 1)
                about = told_tile(s, stage)
        else:
            mbarrier.wait(s.k_full.index(stage), phase, pred=own > 1)
            about = told_tile(s, stage)
        # The first tile is done, or two. The softmax that is taken online has a loop of its own, but nothing
        # else: code that has not run yet is slow to come, and what lies beyond its first 60 kB slower still.
        if C.FIXED or C.MASKED:
            for j in range(1, gl.where(online, own, 0)):
                tile = about if LISTS else tile_at(s, base, whole, masked, j)
                n0 = key_of(s, tile)
                edges = marks_of(w, s, stage, edges)
                if GAPS and passed_over(w, s, tile, j, from_, to, passed):
                    stage, phase, turn = skip(w, s, stage, phase, turn, 1)
                    mbarrier.wait(s.k_full.index(stage), phase, pred=j + 1 < own)
                    about = told_tile(s, stage)
                    passed += 1
                else:
                    passed = zero
                    p, o, reference, sums, stage, phase, last_stage, last_phase, turn, about = step(
                        w, s, q, q, p, o, reference, sums, stage, phase, last_stage, last_phase, turn,
                        j + 1 < own, m0, n0, slope, bias, table, edges, True, False, C.MASKED, True,
                    )  # fmt: skip
        ONE_LOOP: gl.constexpr = C.MASKED and not C.BELOW
        PARTS: gl.constexpr = 2 if C.TRIAL else 1
        KNOWN: gl.constexpr = not LISTS and (C.ALIBI or C.BIAS or ONE_LOOP)
        coming = zero
        if KNOWN:
            coming = tile_at(s, base, whole, masked, gl.minimum(start, own - 1))
        stop = gl.where(online, 0, own if ONE_LOOP else whole)
        trial = stop
        if C.TRIAL:
            # After some tiles of a long line there is a look at its sums: if they are lost already, so is the
            # time that the others would take.
            trial = gl.where(stop > _MANY // C.BN, gl.maximum(start, _TRIAL // C.BN), stop)
        for part in range(PARTS):
            for j in range(gl.where(part == 0, start, trial), gl.where(part == 0, trial, stop)):
                # Where a tile of a band lies is asked by masks, ALiBi and biases alone.
                tile = about if LISTS else coming
                hides = j >= whole
                if LISTS:
                    hides = is_mixed(w, tile)
                elif KNOWN:
                    coming = tile_at(s, base, whole, masked, gl.minimum(j + 1, own - 1))
                n0 = key_of(s, tile)
                edges = marks_of(w, s, stage, edges)
                if C.MASK == BITS and passed_over(w, s, tile, j, from_, to, passed):
                    stage, phase, turn = skip(w, s, stage, phase, turn, 1)
                    mbarrier.wait(s.k_full.index(stage), phase, pred=j + 1 < own)
                    about = told_tile(s, stage)
                    passed += 1
                else:
                    passed = zero
                    p, o, reference, sums, stage, phase, last_stage, last_phase, turn, about = step(
                        w, s, q, q, p, o, reference, sums, stage, phase, last_stage, last_phase, turn,
                        j + 1 < own, m0, n0, slope, bias, table, edges, hides, False, ONE_LOOP, not C.FIXED,
                    )  # fmt: skip
            if C.TRIAL and (part == 0) & (trial < stop):
                lost = gl.max(gl.max(gl.max(gl.where(sums < LARGEST_SUM, 0, 1), 2), 1), 0) > 0
                given_up = gl.where(lost, own - trial, given_up)
                own = gl.where(lost, trial, own)
                stop = gl.where(lost, trial, stop)
        if C.BELOW:
            for j in range(gl.maximum(start, whole), gl.where(online, 0, own)):
                if (j < from_) | (j >= to):
                    n0 = key_of(s, tile_at(s, base, whole, masked, j))
                    p, o, reference, sums, stage, phase, last_stage, last_phase, turn, about = step(
                        w, s, q, q, p, o, reference, sums, stage, phase, last_stage, last_phase, turn,
                        j + 1 < own, m0, n0, slope, bias, table, edges, True, False, True, not C.FIXED,
                    )  # fmt: skip
                else:
                    stage, phase, turn = skip(w, s, stage, phase, turn, 1)
                    mbarrier.wait(s.k_full.index(stage), phase, pred=j + 1 < own)
        if not C.HELD:
            mbarrier.arrive(s.q_empty.index(slot + w), count=1)
        mbarrier.wait(s.v_full.index(last_stage), last_phase)
        weights = unpacked(p, dtype, p_layout)
        o = warpgroup_mma(weights, s.v_smem.index(last_stage).reshape([C.BN, C.DV]), o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive((s.k_empty if C.JOINED else s.v_empty).index(last_stage), count=1)
    else:
        mbarrier.arrive(s.q_empty.index(slot + w), count=1)
    # Before the results: who is behind here holds up everybody else.
    if C.MASKED or C.TRIAL:
        stage, phase, turn = skip(w, s, stage, phase, turn, given_up + after)
    if MARKS:
        # Sums of rows whose results are not finite are no numbers, if a further pass may do better. Weights
        # up to 2^64 times a large value may be infinite where the result is not; zero times what is hidden
        # may be NaN.
        none = gl.convert_layout(row_sums(o * 0.0, C.DV), sums.type.layout)
        sums = sums + (none if C.CAREFUL else gl.where(again == 0, none, 0.0))
    total = gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), r_layout)
    if C.TRIAL:
        total = gl.where(given_up > 0, float("inf"), total)
    broken = finish(w, s, b, h, m0, o, reference, total, broken, again, MARKS)
    return stage, phase, turn, broken
