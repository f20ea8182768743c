"""The command line: what each command prints, in words and as JSON, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from typer.testing import CliRunner, Result

import tilefold
from tilefold import Problem, masks, ops
from tilefold.backends.eager import EagerBackend
from tilefold.bench.entries import Entry, choose, parse
from tilefold.bench.tune import Tuning
from tilefold.bench.tune_kernels import Found, KernelTuning, Trial
from tilefold.cli import MISSING, main
from tilefold.cli.app import COMMANDS, app
from tilefold.cost.hardware import MACHINES
from tilefold.planning.backend import KNOWN_BACKENDS
from tilefold.testing import conformance

SHAPE = "1x8x512x64"


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))


def answer(*arguments: str) -> Any:
    """What a command prints with --json; stdout holds nothing else."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def in_fresh_process(code: str) -> subprocess.CompletedProcess[str]:
    """Compiled files are kept, as they are for a user after the first run."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


# -- the application -----------------------------------------------------------------------------------


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    assert [name for name, _ in COMMANDS if f"│ {name} " not in text] == []


@pytest.mark.parametrize("name", [name for name, _ in COMMANDS if name != "demo"])
def test_every_option_has_a_text(name: str) -> None:
    from typer.main import get_command

    command = get_command(app).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    assert command.help
    assert [parameter.name for parameter in command.params if not parameter.help] == []
    result = run(name, "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_version() -> None:
    assert run("--version").stdout == f"tilefold {tilefold.__version__}\n"


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "tilefold.cli", "mask", "causal()", "--lengths", "9", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["visible"] == 45


def test_the_entry_point_returns_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["mask", "causal("]) == 2
    assert main(["no-such-command"]) == 2
    assert capsys.readouterr().out == f"tilefold {tilefold.__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_says_how_to_get_what_is_missing(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilefold.cli.find_spec", lambda name: None if name == missing else name)
    assert main(["--version"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", MISSING + "\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["explain", "1x8x64"], "q: expected four positive sizes"),
        (["explain", SHAPE, SHAPE, SHAPE, SHAPE], "shapes: expected one to three"),
        (["explain", SHAPE, "--machine", "H1000"], "machine: expected one of"),
        (["explain", SHAPE, "--machine", "H100", "--device", "cpu"], "device: expected cuda beside"),
        (["explain", SHAPE, "--device", "tpu"], "device: expected cpu or cuda, got 'tpu'"),
        (["explain", SHAPE, "--dtype", "int8"], "dtype: expected fp64"),
        (["explain", SHAPE, "--machine", "H100", "--backend", "fast"], "backend: "),
        (["explain", SHAPE, "--machine", "H100", "--bias", "3x3"], "bias: expected a shape that broadcasts"),
        (["explain", SHAPE, "--machine", "H100", "--bias", "many"], "bias: expected positive sizes"),
        (["explain", SHAPE, "--machine", "H100", "--dropout", "1"], "dropout_p: expected a number in [0, 1)"),
        (["explain", SHAPE, "--machine", "H100", "--softcap", "-1"], "softcap: expected"),
        (["explain", SHAPE, "--machine", "H100", "--mask", "padding([5, 9])"], "key_lengths of padding"),
        (["mask", "casual()"], "mask: expected one of bigbird"),
        (["mask", "causal() and full()"], "mask: expected constructors of masks"),
        (["mask", "documents([0, 600])"], "cu_seqlens_q of documents: expected offsets of at most 512"),
        (["mask", "causal()", "--lengths", "1x2x3"], "lengths: expected a positive length"),
        (["mask", "causal()", "--h", "1"], "h: expected an index in [0, 1), got 1"),
        (["mask", "causal()", "--lengths", "9000", "--tile", "1"], "tile: expected one that makes at most"),
        (
            ["mask", "causal()", "--png", "/no/such/folder/x.png"],
            "png: expected a file in a folder that exists",
        ),
        (["check", "--law", "gravity"], "law: expected one of matches_the_reference"),
        (["check", "--backend", "fast"], "backend: expected one of hopper, triton, eager, got 'fast'"),
        (["check", "--device", "tpu"], "device: expected cpu or cuda, got 'tpu'"),
        (["check", "--full", "--cases", "3"], "cases: expected none beside --full, got 3"),
    ],
)
def test_wrong_input_gets_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")


# -- info ----------------------------------------------------------------------------------------------


def test_info_says_what_is_installed_and_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEFOLD_CACHE", str(tmp_path))
    (tmp_path / "cpu-0.json").write_text("{}")
    found = answer("info")
    assert found["versions"]["tilefold"] == tilefold.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["rich"] == version("rich")
    assert found["devices"][0]["threads"] == torch.get_num_threads()
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    assert found["cache"] == {"folder": str(tmp_path), "files": ["cpu-0.json"]}
    rows = {(row["device"], row["backend"]): row for row in found["backends"]}
    assert set(rows) == {(device, name) for device in ("cpu", "cuda") for name in KNOWN_BACKENDS}
    assert rows["cpu", "eager"] == {"device": "cpu", "backend": "eager", "runs": True, "reasons": []}
    assert all(row["runs"] == (row["reasons"] == []) for row in rows.values())
    assert rows["cuda", "eager"]["runs"] == torch.cuda.is_available()


def test_info_in_words_fits_the_console() -> None:
    lines = run("info").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for title in ("Versions", "Devices", "Cache", "Backends"):
        assert any(line.startswith(title) for line in lines)


def test_info_takes_at_most_3_s_of_processor_time() -> None:
    code = (
        "import sys, time; from tilefold.cli import main; code = main(['info']); "
        "print(time.process_time(), file=sys.stderr); sys.exit(code)"
    )
    times: list[float] = []
    while not times or (min(times) > 3.0 and len(times) < 3):
        done = in_fresh_process(code)
        assert done.returncode == 0
        times.append(float(done.stderr))
    assert min(times) <= 3.0, f"seconds in fresh processes: {times}"


# -- explain -------------------------------------------------------------------------------------------


def test_explain_is_the_explanation_of_the_library() -> None:
    problem = Problem(1, 8, 2, 512, 1024, 64, 32, torch.float16, "cuda")
    mask = masks.causal() & masks.window(255, 0)
    wanted = tilefold.explain(problem, mask=mask, machine="A100").to_dict()
    found = answer(
        "explain", "1x8x512x64", "1x2x1024x64", "1x2x1024x32", "--dtype", "fp16", "--machine", "A100",
        "--mask", "causal() & window(255, 0)",
    )  # fmt: skip
    assert found.pop("mask") == "causal() & window(255, 0)"
    wanted.pop("mask")
    assert found == json.loads(json.dumps(wanted))


def test_explain_counts_tiles_and_results() -> None:
    found = answer("explain", "1x8x8192x64", "--mask", "documents([0, 2048, 8192])", "--machine", "A100")
    assert found["mask"] == "documents([0, 2048, 8192])"
    assert (found["form"], found["machine"]) == ("rows", "A100")
    # Tiles of a power of two up to 2048 lie in one document or in none.
    assert found["tiles"]["share"] == (2048**2 + 6144**2) / 8192**2
    assert found["tiles"]["visited"] == found["tiles"]["full"] == found["tiles"]["total"] * 5 // 8
    assert found["forward"]["result_bytes"] == 8 * 8192 * (64 * 2 + 4)


def test_explain_passes_every_option_on() -> None:
    plain = answer("explain", SHAPE, "--machine", "H100")
    extra = ["--softcap", "30", "--dropout", "0.1", "--alibi", "--bias", "1x1x512x512", "--sink"]
    extra.append("--bias-gradient")
    found = answer("explain", SHAPE, "--machine", "H100", "--device", "cuda", "--backend", "eager", *extra)
    for word in ("softcap", "dropout", "bias [1, 1, 512, 512]", "sink", "alibi"):
        assert word in found["call"]
        assert word not in plain["call"]
    assert found["backend"] == "eager"
    assert found["backward"]["result_bytes"] == plain["backward"]["result_bytes"] + 2 * 512 * 512


@pytest.mark.parametrize("machine", list(MACHINES))
def test_explain_in_words_fits_the_console(machine: str) -> None:
    result = run("explain", SHAPE, "--machine", machine, "--mask", "causal() | prefix(9)", "--sink")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(machine in line for line in lines)
    assert any("causal() | prefix(9)" in line for line in lines)


# -- mask ----------------------------------------------------------------------------------------------


def test_mask_counts_the_tiles_of_causal() -> None:
    found = answer("mask", "causal()", "--lengths", "512", "--tile", "64")
    assert found["tiles"] == {"total": 64, "visited": 36, "full": 28, "partial": 8, "empty": 28}
    assert found["visible"] == 512 * 513 // 2
    assert found["share"] == found["visible"] / 512**2
    assert (found["form"], found["form_bytes"], found["empty_rows"]) == ("band", 0, 0)
    assert found["lengths"] == [512, 512]


def test_mask_shows_the_batch_element_and_head_asked_for() -> None:
    expression = "padding([5, 90]) & causal()"
    options = ("--lengths", "40x100", "--batch", "2", "--heads", "3", "--h", "2", "--tile", "32")
    first, second = (answer("mask", expression, *options, "--b", b) for b in ("0", "1"))
    dense = (masks.padding(torch.tensor([5, 90])) & masks.causal()).materialize(2, 3, 40, 100)
    assert [first["visible"], second["visible"]] == [int(dense[b, 2].sum()) for b in (0, 1)]
    assert first["form"] == "rows"
    # One interval of two int32 per row of each batch element, shared by the heads.
    assert first["form_bytes"] == second["form_bytes"] == 2 * 40 * 2 * 4
    assert (second["b"], second["h"], second["batch"], second["heads"]) == (1, 2, 2, 3)


def test_mask_counts_rows_that_see_nothing() -> None:
    assert answer("mask", "window(-3, None)", "--lengths", "20")["empty_rows"] == 3


def test_mask_draws_in_words_and_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    result = run("mask", "documents([0, 300, 512], within=causal())", "--png", str(path))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "documents([0, 300, 512], within=causal())" in lines[0]
    seen = (300 * 301 + 212 * 213) / 2 / 512**2
    assert any(f"{100 * seen:.3g} % of the elements" in line for line in lines)
    assert matplotlib.image.imread(path).shape[2] == 4


# -- check ---------------------------------------------------------------------------------------------


def test_check_runs_every_law_on_every_backend_here() -> None:
    found = answer("check", "--cases", "1")
    assert (found["device"], found["ok"]) == ("cpu", True)
    installed = [name for name in KNOWN_BACKENDS if not isinstance(ops.load(name), str)]
    pairs = [(row["backend"], row["law"]) for row in found["laws"]]
    assert pairs == [(name, law.name) for name in installed for law in conformance.laws()]
    assert all(row["passed"] + row["declined"] == 1 and row["failed"] == 0 for row in found["laws"])


def test_check_takes_as_many_cases_as_asked_for() -> None:
    laws = ("empty_rows_are_zero", "a_query_keeps_its_nan_to_itself")
    found = answer("check", "--backend", "eager", "--cases", "7", "--law", laws[0], "--law", laws[1])
    assert [(row["law"], row["passed"]) for row in found["laws"]] == [(name, 7) for name in laws]


def test_check_finds_a_broken_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = EagerBackend.forward

    def wrong(self: EagerBackend, work: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(self, work)
        return torch.full_like(out, torch.nan), lse

    monkeypatch.setattr(EagerBackend, "forward", wrong)
    arguments = ("check", "--backend", "eager", "--law", "strides_do_not_matter", "--cases", "2")
    result = run(*arguments)
    assert result.exit_code == 1
    assert "2 of 2 checks failed" in result.stdout
    assert result.stdout.count("✗ strides_do_not_matter") == 2
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert len(result.stdout) < 1000
    full = run(*arguments, "--json")
    assert full.exit_code == 1
    (law,) = json.loads(full.stdout)["laws"]
    assert (law["passed"], law["failed"]) == (0, 2)
    names = {case.name for case in conformance.cases()}
    assert all(entry["case"] in names and "out: error inf" in entry["message"] for entry in law["failures"])


def test_check_counts_what_is_declined_and_what_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run_law(law: Any, case: Any, backend: str, device: str) -> None:
        seen.append(case.name)
        if len(seen) > 10:
            raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(conformance, "why_not", lambda case, backend, device: ["no"] * (len(seen) % 2))
    monkeypatch.setattr(conformance, "run", run_law)
    result = run("check", "--backend", "eager", "--law", "matches_the_reference", "--cases", "18", "--json")
    assert result.exit_code == 1
    (law,) = json.loads(result.stdout)["laws"]
    assert (law["passed"], law["declined"], law["failed"]) == (5, 5, 8)
    assert law["failures"][0] == {"case": seen[10], "message": "RuntimeError: out of memory"}
    seen.clear()
    words = run("check", "--backend", "eager", "--law", "matches_the_reference", "--cases", "18").stdout
    assert "and 3 more of matches_the_reference" in words
    assert "8 of 18 checks failed" in words


def test_check_names_a_backend_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "load", lambda name: f"the {name} backend is on holiday")
    result = run("check", "--backend", "triton")
    assert result.exit_code == 2
    assert "got 'triton': the triton backend is on holiday" in result.stderr


def test_check_says_if_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("check", "--device", "cuda")
    assert result.exit_code == 2
    assert "device: expected one that is here, got cuda" in result.stderr


# -- demo ----------------------------------------------------------------------------------------------


def test_demo_gets_its_arguments_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def demo(arguments: list[str]) -> int:
        given.append(arguments)
        return 1

    monkeypatch.setattr("tilefold.demo.__main__.main", demo)
    assert run("demo", "--steps", "5", "--json", "--device", "cpu").exit_code == 1
    assert run("demo").exit_code == 1
    assert given == [["--steps", "5", "--json", "--device", "cpu"], []]


def test_demo_lists_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    result = run("demo", "--help")
    assert result.exit_code == 0
    assert "--max-context" in result.stdout


# -- tune ----------------------------------------------------------------------------------------------


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Tuning that finds the same at once, for a GPU that is said to be there; and how it was asked."""
    asked: list[tuple[Any, ...]] = []
    old, new = (64, 64, 4, 2), (128, 64, 8, 3)

    def fold(device: str, seconds: float, progress: Any, write: bool) -> Tuning:
        progress("case", 0, 1)
        return Tuning("sm90", 1 << 20, 1 << 21, {"case": {1 << 20: 2e-3, 1 << 21: 1e-3}})

    def kernels(device: str, entries: list[Entry], limit: float, progress: Any, write: bool) -> KernelTuning:
        asked.append((device, [entry.name for entry in entries], limit, write))
        progress(entries[0].name, 0, 1)
        trials = [
            Trial(old, "timed", [], 2e-3),
            Trial(new, "timed", [], 1e-3, 3.25),
            Trial((16, 16, 4, 1), "large"),
            Trial((32, 32, 4, 1), "wrong", ["OVER out [bf16]"]),
            Trial((32, 16, 4, 1), "failed", ["RuntimeError: no"]),
        ]
        first = Found(entries[0], old, new, 2e-3, 1e-3, trials)
        nothing = Found(parse("triton/keys/16/576"), None, None)
        return KernelTuning("sm90", [first, nothing], ["triton/dk/16/64"], "/cache/tuned-sm90.json")

    monkeypatch.setattr("tilefold.bench.tune.tune", fold)
    monkeypatch.setattr("tilefold.bench.tune_kernels.tune_kernels", kernels)
    monkeypatch.setattr("tilefold.cli.bench.check_device", lambda device: None)
    monkeypatch.setattr("tilefold.planning.tuned.architecture", lambda device: "sm90")
    monkeypatch.setattr("tilefold.bench.tune.machine", lambda device: "a GPU")
    return asked


def test_tune_goes_on_to_the_kernels_of_a_gpu(tunings: list[tuple[Any, ...]]) -> None:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(
        app, ["tune", "--device", "cuda", "--kernels", "forward"]
    )
    assert result.exit_code == 0, result.output
    device, names, limit, write = tunings[0]
    assert (device, limit, write) == ("cuda", float("inf"), True)
    assert names == [entry.name for entry in choose("sm90", ["forward"])]
    row = next(line for line in result.stdout.splitlines() if line.startswith("forward/16/64"))
    assert " ".join(row.split()) == (
        "forward/16/64 64 x 64, 4 warps, 2 stages 2.000 ms 128 x 64, 8 warps, 3 stages 1.000 ms 3.2 s 2 1 2 0"
    )
    for line in (
        "wrong: triton/forward/16/64, 32 x 32, 4 warps, 1 stage: OVER out [bf16]",
        "failed: triton/forward/16/64, 32 x 16, 4 warps, 1 stage: RuntimeError: no",
        "triton/keys/16/576: no candidate was right",
        "no time was left for triton/dk/16/64",
        "sm90: 1 entry measured; kept in /cache/tuned-sm90.json",
    ):
        assert line in result.stdout


def test_tune_chooses_entries_and_says_all_of_it_as_json(
    tunings: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    options = ["--heads", "64, 128", "--kernels", "queries,dk", "--kinds", "any,rows", "--bits", "16"]
    table = tmp_path / "sm90.json"
    found = answer(
        "tune", "--device", "cuda:0", *options, "--limit", "60", "--dry-run", "--write", str(table)
    )
    kernels = ("queries", "dk")
    assert set(tunings[0][1]) == {
        f"triton/{k}/16/{h}{e}" for k in kernels for h in (64, 128) for e in ("", "/rows")
    }
    assert tunings[0][2:] == (60.0, False)
    assert found["fold_tile_elements"] == 1 << 21
    first = found["kernels"]["entries"][0]
    assert (first["entry"], first["new"]) == ("triton/queries/16/64", [128, 64, 8, 3])
    assert [trial["status"] for trial in first["trials"]] == ["timed", "timed", "large", "wrong", "failed"]
    assert found["kernels"]["left"] == ["triton/dk/16/64"]
    written = json.loads(table.read_text())
    assert written["triton/queries/16/64"] == [128, 64, 8, 3]
    assert written["fold_tile_elements"] == 1 << 21 and written["machine"].startswith("a GPU, PyTorch")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--kernels", "forward"], "kernels: expected only where there are kernels, on cuda, got cpu"),
        (["--limit", "5"], "limit: expected only where there are kernels, on cuda, got cpu"),
        (["--limit", "inf", "--device", "cuda"], "limit: expected a finite number, got inf"),
        (["--heads", "64,wide", "--device", "cuda"], "heads: expected whole numbers with commas between"),
        (
            ["--kinds", "", "--device", "cuda"],
            "kinds: expected some of any, full, short, rows, cols, bits, bias, short full, band, "
            "short band, window, got ''",
        ),
        (
            ["--write", "no/folder/x.json", "--device", "cuda"],
            "write: expected a file in a folder that exists",
        ),
    ],
)
def test_tune_refuses_before_it_measures(
    options: list[str], message: str, tunings: list[tuple[Any, ...]]
) -> None:
    result = run("tune", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert tunings == []


def test_tune_on_a_cpu_has_no_kernels(tunings: list[tuple[Any, ...]], tmp_path: Path) -> None:
    table = tmp_path / "cpu.json"
    assert "kernels" not in answer("tune", "--write", str(table))
    assert tunings == []
    assert json.loads(table.read_text())["fold_tile_elements"] == 1 << 21
