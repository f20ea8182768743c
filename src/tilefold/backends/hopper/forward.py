"""Forward attention for Hopper (compute capability 9.0) in Gluon: FlashAttention-3's roles (Shah et al. 2024,
section 3) with a softmax whose reference is fixed.

A persistent program per core: one warp (`producer`) copies tiles by TMA and runs ahead of the consumers over
the program's whole list of work, so that the next tile's q, k and v come in while this one's results go out.
Each consumer warp group has 64 rows. It issues `q k^T` of one tile of keys, then `p v` of the tile before,
and takes the softmax of the one while the other runs.

**Fixed reference.** A softmax does not depend on the number that a row's scores are shifted by, and bfloat16
has the exponents of float32. So the maximum of a row over its first tile, if all rows see that, stays its
reference: no later maximum, no rescaling. A row whose sum reaches 2^64 (or is not a number) is computed again
with the usual online softmax, by the same program after its list.
"""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from .dialect import (
    copy_in,
    copy_out,
    copy_out_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .machine import begin_beside, log2, packed, unpacked
from .mask import BITS, edges_of, marks_of, visible
from .program import (
    LINES,
    WORDS,
    Shared,
    advance,
    any_broken,
    how_many_again,
    is_broken,
    load_work,
    lse_of,
    place_of,
    read,
    shares_of,
    slot_of,
    tell,
    tile_at,
    tiles_of,
    told,
    write,
)
from .score import bias_of, in_base2, power, scored, slope_of, unit_of, weights_of

LN2 = gl.constexpr(0.6931471805599453)
#: Sums from here on may have lost what is small: 2^64.
LARGEST_SUM = gl.constexpr(1.8446744073709552e19)
#: A line with more tiles is a long one; those before the first look at its sums.
_MANY, _TRIAL = gl.constexpr(16), gl.constexpr(3)


@gluon.jit
def producer(s):
    """Tells the consumers about each piece of work, and copies its q and its tiles of k and v."""
    C: gl.constexpr = s.C
    zero = gl.to_tensor(0)
    stage, phase, done = produce_all(s, zero, zero, zero, False)
    if C.FIXED:
        mbarrier.wait(s.ended.index(0), 0)
        count = zero
        if any_broken(s):
            count = how_many_again(s)
        write(s, C.GROUPS * C.SLOTS * WORDS, count)
        mbarrier.arrive(s.decided.index(0), count=1)
        if count > 0:
            produce_all(s, stage, phase, done, True)


@gluon.jit
def produce_all(s, stage, phase, done, AGAIN: gl.constexpr):
    C: gl.constexpr = s.C
    GROUPS: gl.constexpr = C.GROUPS
    work = load_work(s, 0)
    for i in range(s.items):
        b, h, line, table = place_of(s, work)
        tiles = tiles_of(s, work, line, table)
        base, whole, masked, count = tiles
        work = load_work(s, i + 1)
        wanted = True
        if AGAIN:
            wanted = is_broken(s, b, h, line)
        if wanted:
            slot, parity = slot_of(done, C)
            for w in gl.static_range(GROUPS):
                row = line * (LINES * C.GROUPS) + w * LINES
                mbarrier.wait(s.q_empty.index(slot + w), parity ^ 1)
                tell(s, slot + w, b, h, row, table, tiles, shares_of(s, w, line, tiles))
                mbarrier.arrive(s.q_full.index(slot + w), count=1)
                mbarrier.expect(s.q_full.index(slot + w), s.q_desc.block_type.nbytes)
                copy_in(s.q_desc, [b, h, row, 0], s.q_full.index(slot + w), s.q_smem.index(slot + w))
            done += 1
            hk = h // s.group
            # Where a tile of a list lies is loaded one ahead.
            coming = tile_at(s, base, whole, masked, 0)
            for j in range(count):
                n0 = coming * C.BN
                coming = tile_at(s, base, whole, masked, gl.minimum(j + 1, count - 1))
                mbarrier.wait(s.k_empty.index(stage), phase ^ 1)
                mbarrier.expect(s.k_full.index(stage), s.k_desc.block_type.nbytes)
                copy_in(s.k_desc, [b, hk, n0, 0], s.k_full.index(stage), s.k_smem.index(stage))
                if not C.JOINED:
                    mbarrier.wait(s.v_empty.index(stage), phase ^ 1)
                mbarrier.expect(s.v_full.index(stage), s.v_desc.block_type.nbytes)
                copy_in(s.v_desc, [b, hk, n0, 0], s.v_full.index(stage), s.v_smem.index(stage))
                stage, phase = advance(stage, phase, C.STAGES)
    return stage, phase, done


@gluon.jit
def consumer(w: gl.constexpr, s):
    """Results of 64 of the rows of each piece of work."""
    C: gl.constexpr = s.C
    layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
    broken = gl.full([LINES], 0, gl.int32, layout)
    zero = gl.to_tensor(0)
    stage, phase, turn = zero, zero, zero
    for i in range(s.items):
        stage, phase, turn, broken = attend(w, s, i, stage, phase, turn, broken, C.FIXED, C.TURNS)
    if C.FIXED:
        s.verdict.index(w).store(broken)
        mbarrier.arrive(s.ended.index(0), count=1)
        mbarrier.wait(s.decided.index(0), 0)
        for i in range(read(s, C.GROUPS * C.SLOTS * WORDS, 4)):
            stage, phase, turn, broken = attend(w, s, s.items + i, stage, phase, turn, broken, False, False)
    copy_out_wait(0)


@gluon.jit
def skip(w: gl.constexpr, s, stage, phase, turn, count, TURNS: gl.constexpr):
    """Give back tiles of keys that these rows do not see."""
    C: gl.constexpr = s.C
    for _ in range(count):
        mbarrier.wait(s.k_full.index(stage), phase)
        if not C.JOINED:
            mbarrier.arrive(s.k_empty.index(stage), count=1)
        mbarrier.wait(s.v_full.index(stage), phase)
        mbarrier.arrive((s.k_empty if C.JOINED else s.v_empty).index(stage), count=1)
        if TURNS:
            await_turn(w, s, turn)
            pass_turn(w, s)
            turn += 1
        stage, phase = advance(stage, phase, C.STAGES)
    return stage, phase, turn


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
def product(w: gl.constexpr, s, q, stage, turn, TURNS: gl.constexpr):
    """Send `q k^T`."""
    C: gl.constexpr = s.C
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    if TURNS:
        await_turn(w, s, turn)
    zeros = gl.full([64, C.BN], 0.0, gl.float32, s_layout)
    k = s.k_smem.index(stage).reshape([C.BN, C.D])
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def step(
    w: gl.constexpr, s, q, ready, p, o, reference, sums, stage, phase, last_stage, last_phase, turn, more, m0,
    n0, slope, bias, table, edges, hides, READY: gl.constexpr, MASKED: gl.constexpr, ONLINE: gl.constexpr,
    TURNS: gl.constexpr,
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
        sent = product(w, s, q, stage, turn, TURNS)
    mbarrier.wait(s.v_full.index(last_stage), last_phase)
    added = warpgroup_mma(last, s.v_smem.index(last_stage).reshape([C.BN, C.DV]), o, is_async=True)
    if TURNS:
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
        found = gl.maximum(reference, in_base2(s, gl.max(scores, 1)))
        base = gl.where(found == float("-inf"), 0.0, found)
        alpha = power(s, reference - base)
        reference = found
        spread = gl.convert_layout(alpha, gl.SliceLayout(1, gl.SliceLayout(2, sums.type.layout)))
        sums = sums * spread[:, None][:, :, None]
    else:
        base = reference
    weights = weights_of(s, scores, base)
    sums = sums + row_sums(weights, C.BN)
    next_stage, next_phase = advance(stage, phase, C.STAGES)
    # This wait brings an edge of a basic block, without which the compiler of the machine's code moves every
    # exponential behind the wait for `p v`. Tiles that these rows do not see may lie between the last one and
    # this one: then the next keys may come only when the last values are given back.
    if C.BELOW and MASKED:
        mbarrier.wait(s.v_full.index(last_stage), last_phase)
    else:
        mbarrier.wait(s.k_full.index(next_stage), next_phase, pred=more)
    o = warpgroup_mma_wait(0, [added])
    new = packed(weights, dtype)
    mbarrier.arrive((s.k_empty if C.JOINED else s.v_empty).index(last_stage), count=1)
    if C.BELOW and MASKED:
        mbarrier.wait(s.k_full.index(next_stage), next_phase, pred=more)
    if ONLINE:
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
    return new, o, reference, sums, next_stage, next_phase, stage, phase, turn


@gluon.jit
def attend(w: gl.constexpr, s, done, stage, phase, turn, broken, FIXED: gl.constexpr, TURNS: gl.constexpr):
    """Results of the w-th 64 rows of a line of tiles, the piece of work after `done` others."""
    C: gl.constexpr = s.C
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    r_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = s.q_desc.dtype
    EARLY: gl.constexpr = C.EARLY and not TURNS
    slot, parity = slot_of(done, C)
    mbarrier.wait(s.q_full.index(slot + w), parity)
    place, tiles, shares = told(s, slot + w)
    b, h, m0, table = place
    base, whole, masked = tiles
    before, from_, to, own, after = shares
    rows = m0 + gl.arange(0, LINES, r_layout)
    edges = edges_of(s, rows, table)
    slope = slope_of(s, b, h, rows)
    bias = bias_of(s, b, h)
    o = gl.full([LINES, C.DV], 0.0, gl.float32, o_layout)
    reference = gl.full([LINES], float("-inf"), gl.float32, r_layout)
    sums = row_sums(gl.full([LINES, C.BN], 0.0, gl.float32, s_layout), C.BN)
    given_up = gl.to_tensor(0)
    if C.MASKED:
        stage, phase, turn = skip(w, s, stage, phase, turn, before, TURNS)
    if own > 0:
        held = s.q_smem.index(slot + w).reshape([LINES, C.D])
        if C.HELD:
            q = held.load(gl.DotOperandLayout(0, s_layout, 2))
            if C.OWN_OUT:
                # Those of the next piece of work may come.
                mbarrier.arrive(s.q_empty.index(slot + w), count=1)
        else:
            q = held
        mbarrier.wait(s.k_full.index(stage), phase)
        sent = product(w, s, q, stage, turn, TURNS)
        if TURNS:
            pass_turn(w, s)
            turn += 1
        last_stage, last_phase = stage, phase
        stage, phase = advance(stage, phase, C.STAGES)
        if EARLY:
            # If the next tile is none of these rows' this product is for nothing.
            soon = (whole > 0) & (own > 1) & ((from_ > 1) | (to <= 1))
            mbarrier.wait(s.k_full.index(stage), phase, pred=soon)
            sent_next = product(w, s, q, stage, turn, TURNS)
            scores = warpgroup_mma_wait(1, [sent])
        else:
            scores = warpgroup_mma_wait(0, [sent])
        if not C.JOINED:
            mbarrier.arrive(s.k_empty.index(last_stage), count=1)
        n0 = tile_at(s, base, whole, masked, 0) * C.BN
        edges = marks_of(s, m0, n0, table, edges)
        scores = scored(s, scores, m0, n0, slope, bias, s_layout)
        if C.MASKED and whole == 0:
            scores = gl.where(visible(s, m0, n0, table, edges, s_layout), scores, float("-inf"))
        reference = in_base2(s, gl.max(scores, 1))
        shift = reference
        if C.MASKED or C.BIAS:
            shift = gl.where(reference == float("-inf"), 0.0, reference)
        weights = weights_of(s, scores, shift)
        sums = row_sums(weights, C.BN)
        p = packed(weights, dtype)
        start = 1
        if EARLY:
            ready = warpgroup_mma_wait(0, [sent_next])
            if soon:
                start = 2
                n0 = tile_at(s, base, whole, masked, 1) * C.BN
                edges = marks_of(s, m0, n0, table, edges)
                p, o, reference, sums, stage, phase, last_stage, last_phase, turn = step(
                    w, s, q, ready, p, o, reference, sums, stage, phase, last_stage, last_phase, turn,
                    own > 2, m0, n0, slope, bias, table, edges, whole == 1, True, C.MASKED, not FIXED, TURNS,
                )  # fmt: skip
            else:
                mbarrier.wait(s.k_full.index(stage), phase, pred=own > 1)
        else:
            mbarrier.wait(s.k_full.index(stage), phase, pred=own > 1)
        # The first tile is done, or two.
        if C.MASKED:
            for j in range(1, gl.where(whole == 0, own, 0)):
                n0 = tile_at(s, base, whole, masked, j) * C.BN
                edges = marks_of(s, m0, n0, table, edges)
                p, o, reference, sums, stage, phase, last_stage, last_phase, turn = step(
                    w, s, q, q, p, o, reference, sums, stage, phase, last_stage, last_phase, turn,
                    j + 1 < own, m0, n0, slope, bias, table, edges, True, False, True, True, TURNS,
                )  # fmt: skip
        ONE_LOOP: gl.constexpr = C.MASKED and not C.BELOW
        TRIAL: gl.constexpr = C.TRIAL and FIXED
        PARTS: gl.constexpr = 2 if TRIAL else 1
        coming = gl.to_tensor(0)
        if C.ALIBI or C.BIAS or ONE_LOOP:
            coming = tile_at(s, base, whole, masked, gl.minimum(start, own - 1))
        stop = gl.where(whole == 0, 0, own) if ONE_LOOP else whole
        trial = stop
        if TRIAL:
            # After some tiles of a long line there is a look at its sums: if they are lost already, so is the
            # time that the others would take.
            trial = gl.where(stop > _MANY, start + _TRIAL, stop)
        for part in range(PARTS):
            for j in range(gl.where(part == 0, start, trial), gl.where(part == 0, trial, stop)):
                # Where a tile lies is asked by masks, ALiBi and biases alone.
                n0 = coming * C.BN
                hides = j >= whole
                if C.ALIBI or C.BIAS or ONE_LOOP:
                    coming = tile_at(s, base, whole, masked, gl.minimum(j + 1, own - 1))
                    edges = marks_of(s, m0, n0, table, edges)
                if C.MASK == BITS:
                    hides = edges[0] != -2
                p, o, reference, sums, stage, phase, last_stage, last_phase, turn = step(
                    w, s, q, q, p, o, reference, sums, stage, phase, last_stage, last_phase, turn,
                    j + 1 < own, m0, n0, slope, bias, table, edges, hides, False, ONE_LOOP, not FIXED, TURNS,
                )  # fmt: skip
            if TRIAL and (part == 0) & (trial < stop):
                lost = gl.max(gl.max(gl.max(gl.where(sums < LARGEST_SUM, 0, 1), 2), 1), 0) > 0
                given_up = gl.where(lost, own - trial, given_up)
                own = gl.where(lost, trial, own)
                stop = gl.where(lost, trial, stop)
        if C.BELOW:
            for j in range(gl.maximum(start, whole), gl.where(whole == 0, 0, own)):
                if (j < from_) | (j >= to):
                    n0 = tile_at(s, base, whole, masked, j) * C.BN
                    p, o, reference, sums, stage, phase, last_stage, last_phase, turn = step(
                        w, s, q, q, p, o, reference, sums, stage, phase, last_stage, last_phase, turn,
                        j + 1 < own, m0, n0, slope, bias, table, edges, True, False, True, not FIXED, TURNS,
                    )  # fmt: skip
                else:
                    stage, phase, turn = skip(w, s, stage, phase, turn, 1, TURNS)
                    mbarrier.wait(s.k_full.index(stage), phase, pred=j + 1 < own)
        if C.OWN_OUT and not C.HELD:
            mbarrier.arrive(s.q_empty.index(slot + w), count=1)
        mbarrier.wait(s.v_full.index(last_stage), last_phase)
        weights = unpacked(p, dtype, p_layout)
        o = warpgroup_mma(weights, s.v_smem.index(last_stage).reshape([C.BN, C.DV]), o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive((s.k_empty if C.JOINED else s.v_empty).index(last_stage), count=1)
    elif C.OWN_OUT:
        mbarrier.arrive(s.q_empty.index(slot + w), count=1)
    if C.MASKED or C.TRIAL:
        stage, phase, turn = skip(w, s, stage, phase, turn, after + given_up, TURNS)
    total = gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), r_layout)
    if C.TRIAL and FIXED:
        total = gl.where(given_up > 0, float("inf"), total)
    broken = finish(w, s, slot, b, h, m0, o, reference, total, broken, FIXED)
    return stage, phase, turn, broken


@gluon.jit
def send(s, buffer, values, at):
    """Copy values to `out` by way of shared memory."""
    buffer.reshape(values.shape).store(values)
    fence_async_shared()
    copy_out(s.o_desc, at, buffer)


@gluon.jit
def leave_flag(s, b, h, m0, rows, inside, found):
    """Say whether results of 64 rows are not finite."""
    C: gl.constexpr = s.C
    if C.PERIOD:
        # One of each head, whose rows all lie here.
        at = s.flags + ((b * s.heads + h) * (s.q_length // C.PERIOD) + rows // C.PERIOD)
        gl.store(at, gl.full([LINES], 0, gl.int32, rows.type.layout) + found, mask=inside)
    else:
        granules = (s.q_length + LINES - 1) // LINES
        gl.store(s.flags + (b * s.heads + h) * granules + m0 // LINES, found, mask=m0 < s.q_length)


@gluon.jit
def finish(w: gl.constexpr, s, slot, b, h, m0, o, reference, total, broken, FIXED: gl.constexpr):
    """Write `out` and `lse` of 64 rows."""
    C: gl.constexpr = s.C
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    r_layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
    dtype: gl.constexpr = s.q_desc.dtype
    rows = m0 + gl.arange(0, LINES, r_layout)
    inside = rows < s.q_length
    lost = (total < LARGEST_SUM) == 0
    if C.SINK:
        own_sink = gl.load(s.sink + h).to(gl.float32)
        logit = own_sink * unit_of(C)
        lonely = (reference == float("-inf")) & (total == 0.0)
        top = gl.maximum(reference, logit)
        top = gl.where(top == float("-inf"), 0.0, top)
        alpha = power(s, reference - top)
        total = total * alpha + power(s, logit - top)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
        reference = top
    alive = total != 0.0
    divisor = gl.where(alive, total, 1.0)
    if C.BIAS:
        lse = reference + log2(divisor) * LN2
    else:
        lse = (reference + log2(divisor)) * LN2
    lse = gl.where(alive, lse, float("-inf"))
    if C.SINK:
        # Rows that see nothing have the sink itself, not rounded on the way through base 2.
        lse = gl.where(lonely, own_sink, lse)
    o = o * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, o_layout))[:, None]
    if FIXED or C.CAREFUL:
        spoiled = gl.convert_layout(gl.sum(o * 0.0, 1), r_layout) != 0.0
    if FIXED:
        # Weights up to 2^64 times a large value may be infinite where the result is not.
        lost = lost | spoiled
        lse = gl.where(lost, float("nan"), lse)
        broken = broken | gl.where(lost & inside, 1, 0)
    if C.HALVES:
        halves = gl.permute(o.to(dtype).reshape([LINES, 2, C.DV // 2]), (0, 2, 1))
        left, right = gl.split(halves)
        copy_out_wait(0)
        send(s, s.o_smem.index(w), left, [b, h, m0, 0])
        copy_out_wait(0)
        send(s, s.o_smem.index(w), right, [b, h, m0, C.DV // 2])
    elif C.OWN_OUT:
        copy_out_wait(0)
        send(s, s.o_smem.index(w), o.to(dtype), [b, h, m0, 0])
    else:
        send(s, s.q_smem.index(slot + w), o.to(dtype), [b, h, m0, 0])
    gl.store(lse_of(s, b, h, rows), lse, mask=inside)
    if C.CAREFUL:
        # With a fixed reference, rows that are spoiled come again. Not before the copy above, whose fence
        # would wait for this store.
        leave_flag(s, b, h, m0, rows, inside, 0 if FIXED else gl.max(gl.where(spoiled & inside, 1, 0), 0))
    if not C.OWN_OUT:
        copy_out_wait(0)
        mbarrier.arrive(s.q_empty.index(slot + w), count=1)
    return broken


@gluon.jit(
    do_not_specialize=[
        "heads", "group", "q_length", "k_length", "lines", "lo", "hi", "step",
        "capacity", "table_b", "table_h", "slope_b", "slope_h", "q_step", "k_step", "base",
        "batch_origin", "bias_b", "bias_h", "bias_q", "bias_k",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, flags, work, starts, heads, group, q_length, k_length,
    lines, lo, hi, step, tiles, counts, capacity, table_b, table_h, bounds, index, bias,
    bias_b: gl.int64, bias_h: gl.int64, bias_q: gl.int64, bias_k: gl.int64, sink,
    slopes, slope_b, slope_h, cap, q_step, k_step, base, row_table, key_table, batch_origin, scale,
    C: gl.constexpr,
):  # fmt: skip
    """Shapes: q `[B, Hq, Lq, D]`, k `[B, Hk, Lk, D]`, v `[B, Hk, Lk, DV]`, out like q with DV, lse `[B, Hq,
    Lq]` in the memory order B, Lq, Hq; the places of program n are `work[starts[n] :
    starts[n + 1]]`.
    """
    dtype: gl.constexpr = q_desc.dtype
    program = gl.program_id(0)
    Q_TILES: gl.constexpr = C.GROUPS * C.SLOTS
    q_smem = gl.allocate_shared_memory(dtype, [Q_TILES, 1, 1, LINES, C.D], q_desc.layout)
    if C.OWN_OUT:
        COLUMNS: gl.constexpr = C.DV // 2 if C.HALVES else C.DV
        o_smem = gl.allocate_shared_memory(dtype, [C.GROUPS, 1, 1, LINES, COLUMNS], o_desc.layout)
    else:
        o_smem = q_smem
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
    words = gl.allocate_shared_memory(
        gl.int32, [WORDS * Q_TILES + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    verdict = gl.allocate_shared_memory(gl.int32, [C.GROUPS, LINES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    GROUPS: gl.constexpr = C.GROUPS
    STAGES: gl.constexpr = C.STAGES
    for n in gl.static_range(Q_TILES):
        # What is told, and what is copied.
        mbarrier.init(q_full.index(n), count=2)
        mbarrier.init(q_empty.index(n), count=1)
    for n in gl.static_range(GROUPS):
        mbarrier.init(turn.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(v_full.index(n), count=1)
        mbarrier.init(k_empty.index(n), count=C.GROUPS)
        mbarrier.init(v_empty.index(n), count=C.GROUPS)
    mbarrier.init(ended.index(0), count=C.GROUPS)
    mbarrier.init(decided.index(0), count=1)
    fence_async_shared()
    begin_beside()
    first = gl.load(starts + program)
    s = Shared(
        q_desc, k_desc, v_desc, o_desc, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty,
        v_full, v_empty, turn, ended, decided, words, verdict, lse, flags, work + first, gl.load(starts +
        program + 1) - first, tiles, counts, bounds, index, bias, bias_b, bias_h, bias_q, bias_k, sink,
        slopes, slope_b, slope_h, cap, q_step, k_step, base, row_table, key_table, batch_origin, heads, group,
        q_length, k_length, lines, lo, hi, step, capacity, table_b, table_h, scale, C,
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
