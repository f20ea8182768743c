"""`prefix`: the first keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import MaskError
from ..band import Band
from ..base import Mask
from ..context import states
from ..intervals import spans
from ._checks import INTEGERS, a_tensor, an_int, check_shared
from ._tables import shared


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    n: Any

    def _arguments(self):
        return (("", self.n),)

    def _keys(self, b):
        """How many keys are seen: an int, or int64 like `b`."""
        if isinstance(self.n, Tensor):
            return self.n.long()[shared(b, self.n.shape[0])]
        return self.n

    def visible(self, b, h, i, j, q_length, k_length):
        return j < self._keys(b)

    def band(self, Lq, Lk):
        if isinstance(self.n, Tensor) or 0 < self.n < Lk:
            return None
        return Band(0, -1) if self.n == 0 else Band(None, None)

    def row_spans(self, lines):
        return spans((0, self._keys(lines.b)), like=lines.at)

    def col_spans(self, lines):
        return spans((0, (lines.at < self._keys(lines.b)) * lines.q_length), like=lines.at)

    def tiles(self, boxes):
        n = self._keys(boxes.b)
        return states(boxes.k0 >= n, boxes.k1 <= n)

    def check(self, B, Hq, Lq, Lk, device):
        super().check(B, Hq, Lq, Lk, device)
        if isinstance(self.n, Tensor):
            check_shared("n of prefix", "the batch", self.n.shape[0], B)

    def check_values(self, Lq, Lk):
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
