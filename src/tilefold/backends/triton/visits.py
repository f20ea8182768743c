"""Which tiles the programs of a kernel visit, counted on the CPU before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.cost import tiles
from tilefold.masks.band import Band
from tilefold.problem import Problem

from .arguments import FAR
from .lists import cut, part_size
from .sizes import Sizes


@dataclass(frozen=True, slots=True, eq=False)
class Visits:
    """Per line of tiles and table, lines in the order of their start: float64 `[lines, tables]` each.

    Attributes:
        full, partial: tiles visited.
        reads: rows or keys in them.
        elements: scores in them.
    """

    full: Tensor
    partial: Tensor
    reads: Tensor
    elements: Tensor

    def in_parts(self, form: Any, members: int) -> tuple[Visits, int]:
        """With long lines as the programs that share them (`lists.Split`), where all tables are one; and how
        many these are.

        Args:
            members: query heads whose visits are counted together.
        """
        counts = self.full + self.partial
        size = part_size(counts.t() / members) if form.kind == "bits" and counts.shape[1] == 1 else 0
        if size == 0:
            return self, 0
        parts, line, _, work = cut(counts[:, 0], size * members)
        order = work.argsort(descending=True, stable=True)
        share = (work / counts[line, 0].clamp(min=1))[order, None]
        found = (x[line][order] * share for x in (self.full, self.partial, self.reads, self.elements))
        return Visits(*found), int(parts[parts > 1].sum())


def visits_of(p: Problem, form: Any, sizes: Sizes, by_key: bool) -> Visits:
    """What the programs of a kernel visit; `by_key` for all query heads of a group together."""
    length, other = (p.k_length, p.q_length) if by_key else (p.q_length, p.k_length)
    side, block = (sizes.keys, sizes.rows) if by_key else (sizes.rows, sizes.keys)
    if isinstance(form, Band):
        lo, hi = (-FAR if form.lo is None else form.lo), (FAR if form.hi is None else form.hi)
        lo, hi = (-hi, -lo) if by_key else (lo, hi)
        full, partial, reads = _of_band(lo, hi, form.step != 1, length, other, side, block)
    else:
        full, partial, reads = _of_table(p, form, sizes, by_key)
    elements = reads * tiles.sides(length, side).double()[:, None]
    found = (full, partial, reads, elements)
    if isinstance(form, Band):
        # Lines with most work first, as the launchers say.
        reverse = form.hi is None if by_key else form.hi is not None
        found = tuple(x.flip(0) for x in found) if reverse else found
        return Visits(*(x * p.group if by_key else x for x in found))
    order = (full + partial).argsort(dim=0, descending=True, stable=True)
    if by_key:
        found, order = tuple(_grouped(x, p, form) for x in found), _first_heads(order, p, form)
    found = tuple(x.gather(0, order) for x in found)
    return Visits(*found)


def _of_band(
    lo: int, hi: int, stepped: bool, length: int, other: int, side: int, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`tile.band_tiles` for all lines: full tiles, partial tiles, and what lies in them, `[lines, 1]`."""
    first = torch.arange(0, length, side, device="cpu")
    last = (first + side).clamp(max=length) - 1
    away = other - length
    start = (first + away + lo).clamp(0, other)
    end = torch.maximum((last + away + hi + 1).clamp(max=other), start)
    begin = start // block
    stop = torch.where(end > start, -(-end // block), begin)
    full = torch.zeros_like(begin)
    if not stepped:
        full_begin = torch.maximum(-(-(last + away + lo).clamp(min=0) // block), begin)
        full_stop = torch.minimum((first + away + hi + 1).clamp(0, other) // block, stop)
        full = (full_stop - full_begin).clamp(min=0)
    reads = (stop * block).clamp(max=other) - (begin * block).clamp(max=other)
    found = (full, stop - begin - full, reads)
    return tuple(x.double()[:, None] for x in found)  # pyright: ignore[reportReturnType]


def _of_table(p: Problem, form: Any, sizes: Sizes, by_key: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the states of tiles, for each table, `[lines, Bm * Hm]`."""
    states = states_of(p, form, sizes).flatten(0, 1)
    states = states.transpose(1, 2) if by_key else states
    other, block = (p.q_length, sizes.rows) if by_key else (p.k_length, sizes.keys)
    full = states == tiles.FULL
    if other % block:
        # Only the masked phase of a kernel clips tiles.
        full[..., -1] = False
    seen = states != tiles.EMPTY
    reads = seen.float() @ tiles.sides(other, block).float()
    counts = full.sum(-1), seen.sum(-1)
    found = (counts[0], counts[1] - counts[0], reads)
    return tuple(x.double().t() for x in found)  # pyright: ignore[reportReturnType]


def states_of(p: Problem, form: Any, sizes: Sizes) -> Tensor:
    """int8 `[Bm, Hm, lines of rows, lines of keys]`: states of the tiles of a mask, on the CPU."""
    if p.is_empty:
        heads = [t.shape[:2] for t in form.tensors()[:1]] or [(1, 1)]
        lines = (-(-p.q_length // sizes.rows), -(-p.k_length // sizes.keys))
        return torch.zeros(*heads[0], *lines, dtype=torch.int8, device="cpu")
    return tiles.states(form, p.q_length, p.k_length, sizes.rows, sizes.keys)


def _grouped(x: Tensor, p: Problem, form: Any) -> Tensor:
    """Sums over the query heads of each group; a table for all heads counts once for each."""
    if form.tensors()[0].shape[1] == 1:
        return x * p.group
    return x.reshape(x.shape[0], -1, p.group).sum(-1)


def _first_heads(order: Tensor, p: Problem, form: Any) -> Tensor:
    """The order of the first query head of each group."""
    return order if form.tensors()[0].shape[1] == 1 else order[:, :: p.group]
