"""The GPU record: its digest, its sentences, and the script that makes it, on small suites that run here."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tilefold.testing import record
from tilefold.testing.record import HOPPER, TRITON, Record, State

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tilefold"
SCRIPT = ROOT / "benchmarks" / "gpu_record.py"
ABOUT = {
    "device": "NVIDIA H200",
    "devices": 2,
    "machine": "NVIDIA H200, 140 GiB, CUDA 13.0",
    "versions": {"torch": "2.13.0", "triton": "3.6.0", "driver": "580.1", "python": "3.12.3"},
}
RECORD = Record(
    digest="d1",
    complete=True,
    passed=1234,
    failed=0,
    skipped=0,
    failures=(),
    unfinished=(),
    arguments=(),
    date="2026-11-30",
    seconds=12.5,
    **ABOUT,
)
HEADER = "import os, signal, time, pytest\npytestmark = pytest.mark.gpu\n"
MIXED = """
@pytest.mark.parametrize("word", ["a", "b::c", "d.py"])
def test_good(word): pass

class TestGroup:
    def test_bad(self): assert False

@pytest.fixture
def broken(): raise RuntimeError("set-up")

@pytest.fixture
def leaky():
    yield
    raise RuntimeError("teardown")

def test_setup_errs(broken): pass
def test_teardown_errs(leaky): pass
def test_fails_and_teardown_errs(leaky): assert False
@pytest.mark.skip(reason="not here")
def test_left_out(): pass
@pytest.mark.xfail(strict=True)
def test_expected(): assert False
@pytest.mark.xfail(strict=True)
def test_unexpected(): pass
"""
MIXED_OUTCOMES = {
    "suite/test_mixed.py::test_good[a]": "passed",
    "suite/test_mixed.py::test_good[b::c]": "passed",
    "suite/test_mixed.py::test_good[d.py]": "passed",
    "suite/test_mixed.py::TestGroup::test_bad": "failed",
    "suite/test_mixed.py::test_setup_errs": "failed",
    "suite/test_mixed.py::test_teardown_errs": "failed",
    "suite/test_mixed.py::test_fails_and_teardown_errs": "failed",
    "suite/test_mixed.py::test_left_out": "skipped",
    "suite/test_mixed.py::test_expected": "skipped",
    "suite/test_mixed.py::test_unexpected": "failed",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_record", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_record"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package in a repository of its own, sources of the digest only."""
    folder = tmp_path / "repository" / "src" / "tilefold"
    for pattern in HOPPER.sources:
        for path in PACKAGE.glob(pattern):
            target = folder / path.relative_to(PACKAGE)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (folder.parents[1] / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['gpu: one']\n")
    return folder


@pytest.fixture
def repository(copy: Path) -> Path:
    """Its root."""
    return copy.parents[1]


def suite(repository: Path, **files: str) -> None:
    """Test files of this repository, by name; all of their tests are GPU tests."""
    (repository / "suite").mkdir(exist_ok=True)
    for name, text in files.items():
        (repository / "suite" / f"{name}.py").write_text(HEADER + text)


# The digest.


def test_a_digest_is_that_of_the_names_and_contents(copy: Path, tmp_path: Path) -> None:
    installed = shutil.copytree(copy, tmp_path / "site-packages" / "tilefold")
    assert re.fullmatch("[0-9a-f]{64}", record.digest())
    assert record.digest(copy) == record.digest(installed) == record.digest() == record.digest(PACKAGE)


@pytest.mark.parametrize(
    "name", ["backends/triton/forward.py", "planning/tables/sm90.json", "masks/rows.py", "philox.py"]
)
def test_a_digest_changes_with_every_source(copy: Path, name: str) -> None:
    before, path = record.digest(copy), copy / name
    content = path.read_bytes()
    path.write_bytes(content + b" ")
    assert record.digest(copy) != before
    path.write_bytes(content)
    assert record.digest(copy) == before
    path.rename(path.with_name(f"other{path.suffix}"))
    if name == "philox.py":
        with pytest.raises(FileNotFoundError, match=r"matches philox\.py"):
            record.digest(copy)
    else:
        assert record.digest(copy) != before


@pytest.mark.parametrize("name", ["backends/hopper/forward.py", "planning/tables/hopper/sm90.json"])
def test_the_hopper_kernels_have_a_digest_of_their_own(copy: Path, name: str) -> None:
    both = record.digest(copy), record.digest(copy, HOPPER)
    (copy / name).write_text("changed")
    assert (record.digest(copy) == both[0], record.digest(copy, HOPPER) == both[1]) == (True, False)
    (copy / "backends" / "triton" / "forward.py").write_text("changed")
    assert record.digest(copy) != both[0]


def test_a_digest_sees_new_files_and_text_that_moves_between_files(copy: Path) -> None:
    folder = copy / "backends" / "triton"
    before = record.digest(copy)
    (folder / "za.py").write_text("one")
    (folder / "zb.py").write_text("two")
    first = record.digest(copy)
    (folder / "za.py").write_text("onebackends/triton/zb.pytwo")
    (folder / "zb.py").unlink()
    assert len({before, first, record.digest(copy)}) == 3


def test_a_digest_does_not_change_with_times_line_ends_and_other_files(copy: Path) -> None:
    before, path = record.digest(copy), copy / "philox.py"
    os.utime(path, (1, 1))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (copy / "api.py").write_text("new")
    (copy / "masks" / "library").mkdir()
    (copy / "masks" / "library" / "new.py").write_text("new")
    (copy / "backends" / "triton" / "notes.txt").write_text("new")
    assert record.digest(copy) == before


def test_a_digest_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file of .* matches backends/triton"):
        record.digest(tmp_path)


# What the record says.


def write(repository: Path, text: str) -> None:
    path = repository / TRITON.place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_record_is_read_as_it_was_written(repository: Path) -> None:
    full = dataclasses.replace(
        RECORD, complete=False, failed=1, failures=("a.py::b",), unfinished=("c",), arguments=("-x",)
    )
    for one in (RECORD, full):
        write(repository, one.text())
        assert record.read(repository / TRITON.place) == one


@pytest.mark.parametrize(
    "change, kind, sentence",
    [
        ({}, "matches", "the GPU record matches the Triton kernels (1234 passed on NVIDIA H200, 2026-11-30)"),
        (
            {"skipped": 3, "arguments": ("-qv", "-rs", "--durations=9")},
            "matches",
            "the GPU record matches the Triton kernels (1234 passed, 3 skipped on NVIDIA H200, 2026-11-30)",
        ),
        (
            {"digest": "d0", "failed": 1, "failures": ("a",), "complete": False},
            "changed",
            "the Triton kernels have changed since their GPU record of 2026-11-30: "
            "run `make gpu-record` on a machine with a GPU",
        ),
        (
            {"failed": 2, "failures": ("t.py::a", "t.py::b")},
            "failures",
            "the GPU record of the Triton kernels has failures: 2 of 1236 failed "
            "on NVIDIA H200, 2026-11-30: t.py::a, t.py::b",
        ),
        (
            {"failed": 5, "failures": tuple("abcde"), "complete": False},
            "failures",
            "the GPU record of the Triton kernels has failures: 5 of 1239 failed on NVIDIA H200, 2026-11-30, "
            "before the run was stopped: a, b, c and 2 more",
        ),
        (
            {"complete": False, "unfinished": ("t.py::slow",), "arguments": ("-k", "x")},
            "incomplete",
            "the GPU record of the Triton kernels is incomplete: the run was stopped in t.py::slow "
            "(1234 passed on NVIDIA H200, 2026-11-30): run `make gpu-record` again",
        ),
        (
            {"complete": False},
            "incomplete",
            "the GPU record of the Triton kernels is incomplete: the run was stopped "
            "(1234 passed on NVIDIA H200, 2026-11-30): run `make gpu-record` again",
        ),
        (
            {"arguments": ("-q", "-k", "causal or full")},
            "part",
            "the GPU record of the Triton kernels may cover only a part of the "
            "suite: pytest ran with `-q -k 'causal or full'` "
            "(1234 passed on NVIDIA H200, 2026-11-30)",
        ),
        (
            {"arguments": ("-xkcausal",)},
            "part",
            "the GPU record of the Triton kernels may cover only a part of the "
            "suite: pytest ran with `-xkcausal` "
            "(1234 passed on NVIDIA H200, 2026-11-30)",
        ),
    ],
)
def test_sentences_about_a_record(change: dict[str, object], kind: str, sentence: str) -> None:
    state = record.judge(dataclasses.replace(RECORD, **change), "d1", "Triton kernels")
    assert (state.kind, state.sentence, state.ok) == (kind, sentence, kind == "matches")


def test_the_state_of_a_checkout(copy: Path, repository: Path) -> None:
    assert record.state(copy) == State(
        "absent",
        "there is no GPU record of the Triton kernels: run `make gpu-record` on a machine with a GPU",
    )
    write(repository, dataclasses.replace(RECORD, digest=record.digest(copy)).text())
    assert record.state(copy).kind == "matches"
    (copy / "philox.py").write_text("changed")
    assert record.state(copy).kind == "changed"


def test_an_installed_package_says_where_the_record_lies(copy: Path, repository: Path) -> None:
    installed = shutil.copytree(copy, repository / "site-packages" / "tilefold")
    assert record.state(installed) == State(
        "absent",
        "there is no GPU record of the Triton kernels: it lies in the "
        "repository (benchmarks/results/gpu_conformance.json), "
        "not in the installed package",
    )


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{", "Expecting property name"),
        ("[]", "expected an object, got list"),
        (
            json.dumps(
                {k: v for k, v in json.loads(RECORD.text()).items() if k not in ("digest", "seconds")}
            ),
            "missing or of the wrong kind: digest, seconds",
        ),
        (
            RECORD.text().replace("1234", '"1234"').replace('"failures": []', '"failures": "x"'),
            "missing or of the wrong kind: passed, failures",
        ),
    ],
)
def test_what_is_no_record_is_said(copy: Path, repository: Path, text: str, reason: str) -> None:
    write(repository, text)
    state = record.state(copy)
    assert state.kind == "unreadable"
    assert state.sentence.startswith(
        f"the GPU record of the Triton kernels ({TRITON.place}) cannot be read: {reason}"
    )


@pytest.mark.parametrize("suite", record.SUITES.values(), ids=lambda suite: suite.name)
def test_the_state_of_this_package_is_a_sentence(suite: record.Suite) -> None:
    assert record.package() == PACKAGE.resolve() or record.checkout(record.package()) is None
    assert f"the {suite.kernels}" in record.state(suite=suite).sentence


# The run.


def test_parts_are_run_apart(script: ModuleType, repository: Path) -> None:
    suite(repository, test_a='@pytest.mark.parametrize("n", range(12))\ndef test_one(n): pass\n')
    found = [script.run_suite(repository, part=part).outcomes for part in ("1/2", "2/2")]
    assert all(found) and not set(found[0]) & set(found[1])
    assert len(found[0] | found[1]) == 12


def test_outcomes_are_counted(script: ModuleType, repository: Path) -> None:
    suite(repository, test_mixed=MIXED, test_unmarked="pytestmark = []\ndef test_other(): assert False")
    run = script.run_suite(repository)
    assert run.outcomes == MIXED_OUTCOMES
    assert (run.status, run.complete, run.unfinished) == (1, True, ())
    assert run.seconds > 0


def test_what_was_noted_agrees_with_the_report(
    script: ModuleType, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A crash leaves no report, so the outcomes come from the notes.
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")  # as in a worker of pytest-xdist that runs this test
    suite(repository, test_mixed=MIXED, test_z="def test_crash(): os.kill(os.getpid(), signal.SIGKILL)")
    run = script.run_suite(repository)
    assert run.outcomes == MIXED_OUTCOMES
    assert (run.status, run.complete) == (-signal.SIGKILL, False)
    assert run.unfinished == ("suite/test_z.py::test_crash",)


def test_options_that_the_environment_adds_do_not_count(
    script: ModuleType, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    suite(repository, test_a="def test_one(): pass")
    assert script.run_suite(repository).outcomes == {"suite/test_a.py::test_one": "passed"}


def test_a_file_that_cannot_be_collected_fails(script: ModuleType, repository: Path) -> None:
    suite(repository, test_good="def test(): pass", test_torn="import nothing_of_that_name")
    run = script.run_suite(repository)
    assert run.outcomes == {"suite/test_torn.py": "failed"}
    assert (run.status, run.complete) == (2, False)


def test_a_run_is_recorded(script: ModuleType, repository: Path) -> None:
    suite(repository, test_a="def test_one(): pass\ndef test_two(): pass")
    output = repository / TRITON.place
    assert script.record_run(ABOUT, output, repository) == 0
    written, folder = record.read(output), repository / "src" / "tilefold"
    assert (written.passed, written.failed, written.skipped, written.complete) == (2, 0, 0, True)
    assert (written.arguments, written.failures, written.unfinished) == ((), (), ())
    assert (written.device, written.devices, written.versions) == ("NVIDIA H200", 2, ABOUT["versions"])
    assert written.digest == record.digest(folder)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", written.date)
    assert record.state(folder).ok
    rows = json.loads(output.read_text())["rows"]
    assert [row["measured"] for row in rows] == [2, 0, 0]


def test_arguments_reach_pytest_and_the_record(script: ModuleType, repository: Path) -> None:
    suite(repository, test_mixed=MIXED)
    output = repository / TRITON.place
    assert script.record_run(ABOUT, output, repository, ["-k", "bad or left_out"]) == 1
    written = record.read(output)
    assert (written.passed, written.failed, written.skipped) == (0, 1, 1)
    assert written.failures == ("suite/test_mixed.py::TestGroup::test_bad",)
    assert written.arguments == ("-k", "bad or left_out")
    assert record.state(repository / "src" / "tilefold").kind == "failures"


@pytest.mark.parametrize(
    "text, arguments, status",
    [
        ("def test_one(): pass", ["-k", "nothing"], 5),
        ("def test_one(): pass", ["--no-such-option"], 4),
        ("def test_one(): pytest.skip('no device')", [], 5),
        ("pytestmark = []\ndef test_one(): pass", [], 5),
    ],
)
def test_a_run_without_tests_leaves_the_record_alone(
    script: ModuleType,
    repository: Path,
    capfd: pytest.CaptureFixture[str],
    text: str,
    arguments: list[str],
    status: int,
) -> None:
    suite(repository, test_a=text)
    output = repository / "record.json"
    output.write_text("as before")
    assert script.record_run(ABOUT, output, repository, arguments) == status
    assert output.read_text() == "as before"
    assert "no record is written" in capfd.readouterr().err


def test_kernels_that_change_during_the_run_are_not_recorded(
    script: ModuleType, repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    suite(repository, test_a="def test_one(): open('src/tilefold/philox.py', 'a').write('#')")
    output = repository / "record.json"
    assert script.record_run(ABOUT, output, repository) == 1
    assert not output.exists()
    assert "changed while their tests ran" in capfd.readouterr().err


# Three tests, the second of which waits; `go` tells that it does.
WAITING = """
def test_a(): pass
def test_b():
    {prelude}
    open("go", "w").close()
    time.sleep(300)
def test_c(): pass
"""


@pytest.mark.parametrize(
    "prelude, grace, status",
    [("pass", 60.0, 2), ("signal.signal(signal.SIGINT, signal.SIG_IGN)", 1.0, 128 + signal.SIGKILL)],
    ids=["stops when asked", "has to be killed"],
)
def test_a_run_at_its_limit_is_recorded_as_incomplete(
    script: ModuleType, repository: Path, prelude: str, grace: float, status: int
) -> None:
    suite(repository, test_a=WAITING.format(prelude=prelude))
    output = repository / TRITON.place
    begun = time.monotonic()
    # A limit that ends before the second test is reached would record nothing: the next one is longer.
    for limit in (4.0, 30.0, 120.0):
        result = script.record_run(ABOUT, output, repository, limit=limit, grace=grace)
        if (repository / "go").exists():
            break
    assert result == status
    assert time.monotonic() - begun < 250
    written = record.read(output)
    assert (written.passed, written.failed, written.complete) == (1, 0, False)
    assert written.unfinished == ("suite/test_a.py::test_b",)
    state = record.state(repository / "src" / "tilefold")
    assert (state.kind, "stopped in suite/test_a.py::test_b" in state.sentence) == ("incomplete", True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_recorded_as_incomplete(repository: Path, number: signal.Signals) -> None:
    suite(repository, test_a=WAITING.format(prelude="pass"))
    code = (
        "import sys; from pathlib import Path; import gpu_record; "
        f"sys.exit(gpu_record.record_run({ABOUT!r}, Path({TRITON.place!r}), Path.cwd()))"
    )
    paths = [str(SCRIPT.parent), str(PACKAGE.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen([sys.executable, "-c", code], cwd=repository, env=environment) as process:
        end = time.monotonic() + 120
        while not (repository / "go").exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(120) == 2
    written = record.read(repository / TRITON.place)
    assert (written.passed, written.complete) == (1, False)
    assert written.unfinished == ("suite/test_a.py::test_b",)


# The command.


@pytest.mark.parametrize(
    "words, status, runs",
    [
        ([], 0, ["triton", "hopper"]),
        ([], 1, ["triton", "hopper"]),
        # What pytest was told to run may lie in the next one.
        ([], 5, ["triton", "hopper"]),
        # Interrupted, killed.
        ([], 2, ["triton"]),
        ([], 137, ["triton"]),
        (["--suite", "hopper"], 1, ["hopper"]),
    ],
)
def test_suites_run_one_after_the_other_unless_one_is_stopped(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int, runs: list[str]
) -> None:
    seen: list[str] = []

    def run(*arguments: object, suite: record.Suite, part: str) -> int:
        assert part == "1/1"
        assert arguments[1] == ROOT / suite.place
        seen.append(suite.name)
        return status

    monkeypatch.setattr(script, "refusal", lambda: None)
    monkeypatch.setattr(script, "this_machine", dict)
    monkeypatch.setattr(script, "record_run", run)
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script.torch.cuda, "get_device_capability", lambda: (9, 0))
    assert script.main(words) == status
    assert seen == runs


PARTS = [
    dataclasses.replace(RECORD, part="1/2", passed=7, seconds=1.5),
    dataclasses.replace(RECORD, part="2/2", passed=5, failed=1, failures=("b",), complete=False, seconds=2.0),
]


def test_parts_make_one_record() -> None:
    whole = record.join(PARTS)
    assert (whole.passed, whole.failed, whole.failures, whole.seconds) == (12, 1, ("b",), 3.5)
    assert whole.part == "1/1" and not whole.complete
    assert record.judge(PARTS[0], "d1", "kernels").kind == "part"
    assert record.join([PARTS[1], dataclasses.replace(PARTS[0], passed=1)]).passed == 6


@pytest.mark.parametrize(
    "records, message",
    [
        (PARTS[:1], "expected the parts 1/1, got 1/2"),
        ([PARTS[0], PARTS[0]], "expected the parts 1/2, 2/2, got 1/2, 1/2"),
        ([PARTS[0], dataclasses.replace(PARTS[1], digest="d2")], "parts differ in digest: d1, d2"),
        ([PARTS[0], dataclasses.replace(PARTS[1], device="B200")], "parts differ in device"),
    ],
)
def test_only_the_parts_of_one_suite_are_joined(records: list[Record], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record.join(records)


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_a_part_that_is_none_is_refused(script: ModuleType, part: str) -> None:
    with pytest.raises(ValueError, match="expected a part like 2/3"):
        record.numbers_of(part)
    with pytest.raises(SystemExit):
        script.main(["--part", part])


def test_parts_share_out_every_test() -> None:
    tests = [f"suite/test_x.py::test_{n}" for n in range(300)]
    found = [record.part_of(test, 3) for test in tests]
    assert set(found) == {1, 2, 3} and min(map(found.count, (1, 2, 3))) > 60


def test_a_record_without_a_part_is_a_whole_one(tmp_path: Path) -> None:
    held = json.loads(RECORD.text())
    del held["part"]
    (tmp_path / "old.json").write_text(json.dumps(held))
    assert record.read(tmp_path / "old.json") == RECORD


def test_other_gpus_have_no_record_of_the_hopper_kernels(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script.torch.cuda, "get_device_capability", lambda: (8, 0))
    assert script._here(check=False) == ["triton"]
    assert script._here(check=True) == ["triton", "hopper"]


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": str(PACKAGE.parent), "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        env=os.environ | paths | environment,
    )


def test_without_a_gpu_one_sentence_refuses(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    run = command("--suite", "hopper", "--output", str(output), CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 1
    assert run.stderr == "The GPU suite needs a CUDA device, and this PyTorch sees none.\n"
    assert (run.stdout, output.exists()) == ("", False)


def test_the_interpreter_of_triton_is_refused() -> None:
    run = command(TRITON_INTERPRET="1")
    assert run.returncode == 1
    assert run.stderr.startswith("TRITON_INTERPRET is set: ")
    assert run.stderr.count("\n") == 1


def test_check_says_how_the_records_of_the_checkout_stand() -> None:
    states = [record.state(PACKAGE, suite) for suite in (TRITON, HOPPER)]
    for words, chosen in (((), states), (("--suite", "triton"), states[:1])):
        run = command("--check", *words)
        assert run.stdout == "".join(f"{state.sentence}.\n" for state in chosen)
        assert run.returncode == (0 if all(state.ok for state in chosen) else 1)


@pytest.mark.parametrize(
    "words", [("--workers", "0"), ("--limit", "-1"), ("-k", "causal"), ("--suite", "x"), ("--output", "x")]
)
def test_wrong_options_are_refused(words: tuple[str, str]) -> None:
    run = command(*words)
    assert run.returncode == 2
    assert words[0] in run.stderr


def test_workers_need_xdist(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.spread(1) == []
    there = importlib.util.find_spec("xdist") is not None
    assert script.spread(3) == (["-n", "3", "--dist", "loadgroup"] if there else [])
    assert ("pytest-xdist is not installed" in capsys.readouterr().err) == (not there)


@pytest.mark.parametrize(
    "test, name",
    [
        ("a/b.py::test_x[False]@large", "a/b.py::test_x[False]"),
        ("a/b.py::test_x@large", "a/b.py::test_x"),
        ("a/b.py::test_x[y@z]", "a/b.py::test_x[y@z]"),
        ("a@1/b.py::test_x", "a@1/b.py::test_x"),
    ],
)
def test_groups_are_no_part_of_names(script: ModuleType, test: str, name: str) -> None:
    assert script.ungrouped(test) == name


@pytest.mark.gpu
def test_this_machine_names_itself(script: ModuleType) -> None:
    about = script.this_machine()
    assert about["device"] == torch.cuda.get_device_name() and about["device"] in about["machine"]
    assert about["devices"] == torch.cuda.device_count() >= 1
    assert re.match(r"\d+\.", about["versions"]["cuda"])
    assert set(about["versions"]) == {"tilefold", "torch", "triton", "cuda", "driver", "python"}
