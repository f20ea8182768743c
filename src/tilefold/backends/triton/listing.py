"""Lists of tiles straight from the table of `Rows` or `Cols`: two launches, or three where the lists run
across the table.

The same lists come from `tile_states` and a few sorts, in some thirty small operations of PyTorch, which cost
a mask that is new in every step two milliseconds of the host. Here one program makes the list of one line of
tiles: it compares the line with every tile of the other side, twice, and writes what it finds one behind the
other, first the full tiles, then the partial ones.

A table has a line per query row (`Rows`) or per key (`Cols`). Lists run along it if their own lines are tiles
of the table's lines, and across it if those are what a list holds.
"""

# The functions of Triton are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.cost import tiles as states
from tilefold.masks import rows as tables_of_rows

from .kernel import Kernel, Launch
from .tile import ROWS
from .variant import KINDS, Variant

FULL = tl.constexpr(states.FULL)
PARTIAL = tl.constexpr(states.PARTIAL)
NEVER = tl.constexpr(tables_of_rows.NEVER)
#: Lines of a table, tiles of a list, or lines of lists that a program looks at in one step.
CHUNK = tl.constexpr(128)
#: Lines whose places in the order one program finds.
RANKED = tl.constexpr(16)


# What a tile of a table's lines says about tiles of positions.


@triton.jit
def extremes(bounds, start, stop, AT: tl.constexpr, INTERVALS: tl.constexpr):
    """`(least start, greatest start, least end, greatest end)` of the AT-th interval of a table's lines
    `[start, stop)`; the least start passes over empty intervals.
    """
    lanes = tl.zeros([CHUNK], tl.int32)
    least_start, most_start, least_end, most_end = lanes + NEVER, lanes, lanes + NEVER, lanes
    # In steps of one length, so that nothing is compiled anew for another side of tiles.
    for begin in tl.range(start, stop, CHUNK, num_stages=1):
        at = begin + tl.arange(0, CHUNK)
        inside = at < stop
        line = bounds + at.to(tl.int64) * (2 * INTERVALS) + 2 * AT
        first, last = tl.load(line, mask=inside, other=0), tl.load(line + 1, mask=inside, other=0)
        least_start = tl.minimum(least_start, tl.where(first < last, first, NEVER))
        most_start = tl.maximum(most_start, first)
        least_end = tl.minimum(least_end, tl.where(inside, last, NEVER))
        most_end = tl.maximum(most_end, last)
    return tl.min(least_start, 0), tl.max(most_start, 0), tl.min(least_end, 0), tl.max(most_end, 0)


@triton.jit
def loaded_extremes(corners, tile, tiles, AT: tl.constexpr):
    """The same of several tiles, as `corners_kernel` has kept them."""
    inside = tile < tiles
    at = corners + 4 * AT * tiles + tile
    least_start, most_start = tl.load(at, mask=inside, other=0), tl.load(at + tiles, mask=inside, other=0)
    at += 2 * tiles
    return (
        least_start,
        most_start,
        tl.load(at, mask=inside, other=0),
        tl.load(at + tiles, mask=inside, other=0),
    )


@triton.jit
def compared(first, second, start, stop):
    """Whether both intervals of all lines miss the positions `[start, stop)`, and whether one of them covers
    these in all lines; both are sound. Where there is one interval, it is given twice.
    """
    misses = ((first[0] >= stop) | (first[3] <= start)) & ((second[0] >= stop) | (second[3] <= start))
    covers = ((first[1] <= start) & (first[2] >= stop)) | ((second[1] <= start) & (second[2] >= stop))
    return misses, covers


@triton.jit
def state_of(misses, covers, whole, MASK: tl.constexpr):
    """The state of tiles. Where both claims hold, nothing is known; and a tile that is not `whole`, over the
    edge of the other side, needs the mask.
    """
    # Intervals of ROWS are seen, those of COLS hidden.
    full = (covers if MASK == ROWS else misses).to(tl.int32)
    empty = (misses if MASK == ROWS else covers).to(tl.int32)
    state = full - empty + PARTIAL
    return tl.where(whole, state, tl.minimum(state, PARTIAL))


@triton.jit
def write_list(tiles, counts, line, own, corners, length, side, C: tl.constexpr):
    """The list of one line among those of all tables.

    Args:
        line: the number of the line, over all tables.
        own: its two intervals' extremes, or `(start, stop)` of its positions if it lies across the table.
        corners: in that case, the extremes of the tiles that it meets, else None.
        length, side: of the other side, and of its tiles.
    """
    capacity = tl.cdiv(length, side)
    tiles += line.to(tl.int64) * capacity
    counts += line.to(tl.int64) * 2
    for phase in tl.static_range(2):
        found = 0
        for begin in tl.range(0, capacity, CHUNK, num_stages=1):
            tile = begin + tl.arange(0, CHUNK)
            start = tile * side
            if corners is None:
                misses, covers = compared(own[0], own[1], start, tl.minimum(start + side, length))
            else:
                first = loaded_extremes(corners, tile, capacity, 0)
                second = first
                if C.INTERVALS > 1:
                    second = loaded_extremes(corners, tile, capacity, 1)
                misses, covers = compared(first, second, own[0], own[1])
            state = state_of(misses, covers, start + side <= length, C.MASK)
            wanted = (state == FULL - phase) & (tile < capacity)
            place = tl.cumsum(wanted.to(tl.int32), 0)
            tl.store(tiles + (found - 1) + place, tile, mask=wanted)
            found += tl.sum(wanted.to(tl.int32), 0)
        tl.store(counts + phase, found)
        tiles += found


# The kernels. All take a variant, of which they read MASK and INTERVALS only.


@Kernel
def corners_kernel(bounds, corners, length: tl.int32, side: tl.int32, C: tl.constexpr):
    """`corners [tables, 4 * n, tiles]`: the extremes of each tile of lines of `bounds [tables, length,
    2 * n]`.

    Grid: `tiles * tables`.
    """
    INTERVALS: tl.constexpr = C.INTERVALS
    tiles = tl.cdiv(length, side)
    table, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    bounds += table.to(tl.int64) * length * (2 * INTERVALS)
    corners += table.to(tl.int64) * tiles * (4 * INTERVALS) + tile
    start, stop = tile * side, tl.minimum(tile * side + side, length)
    for at in tl.static_range(INTERVALS):
        found = extremes(bounds, start, stop, at, INTERVALS)
        for i in tl.static_range(4):
            tl.store(corners, found[i])
            corners += tiles


@Kernel
def along_kernel(
    bounds, tiles, counts, length: tl.int32, side: tl.int32, across: tl.int32, across_side: tl.int32,
    C: tl.constexpr,
):  # fmt: skip
    """Lists of tiles of `across_side` of the `across` positions, per tile of `side` lines of `bounds [tables,
    length, 2 * n]`.

    Grid: `lines * tables`.
    """
    line = tl.program_id(0)
    lines = tl.cdiv(length, side)
    table, tile = line // lines, line % lines
    bounds += table.to(tl.int64) * length * (2 * C.INTERVALS)
    start, stop = tile * side, tl.minimum(tile * side + side, length)
    first = extremes(bounds, start, stop, 0, C.INTERVALS)
    second = first
    if C.INTERVALS > 1:
        second = extremes(bounds, start, stop, 1, C.INTERVALS)
    write_list(tiles, counts, line, (first, second), None, across, across_side, C)


@Kernel
def across_kernel(
    corners, tiles, counts, length: tl.int32, side: tl.int32, across: tl.int32, across_side: tl.int32,
    C: tl.constexpr,
):  # fmt: skip
    """Lists of tiles of `side` of the `length` lines of a table, of which `corners` holds the extremes, per
    tile of `across_side` of the `across` positions.

    Grid: `lines * tables`.
    """
    line = tl.program_id(0)
    lines = tl.cdiv(across, across_side)
    table, tile = line // lines, line % lines
    corners += table.to(tl.int64) * tl.cdiv(length, side) * (4 * C.INTERVALS)
    start = tile * across_side
    span = (start, tl.minimum(start + across_side, across))
    write_list(tiles, counts, line, span, corners, length, side, C)


@triton.jit
def work_of(counts, line, lines):
    """How many tiles the lists of some lines hold; 0 for lines that do not exist."""
    inside = line < lines
    at = counts + line.to(tl.int64) * 2
    return tl.load(at, mask=inside, other=0) + tl.load(at + 1, mask=inside, other=0)


@Kernel
def order_kernel(counts, order, lines: tl.int32, C: tl.constexpr):
    """`order [tables, lines]`: the lines, those with most work first, equals as they stand.

    Grid: `ceil(lines / RANKED) * tables`. A line's place is the number of lines before it, which takes no
    sort.
    """
    blocks = tl.cdiv(lines, RANKED)
    table, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    counts += table.to(tl.int64) * lines * 2
    line = block * RANKED + tl.arange(0, RANKED)
    work = work_of(counts, line, lines)
    before = tl.zeros([RANKED, CHUNK], tl.int32)
    for begin in tl.range(0, lines, CHUNK, num_stages=1):
        other = begin + tl.arange(0, CHUNK)
        # Among equals, an earlier line counts as having one tile more.
        theirs = work_of(counts, other, lines)[None, :] + (other[None, :] < line[:, None]).to(tl.int32)
        before += (theirs > work[:, None]).to(tl.int32)
    place = order + table.to(tl.int64) * lines + tl.sum(before, 1)
    tl.store(place, line, mask=line < lines)


# Launching.


class _Launches(NamedTuple):
    """The kernels that make lists, for one kind of table."""

    corners: Launch
    along: Launch
    across: Launch


@cache
def _launches(kind: str, intervals: int) -> _Launches:
    C = Variant(1, 1, 1, 1, MASK=KINDS[kind], INTERVALS=intervals, STAGES=1)
    # One warp adds up a chunk without waiting for another one.
    return _Launches(*(Launch(kernel, C, 1) for kernel in (corners_kernel, along_kernel, across_kernel)))


_order = Launch(order_kernel, Variant(1, 1, 1, 1, MASK=KINDS["rows"], STAGES=1), 4)


def listed(
    form: Any, q_length: int, k_length: int, rows: int, keys: int, by_key: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`(tiles, counts, order)` as in `lists.Lists`, of a `Rows` or `Cols` whose table is on a GPU (or
    anywhere under Triton's interpreter), for tiles of `rows x keys`: per tile of rows, or `by_key` per tile
    of keys.

    Nothing stands in `tiles` behind the partial tiles of a line. The host does not wait for the device.
    """
    bounds = form.bounds.contiguous()
    device, tables = bounds.device, bounds.shape[0] * bounds.shape[1]
    table, positions = (q_length, rows), (k_length, keys)
    if form.kind == "cols":
        table, positions = positions, table
    across = by_key == (form.kind == "rows")
    own, other = (positions, table) if across else (table, positions)
    lines, capacity = -(-own[0] // own[1]), -(-other[0] // other[1])
    tiles = torch.empty((tables, lines, capacity), dtype=torch.int32, device=device)
    counts = torch.empty((tables, lines, 2), dtype=torch.int32, device=device)
    order = torch.empty((tables, lines), dtype=torch.int32, device=device)
    launches = _launches(form.kind, form.count)
    if across:
        corners = torch.empty((tables, 4 * form.count, capacity), dtype=torch.int32, device=device)
        launches.corners(tables * capacity, [bounds, corners, *table], device)
        launches.across(tables * lines, [corners, tiles, counts, *table, *positions], device)
    else:
        launches.along(tables * lines, [bounds, tiles, counts, *table, *positions], device)
    _order(tables * -(-lines // RANKED.value), [counts, order, lines], device)
    return tiles, counts, order
