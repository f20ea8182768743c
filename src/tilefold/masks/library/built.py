"""Masks that hold their lowered tables: what `Mask.build` returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.errors import MaskError
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.bits import Bits
from tilefold.masks.cols import Cols
from tilefold.masks.context import Points
from tilefold.masks.rows import Rows

from ._checks import check_shared
from ._tables import shared


@dataclass(frozen=True, eq=False, repr=False)
class Built(Mask):
    """A lowered form and the lengths for which it was made. `index` and `words` belong to `Bits` only."""

    kind: str
    Lq: int
    Lk: int
    table: Tensor
    index: Tensor | None = None
    words: Tensor | None = None

    def _arguments(self) -> Arguments:
        tensors = (self.table, self.index, self.words)
        return (
            ("", self.kind),
            ("", self.Lq),
            ("", self.Lk),
            *(("", tensor) for tensor in tensors if tensor is not None),
        )

    @property
    def form(self) -> Rows | Cols | Bits:
        """The lowered form."""
        found = self.__dict__.get("_form")
        if found is None:
            found = self._make_form()
            object.__setattr__(self, "_form", found)
        return found

    def _make_form(self) -> Rows | Cols | Bits:
        if self.kind == "rows":
            return Rows(self.table)
        if self.kind == "cols":
            return Cols(self.table)
        if self.index is None or self.words is None:
            raise MaskError("mask built: expected states, index and words, got a table alone")
        return Bits(self.table, self.index, self.words)

    def visible(self, p: Points) -> Tensor:
        inside = (p.i >= 0) & (p.i < self.Lq) & (p.j >= 0) & (p.j < self.Lk)
        if self.Lq == 0 or self.Lk == 0:
            return torch.zeros((), dtype=torch.bool, device=self.table.device)
        form, i, j = self.form, p.i.clamp(0, self.Lq - 1), p.j.clamp(0, self.Lk - 1)
        if isinstance(form, Bits):
            return inside & form.look(p.b, p.h, i, j)
        line, at = (i, j) if isinstance(form, Rows) else (j, i)
        Bm, Hm = form.bounds.shape[:2]
        bounds = form.bounds[shared(p.b, Bm), shared(p.h, Hm), line]
        hit = (at.unsqueeze(-1) >= bounds[..., 0::2]) & (at.unsqueeze(-1) < bounds[..., 1::2])
        return inside & (hit.any(-1) == isinstance(form, Rows))

    def states(self, B: int, H: int, Lq: int, Lk: int, size: int, device: torch.device) -> Tensor:
        if (Lq, Lk) == (self.Lq, self.Lk):
            return self.form.tile_states(Lq, Lk, size, size, device)
        return super().states(B, H, Lq, Lk, size, device)

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        super().check(B, Hq, Lq, Lk, device)
        for got, wanted, name in ((Lq, self.Lq, "Lq"), (Lk, self.Lk, "Lk")):
            if got is not None and got != wanted:
                # Inside a compiled region the lengths may be symbols, which cannot be formatted.
                expected = f"the lengths for which it was built, ({int(self.Lq)}, {int(self.Lk)})"
                raise MaskError(f"mask: expected {expected}, got {name} = {int(got)}")
        check_shared("mask that was built", "the batch", self.table.shape[0], B)
        check_shared("mask that was built", "the query heads", self.table.shape[1], Hq)


def built(
    kind: str, Lq: int, Lk: int, table: Tensor, index: Tensor | None = None, words: Tensor | None = None
) -> Mask:
    """The mask that `form` holds; only `build` and `parse` call this."""
    if kind not in ("rows", "cols", "bits"):
        raise MaskError(f"mask built: expected rows, cols or bits, got {kind!r}")
    return Built(kind, Lq, Lk, table, index, words)
