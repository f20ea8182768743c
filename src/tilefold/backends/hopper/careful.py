"""What a mask hides may be NaN or infinite, and zero times that is NaN. Lines of tiles with rows whose result
is not finite are computed once more, tile by tile, and where values of a tile are not finite those that a row
sees are selected.
"""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from .attend import multiplied, opened, raised, row_sums
from .dialect import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from .finish import finish
from .machine import keep_pointer, kept_pointer, packed, unpacked
from .mask import BAND, BITS, visible
from .program import LINES, advance, got, key_of, put, slot_of, tile_at, told, told_code, told_tile
from .score import scored, weights_of


@gluon.jit
def keep(s, values):
    """Put into shared memory what only this pass asks for: consumers would hold it in registers."""
    keep_pointer(s.cold.index(0), values)
    for n in gl.static_range(3):
        put(s.cold.index(1 + n), s.v_desc.strides[n], gl.int64, 4)
    put(s.cold.index(4), s.v_desc.shape[3], gl.int64, 4)


@gluon.jit
def kept(s, at: gl.constexpr):
    """Strides and columns of the values."""
    return got(s.cold.index(at), 4)


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
    GROUPS: gl.constexpr = C.GROUPS
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
    edges, slope, bias, o, reference, sums = opened(s, b, h, m0, table)
    q = s.q_smem.index(slot).reshape([LINES, C.D])
    for j in range(own + after):
        if C.MASK == BAND:
            n0 = key_of(s, tile_at(s, base, whole, masked, j))
            mbarrier.wait(s.k_full.index(stage), phase)
        else:
            mbarrier.wait(s.k_full.index(stage), phase)
            n0 = key_of(s, told_tile(s, stage))
        if C.MASK == BITS:
            code = told_code(0, s, stage)
            for w in gl.static_range(1, GROUPS):
                code = gl.where(offset == w * LINES, told_code(w, s, stage), code)
            edges = (code, code, code, code)
        scores = warpgroup_mma_wait(0, [multiplied(s, q, stage)])
        if not C.JOINED:
            mbarrier.arrive(s.k_empty.index(stage), count=C.GROUPS)
        seen = visible(s, m0, n0, table, edges, s_layout)
        scores = gl.where(seen, scored(s, scores, m0, n0, slope, bias, s_layout), float("-inf"))
        reference, shift, alpha, sums = raised(s, scores, reference, sums)
        weights = weights_of(s, scores, shift)
        sums = sums + row_sums(weights, C.BN)
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
    finish(0, s, b, h, m0, o, reference, total, none, 1, False)
    return stage, phase
