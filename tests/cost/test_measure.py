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
    monkeypatch.setattr(measure, "_others_at_work", lambda: False)
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


@pytest.mark.parametrize("sign", ["products change their speed", "others are at work"])
def test_a_busy_machine_is_doubted_and_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    if sign == "others are at work":
        monkeypatch.setattr(measure, "_others_at_work", lambda: True)
    else:
        rates = iter([1e12] * 5 + [2e12])
        monkeypatch.setattr(measure, "_matmul_rate", lambda dtype: next(rates))
    machine = measure.this_cpu("float32", Counted())
    assert "busy with something else" in machine.doubt
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_quiet_machine_is_not_doubted(folder: Path) -> None:
    assert measure.this_cpu("float32", Counted()).doubt == ""


def test_others_are_seen_by_what_wants_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(measure.torch, "get_num_threads", lambda: 3)

    def busy(*others: int) -> bool:
        counts = iter(others)
        monkeypatch.setattr(measure, "_others_running", lambda: next(counts))
        return measure._others_at_work()

    assert not busy(0, 0, 0, 0, 0)
    assert not busy(1, 1, 1, 1, 1)
    assert busy(2, 2, 2, 2, 2)
    # A moment's work of others does no harm.
    assert not busy(9, 9, 1, 9, 9)


@pytest.mark.skipif(not Path("/proc/loadavg").exists(), reason="only Linux says what runs")
def test_this_process_is_none_of_the_others() -> None:
    assert any(measure._runs(path) for path in Path("/proc/self/task").iterdir())
    assert not measure._runs(Path("/proc/self/task/0"))
    running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    assert measure._others_running() <= running + 8


def test_patience_ends_after_whole_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure, "_PATIENCE", 10.0)
    runs: list[str] = []

    def slow(name: str) -> None:
        runs.append(name)
        now[0] += 2.0

    found = measure.seconds_of({"a": lambda: slow("a"), "b": lambda: slow("b")}, least=0.0, turns=9)
    assert found == {"a": 2.0, "b": 2.0}
    # Two to warm up and one turn each take 12 s.
    assert runs == ["a", "a", "b", "b", "a", "b"]


def test_threads_and_versions_have_files_of_their_own(folder: Path) -> None:
    before, threads = measure.fingerprint(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert measure.fingerprint() != before
    finally:
        torch.set_num_threads(threads)
    assert measure.fingerprint() == before


#: Contents that no JSON object comes from: half-written, foreign, damaged, or made to hurt.
DAMAGED = [b"", b"{", b"[1]", b"null", b"\x00\x01", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 6000 + b"}"]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:8]))
def test_broken_files_count_as_nothing(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / f"cpu-{measure.fingerprint()}.json").write_bytes(content)
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


def test_a_folder_in_the_place_of_a_file_counts_as_nothing(folder: Path) -> None:
    (folder / "x.json").mkdir(parents=True)
    assert store.read("x") == {}
    assert store.write("x", {"a": 1}) is None
    store.remove("x")
    assert [path.name for path in folder.iterdir()] == ["x.json"]


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.json, "dump", full)
    assert store.write("x", {"a": 1}) is None
    assert list(folder.iterdir()) == []


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

    monkeypatch.setattr(measure, "_PATIENCE", 1e9)
    # Two runs to warm up, then three turns.
    a, b = [9.0, 2.0, 5.0, 3.0, 4.0], [9.0, 2.0, 1.0, 8.0, 8.0]
    found = measure.seconds_of({"a": lambda: run("a", a), "b": lambda: run("b", b)}, least=0.0, turns=3)
    assert found == {"a": 3.0, "b": 1.0}
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b", "a", "b"]
