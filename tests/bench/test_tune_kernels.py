"""Tuning of the kernels: which entries, which candidates, and who wins. The kernels are played by numbers
here; `tests/triton/test_tuning.py` tunes the real ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilefold import Problem, masks
from tilefold.bench import hopper_entries as hopper
from tilefold.bench import tune_kernels as tuning
from tilefold.bench.cases import BenchCase, mask_of
from tilefold.bench.entries import (
    INTERPRETED,
    KERNELS,
    KINDS,
    Entry,
    Scale,
    Sizes,
    checked_cases,
    choose,
    deeper,
    first_candidates,
    fits,
    in_force,
    parse,
    timed_case,
)
from tilefold.cost import store
from tilefold.errors import ArgumentError, BackendError
from tilefold.planning import tuned
from tilefold.testing.cases import DTYPES
from tilefold.testing.tolerance import Verdict

TINY = Scale(odd=(37, 45), length=32, tokens=64, channels=64)
OLD = INTERPRETED
FORWARD, KEYS = parse("triton/forward/16/64"), parse("triton/keys/16/64")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    tuned._table.cache_clear()
    yield tmp_path
    tuned._table.cache_clear()


# -- entries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["gpu", "sm90", "sm86"])
def test_by_default_every_entry_of_16_bits_is_chosen_and_both_ways_of_dk_and_dv(arch: str) -> None:
    names = {
        name for name in tuned.shipped(arch) if name.startswith("triton/") and name.split("/")[2] == "16"
    }
    chosen = [entry.name for entry in choose(arch)]
    assert len(chosen) == len(set(chosen))
    assert names <= set(chosen)
    more = set(chosen) - names
    assert {"triton/keys/16/256", "triton/keys/16/576"} <= more
    assert all(name.replace("/keys/", "/dk/") in names for name in more)
    for name in chosen:
        if "/keys/" in name:
            assert all(
                chosen.index(apart) < chosen.index(name)
                for apart in (name.replace("/keys/", f"/{kernel}/") for kernel in ("dk", "dv"))
                if apart in chosen
            )


def test_options_choose_among_the_entries() -> None:
    found = choose("sm90", kernels=["forward", "queries"], heads=[64, 128], kinds=["any", "rows"])
    assert {entry.name for entry in found} == {
        f"triton/{kernel}/16/{head}{kind}"
        for kernel in ("forward", "queries") for head in (64, 128) for kind in ("", "/rows")
    }  # fmt: skip
    assert {e.bits for e in choose("gpu", bits=[32])} == {32}
    assert [e.kind for e in choose("gpu", kernels=["bias"], heads=[64], kinds=list(KINDS))] == ["any"]
    assert all(parse(entry.name) == entry for entry in choose("sm90", kinds=list(KINDS)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kernels": ["forwards"]}, "kernels: expected some of forward, .*, got 'forwards'"),
        ({"heads": [100]}, "heads: expected some of 64, 128, 256, 576, got 100"),
        ({"bits": [8]}, "bits: expected some of 16, 32, got 8"),
        ({"kinds": ["band"]}, "kinds: expected some of any, full, short, .*, got 'band'"),
    ],
)
def test_unknown_choices_are_refused(options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        choose("gpu", **options)  # pyright: ignore[reportArgumentType]


# -- candidates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch, shared", [("sm90", 227 << 10), ("gpu", 99 << 10)])
def test_the_estimate_lets_through_what_is_known_to_fit(arch: str, shared: int) -> None:
    for name, sizes in tuned.alone(arch).items():
        if name.startswith("triton/") and sizes is not None:
            assert fits(parse(name), tuple(sizes), shared), name


def test_the_estimate_stops_what_cannot_fit() -> None:
    wide = parse("triton/forward/16/256")
    # Three tiles of 128 keys beyond the one at work take 384 KiB; one row of sums takes 256 registers.
    assert fits(wide, (64, 128, 8, 2), 227 << 10)
    assert not fits(wide, (64, 128, 8, 4), 227 << 10)
    assert not fits(wide, (128, 128, 4, 1), 227 << 10)
    # What a kernel for keys moves are rows.
    assert not fits(parse("triton/dk/16/256"), (128, 32, 8, 4), 227 << 10)
    assert fits(parse("triton/dk/16/256"), (32, 128, 8, 4), 227 << 10)


def test_candidates_are_a_grid_with_the_likest_first() -> None:
    grid = first_candidates(FORWARD, (64, 128, 8, 3))
    assert grid[0] == (64, 128, 8, 3)
    assert len(grid) == len(set(grid)) == 32
    assert {sizes[3] for sizes in grid if sizes} == {3}
    assert grid[-1] == (16, 16, 4, 3)
    assert first_candidates(KEYS, None)[0] is None
    # What else a table says stays as it is.
    assert {sizes[3:] for sizes in first_candidates(FORWARD, (64, 64, 4, 2, 1)) if sizes} == {(2, 1)}
    assert deeper(FORWARD, [(64, 128, 8, 3, 1)])[0] == (64, 128, 8, 1, 1)
    assert deeper(FORWARD, [(64, 128, 8, 3, 1, 128)])[-1] == (64, 128, 8, 3, 2, 128)
    assert FORWARD.in_short((64, 128, 8, 3, 1)) == "64 x 128, 8 warps, 3 stages, 1 loop"
    assert FORWARD.in_short((64, 128, 8, 3, 2, 128)) == "64 x 128, 8 warps, 3 stages, 2 loops, 128 registers"
    stages = [(64, 128, 8, n) for n in (1, 2, 3, 4)]
    assert deeper(FORWARD, [(64, 128, 8, 3)]) == [*stages, (64, 128, 8, 3, 1)]
    assert deeper(KEYS, [None]) == []
    assert deeper(parse("triton/bias/16/64"), [(64, 128, 8, 3)]) == stages


# -- the Hopper kernel ---------------------------------------------------------------------------------------


def test_the_hopper_kernel_has_entries_on_its_gpu_alone() -> None:
    every = [entry.name for entry in hopper.choose("sm90")]
    ours = [name for name in every if name.startswith("hopper/")]
    assert every[: len(every) - len(ours)] == [entry.name for entry in choose("sm90")]
    assert len(ours) == len(set(ours)) == 3 * 9 - 2
    assert "hopper/128/short band" in ours and "hopper/256/short band" not in ours
    assert not any(entry.name.startswith("hopper/") for entry in hopper.choose("sm86"))
    with pytest.raises(ArgumentError, match=r"kernels: expected some of forward, .*, bias, got 'hopper'"):
        hopper.choose("sm86", ["hopper"])
    with pytest.raises(
        ArgumentError, match=r"kinds: expected some of any, .*, short band, window, got 'wide'"
    ):
        hopper.choose("sm90", kinds=["wide"])


@pytest.mark.parametrize(
    "options, names",
    [
        (
            {"kernels": ["hopper"], "heads": [64], "kinds": ["band", "full"]},
            {"hopper/64/full", "hopper/64/band"},
        ),
        ({"kinds": ["short full"], "heads": [128]}, {"hopper/128/short full"}),
        (
            {"kernels": ["forward", "hopper"], "heads": [128], "kinds": ["rows"]},
            {"triton/forward/16/128/rows", "hopper/128/rows"},
        ),
    ],
    ids=str,
)
def test_options_choose_among_the_entries_of_the_hopper_kernel(
    options: dict[str, Any], names: set[str]
) -> None:
    assert {entry.name for entry in hopper.choose("sm90", **options)} == names


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": ["forward"], "kinds": ["band"]},
        {"kernels": ["hopper"], "bits": [32]},
        {"kernels": ["hopper"], "heads": [96]},
        {"kernels": ["hopper"], "heads": [256], "kinds": ["short band"]},
    ],
    ids=str,
)
def test_a_choice_that_no_entry_has_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="expected a choice that some entry of the table has, got"):
        hopper.choose("sm90", **options)


@pytest.mark.parametrize("entry", hopper.choose("sm90", ["hopper"]), ids=lambda entry: entry.name)
def test_sizes_of_the_hopper_kernel(entry: hopper.HopperEntry) -> None:
    shared, old = 227 << 10, entry.current("cuda")
    assert dict(old) == tuned.hopper_sizes(entry.head, entry.kind) == entry.stored(old)
    assert entry.fits(old, shared)
    grid = entry.first_candidates(old)
    assert grid and len(grid) == len(set(grid))
    deep = entry.deeper([old])
    for sizes in [*grid, *deep]:
        assert entry.fits(sizes, shared)
        assert tuned.makes_sense(entry.name, entry.stored(sizes))
    assert not entry.fits(hopper.as_sizes(dict(old) | {"STAGES": 8, "BN": 128}), shared)
    with entry.in_force(grid[-1]):
        assert entry.current("cuda") == grid[-1]


@pytest.mark.parametrize("entry", hopper.choose("sm90", ["hopper"]), ids=lambda entry: entry.name)
def test_calls_use_their_entry_of_the_hopper_kernel(entry: hopper.HopperEntry) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from tilefold.backends.hopper.sizes import kind_of, width_of

    for case in [entry.timed_case(Scale()), *entry.checked_cases(Scale(), True)]:
        assert width_of(*case.dims) == entry.head
        (Hq, _), (Lq, Lk) = case.heads, case.lengths
        mask = mask_of(case, "cpu")
        mask = masks.full() if mask is None else mask
        built = mask.build(case.batch, Hq, Lq, Lk, "cpu") if mask.needs_build else mask
        form = masks.lower(*built.spec(), case.batch, Hq, Lq, Lk, "cpu")
        assert kind_of(form, entry.head, Lk, bool(case.bias)) == entry.kind


def test_sizes_of_the_hopper_kernel_in_short() -> None:
    entry = hopper.HopperEntry(128, "full")
    sizes = hopper.as_sizes({"BN": 64, "STAGES": 3, "GROUPS": 3, "REGISTERS": 160, "SLOTS": 2, "HELD": True})
    assert entry.in_short(sizes) == "192 x 64, 3 stages, 2 slots, held"


# -- calls ---------------------------------------------------------------------------------------------------


def _names(entry: Entry, case: BenchCase) -> list[str]:
    """Where the kernels look for sizes in a call of `case`."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tilefold.backends.triton.sizes import kind_of, names_of

    (Hq, Hk), (Lq, Lk) = case.heads, case.lengths
    options = ("bias",) if case.bias else ()
    problem = Problem(case.batch, Hq, Hk, Lq, Lk, *case.dims, DTYPES[case.dtype], options=options)
    mask = mask_of(case)
    whole = masks.full() if mask is None else mask
    spec, held = whole.build(case.batch, Hq, Lq, Lk, "cpu").spec()
    form = masks.lower(spec, held, case.batch, Hq, Lq, Lk, "cpu")
    return names_of(entry.kernel, problem, kind_of(problem, form))


@pytest.mark.parametrize("scale", [Scale(), TINY], ids=["usual", "tiny"])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_an_entry_use_it(kind: str, scale: Scale) -> None:
    for kernel in KERNELS if kind == "any" else ("forward", "keys"):
        entry = Entry(kernel, 16, 64, kind)
        table = {entry.name}
        for case in [timed_case(entry, scale), *checked_cases(entry, scale)]:
            assert table & set(_names(entry, case)), case
        for case in checked_cases(entry, scale):
            assert case.lengths[1] % 2 == 1 or case.bias or kind == "full"
        everything = checked_cases(entry, scale, True)
        assert {case.dtype for case in everything} == {"bf16", "fp16"}
        assert set(checked_cases(entry, scale)) <= set(everything)
    if kind == "any":
        whole = {case.mask for case in checked_cases(FORWARD, scale, True)}
        assert whole == {"none", "causal", "window", "documents", "columns", "bigbird"}


def test_a_kernel_for_dk_alone_is_not_hidden_by_the_one_for_both() -> None:
    with tuned.trying(KEYS.name, (64, 64, 4, 1)):
        with in_force(parse("triton/dk/16/64"), (16, 16, 4, 1)):
            assert tuned.sizes(KEYS.names, "cpu", OLD) is None
            assert tuned.sizes(["triton/dk/16/64"], "cpu") == (16, 16, 4, 1)
        assert tuned.sizes(KEYS.names, "cpu") == (64, 64, 4, 1)


# -- the search ----------------------------------------------------------------------------------------------


class Played:
    """Kernels whose time, errors and failures are functions of the sizes in force."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: dict[Sizes, float] = {}
        self.wrong: set[Sizes] = set()
        self.wrong_somewhere: set[Sizes] = set()
        self.failing: dict[Sizes, Exception] = {}
        self.timed: list[Sizes] = []
        self.entry = FORWARD
        monkeypatch.setattr(tuning, "wrong", self._wrong)
        monkeypatch.setattr(tuning._Search, "time", lambda search: self._time(search))

    def _sizes(self, entry: Entry) -> Sizes:
        return tuned.sizes(entry.names, "cpu", OLD)  # pyright: ignore[reportReturnType]

    def _wrong(self, cases: list[BenchCase], device: str, backend: str) -> list[str]:
        assert backend == "triton"
        sizes = self._sizes(self.entry)
        if sizes in self.failing:
            raise self.failing[sizes]
        usual = checked_cases(self.entry, TINY)
        bad = self.wrong if cases == usual else self.wrong | self.wrong_somewhere
        return ["out is over"] if sizes in bad else []

    def _time(self, search: tuning._Search) -> float:
        sizes = self._sizes(search.entry)
        self.timed.append(sizes)
        return self.seconds.get(sizes, 1.0)

    def tune(self, *candidates: Sizes, **more: object) -> tuning.KernelTuning:
        options = {"scale": TINY, "candidates": candidates} | more
        return tuning.tune_kernels("cpu", [self.entry], **options)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


A, B, C = (16, 16, 4, 1), (16, 32, 4, 1), (64, 64, 4, 1)


def test_the_fastest_right_candidate_is_kept(played: Played, cache: Path) -> None:
    played.seconds = {OLD: 1.0, A: 0.1, B: 0.8, C: 0.5}
    played.wrong, played.failing = {A}, {(16, 64, 4, 1): RuntimeError("out of resource\nand more")}
    huge = (256, 128, 4, 1)
    found = played.tune(A, B, C, (16, 64, 4, 1), huge)
    one = found.entries[0]
    assert (one.old, one.old_seconds, one.best, one.seconds) == (OLD, 1.0, C, 0.5)
    assert {trial.sizes: trial.status for trial in one.trials} == {
        OLD: "timed", A: "wrong", B: "timed", C: "timed", (16, 64, 4, 1): "failed", huge: "large",
    }  # fmt: skip
    assert [one.count(s) for s in ("timed", "wrong", "failed", "large", "left")] == [3, 1, 1, 1, 0]
    assert set(played.timed) == {OLD, B, C}
    reasons = {trial.sizes: trial.reasons for trial in one.trials}
    assert reasons[A] == ["out is over"] and reasons[16, 64, 4, 1] == ["RuntimeError: out of resource"]
    assert json.loads((cache / "tuned-cpu.json").read_text()) == {FORWARD.name: list(C)}
    assert found.path == str(cache / "tuned-cpu.json")
    assert tuned.sizes(FORWARD.names, "cpu") == C
    document = json.loads(json.dumps(found.to_dict()))["entries"][0]
    assert document["new"] == list(C) and len(document["trials"]) == 6


def test_a_dry_run_keeps_nothing(played: Played, cache: Path) -> None:
    played.seconds = {A: 0.5}
    found = played.tune(A, write=False)
    assert found.entries[0].best == A and found.path == ""
    assert list(cache.iterdir()) == []
    assert tuned.sizes(FORWARD.names, "cpu") is None


def test_less_than_noise_changes_nothing(played: Played) -> None:
    played.seconds = {A: 0.99, B: 0.985}
    one = played.tune(A, B).entries[0]
    assert (one.best, one.seconds) == (OLD, 1.0)


def test_a_winner_that_is_wrong_elsewhere_is_passed_over(played: Played) -> None:
    played.seconds, played.wrong_somewhere = {A: 0.2, B: 0.4}, {A}
    one = played.tune(A, B).entries[0]
    assert (one.best, one.seconds) == (B, 0.4)
    assert one.count("wrong") == 1


def test_sizes_in_use_that_are_wrong_are_replaced(played: Played) -> None:
    played.seconds, played.wrong = {A: 3.0}, {OLD}
    one = played.tune(A).entries[0]
    assert (one.old_seconds, one.best, one.seconds) == (None, A, 3.0)


def test_where_nothing_is_right_nothing_is_kept(played: Played, cache: Path) -> None:
    played.wrong = {OLD, A}
    found = played.tune(A)
    assert found.entries[0].seconds is None and found.values == {} and played.timed == []
    assert list(cache.iterdir()) == []


def test_other_stages_are_tried_for_the_fastest(played: Played) -> None:
    played.seconds = {(16, 64, 8, 1): 0.5, (16, 64, 8, 3): 0.25}
    one = played.tune().entries[0]
    assert one.best == (16, 64, 8, 3)
    deep = {trial.sizes for trial in one.trials if trial.sizes and trial.sizes[3] > 1}
    assert len(deep) == tuning.FINALISTS * 3
    other_loops = [trial for trial in one.trials if trial.sizes and trial.sizes[4:] == (1,)]
    assert len(other_loops) == tuning.FINALISTS
    assert len(one.trials) == 32 + len(deep) + len(other_loops)


@pytest.mark.parametrize("apart, best", [(0.5, None), (2.0, OLD)])
def test_dk_and_dv_apart_are_a_candidate(played: Played, apart: float, best: Sizes) -> None:
    played.entry, played.seconds = KEYS, {None: apart}
    found = played.tune(None)
    assert found.entries[0].best == best
    assert tuned.sizes(KEYS.names, "cpu", A) == best
    assert found.values == {KEYS.name: None if best is None else list(best)}


def test_what_does_not_fit_into_the_time_is_said(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: float(next(clock)))
    entries = [FORWARD, parse("triton/queries/16/64"), parse("triton/dk/16/64")]
    played.seconds = {A: 0.5}
    found = tuning.tune_kernels("cpu", entries, limit=8.0, scale=TINY, candidates=[A, B, C])
    statuses = {f.entry.kernel: [t.status for t in f.trials] for f in found.entries}
    assert statuses["forward"][0] == "timed" and statuses["forward"][-1] == "left"
    assert found.left and found.left[-1] == "triton/dk/16/64"
    assert len(found.entries) + len(found.left) == 3


def test_what_was_found_is_in_force_for_the_next_entry(played: Played) -> None:
    seen: list[tuple[str, Sizes]] = []
    played.seconds = {A: 0.5}

    def progress(what: str, done: int, total: int) -> None:
        seen.append((what, tuned.sizes(FORWARD.names, "cpu", OLD)))  # pyright: ignore[reportArgumentType]

    entries = [FORWARD, parse("triton/queries/16/64")]
    tuning.tune_kernels("cpu", entries, math.inf, progress, False, TINY, [A])
    assert seen == [
        ("triton/forward/16/64: 32 x 32, 4 warps, 1 stage", OLD),
        ("triton/forward/16/64: 16 x 16, 4 warps, 1 stage", OLD),
        ("triton/queries/16/64: 32 x 32, 4 warps, 1 stage", A),
        ("triton/queries/16/64: 16 x 16, 4 warps, 1 stage", A),
    ]
    assert tuned.sizes(FORWARD.names, "cpu") is None


def test_a_refusal_of_the_backend_is_no_slow_candidate() -> None:
    # Without the interpreter, Triton's kernels decline tensors on a CPU.
    with pytest.raises(BackendError):
        tuning.tune_kernels("cpu", [FORWARD], scale=TINY, candidates=[A])


class Ticking:
    """A clock, and calls that move it: the first takes a compiler's time."""

    def __init__(self) -> None:
        self.at, self.calls = 0.0, 0

    def now(self) -> float:
        return self.at

    def call(self, *args: object) -> list[object]:
        self.calls += 1
        self.at += 7.5 if self.calls == 1 else 0.5
        return []


def test_seconds_of_the_compiler_are_those_that_a_second_call_does_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Ticking()
    search = tuning._Search(FORWARD, "cpu", TINY, clock, math.inf)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(tuning, "_verdicts", clock.call)
    monkeypatch.setattr(tuning, "_expected", lambda *args: None)
    case = checked_cases(FORWARD, TINY)[0]
    assert search._first_call(case) is None and clock.calls == 0
    search.device = "cuda"
    assert search._first_call(case) == 7.0


def test_a_candidate_that_breaks_the_device_ends_it_all(
    played: Played, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def broken(device: object) -> None:
        raise RuntimeError("illegal memory access, found by the next call")

    init = tuning._Search.__init__

    def on_gpu(self: tuning._Search, *args: Any) -> None:
        init(self, *args)
        self.device = "cuda"

    monkeypatch.setattr(tuning._Search, "__init__", on_gpu)
    monkeypatch.setattr(tuning._Search, "_first_call", lambda self, case: 1.5)
    monkeypatch.setattr("torch.cuda.synchronize", broken)
    played.seconds = {A: 0.5}
    assert played.tune(A, write=False).entries[0].compile_seconds == 1.5
    played.failing = {A: RuntimeError("a kernel failed")}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        played.tune(A)
    assert list(cache.iterdir()) == []
    # A failure that leaves the device alive is one of the candidate.
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    assert played.tune(A).entries[0].count("failed") == 1


def test_a_single_unlucky_draw_is_not_held_against_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    case = checked_cases(FORWARD, TINY)[0]
    drawn: list[int] = []

    def verdicts(case: BenchCase, device: str, seed: int, backend: str) -> list[Verdict]:
        drawn.append(seed)
        # In the first draw plain PyTorch is lucky.
        return [Verdict("out", 1.5, 0.1 if seed == 1 else baseline, 0.0)]

    monkeypatch.setattr(tuning, "_verdicts", verdicts)
    baseline = 1.0
    assert tuning.wrong([case], "cpu", "triton") == []
    assert drawn == list(range(1, 2 + tuning.DRAWS))
    baseline = 0.2
    (reason,) = tuning.wrong([case], "cpu", "triton")
    assert reason.startswith("OVER out")


def test_the_eager_backend_is_within_the_budget() -> None:
    case = replace(checked_cases(FORWARD, TINY)[0], dims=(8, 8), dtype="fp32")
    assert tuning.wrong([case], "cpu", "eager") == []
