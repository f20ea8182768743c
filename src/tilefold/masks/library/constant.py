"""`full`, `empty`: everything, nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..band import Band
from ..base import Mask
from ..intervals import spans


@dataclass(frozen=True, eq=False, repr=False)
class Full(Mask):
    def visible(self, b, h, i, j, q_length, k_length):
        return torch.ones((), dtype=torch.bool, device=i.device)

    def band(self, Lq, Lk):
        return Band(None, None)

    def row_spans(self, lines):
        return spans((0, lines.k_length), like=lines.at)

    def col_spans(self, lines):
        return spans((0, lines.q_length), like=lines.at)

    def tiles(self, boxes):
        return torch.full((1, 1, 1, 1), 2, dtype=torch.int8, device=boxes.q0.device)


@dataclass(frozen=True, eq=False, repr=False)
class Empty(Mask):
    def visible(self, b, h, i, j, q_length, k_length):
        return torch.zeros((), dtype=torch.bool, device=i.device)

    def band(self, Lq, Lk):
        return Band(0, -1)

    def row_spans(self, lines):
        return spans(like=lines.at)

    def col_spans(self, lines):
        return spans(like=lines.at)

    def tiles(self, boxes):
        return torch.zeros((1, 1, 1, 1), dtype=torch.int8, device=boxes.q0.device)


def full() -> Mask:
    """Every query sees every key."""
    return Full()


def empty() -> Mask:
    """No query sees any key."""
    return Empty()
