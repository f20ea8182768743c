"""Which program does what: every program walks its own list of places `pair * lines + line`, where a pair is
a (batch element, head) and a line is as many rows as the program's warp groups have.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilefold.backends.triton.arguments import FAR
from tilefold.masks.band import Band

#: Beside its tiles, a line of tiles takes as long as so many keys.
FIXED_COST = 320
#: Of all tiles, what a mask of lists may show for its lines to be near each other in memory.
_NEAR = 0.25


class Schedule(NamedTuple):
    """The places of all programs, int32, on the device, and of each program where its own begin, how many they
    are and the first of them (0 if it has none), int32 `[programs, 3]`.
    """

    work: Tensor
    portions: Tensor


def portioned(work: Tensor, starts: Tensor) -> Schedule:
    """The places of program `n` are `work[starts[n] : starts[n + 1]]`."""
    begin = starts[:-1].int()
    first = pad(work, (0, 1))[begin.long()]
    return Schedule(work, torch.stack([begin, starts.diff().int(), first], 1))


def visits(form: Band, q_length: int, k_length: int, rows: int, keys: int) -> list[int]:
    """How many tiles of keys each line of tiles visits, as the kernel finds them."""
    found, away = [], k_length - q_length
    lo, hi = (-FAR if form.lo is None else form.lo), (FAR if form.hi is None else form.hi)
    for first in range(0, q_length, rows):
        last = min(first + rows, q_length) - 1
        start = min(max(first + away + lo, 0), k_length)
        end = max(min(last + away + hi + 1, k_length), start)
        found.append(-(-end // keys) - start // keys if end > start else 0)
    return found


def assign(
    costs: Sequence[float], pairs: int, span: int, programs: int, fixed: float = 2.5
) -> list[list[int]]:
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


def of_costs(
    costs: Sequence[float], keys: int, pairs: int, span: int, programs: int, device: torch.device
) -> Schedule:
    """For lines whose numbers of tiles, of so many keys each, the host knows."""
    found = assign(costs, pairs, span, programs, FIXED_COST / keys)
    starts = [0]
    for own in found:
        starts.append(starts[-1] + len(own))
    flat = torch.tensor([place for own in found for place in own], dtype=torch.int32, device="cpu")
    made = portioned(flat, torch.tensor(starts, dtype=torch.int32, device="cpu"))
    return Schedule(*(x.to(device) for x in made))


def dealt(
    lines: int, pairs: int, span: int, programs: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`(pair, rank, starts)` of places that go round the programs, back and forth, where a section's lines of
    rank 0 come before those of rank 1. Made on the device alone, as the capture of a graph asks for.
    """
    turn = torch.arange(lines * pairs, device=device)
    lap, seat = turn // programs, turn % programs
    owner = torch.where(lap % 2 == 0, seat, programs - 1 - seat)
    section = turn // (span * lines)
    inner = turn - section * (span * lines)
    width = (pairs - section * span).clamp(max=span)
    owner, mine = torch.sort(owner, stable=True)
    starts = torch.searchsorted(owner, torch.arange(programs + 1, device=device))
    return (section * span + inner % width)[mine], (inner // width)[mine], starts


def of_ranks(
    lines: int, pairs: int, span: int, programs: int, reverse: bool, device: torch.device
) -> Schedule:
    """As in `dealt`, with lines in their order, the last ones first if `reverse`."""
    pair, rank, starts = dealt(lines, pairs, span, programs, device)
    line = lines - 1 - rank if reverse else rank
    return portioned((pair * lines + line).int(), starts)


def of_lists(
    counts: Tensor, order: Tensor, tables: Tensor, k_length: int, keys: int, span: int, programs: int
) -> Schedule:
    """For lines whose numbers of tiles only the device knows; never waits for it.

    A mask that shows little shows what lies close together: each program has neighbouring lines, in shares
    that take equally long. Otherwise lines go round, the longest ones first, section by section.

    Args:
        counts: int32 `[tables, lines, 2]`, of the tiles of each line.
        order: int32 `[tables, lines]`, the longest lines first.
        tables: int64 `[pairs]`, the table of each pair.
        k_length, keys: of all tiles, and of one.
    """
    device, (lines, pairs) = counts.device, (counts.shape[1], tables.numel())
    visited = counts.sum(-1)[tables].double().flatten()
    costs = visited + FIXED_COST / keys
    spent = costs.cumsum(0)
    middle = spent - costs / 2
    owner = (middle * (programs / spent[-1])).long().clamp(max=programs - 1)
    shares = torch.searchsorted(owner, torch.arange(programs + 1, device=device))
    near = torch.arange(pairs * lines, device=device)
    pair, rank, starts = dealt(lines, pairs, span, programs, device)
    far = pair * lines + order[tables[pair], rank]
    close = visited.mean() * keys < _NEAR * k_length
    return portioned(torch.where(close, near, far).int(), torch.where(close, shares, starts))
