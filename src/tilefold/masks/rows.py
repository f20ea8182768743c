"""Rows: one or two visible key intervals per query row (FlashMask's idea, by query)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .context import capturing, states

NEVER = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Rows:
    """`bounds`: int32 `[Bm, Hm, Lq, 2 * n]`, n in {1, 2}: (s1, e1, s2, e2), half-open VISIBLE key intervals
    of each row.

    Sorted, disjoint, not touching, inside `[0, Lk]`; an unused interval is (0, 0), the first of two if the
    other one does not start at 0. `Bm` is 1 or B, `Hm` is 1 or Hq.
    """

    bounds: Tensor
    kind: ClassVar[str] = "rows"
    _cache: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """Intervals per row, n."""
        return self.bounds.shape[-1] // 2

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bounds,)

    def tile(
        self, q0: int, q1: int, k0: int, k1: int, Lq: int, Lk: int, device: torch.device | str
    ) -> Tensor:
        """Exact visibility, bool `[Bm, Hm, q1 - q0, k1 - k0]`."""
        keys = torch.arange(k0, k1, dtype=torch.int32, device=self.bounds.device)
        return inside(self.bounds[:, :, q0:q1], keys)

    def tile_bounds(self, block: int) -> Tensor:
        """int32 `[Bm, Hm, ceil(Lq / block), 4 * n]`, see `bounds_per_tile`; cached."""
        found = self._cache.get(block)
        if found is None:
            found = bounds_per_tile(self.bounds, block)
            if not capturing(found.device):
                self._cache[block] = found
        return found

    def tile_states(self, Lq: int, Lk: int, bq: int, bk: int, device: torch.device | str) -> Tensor:
        """int8 `[Bm, Hm, ceil(Lq / bq), ceil(Lk / bk)]`: 0 empty, 1 partial, 2 full.

        0 and 2 are never wrong. A tile may be called partial although it is empty (its rows' n-th intervals
        lie on both sides of it) or full (some rows cover it with their first interval and others with their
        second): only minima and maxima are compared.
        """
        misses, covers = compared(self.tile_bounds(bq), Lk, bk)
        return states(misses, covers)

    def visible_count(self, Lq: int, Lk: int) -> float:
        """Visible elements of one batch element and head, on average."""
        lengths = (self.bounds[..., 1::2] - self.bounds[..., 0::2]).clamp(min=0)
        return float(lengths.sum(dtype=torch.int64)) / (self.bounds.shape[0] * self.bounds.shape[1])

    def as_band(self, Lq: int, Lk: int) -> tuple[int | None, int | None] | None:
        """`(lo, hi)` of the band that shows the same, None for an unbounded side; None without one."""
        if self.count > 1 or Lq == 0 or bool((self.bounds != self.bounds[:1, :1]).any()):
            return None
        start, end = self.bounds[0, 0].long().unbind(-1)
        at = torch.arange(Lk - Lq, Lk, device=start.device)
        lows, highs = (start - at)[(start > 0) & (start < end)], (end - 1 - at)[(end < Lk) & (start < end)]
        lo = int(lows[0]) if lows.numel() else None
        hi = int(highs[0]) if highs.numel() else None
        first = torch.zeros_like(at) if lo is None else (at + lo).clamp(min=0)
        last = torch.full_like(at, Lk) if hi is None else (at + hi + 1).clamp(max=Lk)
        seen = first < last
        same = (torch.where(seen, first, 0) == start) & (torch.where(seen, last, 0) == end)
        return (lo, hi) if bool(same.all()) else None

    def empty_rows(self, Lq: int, Lk: int, device: torch.device | str) -> Tensor:
        """bool `[Bm, Hm, Lq]`: rows that see no key."""
        return (self.bounds[..., 0::2] >= self.bounds[..., 1::2]).all(-1)


def inside(bounds: Tensor, at: Tensor) -> Tensor:
    """bool `[Bm, Hm, N, len(at)]`: does position `at` lie in an interval of `bounds` int32 `[Bm, Hm, N, 2 *
    n]`?
    """
    hit = None
    for first in range(0, bounds.shape[-1], 2):
        start, end = bounds[..., first, None], bounds[..., first + 1, None]
        here = (at >= start) & (at < end)
        hit = here if hit is None else hit.logical_or_(here)
    assert hit is not None
    return hit


def bounds_per_tile(bounds: Tensor, block: int) -> Tensor:
    """int32 `[Bm, Hm, tiles, 4 * n]` of int32 `[Bm, Hm, N, 2 * n]`: least start, greatest start, least end,
    greatest end per interval.

    The least start passes over empty intervals (`NEVER` if all are empty), so that they do not widen what the
    tile may touch.
    """
    lines = bounds.shape[2]
    spare = -lines % block
    columns = []
    for first in range(0, bounds.shape[-1], 2):
        start, end = bounds[..., first], bounds[..., first + 1]
        lives = torch.where(start < end, start, NEVER)
        for values, fill, least in (
            (lives, NEVER, True),
            (start, 0, False),
            (end, NEVER, True),
            (end, 0, False),
        ):
            padded = torch.nn.functional.pad(values, (0, spare), value=fill) if spare else values
            split = (
                padded.unflatten(-1, (-1, block))
                if lines
                else padded.new_zeros((*padded.shape[:2], 0, block))
            )
            columns.append(split.amin(-1) if least else split.amax(-1))
    return torch.stack(columns, dim=-1)


def compared(tile_bounds: Tensor, length: int, block: int) -> tuple[Tensor, Tensor]:
    """(all intervals of all lines miss, one interval of all lines covers), bool `[Bm, Hm, tiles, ceil(length
    / block)]`, both sound.
    """
    at = torch.arange(0, length, block, dtype=torch.int32, device=tile_bounds.device)
    to = (at + block).clamp(max=length)
    misses = covers = None
    for first in range(0, tile_bounds.shape[-1], 4):
        least_start, most_start, least_end, most_end = tile_bounds[..., first : first + 4, None].unbind(-2)
        away = (least_start >= to).logical_or_(most_end <= at)
        over = (most_start <= at).logical_and_(least_end >= to)
        misses = away if misses is None else misses.logical_and_(away)
        covers = over if covers is None else covers.logical_or_(over)
    assert misses is not None
    assert covers is not None
    return misses, covers
