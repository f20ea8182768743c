"""Tuning: the sizes of the tables in `planning/tables`, tried on named cases of this machine.

Here the tiles of the eager backend's fold; those of the kernels are in `tune_kernels`. Every candidate is
checked before it is timed: a tile size that gives wrong numbers is an error, not a slow candidate.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tilefold
from tilefold.cost import measure
from tilefold.errors import ArgumentError
from tilefold.planning import tuned
from tilefold.testing.cases import Call

from .cases import CASES, BenchCase, build_sets, short
from .machine import machine
from .run import runs_of
from .timing import Run, clock_for, take_turns
from .tune_kernels import KernelTuning, wrong

#: Per device kind, cases that run in the tiled fold and not in PyTorch's fused kernels.
PRACTICE = {
    "cpu": ("softcap-2k", "alibi-2k", "bias-2k", "dropout-2k"),
    "cuda": ("cuda-causal-4k-d128", "cuda-full-1k-d64", "cuda-window-16k"),
}
#: Candidates for `fold_tile_elements`. The fold holds some six tiles in float32 at once, so that the last
#: ones bound its memory: 200 MB on a CPU, 400 MB on a GPU.
CANDIDATES = {
    "cpu": tuple(1 << n for n in range(16, 24)),
    "cuda": tuple(1 << n for n in range(20, 25)),
}
KEY = "fold_tile_elements"
BACKEND = "eager"


@dataclass
class Tuning:
    """What tuning found.

    Attributes:
        architecture: name of the table.
        before: the value that was in force.
        best: the fastest candidate.
        seconds: median seconds of a step (forward and backward), by case and candidate.
        path: where the table was written; "" if it was not.
    """

    architecture: str
    before: int
    best: int = 0
    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    path: str = ""

    def relative(self, candidate: int) -> float:
        """Geometric mean over the cases of a candidate's time over the best one's of that case."""
        ratios = [times[candidate] / min(times.values()) for times in self.seconds.values()]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        tried = {str(c): self.relative(c) for c in next(iter(self.seconds.values()), {})}
        return {
            "architecture": self.architecture,
            KEY: self.best,
            "before": self.before,
            "relative": tried,
            "seconds": {case: {str(c): s for c, s in times.items()} for case, times in self.seconds.items()},
            "path": self.path,
        }


def tune(
    device: str = "cpu",
    seconds: float = 4.0,
    progress: Callable[[str, int, int], None] = lambda case, done, total: None,
    write: bool = True,
    candidates: Sequence[int] = (),
    cases: Sequence[BenchCase] = (),
) -> Tuning:
    """Measures this machine anew and picks the fold's tiles.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        seconds: for the turns of one case, all candidates together.
        progress: `(case, cases done, cases in all)`, called before each case.
        write: keep what was found in the user's table, which every later process reads.
        candidates, cases: instead of those of the device kind.

    Raises:
        ArgumentError: a device kind without cases, or a candidate that gives wrong numbers.
    """
    kind = torch.device(device).type
    if kind not in PRACTICE:
        raise ArgumentError(f"device: expected cpu or cuda, got {device!r}")
    found = Tuning(tuned.architecture(device), tuned.look_up(KEY, kind))
    chosen = list(cases) or [CASES[name] for name in PRACTICE[kind]]
    for done, case in enumerate(chosen):
        progress(case.name, done, len(chosen))
        found.seconds[case.name] = _times(case, candidates or CANDIDATES[kind], device, seconds)
    found.best = min(next(iter(found.seconds.values())), key=found.relative)
    if write:
        # What was measured with other tiles no longer holds.
        measure.forget()
        path = tuned.keep(found.architecture, {KEY: found.best})
        found.path = str(path) if path is not None else ""
    return found


def _times(case: BenchCase, candidates: Sequence[int], device: str, seconds: float) -> dict[int, float]:
    """Median seconds of a step with every candidate."""
    calls = build_sets(case, device, 1)
    runs: dict[str, list[Run]] = {}
    for candidate in candidates:
        with tuned.trying(KEY, candidate):
            reasons = wrong([short(case)], device, BACKEND)
        if reasons:
            raise ArgumentError(
                f"{KEY}: expected a size that gives right numbers, got {candidate} in {case.name}: "
                f"{'; '.join(reasons)}"
            )
        step = runs_of(_attend, calls, case, case.backward)[0]
        runs[str(candidate)] = [partial(_with_tiles, candidate, step)]
    timings = take_turns(runs, seconds, rounds=3, clock=clock_for(device))
    return {int(candidate): timing.median for candidate, timing in timings.items()}


def _with_tiles(candidate: int, step: Run) -> Any:
    with tuned.trying(KEY, candidate):
        return step()


def _attend(call: Call) -> Tensor:
    return tilefold.attention(call.q, call.k, call.v, backend=BACKEND, **call.options)


def whole_table(device: str, fold: Tuning, kernels: KernelTuning | None = None) -> str:
    """A table for `planning/tables`: the shipped one of this architecture, with what was found laid over it.

    Bytes of stack that the shipped table states remain for the sizes that remain; those of new sizes are to
    be stated anew.
    """
    before = tuned.alone(fold.architecture)
    found = {} if kernels is None else kernels.values
    entries = {name: value for name, value in (before | found).items() if "/" in name}
    table: dict[str, Any] = {
        "measured": True,
        "machine": f"{machine(device)}, PyTorch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
        KEY: fold.best,
    }
    if stack := before.get("stack_bytes"):
        same = {name for name in stack if "/" not in name or entries[name] == before[name]}
        table["stack_bytes"] = {name: count for name, count in stack.items() if name in same}
    table |= dict(sorted(entries.items()))
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"
