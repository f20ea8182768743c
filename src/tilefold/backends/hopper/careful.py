"""What a mask hides may be NaN or infinite, and zero times that is NaN. Lines of tiles with rows whose result
is not finite are computed once more, tile by tile, and where values of a tile are not finite those that a row
sees are selected.
"""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from .attend import row_sums
from .dialect import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from .finish import finish
from .machine import keep_pointer, kept_pointer, packed, unpacked
from .mask import edges_of, marks_of, visible
from .program import LINES, advance, slot_of, tile_at, told
from .score import bias_of, in_base2, power, scored, slope_of, weights_of


@gluon.jit
def keep(s, values):
    """Put into shared memory what only this pass asks for: consumers would hold it in registers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    none = gl.full([1], 0, gl.int64, layout)
    keep_pointer(s.cold.index(0), values)
    for n in gl.static_range(3):
        s.cold.index(1 + n).store(none + s.v_desc.strides[n])
    s.cold.index(4).store(none + s.v_desc.shape[3])


@gluon.jit
def kept(s, at: gl.constexpr):
    """Strides and columns of the values."""
    return gl.max(s.cold.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def is_finite(s, values):
    """Whether all of a tile of values are."""
    C: gl.constexpr = s.C
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.DV, C.DV // 8], [4, 1], [1, 0])
    return gl.sum(gl.sum(values.load(layout).to(gl.float32) * 0.0, 1), 0) == 0.0


@gluon.jit
def selected(s, weights, b, hk, n0, o):
    """`o` and the values of a tile, weighed, of those keys that a row sees: one key after the other. Those
    that it does not see weigh -1.
    """
    C: gl.constexpr = s.C
    columns = gl.arange(0, C.DV, gl.SliceLayout(0, o.type.layout))
    if C.PADDED:
        columns = gl.minimum(columns, kept(s, 4).to(gl.int32) - 1)
    base = kept_pointer(s.cold.index(0), s.q_desc.dtype)
    base = base + b.to(gl.int64) * kept(s, 1) + hk.to(gl.int64) * kept(s, 2)
    step = kept(s, 3)
    keys = gl.arange(0, C.BN, gl.SliceLayout(0, weights.type.layout))
    for n in range(gl.minimum(C.BN, s.k_length - n0)):
        value = gl.load(base + (n0 + n).to(gl.int64) * step + columns).to(gl.float32)
        weight = gl.sum(gl.where((keys == n)[None, :], weights, 0.0), 1)
        weight = gl.convert_layout(weight, gl.SliceLayout(1, o.type.layout))[:, None]
        o = o + gl.where(weight == -1.0, 0.0, weight * value[None, :])
    return o


@gluon.jit
def attend_carefully(s, done, offset, stage, phase):
    """As `attend`, one thing after the other, with the usual online softmax: 64 rows from `offset` on of a
    line of tiles, with all its tiles, in place of all consumers.
    """
    C: gl.constexpr = s.C
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    r_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = s.q_desc.dtype
    slot, parity = slot_of(done, C)
    mbarrier.wait(s.q_full.index(slot), parity)
    place, tiles, shares = told(0, s, slot)
    b, h, hk, m0, table = place
    base, whole, masked = tiles
    # Those of the first warp group, which skips nothing before its own tiles.
    _, _, _, own, after = shares
    m0 += offset
    rows = m0 + gl.arange(0, LINES, r_layout)
    edges = edges_of(s, rows, table)
    slope = slope_of(s, b, h, rows)
    bias = bias_of(s, b, h)
    o = gl.full([LINES, C.DV], 0.0, gl.float32, o_layout)
    reference = gl.full([LINES], float("-inf"), gl.float32, r_layout)
    sums = row_sums(gl.full([LINES, C.BN], 0.0, gl.float32, s_layout), C.BN)
    q = s.q_smem.index(slot).reshape([LINES, C.D])
    for j in range(own + after):
        n0 = tile_at(s, base, whole, masked, j) * C.BN
        edges = marks_of(s, m0, n0, table, edges)
        mbarrier.wait(s.k_full.index(stage), phase)
        k = s.k_smem.index(stage).reshape([C.BN, C.D])
        zeros = gl.full([LINES, C.BN], 0.0, gl.float32, s_layout)
        sent = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, [sent])
        if not C.JOINED:
            mbarrier.arrive(s.k_empty.index(stage), count=C.GROUPS)
        seen = visible(s, m0, n0, table, edges, s_layout)
        scores = gl.where(seen, scored(s, scores, m0, n0, slope, bias, s_layout), float("-inf"))
        found = gl.maximum(reference, in_base2(s, gl.max(scores, 1)))
        shift = gl.where(found == float("-inf"), 0.0, found)
        alpha = power(s, reference - shift)
        reference = found
        weights = weights_of(s, scores, shift)
        spread = gl.convert_layout(alpha, gl.SliceLayout(1, gl.SliceLayout(2, sums.type.layout)))
        sums = sums * spread[:, None][:, :, None] + row_sums(weights, C.BN)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
        mbarrier.wait(s.v_full.index(stage), phase)
        values = s.v_smem.index(stage).reshape([C.BN, C.DV])
        if is_finite(s, values):
            p = unpacked(packed(weights, dtype), dtype, p_layout)
            o = warpgroup_mma_wait(0, [warpgroup_mma(p, values, o, is_async=True)])
        else:
            o = selected(s, gl.where(seen, weights, -1.0), b, hk, n0, o)
        mbarrier.arrive((s.k_empty if C.JOINED else s.v_empty).index(stage), count=C.GROUPS)
        stage, phase = advance(stage, phase, C.STAGES)
    mbarrier.arrive(s.q_empty.index(slot), count=1)
    total = gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), r_layout)
    none = gl.full([LINES], 0, gl.int32, r_layout)
    finish(0, s, b, h, m0, o, reference, total, none, False, False)
    return stage, phase
