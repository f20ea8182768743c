"""The numbers behind a picture of a mask: how many elements each cell of a grid shows.

Nothing here is drawn, and nothing of size `Lq x Lk` is made: the lowered mask decides most cells by itself,
and the others are evaluated in stripes of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tilefold import masks
from tilefold.cost.tiles import EMPTY, FULL, PARTIAL
from tilefold.errors import ArgumentError
from tilefold.masks import Band, Bits, Form

# Elements evaluated in one go.
_STRIPE = 2**22
# Counts of more tiles than these take too much time and memory for a picture.
_MOST_TILES = 2**22


@dataclass(frozen=True, slots=True)
class Size:
    """Of which call the mask is shown, and which part of it.

    Attributes:
        batch, heads: batch elements and query heads of the call.
        q_length, k_length: its lengths `Lq` and `Lk`.
        b, h: the batch element and the query head that are shown.
    """

    q_length: int
    k_length: int
    batch: int = 1
    heads: int = 1
    b: int = 0
    h: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """A grid of cells of `q_step x k_step` elements, clipped at the edges of the matrix.

    Attributes:
        q_step, k_step: sides of a cell.
        seen: int64 `[nq, nk]`, visible elements of each cell.
        size: int64 `[nq, nk]`, all elements of each cell.
    """

    q_step: int
    k_step: int
    seen: Tensor
    size: Tensor

    @property
    def share(self) -> Tensor:
        """float64 `[nq, nk]`: visible elements over all elements."""
        return self.seen / self.size

    @property
    def states(self) -> Tensor:
        """int8 `[nq, nk]`: 0 nothing is visible, 2 everything is, 1 something is."""
        return (self.seen > 0).to(torch.int8) + (self.seen == self.size).to(torch.int8)


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """One batch element and query head of a mask, counted.

    Attributes:
        text: the mask in words.
        size: the call and the part of it.
        form: that part of the lowered mask.
        form_bytes: memory of the lowered mask, of all batch elements and heads together.
        tiles: its tiles.
        empty_rows: rows that see nothing.
    """

    text: str
    size: Size
    form: Form
    form_bytes: int
    tiles: Cells
    empty_rows: int

    @property
    def counts(self) -> dict[str, int]:
        """Tiles by state, and all of them."""
        empty, partial, full = (int((self.tiles.states == state).sum()) for state in (EMPTY, PARTIAL, FULL))
        return {
            "total": self.tiles.seen.numel(),
            "visited": partial + full,
            "full": full,
            "partial": partial,
            "empty": empty,
        }

    @property
    def visible(self) -> int:
        """Visible elements."""
        return int(self.tiles.seen.sum())

    @property
    def share(self) -> float:
        """Visible elements over all elements."""
        return self.visible / (self.size.q_length * self.size.k_length)

    def cells(self, q_step: int, k_step: int) -> Cells:
        """The same part in cells of another size."""
        return count(self.form, self.size.q_length, self.size.k_length, q_step, k_step)

    def states(self, q_step: int, k_step: int) -> Tensor:
        """int8 `[nq, nk]` for cells of another size: the state that all tiles under a cell share, else
        partial.
        """
        least = most = self.tiles.states
        tile = self.tiles.q_step
        for dim, length, step in ((0, self.size.q_length, q_step), (1, self.size.k_length, k_step)):
            spans = [
                (start // tile, -(-min(start + step, length) // tile) - start // tile)
                for start in range(0, length, step)
            ]
            least = torch.stack([least.narrow(dim, *span).amin(dim) for span in spans], dim)
            most = torch.stack([most.narrow(dim, *span).amax(dim) for span in spans], dim)
        return torch.where(least == most, least, PARTIAL)

    def to_dict(self) -> dict[str, object]:
        """The numbers, for JSON."""
        at = self.size
        return {
            "mask": self.text,
            "batch": at.batch,
            "heads": at.heads,
            "b": at.b,
            "h": at.h,
            "lengths": [at.q_length, at.k_length],
            "form": self.form.kind,
            "form_bytes": self.form_bytes,
            "tile": self.tiles.q_step,
            "tiles": self.counts,
            "visible": self.visible,
            "share": self.share,
            "empty_rows": self.empty_rows,
        }


def survey(mask: masks.Mask, size: Size, tile: int, text: str | None = None) -> Survey:
    """Counts `mask` in tiles of `tile x tile`. `text` is what it is called; by default it writes itself.

    Raises:
        MaskError: the mask does not fit the call.
        ArgumentError: a batch element or head that the call does not have, or too many tiles to count.
    """
    Lq, Lk = size.q_length, size.k_length
    for name, index, length in (("b", size.b, size.batch), ("h", size.h, size.heads)):
        if not 0 <= index < length:
            raise ArgumentError(f"{name}: expected an index in [0, {length}), got {index}")
    tiles = -(-Lq // tile) * -(-Lk // tile)
    if tiles > _MOST_TILES:
        raise ArgumentError(f"tile: expected one that makes at most {_MOST_TILES:,} tiles, got {tiles:,}")
    form = masks.lower(mask, (), size.batch, size.heads, Lq, Lk, "cpu")
    held = sum(tensor.numel() * tensor.element_size() for tensor in form.tensors())
    shown = _single(form, size.b, size.h)
    empty = int(shown.empty_rows(Lq, Lk, "cpu").expand(1, 1, Lq).sum())
    return Survey(
        repr(mask) if text is None else text, size, shown, held, count(shown, Lq, Lk, tile, tile), empty
    )


def count(form: Form, Lq: int, Lk: int, q_step: int, k_step: int) -> Cells:
    """Counts a lowered mask of one batch element and head in cells of `q_step x k_step`."""
    heights, widths = _sides(Lq, q_step), _sides(Lk, k_step)
    size = heights[:, None] * widths
    states = form.tile_states(Lq, Lk, q_step, k_step, "cpu").expand(1, 1, *size.shape)[0, 0]
    seen = torch.where(states == FULL, size, 0)
    for row, line in enumerate(states == PARTIAL):
        q0 = row * q_step
        for first, last in _runs(line):
            found = _counted(form, q0, min(q0 + q_step, Lq), first * k_step, min(last * k_step, Lk), Lq, Lk)
            edges = torch.arange(first, last + 1) * k_step - first * k_step
            seen[row, first:last] = found[edges.clamp(max=found.numel() - 1)].diff()
    return Cells(q_step, k_step, seen, size)


def _sides(length: int, step: int) -> Tensor:
    """int64 `[ceil(length / step)]`: lengths of the cells along one side."""
    start = torch.arange(0, length, step)
    return (start + step).clamp(max=length) - start


def _runs(line: Tensor) -> list[tuple[int, int]]:
    """The stretches `[first, last)` of a bool `[n]` in which it is True."""
    edges = torch.nn.functional.pad(line.to(torch.int8), (1, 1)).diff().nonzero().squeeze(-1).tolist()
    return [pair for at, pair in enumerate(pairwise(edges)) if at % 2 == 0]


def _counted(form: Form, q0: int, q1: int, k0: int, k1: int, Lq: int, Lk: int) -> Tensor:
    """int64 `[k1 - k0 + 1]`: visible elements of rows `[q0, q1)` among keys `[k0, k0 + n)`, for every n."""
    columns = torch.zeros(k1 - k0, dtype=torch.int64)
    rows = max(1, _STRIPE // (k1 - k0))
    for start in range(q0, q1, rows):
        end = min(start + rows, q1)
        columns += form.tile(start, end, k0, k1, Lq, Lk, "cpu").expand(1, 1, -1, -1)[0, 0].sum(0)
    return torch.nn.functional.pad(columns.cumsum(0), (1, 0))


def _single(form: Form, b: int, h: int) -> Form:
    """The part of a lowered mask that one batch element and query head see."""

    def part(table: Tensor) -> Tensor:
        at = (b if table.shape[0] > 1 else 0, h if table.shape[1] > 1 else 0)
        return table[at[0] : at[0] + 1, at[1] : at[1] + 1]

    if isinstance(form, Band):
        return form
    if isinstance(form, Bits):
        return Bits(part(form.states), part(form.index), form.words)
    return replace(form, bounds=part(form.bounds), _cache={})
