"""Runs the GPU suites on this machine and writes their GPU records, which CI compares with the kernels.

    python benchmarks/gpu_record.py                                # pytest -m gpu, suite by suite
    python benchmarks/gpu_record.py --suite hopper --workers 8     # one of them, with pytest-xdist
    python benchmarks/gpu_record.py --limit 3000                   # each is stopped after 50 minutes
    python benchmarks/gpu_record.py --suite triton --output /tmp/x.json -- -x -k causal
    python benchmarks/gpu_record.py --suite hopper --part 1/2 --output a.json    # half of the tests; then
    python benchmarks/gpu_record.py --suite hopper --join a.json b.json          # both in one record
    python benchmarks/gpu_record.py --check                        # only say how the records stand

Needs a CUDA device. Exits with pytest's status. A run that is interrupted, stopped at its limit, or crashes
is recorded as incomplete; one in which no test ran is not recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import tilefold
from tilefold.bench.machine import machine
from tilefold.testing import record

ROOT = Path(__file__).parents[1]
#: Names the file in which the pytest below notes what it does; see `pytest_runtest_logstart`.
PROGRESS = "TILEFOLD_GPU_RECORD_PROGRESS"
#: Tells the pytest below which part of the suite it is to run.
PART = "TILEFOLD_GPU_RECORD_PART"
#: Set by pytest-xdist in its workers.
WORKER = "PYTEST_XDIST_WORKER"
#: From mild to grave: a test that passed and then failed in its teardown has failed.
OUTCOMES = ("skipped", "passed", "failed")
#: Seconds that pytest gets to write its report after it was asked to stop.
GRACE = 30.0
#: Statuses with which pytest says that it came to its end.
ENDED = (0, 1)
NO_TEST_RAN = 5


# What pytest does, noted as it happens: this file is loaded into pytest as a plugin. The XML report is
# written at the very end, so a pytest that hangs inside a kernel and has to be killed leaves none.


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    part, parts = record.numbers_of(os.environ.get(PART, "1/1"))
    config.hook.pytest_deselected(items=[x for x in items if record.part_of(x.nodeid, parts) != part])
    items[:] = [x for x in items if record.part_of(x.nodeid, parts) == part]


def pytest_runtest_logstart(nodeid: str) -> None:
    note(nodeid, "started")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        note(report.nodeid, report.outcome)


def pytest_runtest_logfinish(nodeid: str) -> None:
    note(nodeid, "finished")


def note(test: str, event: str) -> None:
    """One line of JSON. Workers of pytest-xdist leave it to the process that collects their reports."""
    if WORKER not in os.environ:
        with open(os.environ[PROGRESS], "a", encoding="utf-8") as file:
            file.write(json.dumps([test, event]) + "\n")


# The run.


@dataclass(frozen=True)
class Run:
    """What came out of one pytest.

    Attributes:
        status: its exit status; negative if a signal ended it.
        complete: whether it came to its end.
        outcomes: of every test that ended, by name.
        unfinished: tests that were running when it was stopped.
        seconds: how long it took.
    """

    status: int
    complete: bool
    outcomes: dict[str, str]
    unfinished: tuple[str, ...]
    seconds: float

    def names(self, outcome: str) -> tuple[str, ...]:
        """Sorted names of the tests with this outcome."""
        return tuple(sorted(test for test, found in self.outcomes.items() if found == outcome))


def run_suite(
    folder: Path,
    arguments: Sequence[str] = (),
    limit: float | None = None,
    grace: float = GRACE,
    part: str = "1/1",
) -> Run:
    """Run the GPU suite of the repository in `folder`; its output is not captured.

    Args:
        arguments: further ones for pytest.
        limit: seconds after which it is stopped.
        grace: seconds it then gets to write its report, before it is killed.
    """
    paths = [folder / "src", Path(__file__).parent]
    paths += [Path(path).absolute() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    with tempfile.TemporaryDirectory() as scratch:
        report, progress = Path(scratch, "report.xml"), Path(scratch, "progress")
        progress.touch()
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", Path(__file__).stem]
        # The older family of reports names the file of each test.
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *arguments]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            PROGRESS: str(progress),
            PART: part,
        }
        # This script may itself be run by a worker's test.
        environment.pop(WORKER, None)
        # What the record says of the run's arguments is all of them.
        environment.pop("PYTEST_ADDOPTS", None)
        begun = time.monotonic()
        # In a session of its own it hears of an interrupt from here only, and can be killed with its workers.
        with terminate_interrupts():
            process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
            ended = wait(process, limit, grace)
        seconds = time.monotonic() - begun
        noted, unfinished = from_progress(progress)
        whole = process.returncode >= 0 and report.exists()
        complete = ended and process.returncode in ENDED
        return Run(
            status=process.returncode,
            complete=complete,
            outcomes=from_junit(report) if whole else noted,
            # A test whose worker crashed has failed, and the others went on.
            unfinished=() if complete else unfinished,
            seconds=seconds,
        )


@contextlib.contextmanager
def terminate_interrupts() -> Iterator[None]:
    """SIGTERM, which ends jobs that take too long, acts like an interrupt: a record is still written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait(process: subprocess.Popen[bytes], limit: float | None, grace: float) -> bool:
    """Whether it ended by itself; else it is interrupted, and killed after `grace` seconds or at a second
    interrupt.
    """
    try:
        process.wait(limit)
        return True
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(grace)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return False


def from_junit(path: Path) -> dict[str, str]:
    """Outcomes of the tests in an XML report, by name as pytest takes it. An error is a failure; a test that
    fails and then errs in its teardown has two entries there, and one here.
    """
    outcomes: dict[str, str] = {}
    for case in ET.parse(path).iter("testcase"):
        if "name" not in case.attrib:
            # An interrupted test: its set-up was reported, its outcome was not.
            continue
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        file, name = case.get("file", ""), case.get("name", "")
        module = file.removesuffix(".py").replace("/", ".")
        if not case.get("classname"):
            # A file that could not be collected.
            test = file or name
        else:
            classes = case.get("classname", "").removeprefix(module).strip(".").split(".")
            test = "::".join([file, *filter(None, classes), name])
        test = ungrouped(test)
        outcomes[test] = graver(outcome, outcomes.get(test))
    return outcomes


def ungrouped(test: str) -> str:
    """A test's name without the group (`@large`) that pytest-xdist appends to it."""
    return re.sub(r"@[\w.-]+$", "", test)


def from_progress(path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Outcomes of the tests that ended, by name, and the names of those that were begun only."""
    begun: dict[str, str | None] = {}
    ended: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        test, event = json.loads(line)
        test = ungrouped(test)
        if event == "started":
            begun[test] = None
        elif event != "finished":
            begun[test] = graver(event, begun.get(test))
        elif (outcome := begun.pop(test)) is not None:
            ended[test] = outcome
    return ended, tuple(begun)


def graver(outcome: str, other: str | None) -> str:
    return outcome if other is None else max(outcome, other, key=OUTCOMES.index)


# The record.


def record_run(
    about: dict[str, Any],
    output: Path,
    folder: Path = ROOT,
    arguments: Sequence[str] = (),
    workers: int = 1,
    limit: float | None = None,
    grace: float = GRACE,
    suite: record.Suite = record.TRITON,
    part: str = "1/1",
) -> int:
    """Run a suite of the repository in `folder`, write its record to `output`, return the exit status.

    Args:
        about: `device`, `devices`, `machine` and `versions` of the record.
        workers: processes of pytest-xdist, if it is installed.
    """
    package, today = folder / "src" / "tilefold", datetime.date.today().isoformat()
    before = record.digest(package, suite)
    run = run_suite(folder, [*suite.tests, *spread(workers), *arguments], limit, grace, part)
    status = run.status if run.status >= 0 else 128 - run.status
    if not {"passed", "failed"} & set(run.outcomes.values()):
        print(f"No test ran ({len(run.outcomes)} skipped): no record is written.", file=sys.stderr)
        return status or NO_TEST_RAN
    if record.digest(package, suite) != before:
        print("The kernels were changed while their tests ran: no record is written.", file=sys.stderr)
        return status or 1
    written = record.Record(
        digest=before,
        complete=run.complete,
        passed=len(run.names("passed")),
        failed=len(run.names("failed")),
        skipped=len(run.names("skipped")),
        failures=run.names("failed"),
        unfinished=run.unfinished,
        arguments=tuple(arguments),
        date=today,
        seconds=round(run.seconds, 1),
        part=part,
        **about,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(written.text(suite.kernels), encoding="utf-8")
    print(f"{output}: {record.judge(written, before, suite.kernels).sentence}")
    return status


def spread(workers: int) -> list[str]:
    """Arguments of pytest for so many workers."""
    if workers == 1:
        return []
    if importlib.util.find_spec("xdist") is None:
        print("pytest-xdist is not installed: the tests run one after the other.", file=sys.stderr)
        return []
    return ["-n", str(workers), "--dist", "loadgroup"]


def this_machine() -> dict[str, Any]:
    """`device`, `devices`, `machine` and `versions` of a record. Needs a CUDA device."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    return {
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "machine": machine("cuda"),
        "versions": {
            "tilefold": tilefold.__version__,
            "torch": torch.__version__,
            "triton": triton,
            "cuda": str(torch.version.cuda or torch.version.hip),
            "driver": driver(),
            "python": platform.python_version(),
        },
    }


def driver() -> str:
    """Version of NVIDIA's driver, from its own tool, which comes with it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()


def refusal() -> str | None:
    """Why no record can be made here, if so."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set: Triton would interpret the kernels on the CPU. Unset it first."
    if not torch.cuda.is_available():
        return "The GPU suite needs a CUDA device, and this PyTorch sees none."
    return None


def main(words: Sequence[str]) -> int:
    words = list(words)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog="What follows -- is passed on to pytest."
    )
    parser.add_argument("--workers", type=int, default=1, help="processes, if pytest-xdist is installed")
    parser.add_argument("--limit", type=float, help="stop pytest after so many seconds")
    parser.add_argument(
        "--suite", choices=list(record.SUITES), action="append", help="only this one (may be repeated)"
    )
    parser.add_argument("--output", type=Path, help="where to write the record of the one suite")
    parser.add_argument("--part", default="1/1", help="1/3: the first of three parts of the tests")
    parser.add_argument("--join", type=Path, nargs="+", help="run nothing; make one record of those of parts")
    parser.add_argument(
        "--check", action="store_true", help="run nothing; say how the record stands, status 1 if not well"
    )
    options = parser.parse_args(words[:cut])
    if options.workers < 1:
        parser.error(f"--workers: expected at least 1, got {options.workers}")
    if options.limit is not None and options.limit <= 0:
        parser.error(f"--limit: expected more than 0 seconds, got {options.limit}")
    try:
        record.numbers_of(options.part)
    except ValueError as error:
        parser.error(f"--part: {error}")
    suites = [record.SUITES[name] for name in options.suite or _here(options.check)]
    if (options.output or options.join) and len(suites) != 1:
        parser.error("--output, --join: expected one --suite beside them")
    if options.join:
        joined = record.join([record.read(path) for path in options.join])
        (options.output or ROOT / suites[0].place).write_text(joined.text(suites[0].kernels))
        return 0
    if options.check:
        states = [record.state(ROOT / "src" / "tilefold", suite) for suite in suites]
        print(*(f"{state.sentence}." for state in states), sep="\n")
        return 0 if all(state.ok for state in states) else 1
    if (reason := refusal()) is not None:
        print(reason, file=sys.stderr)
        return 1
    about, status = this_machine(), 0
    for suite in suites:
        output = options.output or ROOT / suite.place
        more = {"suite": suite, "part": options.part}
        run = record_run(about, output, ROOT, words[cut + 1 :], options.workers, options.limit, **more)
        status = status or run
        if run not in (*ENDED, NO_TEST_RAN):
            # Whoever has stopped one does not want the next one.
            break
    return status


def _here(check: bool) -> list[str]:
    """The suites whose kernels run on this machine's first GPU; to `check`, all."""
    hopper = check or not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
    return [name for name in record.SUITES if name != record.HOPPER.name or hopper]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
