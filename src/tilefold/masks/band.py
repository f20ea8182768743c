"""Band: keys between two offsets around the row's diagonal, every `step`-th. No tensor; closed under `&`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .context import states


@dataclass(frozen=True)
class Band:
    """Key `j` is visible to row `i` iff `lo <= d <= hi` and `d % step == 0`, with `d = j - (i + Lk - Lq)`;
    None = unbounded.

    Two bands are equal iff they show the same offsets: bounds are multiples of `step`, a single offset has
    step 1, the empty band is `Band(0, -1)` and the full one `Band(None, None)`.
    """

    lo: int | None
    hi: int | None
    step: int = 1
    kind: ClassVar[str] = "band"

    def __post_init__(self) -> None:
        lo, hi, step = self.lo, self.hi, self.step
        lo = None if lo is None else -(-lo // step) * step
        hi = None if hi is None else hi // step * step
        if lo is not None and hi is not None:
            if lo > hi:
                lo, hi, step = 0, -1, 1
            elif lo == hi:
                step = 1
        for name, value in (("lo", lo), ("hi", hi), ("step", step)):
            object.__setattr__(self, name, value)

    # -- algebra ---------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return self.lo is not None and self.hi is not None and self.lo > self.hi

    @property
    def is_full(self) -> bool:
        return self.lo is None and self.hi is None and self.step == 1

    def intersection(self, other: Band) -> Band:
        """What both show: always a band."""
        los = [lo for lo in (self.lo, other.lo) if lo is not None]
        his = [hi for hi in (self.hi, other.hi) if hi is not None]
        return Band(max(los, default=None), min(his, default=None), math.lcm(self.step, other.step))

    def union(self, other: Band) -> Band | None:
        """What either shows, where that is a band: one inside the other, or both of one step and touching."""
        if self.contains(other):
            return self
        if other.contains(self):
            return other
        step = self._shared_step(other)
        if step is None or _above(self, other, step) or _above(other, self, step):
            return None
        lo = None if self.lo is None or other.lo is None else min(self.lo, other.lo)
        hi = None if self.hi is None or other.hi is None else max(self.hi, other.hi)
        return Band(lo, hi, step)

    def _shared_step(self, other: Band) -> int | None:
        """The step of both; a single offset takes the other band's step if it lies on it."""
        if self.step == other.step:
            return self.step
        for one, many in ((self, other), (other, self)):
            if one.lo is not None and one.lo == one.hi and one.lo % many.step == 0:
                return many.step
        return None

    def complement(self) -> Band | None:
        """What it hides, where that is a band: half-lines, full and empty."""
        if self.step != 1:
            return None
        if self.is_empty:
            return Band(None, None)
        if self.lo is None:
            return Band(0, -1) if self.hi is None else Band(self.hi + 1, None)
        return Band(None, self.lo - 1) if self.hi is None else None

    def contains(self, other: Band) -> bool:
        """Does this band show everything that `other` shows?"""
        if other.is_empty:
            return True
        single = other.lo is not None and other.lo == other.hi
        on_step = (
            other.lo % self.step == 0 if single and other.lo is not None else other.step % self.step == 0
        )
        low = self.lo is None or (other.lo is not None and other.lo >= self.lo)
        high = self.hi is None or (other.hi is not None and other.hi <= self.hi)
        return on_step and low and high and not self.is_empty

    def shifted(self, by: int) -> Band | None:
        """The band whose offset `d` is this one's offset `d + by`; None where that leaves the residue class
        of zero.
        """
        if self.is_empty:
            return self
        single = self.lo is not None and self.lo == self.hi
        if by % self.step != 0 and not single:
            return None
        lo = None if self.lo is None else self.lo - by
        hi = None if self.hi is None else self.hi - by
        return Band(lo, hi, 1 if single else self.step)

    def clipped(self, Lq: int, Lk: int) -> Band:
        """The same mask for these lengths, with bounds that no pair of positions reaches removed."""
        if Lq == 0 or Lk == 0:
            return Band(None, None)
        least, most = 1 - Lk, Lq - 1
        if (self.lo is not None and self.lo > most) or (self.hi is not None and self.hi < least):
            return Band(0, -1)
        if self.step > max(1, -least, most):
            # Only the diagonal itself is left of the steps.
            return Band(0, 0).clipped(Lq, Lk)
        lo = None if self.lo is None or self.lo <= least else self.lo
        hi = None if self.hi is None or self.hi >= most else self.hi
        return Band(lo, hi, self.step)

    # -- the methods of every form ---------------------------------------------------------------------

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def tile(
        self, q0: int, q1: int, k0: int, k1: int, Lq: int, Lk: int, device: torch.device | str
    ) -> Tensor:
        """Exact visibility, bool `[1, 1, q1 - q0, k1 - k0]`."""
        rows = torch.arange(q0 + Lk - Lq, q1 + Lk - Lq, device=device).unsqueeze(1)
        offset = torch.arange(k0, k1, device=device) - rows
        return self.shows(offset)[None, None]

    def shows(self, offset: Tensor) -> Tensor:
        """bool like `offset`: is a key at this offset from the row's diagonal visible?"""
        seen = None
        if self.lo is not None:
            seen = offset >= bounded(self.lo)
        if self.hi is not None:
            below = offset <= bounded(self.hi)
            seen = below if seen is None else seen & below
        if self.step != 1:
            on_step = offset % bounded(self.step) == 0
            seen = on_step if seen is None else seen & on_step
        return torch.ones_like(offset, dtype=torch.bool) if seen is None else seen

    def box_states(self, least: Tensor, most: Tensor) -> Tensor:
        """int8 states (0 empty, 1 partial, 2 full) of tiles in which every offset of `[least, most]` occurs,
        and no other. Exact.
        """
        low = least if self.lo is None else least.clamp(min=bounded(self.lo))
        high = most if self.hi is None else most.clamp(max=bounded(self.hi))
        full = (low == least) & (high == most)
        if self.step != 1:
            step = bounded(self.step)
            low = -(-low // step) * step
            full = full & (least == most) & (low == least)
        return states(low > high, full)

    def tile_states(self, Lq: int, Lk: int, bq: int, bk: int, device: torch.device | str) -> Tensor:
        """int8 `[1, 1, ceil(Lq / bq), ceil(Lk / bk)]`: 0 empty, 1 partial, 2 full; exact."""
        q0 = torch.arange(0, Lq, bq, device=device).unsqueeze(1)
        k0 = torch.arange(0, Lk, bk, device=device)
        q1, k1 = (q0 + bq).clamp(max=Lq), (k0 + bk).clamp(max=Lk)
        away = Lk - Lq
        return self.box_states(k0 - (q1 - 1 + away), k1 - 1 - (q0 + away))[None, None]

    def visible_count(self, Lq: int, Lk: int) -> float:
        """Visible elements of one batch element and head."""
        at = torch.arange(Lk - Lq, Lk, device="cpu")
        step = bounded(self.step)
        low = -at if self.lo is None else (-at).clamp(min=bounded(self.lo))
        high = Lk - 1 - at if self.hi is None else (Lk - 1 - at).clamp(max=bounded(self.hi))
        first, last = -(-low // step), high // step
        return float((last - first + 1).clamp(min=0).sum())

    def empty_rows(self, Lq: int, Lk: int, device: torch.device | str) -> Tensor:
        """bool `[1, 1, Lq]`: rows that see no key."""
        at = torch.arange(Lk - Lq, Lk, device=device)
        return (
            (self.box_states(-at, Lk - 1 - at) == 0)[None, None]
            if Lk > 0
            else torch.ones_like(at, dtype=torch.bool)[None, None]
        )


def bounded(bound: int) -> int:
    """A bound, step or count as int64 tensors can meet it: no position lies beyond 2^40, and arithmetic with
    that much never overflows.
    """
    return max(-(2**40), min(bound, 2**40))


def _above(a: Band, b: Band, step: int) -> bool:
    """Is there a gap between `b` and `a`, which lies above it?"""
    return a.lo is not None and b.hi is not None and a.lo > b.hi + step
