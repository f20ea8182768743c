"""A whole run on tiny shapes: rows, predictions, refusals; and the two commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import tilefold
from tilefold.bench import cases, contestants, run
from tilefold.bench.cases import BenchCase
from tilefold.bench.contestants import pick
from tilefold.cli import bench as bench_command
from tilefold.cli import report as report_command
from tilefold.errors import ArgumentError, DeviceError

FULL = BenchCase("tiny-full", "everything", heads=(2, 2), lengths=(64, 64), dims=(16, 16))
CAP = BenchCase(
    "tiny-cap", "soft cap", heads=(2, 1), lengths=(48, 96), dims=(16, 16), softcap=5.0, mask="causal"
)
DECODE = BenchCase("tiny-decode", "one row", heads=(2, 2), lengths=(1, 80), dims=(16, 16), backward=False)
TINY = (FULL, CAP, DECODE)


@pytest.fixture(autouse=True)
def figures_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions for a machine of the table: measuring this one takes seconds and is tested elsewhere."""
    explain = tilefold.explain
    monkeypatch.setattr(tilefold, "explain", lambda *x, **options: explain(*x, machine="H200", **options))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", {case.name: case for case in TINY})


def by_key(document: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["case"], row["pass"], row["contestant"]): row for row in document["rows"]}


def test_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    steps: list[tuple[str, str, int, int]] = []
    document = run.bench(
        TINY, pick(["sdpa", "standard"]), run.Options(seconds=0.0), lambda *step: steps.append(step)
    )
    assert [step[:2] for step in steps] == [(p, case.name) for p in ("check", "time") for case in TINY]
    assert document["exact"] is True
    assert json.loads(json.dumps(document)) == document
    rows = by_key(document)
    assert len(rows) == len(document["rows"]) == 3 * (2 + 2 + 1)
    for key, row in rows.items():
        if key[::2] == ("tiny-cap", "sdpa"):
            assert (row["status"], row["reasons"]) == ("refused", ["it has no soft cap"])
            assert "median" not in row
            continue
        assert row["status"] == "ok" and row["reasons"] == []
        assert 0 < row["best"] <= row["low"] <= row["median"] <= row["high"]
        assert row["turns"] == 3
        assert row["flops_per_second"] == pytest.approx(row["flops"] / row["median"])
        assert ("predicted_seconds" in row) is (key[2] == "tilefold")
    # The score matrix is what plain PyTorch holds beyond its arguments: scaled copy, softmax.
    matrix = 2 * 64 * 64 * 4
    assert rows["tiny-full", "forward", "standard"]["extra_bytes"] >= 2 * matrix
    assert capfd.readouterr() == ("", "")


def test_predictions_of_both_passes() -> None:
    call = cases.build(FULL)
    found = run.predictions(call, FULL)
    forward, both = found["forward"], found["forward + backward"]
    explained = tilefold.explain(call.q, call.k, call.v)
    assert forward.flops == 4 * 2 * 64 * 64 * 16
    assert both.flops == explained.forward.flops + explained.backward.flops == 3.5 * forward.flops
    assert both.seconds == explained.forward.seconds + explained.backward.seconds
    assert both.bytes == explained.forward.bytes + explained.backward.bytes


def test_a_pass_that_is_left_out() -> None:
    document = run.bench([FULL], pick(["standard"]), run.Options(seconds=0.0, backward=False, rounds=1))
    assert {row["pass"] for row in document["rows"]} == {"forward"}


def test_a_contestant_without_backward_is_listed_with_its_reasons() -> None:
    forward = contestants.Contestant(
        "forward",
        "",
        lambda case, device, backward: ["it has no backward pass"] if backward else [],
        contestants.CONTESTANTS["standard"].prepare,
    )
    document = run.bench([FULL], [*pick(["tilefold"]), forward], run.Options(seconds=0.0, rounds=1))
    rows = by_key(document)
    assert rows["tiny-full", "forward", "forward"]["status"] == "ok"
    refused = rows["tiny-full", "forward + backward", "forward"]
    assert (refused["status"], refused["reasons"]) == ("refused", ["it has no backward pass"])


def test_a_rival_that_fails_in_its_backward_pass_is_listed() -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            if dx.shape[2] > 256:
                raise RuntimeError("out of memory\nat some place")
            return dx

    long = BenchCase("long", "", heads=(1, 1), lengths=(300, 300), dims=(8, 8))
    plain = contestants.CONTESTANTS["standard"].prepare(long, cases.build(long))
    rival = contestants.Contestant(
        "rival", "", lambda *_: [], lambda *_: lambda call: Stops.apply(plain(call))
    )
    rows = by_key(run.bench([long], [*pick(["tilefold"]), rival], run.Options(seconds=0.0, rounds=1)))
    assert rows["long", "forward", "rival"]["status"] == "ok"
    failed = rows["long", "forward + backward", "rival"]
    assert (failed["status"], failed["reasons"]) == ("failed", ["RuntimeError: out of memory"])
    assert rows["long", "forward + backward", "tilefold"]["status"] == "ok"


def test_timed_runs_are_complete_steps() -> None:
    case = BenchCase(
        "b", "", heads=(2, 2), lengths=(32, 32), dims=(8, 8), bias="HQK", bias_grad=True, sink=True
    )
    calls = cases.build_sets(case, "cpu", 2)
    attend = pick(["standard"])[1].prepare(case, calls[0])
    forward, step = (run.runs_of(attend, calls, case, backward) for backward in (False, True))
    assert len(forward) == len(step) == 2
    (out,) = forward[1]()
    results = step[1]()
    assert torch.equal(results[0], out) and not out.requires_grad
    shapes = [tuple(x.shape) for x in results]
    assert shapes == [(1, 2, 32, 8)] * 4 + [(2, 32, 32), (2,)]


# The commands.


def invoke(command: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.usefixtures("few")
def test_bench_then_report(tmp_path: Path) -> None:
    results, page, picture = (tmp_path / name for name in ("r.json", "r.html", "r.png"))
    options = ("tiny-full", "tiny-d*", "--seconds", "0", "--contestants", "sdpa", "--json", str(results))
    done = invoke(bench_command.command, *options)
    assert done.exit_code == 0, done.output
    assert "tiny-full" in done.stdout and "tiny-cap" not in done.stdout
    document = json.loads(results.read_text())
    assert {row["contestant"] for row in document["rows"]} == {"tilefold", "sdpa"}
    done = invoke(report_command.command, str(results), "--html", str(page), "--png", str(picture))
    assert done.exit_code == 0, done.output
    assert "tiny-decode" in done.stdout
    assert page.read_text().startswith("<!doctype html>") and picture.read_bytes().startswith(b"\x89PNG")
    done = invoke(report_command.command, str(results), "--json")
    assert json.loads(done.stdout) == [document]


@pytest.mark.usefixtures("few")
def test_json_on_stdout_is_nothing_else() -> None:
    done = invoke(
        bench_command.command, "tiny-decode", "--seconds", "0", "--contestants", "standard", "--json", "-"
    )
    assert done.exit_code == 0
    assert json.loads(done.stdout)["exact"] is True


@pytest.mark.usefixtures("few")
def test_bench_refuses_if_tilefold_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = tilefold.attention

    def wrong(*args: Any, **options: Any) -> Any:
        found = attention(*args, **options)
        return (found[0] * 1.01, found[1]) if isinstance(found, tuple) else found * 1.01

    monkeypatch.setattr(tilefold, "attention", wrong)
    done = invoke(
        bench_command.command, "tiny-full", "--seconds", "0", "--contestants", "sdpa", "--json", "-"
    )
    assert done.exit_code == 1
    assert all("median" not in row for row in json.loads(done.stdout)["rows"])


def test_the_list_of_cases() -> None:
    done = invoke(bench_command.command, "window", "--list")
    assert done.exit_code == 0
    assert "window-8k" in done.stdout and "full-1k" not in done.stdout


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (["unheard-of"], ArgumentError, "case: expected .* got 'unheard-of'"),
        (["--device", "tpu"], DeviceError, "device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "cpu:1"], DeviceError, "device: expected"),
        (["--device", "cuda:99"], DeviceError, "device: expected one that is here"),
        (["--contestants", "sdpa,nobody"], ArgumentError, r"contestants: expected .* got \['nobody'\]"),
        (
            ["--json", "/no/such/folder/r.json"],
            ArgumentError,
            "json: expected a file in a folder that exists",
        ),
    ],
)
def test_bench_refuses_bad_input(arguments: list[str], error: type[Exception], words: str) -> None:
    done = invoke(bench_command.command, *arguments)
    with pytest.raises(error, match=words):
        raise done.exception


def test_report_refuses_bad_input(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    for arguments, words in (
        ([str(path), str(path), "--png", str(tmp_path / "x.png")], "png: expected one FILE"),
        ([str(path), "--html", "/no/such/folder/x.html"], "html: expected a file in a folder that exists"),
        ([str(tmp_path / "none.json")], "FILE: expected results"),
    ):
        done = invoke(report_command.command, *arguments)
        with pytest.raises(ArgumentError, match=words):
            raise done.exception
