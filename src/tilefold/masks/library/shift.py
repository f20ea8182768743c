"""`shift`: a part of a larger mask."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilefold.errors import MaskError
from tilefold.masks import intervals
from tilefold.masks.band import Band
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Boxes, Lines, Points
from tilefold.masks.intervals import Spans

from ._checks import a_mask, an_int


@dataclass(frozen=True, eq=False, repr=False)
class Shift(Mask):
    mask: Mask
    dq: int
    dk: int
    Lq: int
    Lk: int

    def _arguments(self) -> Arguments:
        return ("", self.mask), ("", self.dq), ("", self.dk), ("", self.Lq), ("", self.Lk)

    def _parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def _covers(self, Lq: int, Lk: int) -> bool:
        """Does a call of these lengths lie inside the original one?"""
        return 0 <= self.dq <= self.Lq - Lq and 0 <= self.dk <= self.Lk - Lk

    def visible(self, p: Points) -> Tensor:
        i, j = p.i + self.dq, p.j + self.dk
        inside = (i >= 0) & (i < self.Lq) & (j >= 0) & (j < self.Lk)
        i, j = i.clamp(0, max(self.Lq - 1, 0)), j.clamp(0, max(self.Lk - 1, 0))
        return inside & self.mask.visible(Points(p.b, p.h, i, j, self.Lq, self.Lk))

    def band(self, Lq: int, Lk: int) -> Band | None:
        inner = self.mask.band(self.Lq, self.Lk)
        if inner is None or not self._covers(Lq, Lk):
            return None
        return inner.shifted((Lk - Lq) + self.dk - self.dq - (self.Lk - self.Lq))

    def row_spans(self, lines: Lines) -> Spans | None:
        at = lines.at + self.dq
        inner = self.mask.row_spans(replace(lines, at=at, q_length=self.Lq, k_length=self.Lk))
        return self._moved(inner, (at >= 0) & (at < self.Lq), self.Lk, self.dk)

    def col_spans(self, lines: Lines) -> Spans | None:
        at = lines.at + self.dk
        inner = self.mask.col_spans(replace(lines, at=at, q_length=self.Lq, k_length=self.Lk))
        return self._moved(inner, (at >= 0) & (at < self.Lk), self.Lq, self.dq)

    def _moved(self, inner: Spans | None, inside: torch.Tensor, length: int, by: int) -> Spans | None:
        """`inner` clipped to the original side, on lines that are inside, in this mask's coordinates."""
        if inner is None or inner.count == 0:
            return inner
        inner = intervals.canonical(inner, length)
        return Spans(torch.where(inside, inner.start, 0) - by, torch.where(inside, inner.end, 0) - by)

    def tiles(self, boxes: Boxes) -> Tensor:
        q0, q1, k0, k1 = boxes.q0 + self.dq, boxes.q1 + self.dq, boxes.k0 + self.dk, boxes.k1 + self.dk
        inside = (q0 >= 0) & (q1 <= self.Lq) & (k0 >= 0) & (k1 <= self.Lk)
        inner = self.mask.tiles(Boxes(boxes.b, boxes.h, q0, q1, k0, k1, self.Lq, self.Lk, boxes.size))
        return torch.where(inside, inner, torch.ones_like(inner))

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        if Lq is not None and Lk is not None and not self._covers(Lq, Lk):
            queries, keys = f"[{self.dq}, {self.dq + Lq})", f"[{self.dk}, {self.dk + Lk})"
            raise MaskError(
                f"mask shift: expected a call inside the original lengths ({self.Lq}, {self.Lk}), "
                f"got queries {queries} and keys {keys} of it"
            )
        self.mask.check(B, Hq, self.Lq, self.Lk, device)

    def check_values(self, Lq: int | None, Lk: int | None) -> None:
        self.mask.check_values(self.Lq, self.Lk)


def shift(mask: Mask, dq: int, dk: int, Lq: int, Lk: int) -> Mask:
    """`mask` at `(q + dq, k + dk)`: the part of a call of lengths `(Lq, Lk)` that starts at query `dq` and
    key `dk`.

    The diagonal stays that of the original call. Calls that reach outside the original one are refused;
    inside `documents`, where that cannot be checked, positions outside are hidden.

    Args:
        mask: the mask of the original call.
        dq, dk: the original query and key that become query 0 and key 0.
        Lq, Lk: lengths of the original call.

    Raises:
        ArgumentTypeError, MaskError: not a mask, not ints, or negative lengths.
    """
    offsets = an_int("dq", dq), an_int("dk", dk)
    return Shift(a_mask("mask", mask), *offsets, an_int("Lq", Lq, 0), an_int("Lk", Lk, 0))
