"""What masks around the diagonal share: each says its `Band`, and all answers follow."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilefold.masks.band import Band, bounded
from tilefold.masks.base import Mask
from tilefold.masks.context import Boxes, Lines, Points, position
from tilefold.masks.intervals import Spans, spans


@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(Mask):
    """A mask that depends on the offset `j - (i + Lk - Lq)` only."""

    def around(self) -> Band:
        """The offsets that are visible."""
        raise NotImplementedError

    def visible(self, p: Points) -> Tensor:
        return self.around().shows(p.j - position(p.i, p.q_length, p.k_length))

    def band(self, Lq: int, Lk: int) -> Band | None:
        return self.around()

    def row_spans(self, lines: Lines) -> Spans | None:
        band = self.around()
        if band.step != 1:
            return None
        at = position(lines.at, lines.q_length, lines.k_length)
        start = 0 if band.lo is None else at + bounded(band.lo)
        end = lines.k_length if band.hi is None else at + bounded(band.hi + 1)
        return spans((start, end), like=lines.at)

    def col_spans(self, lines: Lines) -> Spans | None:
        band = self.around()
        if band.step != 1:
            return None
        at = lines.at - (lines.k_length - lines.q_length)
        start = 0 if band.hi is None else at - bounded(band.hi)
        end = lines.q_length if band.lo is None else at + 1 - bounded(band.lo)
        return spans((start, end), like=lines.at)

    def tiles(self, boxes: Boxes) -> Tensor:
        away = boxes.k_length - boxes.q_length
        least = boxes.k0 - (boxes.q1 - 1 + away)
        most = boxes.k1 - 1 - (boxes.q0 + away)
        return self.around().box_states(least, most)
