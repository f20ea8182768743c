"""Files that commands write: what cannot be written is refused at once, in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tilefold.bench import run as running
from tilefold.cli import files
from tilefold.cli.app import app
from tilefold.errors import ArgumentError
from tilefold.pictures import grid

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "bench_h200.json"
# Commands and the option that names a file; `png` wants a suffix.
WRITERS = {
    "bench": (["bench", "small-16", "--seconds", "0", "--json"], "json"),
    "list": (["bench", "--list", "--json"], "json"),
    "html": (["report", str(RESULTS), "--html"], "html"),
    "png": (["report", str(RESULTS), "--png"], "png"),
    "mask": (["mask", "causal()", "--png"], "png"),
}


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))


def refusal(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (2, "")
    # Before the last line there may be a bar of what was computed.
    *before, line = result.stderr.splitlines()
    assert [part for part in before if part.strip() and not part.startswith(("check", "time"))] == []
    return line


@pytest.fixture
def nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("computed before the file was checked")

    monkeypatch.setattr(running, "bench", refuse)
    monkeypatch.setattr(grid, "survey", refuse)
    monkeypatch.setattr("tilefold.bench.report.load", refuse)


@pytest.mark.usefixtures("nothing_is_computed")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "name, words",
    [
        ("", "expected the name of a file, got ''"),
        ("{folder}", "expected a file, got the folder {folder}"),
        ("{folder}/gone/x.png", "expected a file in a folder that exists, got {folder}/gone/x.png"),
        ("{folder}/file/x.png", "expected a file"),
        ("/proc/x.png", "expected a file that can be written, got /proc/x.png ("),
        ("{folder}/" + 300 * "x" + ".png", "expected a file that can be written, got {folder}/xxx"),
        ("{folder}/loop.png", "expected a file that can be written, got {folder}/loop.png ("),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused_first(
    writer: str, name: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop.png").symlink_to("loop.png")
    before = sorted(tmp_path.iterdir())
    arguments, option = WRITERS[writer]
    line = refusal(run(*arguments, name.format(folder=tmp_path)))
    assert line.startswith(f"error: {option}: {words.format(folder=tmp_path)}")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("nothing_is_computed")
@pytest.mark.parametrize("writer", ["png", "mask"])
@pytest.mark.parametrize("name", ["o.jpg", "o", "png", ".png", "o.png.pdf"])
def test_a_picture_has_the_suffix_of_its_format(writer: str, name: str, tmp_path: Path) -> None:
    arguments, _ = WRITERS[writer]
    line = refusal(run(*arguments, str(tmp_path / name)))
    assert line == f"error: png: expected a name that ends in .png, got {tmp_path / name}"


@pytest.mark.parametrize("writer", ["png", "mask"])
@pytest.mark.parametrize("name", ["o.png", "O.PNG", "o.jpg.png", "link.png"])
def test_a_picture_is_written_where_it_was_asked_for(writer: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "link.png").symlink_to(tmp_path / "target.png")
    arguments, _ = WRITERS[writer]
    assert run(*arguments, str(tmp_path / name)).exit_code == 0
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} <= {name, "link.png", "target.png"}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_is_full_is_told_in_one_line(writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    if writer == "bench":
        document = json.loads(RESULTS.read_text())
        monkeypatch.setattr(running, "bench", lambda *arguments, **options: document)
    # The suffix is not what is tested here.
    monkeypatch.setattr(files, "output", lambda argument, name, suffix="": Path(name))
    for module in ("bench", "report"):
        monkeypatch.setattr(f"tilefold.cli.{module}.output", files.output)
    arguments, option = WRITERS[writer]
    line = refusal(run(*arguments, "/dev/full"))
    assert line.startswith(f"error: {option}: expected a file that can be written, got /dev/full (")


@pytest.fixture
def held(tmp_path: Path) -> Path:
    path = tmp_path / "held.json"
    path.write_text("held")
    return path


def test_the_check_changes_nothing(held: Path) -> None:
    assert files.output("json", str(held)) == held
    assert held.read_text() == "held"
    assert files.output("json", str(held.with_name("new.json"))).exists() is False
    assert files.output("json", "/dev/null") == Path("/dev/null")


def test_a_file_without_permission_is_refused(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as the superuser, who may write everything."""

    def deny(path: Path, mode: str) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", deny)
    words = r"json: expected a file that can be written, got .*held\.json \(Permission denied\)"
    with pytest.raises(ArgumentError, match=words):
        files.output("json", str(held))


# -- the list of cases ---------------------------------------------------------------------------------


def test_the_list_of_cases_as_json(tmp_path: Path) -> None:
    shown = run("bench", "window", "full", "--list", "--json", "-")
    assert (shown.exit_code, shown.stderr) == (0, "")
    listed = json.loads(shown.stdout)
    assert {"window-8k", "full-1k-fp32-d64"} <= {entry["case"] for entry in listed}
    (window,) = (entry for entry in listed if entry["case"] == "window-8k")
    assert window == {
        "case": "window-8k",
        "shape": "B 1 H 2 L 8192 D 64 fp32",
        "about": "sliding window of 1024 tokens",
    }
    path = tmp_path / "cases.json"
    written = run("bench", "window", "full", "--list", "--json", str(path))
    assert written.exit_code == 0 and "window-8k" in written.stdout
    assert json.loads(path.read_text()) == listed


@pytest.mark.parametrize("arguments", [[""], ["full", ""], ["", "--list"], ["", "--json", "-"]])
def test_an_empty_name_of_a_case_is_refused(arguments: list[str]) -> None:
    line = refusal(run("bench", *arguments))
    assert line == "error: case: expected the name, a glob or the beginning of a case for cpu, got ''"


@pytest.mark.parametrize("content", ["[" * 20000, '{"rows": []}', '{"rows": [{"case": [1]}]}', "\x00"])
def test_report_refuses_a_damaged_file_in_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    for options in ([], ["--json"], ["--html", str(tmp_path / "r.html")], ["--png", str(tmp_path / "r.png")]):
        line = refusal(run("report", str(path), *options))
        assert line.startswith(f"error: FILE: expected results of `tilefold bench`, got {path}: ")
    assert list(tmp_path.iterdir()) == [path]
