"""This CPU, measured once and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilefold.cost import measure, store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and figures that take no time."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "_matmul_rate", lambda dtype: 1e12)
    measure._this_cpu.cache_clear()
    yield tmp_path / "cache"
    measure._this_cpu.cache_clear()


class Counted:
    """Measures a rate of 1 and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, dtype: str) -> dict[str, float]:
        self.asked.append(dtype)
        return {"kernel": 1.0}


def test_a_dtype_is_measured_once_for_this_and_every_later_process(folder: Path) -> None:
    first, second = Counted(), Counted()
    assert measure.this_cpu("float32", first).rates == {"kernel": 1.0}
    measure.this_cpu("float32", first)
    measure.this_cpu("bfloat16", first)
    assert first.asked == ["float32", "bfloat16"]
    # Another process knows nothing but the file.
    measure._this_cpu.cache_clear()
    again = measure.this_cpu("float32", second)
    assert second.asked == []
    assert again.bandwidth == measure.this_cpu("bfloat16", second).bandwidth > 1e8
    assert second.asked == []


def test_what_is_forgotten_is_measured_again(folder: Path) -> None:
    counted = Counted()
    measure.this_cpu("float32", counted)
    measure.forget()
    assert list(folder.iterdir()) == []
    measure.this_cpu("float32", counted)
    assert counted.asked == ["float32", "float32"]
    measure.forget()
    measure.forget()


def test_a_busy_machine_is_not_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([1e12] * 5 + [2e12, 1e12, 1e12])
    monkeypatch.setattr(measure, "_matmul_rate", lambda dtype: next(rates))
    counted = Counted()
    machine = measure.this_cpu("float32", counted)
    assert "while it was busy" in machine.sources["bandwidth"]
    assert not folder.exists() or list(folder.iterdir()) == []


def test_threads_and_versions_have_files_of_their_own(folder: Path) -> None:
    before, threads = measure.fingerprint(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert measure.fingerprint() != before
    finally:
        torch.set_num_threads(threads)
    assert measure.fingerprint() == before


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\x00\x01"])
def test_broken_files_count_as_nothing(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / f"cpu-{measure.fingerprint()}.json").write_text(content)
    counted = Counted()
    measure.this_cpu("float32", counted)
    assert counted.asked == ["float32"]
    kept = json.loads((folder / f"cpu-{measure.fingerprint()}.json").read_text())
    assert kept["rates"] == {"float32": {"kernel": 1.0}}


def test_a_folder_that_cannot_be_made_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = folder.parent / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv(store.VARIABLE, str(blocked))
    assert store.write("x", {"a": 1}) is None
    assert store.read("x") == {}
    assert measure.this_cpu("float32", Counted()).rates == {"kernel": 1.0}


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "mine"))
    assert store.folder() == tmp_path / "mine"
    monkeypatch.delenv(store.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.folder() == tmp_path / "tilefold"


def test_runs_take_turns_and_the_fastest_turn_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def run(name: str, costs: list[float]) -> None:
        order.append(name)
        now[0] += costs.pop(0) if len(costs) > 1 else costs[0]

    # Two runs to warm up, then three turns.
    a, b = [9.0, 2.0, 5.0, 3.0, 4.0], [9.0, 2.0, 1.0, 8.0, 8.0]
    found = measure.seconds_of({"a": lambda: run("a", a), "b": lambda: run("b", b)}, least=0.0, turns=3)
    assert found == {"a": 3.0, "b": 1.0}
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b", "a", "b"]
