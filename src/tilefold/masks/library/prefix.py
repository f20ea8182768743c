"""`prefix`: the first keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.errors import MaskError
from tilefold.masks.band import Band, bounded
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Boxes, Lines, Points, states
from tilefold.masks.intervals import Spans, spans

from ._checks import INTEGERS, a_tensor, an_int, check_shared
from ._tables import shared


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    n: Any

    def _arguments(self) -> Arguments:
        return (("", self.n),)

    def _keys(self, b: Tensor) -> Any:
        """How many keys are seen: an int, or int64 like `b`."""
        if isinstance(self.n, Tensor):
            return self.n.long()[shared(b, self.n.shape[0])]
        return bounded(self.n)

    def visible(self, p: Points) -> Tensor:
        return p.j < self._keys(p.b)

    def band(self, Lq: int, Lk: int) -> Band | None:
        if isinstance(self.n, Tensor) or 0 < self.n < Lk:
            return None
        return Band(0, -1) if self.n == 0 else Band(None, None)

    def row_spans(self, lines: Lines) -> Spans | None:
        return spans((0, self._keys(lines.b)), like=lines.at)

    def col_spans(self, lines: Lines) -> Spans | None:
        return spans((0, (lines.at < self._keys(lines.b)) * lines.q_length), like=lines.at)

    def tiles(self, boxes: Boxes) -> Tensor:
        n = self._keys(boxes.b)
        return states(boxes.k0 >= n, boxes.k1 <= n)

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        super().check(B, Hq, Lq, Lk, device)
        if isinstance(self.n, Tensor):
            check_shared("n of prefix", "the batch", self.n.shape[0], B)

    def check_values(self, Lq: int | None, Lk: int | None) -> None:
        if isinstance(self.n, Tensor) and self.n.numel() and int(self.n.amin()) < 0:
            raise MaskError(f"n of prefix: expected lengths of at least 0, got {int(self.n.amin())}")


def prefix(n: int | Tensor) -> Mask:
    """Every query sees keys `< n`; `prefix(n) | causal()` is a prefix language model.

    Args:
        n: an int of at least 0, or int32 / int64 `[B]` with one length per batch element.

    Raises:
        ArgumentTypeError, MaskError: neither of these.
    """
    if isinstance(n, Tensor):
        return Prefix(a_tensor("n", n, "an int, or int32 or int64 of shape [B]", INTEGERS, (1,)))
    return Prefix(an_int("n", n, 0))
