"""Cols: one or two hidden query intervals per key (FlashMask: Wang et al. 2024, arXiv:2410.01359; the
transpose of `Rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .context import capturing, states
from .rows import bounds_per_tile, compared, inside


@dataclass(frozen=True, eq=False)
class Cols:
    """`bounds`: int32 `[Bm, Hm, Lk, 2 * n]`, n in {1, 2}: (s1, e1, s2, e2), half-open HIDDEN query intervals
    of each key.

    Sorted, disjoint, not touching, inside `[0, Lq]`; an unused interval is (0, 0), the first of two if the
    other one does not start at 0. `Bm` is 1 or B, `Hm` is 1 or Hq.
    """

    bounds: Tensor
    kind: ClassVar[str] = "cols"
    _cache: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """Intervals per key, n."""
        return self.bounds.shape[-1] // 2

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bounds,)

    def tile(
        self, q0: int, q1: int, k0: int, k1: int, Lq: int, Lk: int, device: torch.device | str
    ) -> Tensor:
        """Exact visibility, bool `[Bm, Hm, q1 - q0, k1 - k0]`."""
        rows = torch.arange(q0, q1, dtype=torch.int32, device=self.bounds.device)
        return inside(self.bounds[:, :, k0:k1], rows).logical_not_().transpose(-1, -2)

    def tile_bounds(self, block: int) -> Tensor:
        """int32 `[Bm, Hm, ceil(Lk / block), 4 * n]`, see `rows.bounds_per_tile`; cached."""
        found = self._cache.get(block)
        if found is None:
            found = bounds_per_tile(self.bounds, block)
            if not capturing(found.device):
                self._cache[block] = found
        return found

    def tile_states(self, Lq: int, Lk: int, bq: int, bk: int, device: torch.device | str) -> Tensor:
        """int8 `[Bm, Hm, ceil(Lq / bq), ceil(Lk / bk)]`: 0 empty, 1 partial, 2 full.

        0 and 2 are never wrong. A tile may be called partial although it is full or empty, where single
        minima and maxima cannot tell: it is hidden by the union of both intervals, or its keys' n-th
        intervals lie on both sides of it.
        """
        misses, covers = compared(self.tile_bounds(bk), Lq, bq)
        return states(covers, misses).transpose(-1, -2)

    def visible_count(self, Lq: int, Lk: int) -> float:
        """Visible elements of one batch element and head, on average."""
        hidden = (self.bounds[..., 1::2] - self.bounds[..., 0::2]).clamp(min=0)
        tables = self.bounds.shape[0] * self.bounds.shape[1]
        return Lq * Lk - float(hidden.sum(dtype=torch.int64)) / tables

    def empty_rows(self, Lq: int, Lk: int, device: torch.device | str) -> Tensor:
        """bool `[Bm, Hm, Lq]`: rows that see no key, by counting how many keys hide each row."""
        Bm, Hm = self.bounds.shape[:2]
        steps = self.bounds.new_zeros((Bm, Hm, Lq + 1))
        for first in range(0, self.bounds.shape[-1], 2):
            ones = torch.ones_like(self.bounds[..., first])
            steps.scatter_add_(-1, self.bounds[..., first].long(), ones)
            steps.scatter_add_(-1, self.bounds[..., first + 1].long(), -ones)
        return steps.cumsum(-1)[..., :Lq] == Lk
