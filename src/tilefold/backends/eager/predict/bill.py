"""What a pass will take, added up by the names of the rates in `calibrate.py`."""

from __future__ import annotations

from collections import defaultdict

import torch

from tilefold.cost.memory import Heap
from tilefold.cost.steps import Step

from ..pieces import rows_per_block
from .calibrate import KEY_BLOCK, at_size, class_of


def matrix_units() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 (AMX), of which PyTorch's kernels make use."""
    # PyTorch has no public question for it.
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(asked and asked())


class Bill:
    """Steps, traffic and held memory of one pass.

    Attributes:
        dim, size: the head size, and the bytes of an element.
        threads: among which work is divided.
        packs: whether PyTorch's forward kernel may pack keys and values.
        serial: whether the parts of a step are operations of their own; see `Step`.
        heap: what is held beyond arguments and results.
        traffic: bytes between slow and fast memory, by what they belong to.
    """

    def __init__(
        self, dim: int, size: int, threads: int | None = None, *, serial: bool = False, packs: bool = False
    ) -> None:
        self.dim, self.size, self.packs = dim, size, packs
        self.threads, self.serial = threads or torch.get_num_threads(), serial
        self.heap = Heap()
        self.traffic: dict[str, float] = defaultdict(float)
        self._units: dict[str, float] = defaultdict(float)
        self._flops: dict[str, float] = defaultdict(float)
        self._passes: dict[str, float] = defaultdict(float)
        self._exps: dict[str, float] = defaultdict(float)
        self._ops: dict[str, float] = defaultdict(float)

    def add(
        self,
        rate: str,
        units: float,
        *,
        flops: float = 0.0,
        passes: float = 0.0,
        exps: float = 0.0,
        ops: float = 0.0,
    ) -> None:
        """`units` of the rate, and what a machine without that rate has to know."""
        if units:
            self._units[rate] += units
            self._flops[rate] += flops
            self._passes[rate] += passes
            self._exps[rate] += exps
            self._ops[rate] += ops

    def add_sized(self, label: str, units: float, **work: float) -> None:
        """`add` for a rate that was measured at some head sizes."""
        for size, weight in at_size(self.dim).items():
            self.add(f"{label}, D {size}", weight * units, **work)
            # The work counts once, whatever sizes its time is made up of.
            work = {}

    def steps(self) -> tuple[Step, ...]:
        """Everything so far."""
        return tuple(
            Step(
                rate,
                units,
                self._flops[rate],
                self._passes[rate],
                self._exps[rate],
                self._ops[rate],
                self.serial,
            )
            for rate, units in self._units.items()
        )

    def kernel(
        self,
        direction: str,
        kind: str,
        pairs: int,
        rows: int,
        keys: int,
        times: int = 1,
        group: int = 1,
    ) -> None:
        """`times` calls of PyTorch's kernel on `rows x keys` for `pairs` of a batch element and a query head,
        `group` of which share their keys.

        The forward shares blocks of rows among the threads, in runs of equal length; the backward shares
        key heads, or the inside of its products where there is only one.
        """
        reach = _reach(kind, rows, keys)
        costs, squares = _blocks(rows, reach), [-(-r // KEY_BLOCK) for r in reach]
        elements, name = float(sum(costs)), direction
        if direction == "forward":
            units, blocks = (_busiest(pairs, x, self.threads) for x in (costs, squares))
        else:
            alone = pairs // group < self.threads
            busy = pairs if alone else -(-pairs // group // self.threads) * group
            units, blocks = busy * elements, float(busy * sum(squares))
            name = "backward alone" if alone else direction
        label = f"{name}, {class_of(rows)} rows"
        self.add_sized(f"kernel block {label}", times * blocks)
        products = 2 if direction == "forward" else 5
        work = times * pairs * elements
        self.add_sized(
            f"kernel {label}",
            times * units,
            flops=2.0 * products * work * self.dim,
            passes=4.0 * work * (4 if direction == "forward" else 8),
            exps=work,
            ops=times,
        )
        self._count_traffic(direction, times * pairs, rows, sum(reach))
        if kind in ("band", "table"):
            self.add(f"kernel mask {direction}", times * _shared(pairs, rows * keys, self.threads))

    def _count_traffic(self, direction: str, pairs: int, rows: int, reached: int) -> None:
        """Rows move once, keys and values once per block of rows; their gradients come and go."""
        once, each = (pairs * length * self.dim * self.size for length in (rows, reached))
        moved = {"q": once, "k": each, "v": each, "out": once}
        if direction == "backward":
            moved |= {"dout": once, "dq": once, "dk": 2 * each, "dv": 2 * each}
        for name, count in moved.items():
            self.traffic[name] += count
        self.traffic["lse"] += 4 * pairs * rows


def _reach(kind: str, rows: int, keys: int) -> list[int]:
    """Keys that each block of rows visits. An `is_causal` call skips whole blocks of keys."""
    height = rows_per_block(rows)
    count = -(-rows // height)
    if kind not in ("causal", "flipped"):
        return [keys] * count
    return [min(-(-min((m + 1) * height, keys) // KEY_BLOCK) * KEY_BLOCK, keys) for m in range(count)]


def _blocks(rows: int, reach: list[int]) -> list[int]:
    """Elements that each block of rows visits, whose keys are counted in `reach`."""
    height = rows_per_block(rows)
    return [min(height, rows - m * height) * keys for m, keys in enumerate(reach)]


def _busiest(pairs: int, costs: list[int], threads: int) -> float:
    """Elements of the thread that has the most, when `pairs` copies of `costs` are dealt out in runs."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    tasks = pairs * len(costs)
    run = -(-tasks // threads)

    def before(task: int) -> int:
        whole, rest = divmod(min(task, tasks), len(costs))
        return whole * sums[-1] + sums[rest]

    return float(max(before(at + run) - before(at) for at in range(0, tasks, run)))


def _shared(pairs: int, elements: int, threads: int) -> float:
    """Elements of the busiest thread where whole pairs are dealt out."""
    return -(-pairs // threads) * elements if pairs >= threads else pairs * elements / threads
