"""What a line of tiles visits, worked out once for each kind of call: eight numbers for each warp group.

The tiles of a band lie in the order in which the kernel takes them. Those that all rows see come first, from
`base` down: they need no mask, and each row has something to take its reference from. Next are those over its
upper edge, from `base` up, then those over its lower edge, down.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.backends.triton.arguments import MaskArguments

from .variant import LINES, Variant

#: Numbers of a warp group.
WORDS = 8


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
        shares = _everything(count, C)
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


def of_lists(counts: Tensor, tiles: Tensor, C: Variant) -> Lines:
    """Of lists: all rows of a line take all its tiles.

    Args:
        counts: int32 `[tables, lines, 2]`, how many tiles of a line are full, how many partial.
        tiles: int32 `[tables, lines, capacity]`.
    """
    full, partial = counts.long().unbind(-1)
    base = torch.arange(full.numel(), device=full.device).view_as(full)
    return _lines(base, full, partial, _everything(full + partial, C), tiles[:, :, 0].long() * C.BN)


def _everything(count: Tensor, C: Variant) -> list[Tensor]:
    """All tiles of a line for all warp groups."""
    none = torch.zeros_like(count)
    return [torch.stack([none, count, count, count, none], -1)] * C.GROUPS


def _lines(base: Tensor, whole: Tensor, masked: Tensor, shares: list[Tensor], first: Tensor) -> Lines:
    words = [
        torch.cat([torch.stack([base + share[..., 0], whole, masked], -1), share], -1) for share in shares
    ]
    made = torch.stack(words, -2).int()
    made = made if made.dim() == 4 else made[None]
    found = Lines(made, first.int().view(made.shape[:2]))
    return found._replace(first=torch.where(found.counts > 0, found.first, -1))
