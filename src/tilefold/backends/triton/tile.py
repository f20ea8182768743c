"""Pieces that the kernels share: tiles of matrices, which tiles to visit, the mask and the score of a tile.

`rows` and `keys` are index tensors of two dimensions, one of them of size 1, so that the same code serves
tiles of scores and of transposed scores.
"""

# The functions of Triton are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from . import variant

BAND = tl.constexpr(variant.BAND)
ROWS = tl.constexpr(variant.ROWS)
COLS = tl.constexpr(variant.COLS)
BITS = tl.constexpr(variant.BITS)
_APART = tl.constexpr(variant.APART)
_AFTER = tl.constexpr(variant.AFTER)
_BESIDE = tl.constexpr(variant.BESIDE)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GRANULE = tl.constexpr(64)


# Tiles of matrices.


@triton.jit
def tile_pointers(base, start, stride, N: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers `[N, WIDTH]` to rows from `start` and columns from FIRST of a matrix with dense rows."""
    # The part that moves is one 64-bit number, the part per element stays within 32 bits.
    corner = base + start.to(tl.int64) * stride + FIRST
    return corner + (tl.arange(0, N)[:, None] * stride + tl.arange(0, WIDTH)[None, :])


@triton.jit
def inside_tile(start, limit, N: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Which elements of such a tile lie in a matrix of `limit` rows and SIZE columns, `[N, WIDTH]`."""
    seen = tl.arange(0, N)[:, None] < limit - start
    if FIRST + WIDTH > SIZE:
        seen = seen & (tl.arange(0, WIDTH)[None, :] < SIZE - FIRST)
    return seen


@triton.jit
def load_tile(
    base,
    start,
    stride,
    limit,
    N: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    CLIP: tl.constexpr,
):
    """A tile, with zeros outside the matrix; without CLIP all of its rows are inside."""
    at = tile_pointers(base, start, stride, N, FIRST, WIDTH)
    if CLIP:
        return tl.load(at, mask=inside_tile(start, limit, N, FIRST, WIDTH, SIZE), other=0.0)
    elif FIRST + WIDTH > SIZE:
        return tl.load(at, mask=tl.arange(0, WIDTH)[None, :] < SIZE - FIRST, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_tile(
    base,
    start,
    stride,
    limit,
    values,
    N: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write what of a tile lies inside the matrix, rounded to its dtype."""
    at = tile_pointers(base, start, stride, N, FIRST, WIDTH)
    tl.store(at, values.to(base.dtype.element_ty), mask=inside_tile(start, limit, N, FIRST, WIDTH, SIZE))


@triton.jit
def store_blocks(
    base, start, stride, limit, first, second, N: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write a tile that is one block of W0 columns, or two, the second one of W1."""
    store_tile(base, start, stride, limit, first, N, 0, W0, SIZE)
    if W1 > 0:
        store_tile(base, start, stride, limit, second, N, W0, W1, SIZE)


@triton.jit
def product(a, b, TF32: tl.constexpr, WIDE: tl.constexpr):
    """`a @ b` in float32."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32" if TF32 else "ieee")
    else:
        return tl.dot(a, b, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def add_product(acc, a, b, TF32: tl.constexpr, WIDE: tl.constexpr):
    """`acc + a @ b`."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32" if TF32 else "ieee")
    elif a.dtype == tl.float32 and not TF32:
        # Each tile is summed by itself, since one sum over all rows or keys would round as often as there are
        # any. A difference, because the compiler would fold a sum into the product.
        return acc - tl.dot(-a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def in_base2(m, factor):
    """`m * factor`, rounded: the compiler must not fuse the product with a difference behind it, for what
    weighs one tile has to be, to the last bit, what the next one starts from.
    """
    return tl.fma(m, factor, 0.0)


# Products that select: what a row does not see must not meet its zero weight, since 0 * NaN is NaN.


@triton.jit
def only_finite(x):
    """`x` with NaN and infinities replaced by zero."""
    return tl.where((x == x) & (tl.abs(x) < float("inf")), x, 0.0)


@triton.jit
def only_infinite(x, SIGNED: tl.constexpr, NEGATIVE: tl.constexpr):
    """1 where an entry acts as an infinity of that sign. NaN acts as both; SIGNED: so does infinity."""
    either = x != x
    if SIGNED:
        either = either | (tl.abs(x) == float("inf"))
    return (either | (x == (-float("inf") if NEGATIVE else float("inf")))).to(tl.int32)


@triton.jit
def add_selected(
    acc, weights, seen, x, dtype: tl.constexpr, SIGNED: tl.constexpr, TF32: tl.constexpr, WIDE: tl.constexpr
):
    """`acc + weights @ x`, where entries of x count only for rows with `seen`.

    An infinity that is seen stays one under positive weights; everything else that is not finite gives NaN.
    """
    if WIDE:
        x = x.to(tl.float32)
    weights = tl.where(seen, weights, 0.0)
    acc = add_product(acc, weights.to(dtype), only_finite(x), TF32, WIDE)
    # No product of matrices here: entry by entry, for each of the few tiles that come this way.
    up, down = only_infinite(x, SIGNED, False), only_infinite(x, SIGNED, True)
    meets = (seen & (weights != 0.0)).to(tl.int32)
    plus, minus = tl.zeros_like(acc).to(tl.int32), tl.zeros_like(acc).to(tl.int32)
    for j in tl.range(0, x.shape[0], num_stages=1):
        here = (tl.arange(0, x.shape[0]) == j).to(tl.int32)
        meet = tl.max(meets * here[None, :], axis=1)[:, None]
        plus = plus | (meet & tl.max(up * here[:, None], axis=0)[None, :])
        minus = minus | (meet & tl.max(down * here[:, None], axis=0)[None, :])
    acc += tl.where(plus > 0, float("inf"), 0.0)
    return acc + tl.where(minus > 0, -float("inf"), 0.0)


@triton.jit
def add_chosen(
    acc,
    weights,
    seen,
    x,
    dtype: tl.constexpr,
    SIGNED: tl.constexpr,
    TF32: tl.constexpr,
    WIDE: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """`acc + weights @ x`, by `add_selected` if SELECTED."""
    if SELECTED:
        return add_selected(acc, weights, seen, x, dtype, SIGNED, TF32, WIDE)
    else:
        return add_product(acc, weights.to(dtype), x, TF32, WIDE)


@triton.jit
def any_nan(x):
    """Whether a tile holds a NaN, as a scalar 0 or 1."""
    # In one reduction: Triton 3.6 has no layout for the second of two behind a product on Blackwell.
    return tl.max(tl.ravel((x != x).to(tl.int32)), axis=0)


# Which tiles a line of tiles visits: first the full ones, then those that need the mask.


@triton.jit
def band_tiles(first, last, away, lo, hi, length, BLOCK: tl.constexpr, STEPPED: tl.constexpr):
    """Tiles of BLOCK on the other side that lines `first` to `last` of a band see.

    Returns:
        `(start, full start, full end, end)` in tiles.
    """
    start = tl.minimum(tl.maximum(first + away + lo, 0), length)
    end = tl.maximum(tl.minimum(last + away + hi + 1, length), start)
    begin = start // BLOCK
    stop = tl.where(end > start, tl.cdiv(end, BLOCK), begin)
    if STEPPED:
        return begin, begin, begin, stop
    else:
        full_begin = tl.maximum(tl.cdiv(tl.maximum(last + away + lo, 0), BLOCK), begin)
        full_stop = tl.minimum(tl.maximum(tl.minimum(first + away + hi + 1, length), 0) // BLOCK, stop)
        none = full_begin >= full_stop
        return begin, tl.where(none, begin, full_begin), tl.where(none, begin, full_stop), stop


@triton.jit
def visited(i, begin, full_begin, full_stop, tiles, MASK: tl.constexpr, PHASE: tl.constexpr):
    """The i-th tile of a phase: 0 visits the full tiles, 1 the partial ones, 2 all of them, and 3 all of
    them, the full ones first.
    """
    if MASK != BAND:
        if PHASE == 1:
            return tl.load(tiles + full_stop + i)
        else:
            return tl.load(tiles + i)
    elif PHASE == 0:
        return full_begin + i
    elif PHASE == 1:
        at = begin + i
        return at + tl.where(at >= full_begin, full_stop - full_begin, 0)
    elif PHASE == 2:
        return begin + i
    else:
        full = full_stop - full_begin
        at = begin + i - full
        return tl.where(i < full, full_begin + i, at + tl.where(at >= full_begin, full, 0))


@triton.jit
def begin_chained(C: tl.constexpr):
    """What comes first in every kernel of a chain; see `Variant.CHAIN`."""
    if C.CHAIN == _AFTER:
        await_earlier()
    if C.CHAIN != _APART:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def end_chained(C: tl.constexpr):
    """What comes last in every kernel of a chain."""
    if C.CHAIN == _BESIDE:
        await_earlier()


@triton.jit
def await_earlier():
    """Wait for the end of the kernel before this one on its stream."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def place(pid, lines, pairs, span, reverse, heads, C: tl.constexpr):
    """Which line of tiles and which (batch element, head) a program works on.

    Pairs go in sections of `span`, whose keys and values fit the L2 cache together; inside a section, lines
    with more work come first.
    """
    section = pid // (span * lines)
    inner = pid % (span * lines)
    width = tl.minimum(span, pairs - section * span)
    slot = inner // width
    line = tl.where(reverse != 0, lines - 1 - slot, slot)
    pair = section * span + inner % width
    if C.BATCHES_FIRST:
        batches = pairs // heads
        pair = pair % batches * heads + pair // batches
    return line, pair


@triton.jit
def item(order, table, lines, place, C: tl.constexpr):
    """What the program at a place of a table's order works on: the line, the first of the line's tiles, and
    where its result goes if it is one of several parts of the line, else -1. The line is -1 if there is
    nothing to do.
    """
    if C.MASK == BAND:
        return place, 0, -1
    else:
        at = table.to(tl.int64) * lines + place
        if C.SPLIT > 0:
            return tl.load(order + at * 3), tl.load(order + at * 3 + 1), tl.load(order + at * 3 + 2)
        else:
            return tl.load(order + at), 0, -1


@triton.jit
def part_of(first, count, before, C: tl.constexpr):
    """The range of a phase's tiles that belongs to a part of a line which starts at the `first` tile.
    `before`: tiles of earlier phases.
    """
    if C.SPLIT > 0:
        return tl.maximum(first - before, 0), tl.minimum(count, first + C.SPLIT - before)
    else:
        return 0, count


# The mask of a tile.


@triton.jit
def edges_of(bounds, table, at, length, WANTED: tl.constexpr, INTERVALS: tl.constexpr):
    """The intervals `(start, end, start, end)` of the lines `at` in a table of ROWS or COLS, the second one
    empty if there is one only; four times `at` if they are not wanted.
    """
    if WANTED:
        # As one matrix, whose rows are read whole by neighbouring threads: as vectors, each thread would read
        # the bounds of all elements that it holds by itself.
        line = table.to(tl.int64) * length + tl.minimum(tl.reshape(at, (at.numel,)), length - 1)
        places = bounds + line[:, None] * (2 * INTERVALS) + tl.arange(0, 2 * INTERVALS)[None, :]
        found = tl.load(places)
        if INTERVALS > 1:
            starts, ends = tl.split(tl.reshape(found, (at.numel, INTERVALS, 2)))
            start, second_start = tl.split(starts)
            end, second_end = tl.split(ends)
            return (
                tl.reshape(start, at.shape), tl.reshape(end, at.shape), tl.reshape(second_start, at.shape),
                tl.reshape(second_end, at.shape),
            )  # fmt: skip
        else:
            start, end = tl.split(found)
            start, end = tl.reshape(start, at.shape), tl.reshape(end, at.shape)
            return start, end, end, end
    else:
        return at, at, at, at


@triton.jit
def in_edges(edges, x, INTERVALS: tl.constexpr):
    """Whether `x` lies in one of the half-open intervals."""
    hit = (x >= edges[0]) & (x < edges[1])
    if INTERVALS > 1:
        hit = hit | ((x >= edges[2]) & (x < edges[3]))
    return hit


@triton.jit
def granule_word(words, line, found, HALF: tl.constexpr):
    """32 of the 64 bits of a row of a granule: HALF 0 the lower ones."""
    word = tl.load(words + line * 2 + HALF, mask=found >= 0, other=0)
    return tl.where(found == -2, -1, word)


@triton.jit
def visible(
    rows, keys, k0, q_length, k_length, lo, hi, step, table, bounds, index, edges, HELD: tl.constexpr,
    BN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Which elements of a tile are visible.

    `k0` is the tile's first key, `table` the table's number. `bounds` are those of ROWS and COLS, or the
    words of BITS, whose `index` has -1 for an empty granule and -2 for a full one. `edges` are those of the
    tile's lines if C.MASK is HELD; else they are loaded here. HELD says whose lines a thread has few of,
    those of keys (COLS) or else of rows.
    """
    INTERVALS: tl.constexpr = C.INTERVALS
    if C.MASK == BAND:
        # Each line's ends are worked out once; an element takes two comparisons.
        shift = k_length - q_length
        if HELD == COLS:
            seen = (rows <= keys - (shift + lo)) & (rows >= keys - (shift + hi))
        else:
            seen = (keys >= rows + (shift + lo)) & (keys <= rows + (shift + hi))
        if C.STEPPED:
            # The remainder has the sign of the offset, so that zero is the only thing to ask for.
            seen = seen & ((keys - rows - shift) % step == 0)
        if not C.EVEN:
            seen = seen & (keys < k_length) & (rows < q_length)
        return seen
    elif C.MASK == ROWS:
        if HELD == ROWS:
            return in_edges(edges, keys, INTERVALS)
        else:
            return in_edges(edges_of(bounds, table, rows, q_length, True, INTERVALS), keys, INTERVALS)
    elif C.MASK == COLS:
        if HELD == COLS:
            hidden = in_edges(edges, rows, INTERVALS)
        else:
            hidden = in_edges(edges_of(bounds, table, keys, k_length, True, INTERVALS), rows, INTERVALS)
        seen = hidden == 0
        if not C.EVEN:
            seen = seen & (keys < k_length) & (rows < q_length)
        return seen
    else:
        rows = tl.minimum(rows, q_length - 1)
        k_granules = tl.cdiv(k_length, GRANULE)
        corner = (table * tl.cdiv(q_length, GRANULE) + rows // GRANULE).to(tl.int64) * k_granules
        first = k0 // GRANULE
        part = (keys - first * GRANULE) // 32
        word = tl.zeros_like(rows + keys)
        for granule in tl.static_range(0, (BN + 63) // 64):
            found = tl.load(index + corner + tl.minimum(first + granule, k_granules - 1))
            line = found.to(tl.int64) * GRANULE + rows % GRANULE
            word = tl.where(part == 2 * granule, granule_word(bounds, line, found, 0), word)
            word = tl.where(part == 2 * granule + 1, granule_word(bounds, line, found, 1), word)
        seen = ((word >> (keys % 32)) & 1) != 0
        if not C.EVEN:
            seen = seen & (keys < k_length)
        return seen


# The score of a tile.


@triton.jit
def tanh(x):
    """tanh by one exponential, and by a polynomial near zero where that one cancels (Moshier, Cephes)."""
    square = x * x
    near = -5.70498872745e-3 * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0.0, -far, far)
    return tl.where(tl.abs(x) < 0.625, near, far)


@triton.jit
def tanh_derivative(x):
    """`1 - tanh(x)^2` without its cancellation."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def distance(
    rows, keys, q_length, k_length, row_table, key_table, base, q_step, k_step, TABLES: tl.constexpr
):
    """ALiBi's distance between a row's diagonal and a key, int32."""
    if TABLES:
        row = tl.load(row_table + q_length + tl.minimum(rows, q_length - 1))
        return tl.abs(row - tl.load(key_table + tl.minimum(keys, k_length - 1)))
    else:
        return tl.abs(rows * q_step + base - keys * k_step)


@triton.jit
def slope_of(slopes, slope_b, slope_h, b, h, rows, q_length, row_table, batch_origin, PER_ROW: tl.constexpr):
    """The ALiBi slope of a head, or those of its rows, in float32."""
    if PER_ROW:
        document = tl.load(row_table + 2 * q_length.to(tl.int64) + tl.minimum(rows, q_length - 1))
        at = slopes + (document + batch_origin).to(tl.int64) * slope_b + h * slope_h
    else:
        at = slopes + b.to(tl.int64) * slope_b + h * slope_h
    return tl.load(at).to(tl.float32)


@triton.jit
def load_bias(
    bias, bias_q, bias_k, rows, keys, q_length, k_length, C: tl.constexpr, CLIP: tl.constexpr
):  # fmt: skip
    """The bias of a tile in its dtype; without CLIP all keys exist. Rows that do not exist read the last
    one.
    """
    if rows.shape[0] == 1:
        # Read along the keys, which are neighbours in memory, also for a transposed tile.
        return tl.trans(
            load_bias(bias, bias_q, bias_k, tl.trans(rows), tl.trans(keys), q_length, k_length, C, CLIP)
        )
    else:
        line = bias + tl.minimum(rows, q_length - 1).to(tl.int64) * (bias_q * C.BIAS_UNIT)
        at = line + (keys if C.BIAS_DENSE else keys.to(tl.int64) * bias_k)
        if CLIP:
            inside = tl.broadcast_to(keys < k_length, at.shape)
            if C.BIAS_UNIT == 8:
                inside = tl.max_constancy(inside, [1, 8])
            return tl.load(at, mask=inside, other=0.0)
        else:
            return tl.load(at)


@triton.jit
def send_for_bias(bias, bias_q, m0, n0, q_length, k_length, C: tl.constexpr):
    """Have a tile of the bias on its way into the L2 cache. Its keys are neighbours in memory."""
    # One address for each line of the cache, 128 bytes.
    WIDTH: tl.constexpr = 1024 // bias.dtype.element_ty.primitive_bitwidth
    COLUMNS: tl.constexpr = max(C.BN // WIDTH, 1)
    rows = tl.minimum(m0 + tl.arange(0, C.BM)[:, None], q_length - 1).to(tl.int64)
    keys = tl.minimum(n0 + tl.arange(0, COLUMNS)[None, :] * WIDTH, k_length - 1)
    at = (bias + rows * (bias_q * C.BIAS_UNIT) + keys).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_scores(base, line, n0, values, rows, keys, q_length, k_length, C: tl.constexpr):
    """Write what of a tile of scores lies inside a dense matrix whose rows have `k_length` elements, the
    tile's first one being the `line`-th of all.
    """
    # Told that lines start at multiples of 16 bytes, the compiler writes as many at once.
    length = k_length // C.BIAS_UNIT * C.BIAS_UNIT if C.BIAS_UNIT > 1 else k_length
    steps = tl.arange(0, values.shape[0])[:, None].to(tl.int64) * length
    at = base + line * length + n0 + steps + tl.arange(0, values.shape[1])[None, :]
    if C.EVEN:
        tl.store(at, values.to(base.dtype.element_ty))
    else:
        inside = (rows < q_length) & (keys < k_length)
        if C.BIAS_UNIT == 8:
            inside = tl.max_constancy(inside, [1, 8])
        tl.store(at, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def words_to_keep(threshold, word):
    """Whether a random word says keep; the threshold is an unsigned number in a signed argument."""
    return word.to(tl.uint32, bitcast=True) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def kept(
    rows,
    keys,
    k0,
    b,
    h,
    q_length,
    k_length,
    row_table,
    key_table,
    q_origin,
    q_step,
    k_origin,
    k_step,
    seed,
    threshold,
    BN: tl.constexpr,
    TABLES: tl.constexpr,
    QUADS: tl.constexpr,
):
    """Which probabilities of a tile survive dropout: Philox4x32-10 with key = seed and counter
    `(k // 4, q, h, b)`, lane `k % 4`.
    """
    if TABLES:
        row = tl.minimum(rows, q_length - 1)
        query = tl.load(row_table + row)
        batch = tl.load(row_table + 2 * q_length.to(tl.int64) + row) + b
        key = tl.load(key_table + tl.minimum(keys, k_length - 1))
    else:
        query = rows * q_step + q_origin
        batch = tl.zeros_like(rows) + b
        key = keys * k_step + k_origin
    if QUADS:
        # One counter serves four keys; their words are woven into the row.
        group = (k0 + k_origin) // 4 + tl.arange(0, BN // 4)[None, :]
        query, batch = tl.reshape(query, (query.numel, 1)), tl.reshape(batch, (batch.numel, 1))
        zero = tl.zeros_like(query + group)
        w0, w1, w2, w3 = tl.philox(seed, zero + group, zero + query, zero + h, zero + batch)
        woven = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        keep = words_to_keep(threshold, tl.reshape(woven, (query.numel, BN)))
        if rows.shape[0] == 1:
            keep = tl.trans(keep)
        return keep
    else:
        zero = tl.zeros_like(rows + keys)
        w0, w1, w2, w3 = tl.philox(seed, zero + (key >> 2), zero + query, zero + h, zero + batch)
        lane = zero + (key & 3)
        word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
        return words_to_keep(threshold, word)


# What the backward kernels share.


@triton.jit
def probability(s, logs, factor, C: tl.constexpr):
    """Of a score, in natural units but for the factor, under the `logs` of `delta.delta_kernel`."""
    if C.BASE2:
        return tl.exp2(tl.fma(s, factor, -logs))
    else:
        return tl.exp2((s - logs) * factor)


@triton.jit
def row_values(
    values, b, h, heads, start, length, N: tl.constexpr, other: tl.constexpr, CLIP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """N fp32 values of rows from `start`, of a dense `[B, heads, length]`, `other` outside; without CLIP all
    of the rows exist. EVEN: lengths are multiples of 16.
    """
    # Told so, the compiler reads four at once.
    whole = length // 16 * 16 if EVEN else length
    row = start + tl.arange(0, N)
    at = values + (b.to(tl.int64) * heads + h) * whole + row
    if CLIP:
        return tl.load(at, mask=row < length, other=other)
    else:
        return tl.load(at)


@triton.jit
def scored(
    raw, rows, keys, scale, softcap, bias, slope, q_length, k_length, row_table, key_table, base, q_step,
    k_step, C: tl.constexpr,
):  # fmt: skip
    """The score before the mask, in natural units, and the derivative of the soft cap. `bias` is the
    tile's, if there is one.
    """
    s = raw * scale
    derivative = s
    if C.SOFTCAP:
        derivative = tanh_derivative(s / softcap)
        s = softcap * tanh(s / softcap)
    if C.ALIBI:
        away = distance(rows, keys, q_length, k_length, row_table, key_table, base, q_step, k_step, C.TABLES)
        s -= slope * away.to(tl.float32)
    if C.BIAS:
        s += bias.to(tl.float32)
    return s, derivative
