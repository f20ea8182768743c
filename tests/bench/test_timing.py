"""Turns, rotation and quartiles under a clock that only the contestants move; memory of known allocations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tilefold.bench.machine import machine, versions
from tilefold.bench.timing import Timing, WallClock, clock_for, extra_memory, take_turns
from tilefold.errors import ArgumentError


class FakeTime:
    """A moment that moves only when a run takes its time; `log` holds who ran on which set."""

    def __init__(self) -> None:
        self.moment = 100.0
        self.log: list[tuple[str, int]] = []

    def __call__(self) -> float:
        return self.moment

    def runs(self, name: str, costs: list[float], sets: int = 1) -> list[Callable[[], None]]:
        """Runs of `name`, one per set; turn `n` (the round that does not count included) takes `costs[n]`."""
        left = iter(costs)

        def run(which: int) -> None:
            self.log.append((name, which))
            self.moment += next(left)

        return [lambda which=which: run(which) for which in range(sets)]


def test_turns_alternate_inputs_rotate_and_the_first_round_does_not_count() -> None:
    time = FakeTime()
    contestants = {"a": time.runs("a", [9.0, 1.0, 2.0, 4.0], 2), "b": time.runs("b", [9.0] + [0.5] * 3, 2)}
    found = take_turns(contestants, 0.0, 3, WallClock(time))
    assert time.log[:2] == [("a", 0), ("b", 0)]
    assert time.log[2:] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 0), ("b", 0)]
    assert found == {"a": Timing((1.0, 2.0, 4.0)), "b": Timing((0.5, 0.5, 0.5))}


def test_turns_go_on_for_the_time_that_is_given() -> None:
    time = FakeTime()
    found = take_turns(
        {"a": time.runs("a", [1.0] * 99), "b": time.runs("b", [2.0] * 99)}, 30.0, 3, WallClock(time)
    )
    assert [len(timing.seconds) for timing in found.values()] == [10, 10]


def test_median_and_quartiles() -> None:
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (timing.best, timing.low, timing.median, timing.high) == (1.0, 2.0, 3.0, 4.0)
    once = Timing((2.5,))
    assert (once.best, once.low, once.median, once.high) == (2.5, 2.5, 2.5, 2.5)


def test_results_are_released_after_the_clock_has_stopped() -> None:
    time = FakeTime()

    class Slow:
        def __del__(self) -> None:
            time.moment += 50.0

    assert WallClock(time).time(Slow) == 0.0
    assert time.moment == 150.0


def test_nothing_to_run() -> None:
    assert take_turns({}, 5.0) == {}
    with pytest.raises(ArgumentError, match="rounds: expected at least 1, got 0"):
        take_turns({"a": [lambda: None]}, 0.0, 0)
    with pytest.raises(
        ArgumentError, match="contestants: expected a run per set of inputs, got none for 'b'"
    ):
        take_turns({"a": [lambda: None], "b": []}, 0.0, 1)


def test_the_clock_of_a_cpu_is_a_wall_clock() -> None:
    assert isinstance(clock_for("cpu"), WallClock)


def test_extra_memory_counts_the_worst_moment_without_results() -> None:
    x = torch.ones(1024, 256)  # 1 MiB

    def run() -> tuple[torch.Tensor, ...]:
        first = x + 1
        second = first * 2
        del first
        third = second * 3
        return (third.sum(),)

    assert 2 << 20 <= extra_memory(run) < (2 << 20) + 4096
    assert 0 <= extra_memory(lambda: (x + 1,)) < 4096


def test_measuring_memory_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    extra_memory(lambda: (torch.ones(10) + 1,))
    assert capfd.readouterr() == ("", "")


def test_the_machine_in_words() -> None:
    assert str(torch.get_num_threads()) in machine()
    assert machine().endswith(torch.backends.cpu.get_cpu_capability())
    assert versions()["torch"] == torch.__version__
