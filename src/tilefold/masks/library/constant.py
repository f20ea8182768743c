"""`full`, `empty`: everything, nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.masks.band import Band
from tilefold.masks.base import Mask
from tilefold.masks.context import Boxes, Lines, Points
from tilefold.masks.intervals import Spans, spans


@dataclass(frozen=True, eq=False, repr=False)
class Full(Mask):
    def visible(self, p: Points) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=p.i.device)

    def band(self, Lq: int, Lk: int) -> Band | None:
        return Band(None, None)

    def row_spans(self, lines: Lines) -> Spans | None:
        return spans((0, lines.k_length), like=lines.at)

    def col_spans(self, lines: Lines) -> Spans | None:
        return spans((0, lines.q_length), like=lines.at)

    def tiles(self, boxes: Boxes) -> Tensor:
        return torch.full((1, 1, 1, 1), 2, dtype=torch.int8, device=boxes.q0.device)


@dataclass(frozen=True, eq=False, repr=False)
class Empty(Mask):
    def visible(self, p: Points) -> Tensor:
        return torch.zeros((), dtype=torch.bool, device=p.i.device)

    def band(self, Lq: int, Lk: int) -> Band | None:
        return Band(0, -1)

    def row_spans(self, lines: Lines) -> Spans | None:
        return spans(like=lines.at)

    def col_spans(self, lines: Lines) -> Spans | None:
        return spans(like=lines.at)

    def tiles(self, boxes: Boxes) -> Tensor:
        return torch.zeros((1, 1, 1, 1), dtype=torch.int8, device=boxes.q0.device)


def full() -> Mask:
    """Every query sees every key."""
    return Full()


def empty() -> Mask:
    """No query sees any key."""
    return Empty()
