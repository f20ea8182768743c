"""Which program does what: every program walks its own list of pieces of work. Each is a place `pair * lines
+ line`, where a pair is a (batch element, head) and a line is as many rows as the program's warp groups have.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilefold.backends.triton.arguments import MaskArguments

from .lines import Lines

#: Beside its tiles, a line of tiles takes as long as so many keys.
FIXED_COST = 128
#: Of all tiles, what a mask of lists may show for its lines to be near each other in memory.
_NEAR = 0.25
#: Of a program's share, what a piece of work takes that may come anywhere: 1 / 32.
_SMALL = 32
#: Pieces of work that the host shares out one by one, which takes half a microsecond for each.
_MANY = 8192


class Order(NamedTuple):
    """The places of program `n` are `places[starts[n] : starts[n + 1]]`."""

    places: Tensor
    starts: Tensor


class Schedule(NamedTuple):
    """What the kernel is told, all int32.

    Attributes:
        work: `[places, 8]`, program after program: batch element, query head and (in the upper half of the
            same number) key head, line of tiles among those of all tables, first key of its first tile or -1,
            first row, table.
        portions: `[programs, 16]`: the first piece of work of a program as in `work` (if it has none,
            somebody's), where its own begin in `work`, and how many they are.
        lines: `[tables, lines, groups, 8]`, see `lines`.
    """

    work: Tensor
    portions: Tensor
    lines: Tensor

    @property
    def programs(self) -> int:
        return len(self.portions)


def scheduled(order: Order, lines: Lines, heads: int, group: int, mask: MaskArguments, rows: int) -> Schedule:
    """Pieces of work in their order; `rows` of a line of tiles."""
    count = lines.words.shape[1]
    pair, line = order.places // count, order.places % count
    b, h = pair // heads, pair % heads
    table = b * mask.table_b + h * mask.table_h
    at = table * count + line
    none = torch.zeros_like(at)
    columns = [b, h | (h // group << 16), at, lines.first.flatten()[at], line * rows, table, none, none]
    work = torch.stack(columns, -1).int()
    # A program that has none looks at somebody's.
    begin = order.starts[:-1].clamp(max=len(work) - 1)
    about = torch.stack([begin, order.starts.diff()], -1).int()
    return Schedule(work, pad(torch.cat([work[begin], about], -1), (0, 6)), lines.words)


def assign(costs: Sequence[float], pairs: int, span: int, programs: int, fixed: float) -> list[list[int]]:
    """The places of each program: pairs in sections of `span`, whose keys and values fit the L2 cache
    together; in a section the longest lines first, each to whoever is done first.
    """
    work: list[list[int]] = [[] for _ in range(programs)]
    lines = len(costs)
    order = sorted(range(lines), key=lambda n: -costs[n])
    heap = [(0.0, n) for n in range(programs)]
    for first in range(0, pairs, span):
        for line in order:
            for pair in range(first, min(first + span, pairs)):
                spent, n = heap[0]
                work[n].append(pair * lines + line)
                heapq.heapreplace(heap, (spent + costs[line] + fixed, n))
    return work


def of_costs(costs: Sequence[float], keys: int, pairs: int, span: int, programs: int) -> Order:
    """For lines whose numbers of tiles, of so many keys each, the host knows; made on the host. Where lines
    cost the same, or pieces of work are too many to be looked at one by one, they go round.
    """
    alike = min(costs) == max(costs)
    if alike or len(costs) * pairs > _MANY:
        device = torch.device("cpu")
        pair, rank, starts = dealt(len(costs), pairs, span, programs, device, back=not alike)
        longest = torch.tensor(costs, device=device).argsort(descending=True, stable=True)
        return Order(pair * len(costs) + longest[rank], starts)
    found = assign(costs, pairs, span, programs, FIXED_COST / keys)
    starts = [0]
    for own in found:
        starts.append(starts[-1] + len(own))
    places = [place for own in found for place in own]
    return Order(torch.tensor(places, device="cpu"), torch.tensor(starts, device="cpu"))


def dealt(
    lines: int, pairs: int, span: int, programs: int, device: torch.device, back: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """`(pair, rank, starts)` of places that go round the programs, and `back` in every other lap, where a
    section's lines of rank 0 come before those of rank 1. Made on the device alone, as the capture of a graph
    asks for.
    """
    turn = torch.arange(lines * pairs, device=device)
    lap, seat = turn // programs, turn % programs
    owner = torch.where((lap % 2 == 1) & back, programs - 1 - seat, seat)
    section = turn // (span * lines)
    inner = turn - section * (span * lines)
    width = (pairs - section * span).clamp(max=span)
    owner, mine = torch.sort(owner, stable=True)
    starts = torch.searchsorted(owner, torch.arange(programs + 1, device=device))
    return (section * span + inner % width)[mine], (inner // width)[mine], starts


def of_ranks(lines: int, pairs: int, span: int, programs: int, reverse: bool, device: torch.device) -> Order:
    """As in `dealt`, with lines in their order, the last ones first if `reverse`."""
    pair, rank, starts = dealt(lines, pairs, span, programs, device)
    line = lines - 1 - rank if reverse else rank
    return Order(pair * lines + line, starts)


def shared_out(costs: Tensor, programs: int) -> Order:
    """Pieces of work in their order, shared out so that programs take about equally long; made on the device
    alone.

    Those that cost more than a program's share have a program of their own. The next ones go round the
    others, the largest ones first, back and forth, and the small ones fill up what these leave, neighbours
    together.
    """
    device, count = costs.device, costs.numel()
    seats = torch.arange(programs, device=device)
    share = costs.sum() / programs
    sizes, largest = costs.sort(descending=True, stable=True)
    turn = torch.arange(count, device=device)
    alone = (sizes >= share).sum().clamp(max=programs - 1)
    width = programs - alone
    lap, seat = (turn - alone) // width, (turn - alone) % width
    seat = torch.where(lap % 2 == 1, programs - 1 - seat, alone + seat)
    seat = torch.where(turn < alone, turn, seat)
    large = sizes > share / _SMALL
    load = torch.zeros_like(costs[:1]).expand(programs).scatter_add(0, seat, sizes * large)
    # The level up to which programs that have less are filled.
    low = load.sort().values
    levels = (share * programs - load.sum() + low.cumsum(0)) / (seats + 1)
    level = levels.gather(0, ((levels > low).sum() - 1).clamp(min=0).view(1))
    room = (level - load).clamp(min=0).cumsum(0)
    # In the pieces' own order.
    rank = torch.empty_like(largest).scatter_(0, largest, turn)
    is_large = rank < large.sum()
    small = costs * ~is_large
    owner = torch.searchsorted(room, small.cumsum(0) - small / 2, right=True).clamp(max=programs - 1)
    owner = torch.where(is_large, seat[rank], owner)
    key = owner * (2 * count) + torch.where(is_large, rank, count + turn)
    places = key.argsort()
    return Order(places, torch.searchsorted(owner[places], torch.arange(programs + 1, device=device)))


def of_counts(
    counts: Tensor, order: Tensor, tables: Tensor, k_length: int, keys: int, span: int, programs: int
) -> Order:
    """For lines whose numbers of tiles only the device knows; never waits for it.

    A mask that shows little shows what lies close together: each program has neighbouring lines, see
    `shared_out`. Otherwise lines go round, the longest ones first, section by section.

    Args:
        counts: `[tables, lines]`, of the tiles of each line.
        order: int32 `[tables, lines]`, the longest lines first.
        tables: int64 `[pairs]`, the table of each pair.
        k_length, keys: of all tiles, and of one.
    """
    device, (lines, pairs) = counts.device, (counts.shape[1], tables.numel())
    visited = counts[tables].double().flatten()
    near = shared_out(visited + FIXED_COST / keys, programs)
    pair, rank, starts = dealt(lines, pairs, span, programs, device)
    far = pair * lines + order[tables[pair], rank]
    close = visited.mean() * keys < _NEAR * k_length
    return Order(torch.where(close, near.places, far), torch.where(close, near.starts, starts))
