"""The programs of a GPU kernel, and when the last of them ends."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

#: The most programs that are played through one by one.
_PLAYED = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Programs that GPU cores work off. A cost is counted in units, such as visits of a full tile.

    Attributes:
        costs: float64 `[lines, tables]` on the CPU: what a program costs, lines in the order of their start.
        pairs: programs of each line, a multiple of `tables`; neighbours share a table.
        group: pairs start in sections of a multiple of this many.
        pair_bytes: what the programs of one pair read again and again. The lines of a `section` of pairs all
            start before the next section.
        per_core: programs that run on a core at once.
        flops: of matrix products in one unit.
        share: of the peak of matrix units that these products reach while every core is busy.
        instructions: elementwise ones of one unit that do not overlap with its products.
    """

    costs: Tensor
    pairs: int
    group: int
    pair_bytes: int
    per_core: int
    flops: float
    share: float = 1.0
    instructions: float = 0.0

    @property
    def programs(self) -> int:
        """How many there are."""
        return self.costs.shape[0] * self.pairs

    @property
    def units(self) -> float:
        """What all programs cost together."""
        return float(self.costs.sum()) * (self.pairs / max(self.costs.shape[1], 1))

    def makespan(self, cores: int, cache_bytes: int) -> float:
        """Units from the first start to the last end, where each program begins on the place that is free
        first. Among more than some thousand programs, that of the last is bounded from above instead.
        """
        places, programs = cores * self.per_core, self.programs
        if programs == 0:
            return 0.0
        least, most = float(self.costs.min()), float(self.costs.max())
        if least == most:
            return -(-programs // places) * most
        costs = self._started(cache_bytes)
        if programs <= _PLAYED:
            return _play(costs.tolist(), places)
        # When a program starts, all places have been busy with those before it.
        before = costs.cumsum(0) - costs
        return float((before / places + costs).max())

    def _started(self, cache_bytes: int) -> Tensor:
        """Costs of all programs, in the order of their start."""
        span = section(self.pairs, cache_bytes // 2 // max(self.pair_bytes, 1) * self.group, self.group)
        whole = self.costs.repeat_interleave(self.pairs // self.costs.shape[1], dim=1)
        return torch.cat([section.reshape(-1) for section in whole.split(span, dim=1)])


def section(pairs: int, fitting: int, group: int = 1) -> int:
    """How many pairs make a section, a multiple of `group`, where `fitting` ones fit half of the cache: less
    than twice as many, so that the last section is not a small one, whose long lines would be at work alone
    in the end.
    """
    groups = pairs // group
    return max(1, -(-groups // max(1, groups // max(1, fitting // group)))) * group


def _play(costs: list[float], places: int) -> float:
    """The last end."""
    free = [0.0] * places
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)
