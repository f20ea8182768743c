"""Fair measuring: contestants take turns, inputs rotate, medians and quartiles; and the memory of a call."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tilefold.errors import ArgumentError

Run = Callable[[], Any]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Timing:
    """What the turns of one contestant took, in seconds, in the order of the turns."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        """The lower quartile."""
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        """The upper quartile."""
        return self._quartiles()[2]

    @property
    def best(self) -> float:
        return min(self.seconds)

    def _quartiles(self) -> list[float]:
        if len(self.seconds) == 1:
            return [self.seconds[0]] * 3
        return statistics.quantiles(self.seconds, n=4, method="inclusive")


class Clock(Protocol):
    """Measures runs."""

    def now(self) -> float:
        """Seconds from any fixed moment."""
        ...

    def time(self, run: Run) -> float:
        """Seconds that `run` takes."""
        ...


class WallClock:
    """Wall time. Results are released after the clock has stopped."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def time(self, run: Run) -> float:
        start = self.now()
        result = run()
        elapsed = self.now() - start
        del result
        return elapsed


class CudaClock:
    """Time between two events on a device, after its L2 cache was filled with something else."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        size = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._flush = torch.ones(max(2 * size, 1 << 20) // 4, dtype=torch.int32, device=self.device)

    def now(self) -> float:
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def time(self, run: Run) -> float:
        with torch.cuda.device(self.device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.add_(1)
            start.record()
            result = run()
            end.record()
            end.synchronize()
        del result
        return start.elapsed_time(end) / 1e3


def clock_for(device: torch.device | str) -> Clock:
    """The clock of a device kind."""
    return CudaClock(device) if torch.device(device).type == "cuda" else WallClock()


def take_turns(
    contestants: Mapping[str, Sequence[Run]],
    seconds: float,
    rounds: int = 3,
    clock: Clock | None = None,
) -> dict[str, Timing]:
    """Times the contestants in turns, for about `seconds` and at least `rounds` rounds, after one
    round that does not count.

    Each contestant has one run per set of inputs. Round `n` takes set `n`, beginning anew after the last; and
    another contestant begins in every round, so that nobody always follows the same neighbour.

    Raises:
        ArgumentError: a contestant without runs, or fewer than one round.
    """
    if rounds < 1:
        raise ArgumentError(f"rounds: expected at least 1, got {rounds}")
    for name, runs in contestants.items():
        if not runs:
            raise ArgumentError(f"contestants: expected a run per set of inputs, got none for {name!r}")
    clock = clock or WallClock()
    names = list(contestants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for runs in contestants.values():
        clock.time(runs[0])
    end, done = clock.now() + seconds, 0
    while names and (done < rounds or clock.now() < end):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            runs = contestants[name]
            found[name].append(clock.time(runs[done % len(runs)]))
        done += 1
    return {name: Timing(tuple(times)) for name, times in found.items()}


def extra_memory(run: Callable[[], tuple[Tensor, ...]], device: torch.device | str = "cpu") -> int:
    """The most bytes that torch's allocator held at once during `run`, beyond what it held before, without
    those of the results.
    """
    results, peak = peak_memory(run, device)
    return peak - sum(t.untyped_storage().nbytes() for t in results)


def peak_memory(run: Callable[[], Result], device: torch.device | str = "cpu") -> tuple[Result, int]:
    """What `run` returns, and the most bytes that torch's allocator held at once meanwhile, beyond what it
    held before.

    On CUDA the caching allocator counts them. On a CPU it is the largest sum of the profiler's memory events,
    those inside kernels included.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = run()
        torch.cuda.synchronize(device)
        return results, torch.cuda.max_memory_allocated(device) - before
    options: Any = {"activities": [torch.profiler.ProfilerActivity.CPU], "profile_memory": True}
    with _silent_stderr(), torch.profiler.profile(acc_events=True, **options) as profile:
        results = run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, held)
    return results, peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Sends file descriptor 2 nowhere: some builds of the profiler write to it at every start and stop."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
