"""Tuning of a GPU's kernels: entries of the tables in `planning/tables`, tried on this GPU.

For each entry: the shapes of tiles with few stages or many, then other depths of the pipeline for the fastest
ones. Compilers have been wrong for some sizes, so a candidate is timed only after its results and gradients
were within the error budget of `testing.tolerance`; and what replaces sizes in use is checked on everything
that the entry serves.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import tilefold
from tilefold.errors import TilefoldError
from tilefold.planning import tuned
from tilefold.testing.cases import Call
from tilefold.testing.evaluate import Expectation, Subject, expect, observe
from tilefold.testing.tolerance import Verdict, pool

from .cases import BenchCase, build
from .entries import Scale, shared_memory
from .gate import in_words
from .hopper_entries import AnyEntry
from .timing import Clock, Run, clock_for, take_turns

#: Sizes of one kernel or another.
Sizes = Any
#: How many of the fastest candidates are tried with other stages, and meet the old sizes at the end.
FINALISTS = 3
#: Seconds and least rounds of one candidate.
SECONDS, ROUNDS = 0.05, 5
#: Sizes in use stay unless others are faster by this factor: less is noise.
MARGIN = 0.98
#: More draws of a case where a single one is over its budget, which may be a matter of luck.
DRAWS = 8


@dataclass
class Trial:
    """One candidate.

    Attributes:
        status: "timed"; "wrong", with what was wrong; "failed" to compile or to fit, with the error; "large":
            an estimate says that it cannot fit; "left" untried, for want of time.
        seconds: median seconds of the call, forward or backward, that runs the kernel.
        compile_seconds: by which the first call took longer than another: in the compiler or reading its
            cache. That of the sizes in use may include other kernels of the call.
    """

    sizes: Sizes
    status: str
    reasons: list[str] = field(default_factory=list)
    seconds: float | None = None
    compile_seconds: float | None = None


@dataclass
class Found:
    """What tuning found for one entry.

    Attributes:
        old, best: sizes before and after; equal where nothing better is right.
        old_seconds, seconds: medians of the last comparison; None where those sizes are not right here.
        trials: of every candidate.
    """

    entry: AnyEntry
    old: Sizes
    best: Sizes
    old_seconds: float | None = None
    seconds: float | None = None
    trials: list[Trial] = field(default_factory=list)

    def count(self, status: str) -> int:
        return sum(trial.status == status for trial in self.trials)

    @property
    def compile_seconds(self) -> float | None:
        """Of the best sizes."""
        return next((t.compile_seconds for t in self.trials if t.sizes == self.best), None)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "entry": self.entry.name,
            "old": self.entry.stored(self.old),
            "old_seconds": self.old_seconds,
            "new": self.entry.stored(self.best),
            "new_seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "trials": [vars(trial) | {"sizes": self.entry.stored(trial.sizes)} for trial in self.trials],
        }


@dataclass
class KernelTuning:
    """What tuning found for the kernels.

    Attributes:
        left: names of entries for which the time did not suffice.
        path: where the table was written; "" if it was not.
    """

    architecture: str
    entries: list[Found] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    path: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """Entries of a table, those that were measured."""
        return {f.entry.name: f.entry.stored(f.best) for f in self.entries if f.seconds is not None}

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        entries = [found.to_dict() for found in self.entries]
        return {
            "architecture": self.architecture,
            "entries": entries,
            "left": self.left,
            "path": self.path,
        }


@functools.lru_cache(maxsize=64)
def _expected(case: BenchCase, device: str, seed: int) -> tuple[Call, Expectation]:
    call = build(case, device, seed)
    return call, expect(call)


def _verdicts(case: BenchCase, device: str, seed: int, backend: str) -> list[Verdict]:
    """Results and gradients against float64."""
    call, expected = _expected(case, device, seed)
    mask = "every key" if case.mask == "none" else case.mask
    where = f"{mask}, {'{} x {}'.format(*case.lengths)}, {case.dtype}"
    return expected.judge(observe(Subject(backend, device), call, case.wanted), where)


def wrong(cases: Sequence[BenchCase], device: str, backend: str) -> list[str]:
    """What is over its error budget with the sizes in force, as text."""
    for case in cases:
        verdicts = _verdicts(case, device, 1, backend)
        if not all(verdict.ok for verdict in verdicts):
            verdicts = pool([verdicts, *(_verdicts(case, device, 2 + n, backend) for n in range(DRAWS))])
        if found := [str(verdict) for verdict in verdicts if not verdict.ok]:
            return found
    return []


def _attend(call: Call, backend: str) -> Tensor:
    return tilefold.attention(call.q, call.k, call.v, backend=backend, **call.options)


def _forward(call: Call, backend: str) -> Tensor:
    with torch.no_grad():
        return _attend(call, backend)


def run_of(entry: AnyEntry, call: Call) -> Run:
    """A forward, or a backward for the gradients that call the entry's kernel; its forward is done here."""
    names = entry.gradients
    if not names:
        return partial(_forward, call, entry.backend)
    leaves = {name: call.arguments[name].detach().requires_grad_() for name in names}
    out = _attend(call.with_arguments(**leaves), entry.backend)
    return partial(torch.autograd.grad, out, list(leaves.values()), call.dout, retain_graph=True)


# The search.


class _Search:
    """The candidates of one entry, each tried once."""

    def __init__(self, entry: AnyEntry, device: str, scale: Scale, clock: Clock, end: float) -> None:
        self.entry, self.device, self.scale, self.clock, self.end = entry, device, scale, clock, end
        self.shared = shared_memory(device)
        self.call = build(entry.timed_case(scale), device)
        self.trials: dict[Sizes, Trial] = {}

    def run(self, old: Sizes, candidates: Sequence[Sizes], report: Callable[[Sizes], None]) -> Found:
        """The sizes in use first, then what is like them; candidates that are given instead of the grid."""
        self.try_all([old], report)
        self.try_all(candidates or self.entry.first_candidates(old), report)
        if not candidates:
            self.try_all(self.entry.deeper([t.sizes for t in self.fastest()[:FINALISTS]]), report)
        return self.settle(old)

    def try_all(self, candidates: Sequence[Sizes], report: Callable[[Sizes], None]) -> None:
        for sizes in candidates:
            if sizes not in self.trials:
                report(sizes)
                self.trials[sizes] = self._try(sizes)

    def _try(self, sizes: Sizes) -> Trial:
        if sizes is not None and not self.entry.fits(sizes, self.shared):
            return Trial(sizes, "large")
        if time.monotonic() >= self.end and self.trials:
            return Trial(sizes, "left")
        cases = self.entry.checked_cases(self.scale)
        with self.entry.in_force(sizes):
            try:
                compiled = self._first_call(cases[0])
                if reasons := wrong(cases, self.device, self.entry.backend):
                    return Trial(sizes, "wrong", reasons)
                return Trial(sizes, "timed", [], self.time(), compiled)
            except TilefoldError:
                raise
            except Exception as error:  # whatever compilers and drivers raise; it is reported
                self._still_alive(error)
                return Trial(sizes, "failed", [in_words(error)])

    def _first_call(self, case: BenchCase) -> float | None:
        """Seconds by which it takes longer than a second one; None where nothing is compiled."""
        if torch.device(self.device).type != "cuda":
            return None
        _expected(case, self.device, 1)
        took = []
        for _ in range(2):
            start = self.clock.now()
            _verdicts(case, self.device, 1, self.entry.backend)
            took.append(self.clock.now() - start)
        return max(0.0, took[0] - took[1])

    def _still_alive(self, error: Exception) -> None:
        """Raises if the failure has broken the device for this process: all that follows would fail too."""
        if torch.device(self.device).type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as broken:
                raise broken from error

    def time(self) -> float:
        """Median seconds of the typical call with the sizes in force."""
        run = run_of(self.entry, self.call)
        return take_turns({"": [run]}, SECONDS, ROUNDS, self.clock)[""].median

    def fastest(self) -> list[Trial]:
        """Trials that were timed, the fastest first."""
        found = [trial for trial in self.trials.values() if trial.status == "timed"]
        return sorted(found, key=lambda trial: trial.seconds or 0.0)

    def settle(self, old: Sizes) -> Found:
        """The old sizes and the fastest ones in turns, since a GPU's clock changes within minutes; whatever
        replaces the old ones is checked on all that it serves.
        """
        found = Found(self.entry, old, old, trials=list(self.trials.values()))
        best = self.fastest()[:FINALISTS]
        best += [trial for trial in self.fastest() if trial.sizes == old and trial not in best]
        rounds: dict[Sizes, list[float]] = {trial.sizes: [] for trial in best}
        for _ in range(3):
            for sizes, seconds in rounds.items():
                with self.entry.in_force(sizes):
                    seconds.append(self.time())
        times = {sizes: median(seconds) for sizes, seconds in rounds.items()}
        found.old_seconds = found.seconds = times.get(old)
        for sizes in sorted(times, key=lambda sizes: times[sizes]):
            slower = found.seconds is not None and times[sizes] > found.seconds * MARGIN
            if sizes == old or slower:
                break
            if self._holds_everywhere(sizes):
                found.best, found.seconds = sizes, times[sizes]
                break
        return found

    def _holds_everywhere(self, sizes: Sizes) -> bool:
        trial = self.trials[sizes]
        with self.entry.in_force(sizes):
            try:
                trial.reasons = wrong(
                    self.entry.checked_cases(self.scale, True), self.device, self.entry.backend
                )
                trial.status = "wrong" if trial.reasons else "timed"
            except TilefoldError:
                raise
            except Exception as error:  # as above
                self._still_alive(error)
                trial.status, trial.reasons = "failed", [in_words(error)]
        return trial.status == "timed"


def tune_kernels(
    device: str,
    entries: Sequence[AnyEntry],
    limit: float = math.inf,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    write: bool = True,
    scale: Scale | None = None,
    candidates: Sequence[Sizes] = (),
) -> KernelTuning:
    """Tries sizes for entries of the table and keeps the best.

    What is found for one entry is in force while the next ones are tried, and is kept at once, so that an
    interrupt loses one entry only.

    Args:
        device: "cuda" or "cuda:N"; or "cpu" under Triton's interpreter.
        entries: in the order of `entries.choose`.
        limit: seconds for all of them, each having its share of what is left.
        progress: `(entry and candidate, entries done, entries in all)`, called before each candidate.
        write: keep what was found in the user's table.
        scale: how large calls are.
        candidates: beside the sizes in use, instead of those of the grid.

    Raises:
        BackendError: the kernels do not run on this device.
        RuntimeError: a candidate has broken the device for this process.
    """
    kind, clock = torch.device(device).type, clock_for(device)
    found = KernelTuning(tuned.architecture(device))
    end = time.monotonic() + limit
    with ExitStack() as stack:
        for done, entry in enumerate(entries):
            now = time.monotonic()
            if now >= end:
                found.left.append(entry.name)
                continue
            share = now + (end - now) / (len(entries) - done)
            old = entry.current(kind)
            search = _Search(entry, device, scale or Scale(), clock, share)

            def report(sizes: Sizes, entry: AnyEntry = entry, done: int = done) -> None:
                progress(f"{entry.name}: {entry.in_short(sizes)}", done, len(entries))

            found.entries.append(search.run(old, candidates, report))
            stack.enter_context(tuned.trying(entry.name, entry.stored(found.entries[-1].best)))
            if write and found.values:
                path = tuned.keep(found.architecture, found.values)
                found.path = str(path) if path is not None else ""
    return found
