"""`padding`: keys inside each sequence's length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tilefold.errors import MaskError
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Boxes, Length, Lines, Points, states
from tilefold.masks.intervals import Spans, spans

from ._checks import INTEGERS, a_tensor, check_shared
from ._tables import shared


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    key_lengths: Tensor
    side: str

    def _arguments(self) -> Arguments:
        side = () if self.side == "right" else (("side", self.side),)
        return (("", self.key_lengths), *side)

    def _keys(self, b: Tensor, k_length: Length) -> tuple[Length, Length]:
        """First and last-but-one key that is not padding."""
        n = self.key_lengths.long()[shared(b, self.key_lengths.shape[0])]
        return (0, n) if self.side == "right" else (k_length - n, k_length)

    def visible(self, p: Points) -> Tensor:
        first, last = self._keys(p.b, p.k_length)
        return (p.j >= first) & (p.j < last)

    def row_spans(self, lines: Lines) -> Spans | None:
        return spans(self._keys(lines.b, lines.k_length), like=lines.at)

    def col_spans(self, lines: Lines) -> Spans | None:
        first, last = self._keys(lines.b, lines.k_length)
        return spans((0, ((lines.at >= first) & (lines.at < last)) * lines.q_length), like=lines.at)

    def tiles(self, boxes: Boxes) -> Tensor:
        first, last = self._keys(boxes.b, boxes.k_length)
        return states((boxes.k0 >= last) | (boxes.k1 <= first), (boxes.k0 >= first) & (boxes.k1 <= last))

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        super().check(B, Hq, Lq, Lk, device)
        check_shared("key_lengths of padding", "the batch", self.key_lengths.shape[0], B)

    def check_values(self, Lq: int | None, Lk: int | None) -> None:
        if not self.key_lengths.numel():
            return
        least, most = int(self.key_lengths.amin()), int(self.key_lengths.amax())
        if least < 0 or (Lk is not None and most > Lk):
            bound = "at least 0" if Lk is None else f"in [0, {Lk}], the length of the keys"
            raise MaskError(
                f"key_lengths of padding: expected lengths {bound}, got {least if least < 0 else most}"
            )


def padding(key_lengths: Tensor, side: Literal["right", "left"] = "right") -> Mask:
    """Every query sees the keys inside its sequence's length; the rest is padding. Hides keys only: rows of
    padding still see keys.

    Args:
        key_lengths: int32 or int64 `[B]` (or `[1]`, shared), how many keys of each sequence are real.
        side: the side that is padded: real keys are the first (right) or the last ones (left).

    Raises:
        ArgumentTypeError, MaskError: not such a tensor, or another side.
    """
    if side not in ("right", "left"):
        raise MaskError(f"side: expected 'right' or 'left', got {side!r}")
    return Padding(a_tensor("key_lengths", key_lengths, "int32 or int64 of shape [B]", INTEGERS, (1,)), side)
