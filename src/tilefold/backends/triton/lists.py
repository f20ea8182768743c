"""Which tiles to visit, as lists on the device: for tables (`Rows`, `Cols`, `Bits`), whose tiles are skipped,
full or partial by comparison with bounds or granules.

A list takes four bytes per pair of tiles, 0.02 % of the score matrix in bytes at tiles of 128 x 64. It is
kept with the form, so that all layers and steps that share a mask share its lists, and is made without
reading the device, but for `Bits`, whose form is not made without that either.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from tilefold.cost.tiles import FULL, PARTIAL
from tilefold.masks.context import capturing

from .listing import listed


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Lines so long that their program would run when all others have ended are several programs' work.

    Attributes:
        size: tiles of a part.
        slots: parts of such lines, in each table.
        joins: int32 `[tables, long lines, 3]`: a line, the first of its parts, and how many they are, 0 for
            none.
    """

    size: int
    slots: int
    joins: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """For each tile of one side, the tiles of the other side that it meets.

    Attributes:
        tiles: int32 `[tables, lines, capacity]`: first the full tiles, then the partial ones, then others.
        counts: int32 `[tables, lines, 2]`: how many are full, how many partial.
        order: int32 `[tables, programs]`: the lines, those with most work first; with a `split` `[tables,
            programs, 3]`: a line or -1, its first tile, and the place of the result or -1.
        split: how long lines are cut into parts.
    """

    tiles: Tensor
    counts: Tensor
    order: Tensor
    split: Split | None = None

    @property
    def capacity(self) -> int:
        return self.tiles.shape[-1]

    @property
    def programs(self) -> int:
        """Of one pair (batch element, head)."""
        return self.order.shape[1]


#: A part with fewer tiles is not worth its beginning and end.
_LEAST_PART = 16
_kept: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Lists]] = weakref.WeakKeyDictionary()


def lists_of(
    form: Any, q_length: int, k_length: int, rows: int, keys: int, by_key: bool, may_split: bool = False
) -> Lists:
    """The lists of a form for tiles of `rows x keys`: per tile of rows, or `by_key` per tile of keys.

    `may_split`: long lines of `Bits` may be cut into parts. That takes a read of the device, as making such a
    form does.
    """
    found = _kept.setdefault(form, {})
    may_split = may_split and form.kind == "bits"
    name = (q_length, k_length, rows, keys, int(by_key), int(may_split))
    lists = found.get(name)
    if lists is None:
        lists = _made(form, q_length, k_length, rows, keys, by_key)
        if not capturing(form.tensors()[0].device):
            lists = found[name] = _split(lists) if may_split else lists
    return lists


def _made(form: Any, q_length: int, k_length: int, rows: int, keys: int, by_key: bool) -> Lists:
    if form.kind != "bits" and (form.tensors()[0].device.type != "cpu" or knobs.runtime.interpret):
        return Lists(*listed(form, q_length, k_length, rows, keys, by_key))
    states = form.tile_states(q_length, k_length, rows, keys, form.tensors()[0].device).flatten(0, 1)
    states = states.transpose(1, 2).contiguous() if by_key else states
    length, side = (q_length, rows) if by_key else (k_length, keys)
    if length % side:
        # A tile over the edge is full as far as it exists; the kernels clip it in their masked phase only.
        states = states.clone()
        states[..., -1:].clamp_(max=PARTIAL)
    return _listed(states)


def _listed(states: Tensor) -> Lists:
    """Lists of int8 states `[tables, lines, tiles]`."""
    full, partial = (states == FULL).sum(-1), (states == PARTIAL).sum(-1)
    tiles = states.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    order = (full + partial).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return Lists(tiles.contiguous(), torch.stack([full, partial], -1).to(torch.int32), order)


def _split(lists: Lists) -> Lists:
    """The lists with lines in parts, if there are some that take far longer than others."""
    counts = lists.counts.sum(-1, dtype=torch.int64).cpu()
    lines = counts.shape[1]
    size = part_size(counts)
    if size == 0:
        return lists
    items, joins, used = [], [], 0
    for n in counts:
        own, line, part, work = cut(n, size)
        several = own > 1
        slots = torch.where(several, own, 0)
        used = max(used, int(slots.sum()))
        slot = torch.where(several, slots.cumsum(0) - slots, -1)
        place = torch.where(several[line], slot[line] + part, -1)
        item = torch.stack([line, part * size, place], -1)
        items.append(item[work.argsort(descending=True, stable=True)])
        joins.append(torch.stack([torch.arange(lines, device="cpu"), slot, own], -1)[several])
    device = lists.order.device
    order = _stacked(items, (-1, 0, -1)).to(device)
    split = Split(size, used, _stacked(joins, (0, 0, 0)).to(device))
    return Lists(lists.tiles, lists.counts, order, split)


def cut(counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parts of lines of so many tiles `[lines]`, `size` tiles each but for the last of a line: how many
    each line has; and for each part its line, its number in it, and its tiles.
    """
    own = (counts / size).ceil().clamp(min=1).long()
    line = torch.arange(len(counts), device="cpu").repeat_interleave(own)
    part = torch.arange(len(line), device="cpu") - (own.cumsum(0) - own).repeat_interleave(own)
    return own, line, part, (counts[line] - part * size).clamp(max=size)


def part_size(counts: Tensor) -> int:
    """Tiles of a part, a power of two, for lines of so many tiles `[tables, lines]`; 0 if no line is so much
    longer than the average one that it is worth joining parts.
    """
    mean = float(counts.double().mean()) if counts.numel() else 0.0
    size = max(_LEAST_PART, 1 << math.ceil(math.log2(max(2 * mean, 1.0))))
    return size if counts.numel() and int(counts.max()) > 2 * size else 0


def _stacked(rows: list[Tensor], fill: tuple[int, ...]) -> Tensor:
    """Lists of records of different lengths as one int32 tensor, `fill` at the end of shorter ones."""
    whole = torch.tensor(fill, dtype=torch.int32, device="cpu").repeat(len(rows), max(map(len, rows)), 1)
    for n, row in enumerate(rows):
        whole[n, : len(row)] = row
    return whole
