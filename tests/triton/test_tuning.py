"""`tilefold tune` on the real kernels, under Triton's interpreter: tiny calls, few candidates, wall time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tilefold.bench import tune_kernels as tuning
from tilefold.bench.entries import INTERPRETED, Scale, Sizes, parse
from tilefold.cost import store
from tilefold.planning import tuned

pytest.importorskip("triton", reason="Triton is not installed")

from tilefold.backends.triton import backward, forward
from tilefold.backends.triton.kernel import Launch

pytestmark = pytest.mark.interpreter

TINY = Scale(odd=(37, 45), length=32, tokens=64, channels=64)
OLD, WRONG, RIGHT = INTERPRETED, (16, 32, 4, 1), (32, 16, 4, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table of the user that is empty, and one timed round per candidate."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    monkeypatch.setattr(tuning, "SECONDS", 0.0)
    monkeypatch.setattr(tuning, "ROUNDS", 1)
    tuned._table.cache_clear()
    yield tmp_path
    tuned._table.cache_clear()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[Sizes]:
    """Kernels that are wrong for tiles of the sizes `WRONG`, as after a miscompilation; and the sizes of all
    launches of the forward kernel and of those for keys.
    """
    launched: list[Sizes] = []
    run = Launch.__call__

    def call(self: Launch, programs: int, arguments: list[Any], device: Any) -> None:
        run(self, programs, arguments, device)
        C = self.variant
        sizes = (C.BM, C.BN, self.warps, C.STAGES)
        if self.kernel in (forward.forward_kernel, backward.keys_kernel) and not C.REPAIR:
            launched.append(sizes)
            # `out`, or dk and dv.
            results = arguments[3:4] if self.kernel is forward.forward_kernel else arguments[6:8]
            for x in results:
                if sizes == WRONG and isinstance(x, Tensor):
                    x[..., -1, 0] += 0.25

    monkeypatch.setattr(Launch, "__call__", call)
    return launched


@pytest.mark.parametrize("name", ["triton/forward/16/64/short", "triton/dk/16/64/rows"])
def test_a_candidate_with_wrong_numbers_is_named_and_never_timed(
    name: str, broken: list[Sizes], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    timed: list[Sizes] = []
    take_turns = tuning.take_turns

    def note(*args: Any) -> Any:
        before = len(broken)
        found = take_turns(*args)
        # Kernels that are not tried keep their tiles, those of the candidates differ from them.
        timed.extend(set(broken[before:]) - {OLD})
        return found

    monkeypatch.setattr(tuning, "take_turns", note)
    found = tuning.tune_kernels("cpu", [parse(name)], scale=TINY, candidates=[WRONG, RIGHT])
    one = found.entries[0]
    assert {trial.sizes: trial.status for trial in one.trials} == {
        OLD: "timed", WRONG: "wrong", RIGHT: "timed"
    }  # fmt: skip
    (reason,) = (trial.reasons[0] for trial in one.trials if trial.reasons)
    assert ("out" if "forward" in name else "grad k") in reason and "OVER" in reason
    assert {WRONG, RIGHT, OLD} <= set(broken)
    assert set(timed) == {RIGHT}
    best = tuned.sizes([name], "cpu")
    assert best in (OLD, RIGHT) and best == one.best
    assert one.seconds is not None and one.seconds > 0.0


def test_the_kernel_for_both_meets_a_kernel_each(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[tuple[bool, bool]] = set()
    run = Launch.__call__

    def call(self: Launch, *args: Any) -> None:
        if self.kernel is backward.keys_kernel:
            launched.add((self.variant.WANT_K, self.variant.WANT_V))
        run(self, *args)

    monkeypatch.setattr(Launch, "__call__", call)
    entry = parse("triton/keys/16/64/short")
    found = tuning.tune_kernels("cpu", [entry], scale=TINY, candidates=[None], write=False)
    assert {trial.sizes: trial.status for trial in found.entries[0].trials} == {OLD: "timed", None: "timed"}
    assert launched == {(True, True), (True, False), (False, True)}
