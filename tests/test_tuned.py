"""Tuned sizes: the library's tables, the user's over them, and what tuning does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilefold import attention
from tilefold.backends.eager import fold
from tilefold.bench import tune as tuning
from tilefold.bench.cases import BenchCase
from tilefold.bench.entries import parse
from tilefold.bench.tune_kernels import Found, KernelTuning
from tilefold.cost import store
from tilefold.errors import ArgumentError
from tilefold.planning import tuned
from tilefold.problem import Problem

TABLES = Path(tuned.__file__).parent / "tables"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    tuned._table.cache_clear()
    yield tmp_path
    tuned._table.cache_clear()


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_tables_hold_every_size_and_say_whether_it_was_measured(path: Path) -> None:
    table = json.loads(path.read_text())
    assert isinstance(table["measured"], bool)
    assert not table["measured"] or {"machine", "date"} <= set(table)
    for key, (least, most) in tuned.KEYS.items():
        assert least <= table[key] <= most


def test_architectures_without_a_table_take_the_one_of_gpus() -> None:
    assert tuned.shipped("sm86") == tuned.shipped("gpu") != tuned.shipped("sm90")
    assert tuned.architecture("cpu") == "cpu"
    assert tuned.architecture("mps") == "mps"


def test_the_users_table_lies_over_the_librarys(cache: Path) -> None:
    before = tuned.look_up("fold_tile_elements", "cpu")
    tuned.keep("cpu", {"fold_tile_elements": 1 << 14})
    assert tuned.look_up("fold_tile_elements", "cpu") == 1 << 14
    (cache / "tuned-cpu.json").unlink()
    tuned._table.cache_clear()
    assert tuned.look_up("fold_tile_elements", "cpu") == before


@pytest.mark.parametrize("value", [7, 1 << 40, "large", None, 1.5, True])
def test_values_without_sense_in_the_users_table_do_not_count(cache: Path, value: object) -> None:
    before = tuned.look_up("fold_tile_elements", "cpu")
    store.write("tuned-cpu", {"fold_tile_elements": value, "other": 3})
    tuned._table.cache_clear()
    assert tuned.look_up("fold_tile_elements", "cpu") == before


@pytest.mark.parametrize(
    "content", [b"\xff", b"[" * 100_000, b'{"fold_tile_elements": ' + b"9" * 6000 + b"}"]
)
def test_a_call_never_dies_of_a_damaged_table(cache: Path, content: bytes) -> None:
    (cache / "tuned-cpu.json").write_bytes(content)
    tuned._table.cache_clear()
    q = torch.randn(1, 2, 8, 4)
    assert attention(q, q, q, softcap=3.0).isfinite().all()


def test_assumptions_stay_in_their_thread(cache: Path) -> None:
    problem = Problem(1, 4, 4, 4096, 4096, 64, 64, torch.float32)
    outside, found = fold.block_of(problem), []
    with tuned.assuming("sm90"):
        thread = threading.Thread(target=lambda: found.append(fold.block_of(problem)))
        thread.start()
        thread.join()
        assert fold.block_of(problem) != outside
    assert found == [outside]


def test_trials_in_trials_end_one_after_the_other(cache: Path) -> None:
    before = tuned.look_up("fold_tile_elements", "cpu")
    with tuned.trying("fold_tile_elements", 1 << 13):
        with tuned.trying("fold_tile_elements", 1 << 14):
            assert tuned.look_up("fold_tile_elements", "cpu") == 1 << 14
        assert tuned.look_up("fold_tile_elements", "cpu") == 1 << 13
    assert tuned.look_up("fold_tile_elements", "cpu") == before


def test_trials_go_before_tables_and_end(cache: Path) -> None:
    problem = Problem(1, 4, 4, 4096, 4096, 64, 64, torch.float32)
    before = fold.block_of(problem)
    with tuned.trying("fold_tile_elements", 4 * 32 * 32):
        assert fold.block_of(problem) == 32
        with tuned.assuming("sm90"):
            assert fold.block_of(problem) == 32
    assert fold.block_of(problem) == before
    with tuned.assuming("sm90"), tuned.assuming(None):
        assert fold.block_of(problem) == 1024
    assert fold.block_of(problem) == before


NAMES = ["triton/keys/16/64/rows", "triton/keys/16/64"]


def test_sizes_are_those_of_the_first_name_in_the_table(cache: Path) -> None:
    assert tuned.sizes(NAMES, "cpu") is None
    assert tuned.sizes(NAMES, "cpu", (1, 2, 3, 4)) == (1, 2, 3, 4)
    tuned.keep("cpu", {NAMES[1]: [64, 32, 4, 2]})
    assert tuned.sizes(NAMES, "cpu", (1, 2, 3, 4)) == (64, 32, 4, 2)
    tuned.keep("cpu", {NAMES[0]: None})
    assert tuned.sizes(NAMES, "cpu", (1, 2, 3, 4)) is None
    with tuned.trying(NAMES[0], [16, 16, 4, 1]):
        assert tuned.sizes(NAMES, "cpu") == (16, 16, 4, 1)
        with tuned.trying(NAMES[0], None):
            assert tuned.sizes(NAMES, "cpu", (1, 2, 3, 4)) is None
        assert tuned.sizes(NAMES, "cpu") == (16, 16, 4, 1)
    assert tuned.sizes(NAMES[1:], "cpu") == (64, 32, 4, 2)


@pytest.mark.parametrize(
    "value",
    [
        [64, 64, 4],
        [64, 64, 4, 2.0],
        [64, 64, 4, 0],
        [512, 64, 4, 2],
        [64, 64, 4, 2, 3],
        [64, 48, 4, 2],
        [8, 64, 4, 2],
        [64, 64, 3, 2],
        [64, 64, True, 2],
        [64, 64, 4, 2, 1, 1],
        [64, 64, 4, 2, 1, 256],
        [64, 64, 4, 2, 1, 128, 1],
        "none",
    ],
)
def test_sizes_without_sense_in_the_users_table_do_not_count(cache: Path, value: object) -> None:
    store.write("tuned-cpu", {NAMES[1]: value, "triton/forward/16/64": None})
    tuned._table.cache_clear()
    for name in (NAMES[1], "triton/forward/16/64"):
        assert tuned.sizes([name], "cpu", (1, 2, 3, 4)) == (1, 2, 3, 4)


def test_a_change_of_sizes_is_told_to_who_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, ...] | None] = []
    monkeypatch.setattr(tuned, "_listeners", [])
    tuned.on_change(lambda: told.append(tuned.sizes(NAMES, "cpu")))
    with tuned.trying("fold_tile_elements", 1 << 13):
        assert told == []
    with tuned.trying(NAMES[0], [16, 16, 4, 1]):
        assert told == [(16, 16, 4, 1)]
    tuned.keep("cpu", {NAMES[1]: [32, 32, 4, 1]})
    assert told == [(16, 16, 4, 1), None, (32, 32, 4, 1)]


SMALL = BenchCase("toy", "soft cap", heads=(2, 2), lengths=(64, 64), dims=(16, 16), softcap=5.0)


def test_tuning_keeps_the_fastest_candidate(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    cost = {1 << 13: 3.0, 1 << 14: 1.0, 1 << 15: 2.0}

    class Clock:
        at = 0.0

        def now(self) -> float:
            return self.at

        def time(self, run: object) -> float:
            assert callable(run)
            run()
            self.at += 1.0
            return cost[run.args[0]]  # pyright: ignore

    monkeypatch.setattr(tuning, "clock_for", lambda device: Clock())
    found = tuning.tune("cpu", 0.0, lambda *at: seen.append(at), candidates=tuple(cost), cases=[SMALL])
    assert found.best == 1 << 14
    assert found.seconds == {"toy": cost}
    assert [found.relative(c) for c in cost] == pytest.approx([3.0, 1.0, 2.0])
    assert seen == [("toy", 0, 1)]
    assert tuned.look_up("fold_tile_elements", "cpu") == 1 << 14
    assert json.loads(json.dumps(found.to_dict()))["seconds"] == {"toy": {str(c): s for c, s in cost.items()}}


def test_a_dry_run_keeps_nothing(cache: Path) -> None:
    found = tuning.tune("cpu", 0.0, write=False, candidates=(1 << 13, 1 << 14), cases=[SMALL])
    assert found.best in (1 << 13, 1 << 14)
    assert list(cache.iterdir()) == []


def test_a_candidate_that_gives_wrong_numbers_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = fold._Fold.score

    def wrong(self: fold._Fold, raw: torch.Tensor, tile: fold.Tile) -> torch.Tensor:
        return kept(self, raw, tile) + (0.1 * tile.keys.start if self.block == 32 else 0.0)

    monkeypatch.setattr(fold._Fold, "score", wrong)
    with pytest.raises(ArgumentError, match="expected a size that gives right numbers, got 4096 in toy"):
        tuning.tune("cpu", 0.0, candidates=(1 << 14, 1 << 12), cases=[SMALL])
    assert list(cache.iterdir()) == []


def test_devices_without_cases_are_refused(cache: Path) -> None:
    with pytest.raises(ArgumentError, match="device: expected cpu or cuda, got 'mps'"):
        tuning.tune("mps")


@pytest.mark.parametrize("elements", [1 << 12, 1 << 20])
def test_results_do_not_depend_on_tiles(elements: int) -> None:
    q, k, v = (torch.randn(2, 2, 100, 16, dtype=torch.float64) for _ in range(3))
    whole = attention(q, k, v, softcap=3.0)
    with tuned.trying("fold_tile_elements", elements):
        torch.testing.assert_close(attention(q, k, v, softcap=3.0), whole, rtol=1e-12, atol=1e-12)


def test_a_whole_table_is_the_shipped_one_with_what_was_found(cache: Path) -> None:
    shipped = json.loads((TABLES / "sm90.json").read_text())
    name, other, new = "triton/forward/16/64", "triton/keys/16/64", "triton/keys/16/256"
    found = KernelTuning("sm90")
    for text, best in ((name, (16, 16, 4, 1)), (other, None), (new, (32, 32, 4, 1))):
        found.entries.append(Found(parse(text), None, best, 2.0, 1.0))
    # What was right nowhere is not in a table.
    found.entries.append(Found(parse("triton/keys/16/576"), None, None))
    text = tuning.whole_table("cpu", tuning.Tuning("sm90", 1, 1 << 20), found)
    table = json.loads(text)
    changed = {name: [16, 16, 4, 1], other: None, new: [32, 32, 4, 1], "fold_tile_elements": 1 << 20}
    assert {key: table[key] for key in changed} == changed
    stated = table.pop("stack_bytes")
    assert stated == {k: v for k, v in shipped.pop("stack_bytes").items() if k not in changed}
    free = {"machine", "date"}
    assert table.keys() == shipped.keys() | {new}
    assert all(table[key] == shipped[key] for key in shipped.keys() - changed.keys() - free)
    # A line per entry, sorted.
    lines = [line.split('"')[1] for line in text.splitlines()[1:-1]]
    assert lines[:5] == ["measured", "machine", "date", "fold_tile_elements", "stack_bytes"]
    assert lines[5:] == sorted(lines[5:])


def test_a_whole_table_of_an_architecture_without_one_holds_what_was_measured(cache: Path) -> None:
    found = KernelTuning("sm86", [Found(parse("triton/dk/16/64"), None, (16, 16, 4, 1), 2.0, 1.0)])
    table = json.loads(tuning.whole_table("cpu", tuning.Tuning("sm86", 1, 1 << 20), found))
    assert list(table) == ["measured", "machine", "date", "fold_tile_elements", "triton/dk/16/64"]
    assert table["measured"] is True
