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
#: Of lines of lists, pieces of work that each program has in a section, and the most sections.
_LAPS, _SECTIONS = 5, 16
#: Of a program's share, what a small piece of work takes at most: 1 / 32.
_SMALL = 32
#: How much longer programs may take for what they read to be near.
_UNEVEN = 1.03
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
    owner = _back_and_forth(turn, programs) if back else turn % programs
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
    """Pieces of work shared out so that programs take about equally long and, if that is possible, are at
    about the same place at any time: what they read is then in the L2 cache. Each takes its own in their
    order. Made on the device alone; `costs` are whole numbers, whose sums are the same in every run (up to
    2^45 or so: they are multiplied by the programs).

    Those that cost more than a program's share have a program of their own.
    """
    device, count = costs.device, costs.numel()
    alone = costs * programs >= costs.sum()
    alone = alone & (alone.cumsum(0) < programs)
    width = programs - alone.sum()
    # Those alone come first: if they were as many as the programs, all would cost the same.
    order = costs.argsort(descending=True, stable=True)
    near = _in_sections(costs, order, alone, width, programs)
    even = _by_size(costs, order, alone, width, programs)
    spent = [costs.new_zeros(programs).scatter_add_(0, owner, costs).max() for owner in (near, even)]
    owner = torch.where(spent[0] <= _UNEVEN * spent[1], near, even)
    places = (owner * count + torch.arange(count, device=device)).argsort()
    return Order(places, torch.searchsorted(owner[places], torch.arange(programs + 1, device=device)))


def _in_sections(costs: Tensor, order: Tensor, alone: Tensor, width: Tensor, programs: int) -> Tensor:
    """Whose pieces of work are: section after section they go round `width` programs, the largest of a
    section first, back and forth, and the program that has least so far gets the most. `order`: the largest
    first.
    """
    device, count = costs.device, costs.numel()
    sections = min(max(count // (_LAPS * programs), 1), _SECTIONS)
    seats = torch.arange(programs, device=device)
    others = (count - programs + width).clamp(min=1)
    section = torch.where(alone, sections, ((~alone).cumsum(0) - 1) * sections // others)
    order = order[section[order].argsort(stable=True)]
    section = section[order]
    rank = torch.arange(count, device=device) - torch.searchsorted(section, section)
    seat = torch.where(section == sections, width + rank, _back_and_forth(rank, width))
    sums = costs.new_zeros((sections + 1) * programs).scatter_add_(0, section * programs + seat, costs[order])
    closed = seats >= width
    load = costs.new_zeros(programs).masked_fill(closed, torch.iinfo(costs.dtype).max)
    owners = []
    for own in sums.view(-1, programs)[:-1]:
        most = own.masked_fill(closed, -1).argsort(descending=True, stable=True)
        least = load.argsort(stable=True)
        load = load.scatter_add(0, least, own[most])
        owners.append(torch.empty_like(least).scatter_(0, most, least))
    owner = torch.stack([*owners, seats])[section, seat]
    return torch.empty_like(order).scatter_(0, order, owner)


def _by_size(costs: Tensor, order: Tensor, alone: Tensor, width: Tensor, programs: int) -> Tensor:
    """Whose pieces of work are: the large ones go round `width` programs, the largest first, back and forth,
    and small ones fill up what these leave, neighbours together. `order`: the largest first.
    """
    rank = torch.arange(costs.numel(), device=costs.device)
    seat = torch.where(alone[order], width + rank, _back_and_forth(rank - (programs - width), width))
    owner = torch.empty_like(order).scatter_(0, order, seat)
    small = (costs * programs * _SMALL <= costs.sum()) & ~alone
    load = costs.new_zeros(programs).scatter_add_(0, owner, costs * ~small)
    # Up to this level programs that have less are filled; rounded up, or the last one would get the rest.
    low, total = load.sort().values, (costs * small).cumsum(0)
    levels = (total[-1] + low.cumsum(0)) // torch.arange(1, programs + 1, device=costs.device) + 1
    level = levels.gather(0, ((levels > low).sum() - 1).clamp(min=0).view(1))
    room = (level - load).clamp(min=0).cumsum(0)
    filled = torch.searchsorted(room, total - costs // 2, right=True).clamp(max=programs - 1)
    return torch.where(small, filled, owner)


def _back_and_forth(rank: Tensor, width: Tensor | int) -> Tensor:
    """Where those are who go round `width` places, and back in every other lap."""
    seat = rank % width
    return torch.where(rank // width % 2 == 1, width - 1 - seat, seat)


def of_lines(costs: Tensor, tables: Tensor, programs: int) -> Order:
    """For lines of which only the device knows how long they take; never waits for it.

    Args:
        costs: int64 `[tables, lines]`, in keys.
        tables: int64 `[pairs]`, the table of each pair.
    """
    return shared_out(costs[tables].flatten() + FIXED_COST, programs)
