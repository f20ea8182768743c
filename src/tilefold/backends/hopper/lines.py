"""What a line of tiles visits, worked out once for each kind of call: eight numbers for each warp group.

The tiles of a band lie in the order in which the kernel takes them. Those that all rows see come first, from
`base` down: they need no mask, and each row has something to take its reference from. Next are those over its
upper edge, from `base` up, then those over its lower edge, down.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilefold.backends.triton.arguments import MaskArguments
from tilefold.backends.triton.lists import Lists
from tilefold.cost.tiles import FULL, PARTIAL

from .variant import BITS, HIDDEN, LINES, MIXED, Variant, entry_words

#: Numbers of a warp group.
WORDS = 8
#: How much longer than a whole tile one under a mask takes, and any with the online softmax, in sixteenths.
MIXED_MORE, ONLINE_MORE = 5, 6


class Lines(NamedTuple):
    """
    Attributes:
        words: int32 `[tables, lines, groups, 8]`. Of the line: `base, whole, masked`, tiles without a mask
            and the next ones. Of the rows of a warp group: `before, from, to, own, after`. They skip
            `before` tiles, then `own` are theirs but for those `from` one place `to` another, then they skip
            `after`. Its `base` counts from the first tile that it does not skip.
        first: int32 `[tables, lines]`, the first key of the first tile, or -1 where there is none.
    """

    words: Tensor
    first: Tensor

    @property
    def counts(self) -> Tensor:
        """Tiles of each line, `[tables, lines]`: the first warp group begins where its line does."""
        return self.words[:, :, 0, 6] + self.words[:, :, 0, 7]


def of_band(mask: MaskArguments, q_length: int, k_length: int, C: Variant, device: torch.device) -> Lines:
    """Of a band; lengths as the kernel sees them."""
    rows = C.GROUPS * LINES
    away = k_length - (C.PERIOD or q_length)

    def rows_of(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the last row of a head: where several heads share a tile, all there are."""
        if C.PERIOD:
            return torch.zeros_like(first), torch.full_like(last, C.PERIOD - 1)
        return first, last

    def keys_of(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """The tiles of keys `[begin, stop)` that rows from `first` to `last` see."""
        start = (first + away + mask.lo).clamp(0, k_length)
        end = torch.maximum((last + away + mask.hi + 1).clamp(max=k_length), start)
        begin = start // C.BN
        return begin, torch.where(end > start, -(-end // C.BN), begin)

    starts = torch.arange(0, q_length, rows, device=device)
    first, last = rows_of(starts, (starts + rows).clamp(max=q_length) - 1)
    begin, stop = keys_of(first, last)
    base, whole = stop, stop - begin
    if C.MASKED:
        upper = begin if C.STEPPED else (first + away + mask.hi + 1).clamp(0, k_length) // C.BN
        lower = -(-(last + away + mask.lo).clamp(min=0) // C.BN)
        lower = torch.minimum(torch.maximum(lower, begin), stop)
        upper = torch.maximum(torch.minimum(upper, stop), lower)
        whole = upper - lower
        base = torch.where(whole > 0, upper, begin)
    masked, count = stop - base, stop - begin
    if not C.MASKED:
        shares = [_first_of(count, count)] * C.GROUPS
    else:
        shares = []
        for w in range(C.GROUPS):
            mine = starts + w * LINES
            own_begin, own_stop = keys_of(*rows_of(mine, mine + LINES - 1))
            own_begin = torch.minimum(torch.maximum(own_begin, begin), stop)
            own_stop = torch.maximum(torch.minimum(own_stop, stop), own_begin)
            some = whole > 0
            # Where no tile is whole, all of them lie in a row.
            before = torch.where(some, 0, own_begin - begin)
            above = whole + (own_stop - base).clamp(min=0)
            below = (base - whole - own_begin).clamp(min=0)
            gap = torch.where(some, above, own_stop - own_begin)
            to = torch.where(some, whole + masked, gap)
            own = torch.where(some & (below > 0), to + below, gap)
            own = torch.where(mine < q_length, own, 0)
            shares.append(torch.stack([before, gap, to, own, count - before - own], -1))
    return _lines(base, whole, masked, shares, torch.where(whole > 0, base - 1, base) * C.BN)


class Listed(NamedTuple):
    """
    Attributes:
        lines: what each line visits.
        tiles: int32 `[tables, lines, capacity]`, the tiles of each line in their order, with bits that say
            which warp groups see nothing of a tile, and not all of it (`variant.HIDDEN, MIXED`); of bits
            `[tables, lines, capacity, 4]`, with a code of `index` for each warp group.
        costs: int64 `[tables, lines]`, how long each line takes, in keys.
    """

    lines: Lines
    tiles: Tensor
    costs: Tensor


def of_lists(lists: Lists, states: Tensor, index: Tensor | None, C: Variant) -> Listed:
    """Of lists. Tiles that all rows see come first, then those of which each warp group sees something, then
    those of fewer of them in turn, so that none is without work for long.

    Args:
        states: int8 `[tables, ceil(q_length / 64), tiles]`: of what each 64 rows see, a tile is empty (0),
            partial (1) or full (2).
        index: int32 `[Bm, Hm, ceil(q_length / 64), tiles]`, where the bits of a tile are, or -1 where it is
            empty and -2 where it is full; None unless the lists are those of bits.
    """
    full, partial = lists.counts.unbind(-1)
    _, lines, capacity = lists.tiles.shape
    at, count = torch.arange(capacity, device=full.device, dtype=torch.int32), full + partial
    there = at < count[..., None]
    # Nothing is said of what lies behind them in memory.
    tiles = torch.where(there, lists.tiles, 0)
    states = _at(_by_group(states, lines, C), tiles) * there[:, :, None]
    order = _in_turn(states, at < full[..., None])
    states, tiles = _at(states, order), tiles.gather(-1, order)
    own = ((at + 1) * (states > 0)).amax(-1)
    entries = tiles.int()
    for w in range(C.GROUPS):
        hidden, mixed = (states[:, :, w] < state for state in (PARTIAL, FULL))
        entries = entries | (hidden.int() << (HIDDEN + w)) | (mixed.int() << (MIXED + w))
    if index is not None:
        codes = _at(_by_group(index.flatten(0, 1), lines, C), tiles)
        entries = pad(torch.stack([entries, *codes.unbind(2)], -1), (0, entry_words(C.MASK) - 1 - C.GROUPS))
    base = torch.arange(full.numel(), device=full.device).view_as(full)
    shares = [_first_of(own[:, :, w], count) for w in range(C.GROUPS)]
    found = _lines(base, full, partial, shares, tiles[:, :, 0].long() * C.BN)
    return Listed(found, entries, _costs(states, own, at, C))


def _in_turn(states: Tensor, whole: Tensor) -> Tensor:
    """The order of the tiles of each line: the `whole` ones first, then those that more warp groups see, each
    in its place among those that the same ones see; of these, those that more of them see all of come first.
    """
    groups, capacity = states.shape[2:]
    seen, group = (states > 0).int(), torch.arange(groups, device=states.device)[:, None]
    viewers = (seen << group).sum(2, dtype=torch.int32)
    alike = viewers * (groups + 1) + groups - (states == FULL).sum(2, dtype=torch.int32)
    order = alike.argsort(dim=-1, stable=True)
    viewers = viewers.gather(-1, order)
    place = torch.arange(capacity, device=states.device) - torch.searchsorted(viewers, viewers)
    place = torch.empty_like(place).scatter_(-1, order, place)
    key = (groups - seen.sum(2)) * capacity + place
    return torch.where(whole, -1, key).argsort(dim=-1, stable=True)


def _by_group(x: Tensor, lines: int, C: Variant) -> Tensor:
    """`[tables, rows / 64, tiles]` as `[tables, lines, groups, tiles]`, with zeros behind the last row."""
    return pad(x, (0, 0, 0, lines * C.GROUPS - x.shape[1])).view(len(x), lines, C.GROUPS, -1)


def _costs(states: Tensor, own: Tensor, at: Tensor, C: Variant) -> Tensor:
    """How long lines take, in keys, of the states of their tiles for each warp group, of which it takes the
    first `own`.
    """
    mixed = states == PARTIAL
    if C.MASK != BITS:
        mixed = (states < FULL) & (at < own[..., None])
    busy = 16 * (states == FULL).sum(-1) + (16 + MIXED_MORE) * mixed.sum(-1)
    online = (states[..., 0] < FULL) | (not C.FIXED)
    busy = torch.where(online, busy * (16 + ONLINE_MORE) // 16, busy) * C.BN // 16
    # Alone, a warp group takes more than its part of the time that all of them take.
    return torch.maximum(busy.sum(-1) // C.GROUPS, busy.amax(-1) * 5 // 8)


def _at(states: Tensor, places: Tensor) -> Tensor:
    """States of warp groups, `[tables, lines, groups, tiles]`, at places that they share."""
    return states.gather(-1, places.long()[:, :, None].expand(-1, -1, states.shape[2], -1))


def _first_of(own: Tensor, count: Tensor) -> Tensor:
    """The share of a warp group that takes the first `own` of `count` tiles."""
    none = torch.zeros_like(own)
    return torch.stack([none, own, own, own, count - own], -1)


def _lines(base: Tensor, whole: Tensor, masked: Tensor, shares: list[Tensor], first: Tensor) -> Lines:
    words = [
        torch.cat([torch.stack([base + share[..., 0], whole, masked], -1), share], -1) for share in shares
    ]
    made = torch.stack(words, -2).int()
    made = made if made.dim() == 4 else made[None]
    found = Lines(made, first.int().view(made.shape[:2]))
    return found._replace(first=torch.where(found.counts > 0, found.first, -1))
