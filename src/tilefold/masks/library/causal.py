"""`causal`: no query sees what comes after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tilefold.errors import MaskError
from tilefold.masks.band import Band
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Boxes, Lines, Points
from tilefold.masks.intervals import Spans, spans

from ._diagonal import Diagonal


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Diagonal):
    def around(self) -> Band:
        return Band(None, 0)


@dataclass(frozen=True, eq=False, repr=False)
class TopLeftCausal(Mask):
    """`key <= query`, whatever the lengths: the diagonal starts in the top left corner."""

    def _name(self) -> str:
        return "causal"

    def _arguments(self) -> Arguments:
        return (("align", "top-left"),)

    def visible(self, p: Points) -> Tensor:
        return p.j <= p.i

    def band(self, Lq: int, Lk: int) -> Band | None:
        return Band(None, Lq - Lk)

    def row_spans(self, lines: Lines) -> Spans | None:
        return spans((0, lines.at + 1), like=lines.at)

    def col_spans(self, lines: Lines) -> Spans | None:
        return spans((lines.at, lines.q_length), like=lines.at)

    def tiles(self, boxes: Boxes) -> Tensor:
        return Band(None, 0).box_states(boxes.k0 - (boxes.q1 - 1), boxes.k1 - 1 - boxes.q0)


def causal(align: Literal["bottom-right", "top-left"] = "bottom-right") -> Mask:
    """Query `i` sees keys `j <= i + Lk - Lq` (bottom-right, so that the last query sees everything) or `j <=
    i` (top-left).

    Args:
        align: which corner of the score matrix the diagonal ends in.

    Raises:
        MaskError: another alignment.
    """
    if align == "bottom-right":
        return Causal()
    if align == "top-left":
        return TopLeftCausal()
    raise MaskError(f"align: expected 'bottom-right' or 'top-left', got {align!r}")
