"""Which tiles to visit, as lists on the device: for tables (`Rows`, `Cols`, `Bits`), whose tiles are skipped,
full or partial by comparison with bounds or granules.

A list takes four bytes per pair of tiles, 0.02 % of the score matrix in bytes at tiles of 128 x 64. It is
made without reading the device, and kept with the form, so that all layers and steps that share a mask share
its lists.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.cost.tiles import FULL, PARTIAL
from tilefold.masks.context import capturing


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """For each tile of one side, the tiles of the other side that it meets.

    Attributes:
        tiles: int32 `[tables, lines, capacity]`: first the full tiles, then the partial ones, then others.
        counts: int32 `[tables, lines, 2]`: how many are full, how many partial.
        order: int32 `[tables, lines]`: the lines, those with most work first.
    """

    tiles: Tensor
    counts: Tensor
    order: Tensor

    @property
    def capacity(self) -> int:
        return self.tiles.shape[-1]


_kept: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Lists]] = weakref.WeakKeyDictionary()


def lists_of(form: Any, q_length: int, k_length: int, rows: int, keys: int, by_key: bool) -> Lists:
    """The lists of a form for tiles of `rows x keys`: per tile of rows, or `by_key` per tile of keys."""
    found = _kept.setdefault(form, {})
    name = (q_length, k_length, rows, keys, int(by_key))
    lists = found.get(name)
    if lists is None:
        states = form.tile_states(q_length, k_length, rows, keys, form.tensors()[0].device).flatten(0, 1)
        states = states.transpose(1, 2).contiguous() if by_key else states
        length, side = (q_length, rows) if by_key else (k_length, keys)
        if length % side:
            # A tile over the edge is full as far as it exists; the kernels clip it in their masked phase
            # only.
            states = states.clone()
            states[..., -1:].clamp_(max=PARTIAL)
        lists = _listed(states)
        if not capturing(states.device):
            found[name] = lists
    return lists


def _listed(states: Tensor) -> Lists:
    """Lists of int8 states `[tables, lines, tiles]`."""
    full, partial = (states == FULL).sum(-1), (states == PARTIAL).sum(-1)
    tiles = states.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    order = (full + partial).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return Lists(tiles.contiguous(), torch.stack([full, partial], -1).to(torch.int32), order)
