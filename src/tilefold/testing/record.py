"""The GPU records: which kernels the GPU suites have last been run on, where, and what came out.

Continuous integration has no GPU. `make gpu-record` runs the GPU suites on a machine that has one and leaves
a `Record` of each in the repository; its digest says whether the kernels are still those that were tested.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

COMMAND = "`make gpu-record`"
#: Arguments of pytest that do not choose tests.
HARMLESS = re.compile(r"-[qvsx]+|-r\w+|--(tb|durations|color|maxfail)=.*")
#: What JSON makes of the fields of a record.
KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "bool": bool,
    "int": int,
    "float": (int, float),
    "tuple[str, ...]": list,
    "dict[str, str]": dict,
}
#: How many names of tests a sentence lists.
NAMED = 3

Kind = Literal["matches", "changed", "failures", "incomplete", "part", "absent", "unreadable"]


@dataclass(frozen=True)
class Suite:
    """Tests of one backend's kernels on a GPU.

    Attributes:
        name: that of the backend.
        kernels: what sentences call them.
        tests: arguments of pytest that choose the suite, beside the marker.
        sources: patterns of what decides the kernels' numbers, below the package.
        place: where the record lies, below the root of the repository. It is no part of the package.
    """

    name: str
    kernels: str
    tests: tuple[str, ...]
    sources: tuple[str, ...]
    place: str


TRITON = Suite(
    "triton",
    "Triton kernels",
    ("--ignore=tests/hopper",),
    ("backends/triton/*.py", "planning/tables/*.json", "masks/*.py", "philox.py"),
    "benchmarks/results/gpu_conformance.json",
)
#: Lists of tiles and gradients are those of the Triton backend.
HOPPER = Suite(
    "hopper",
    "Hopper kernels",
    ("tests/hopper",),
    (
        *TRITON.sources,
        "backends/hopper/*.py",
        "planning/tables/hopper/*.json",
        "planning/tuned.py",
        "cost/grid.py",
    ),
    "benchmarks/results/gpu_conformance_hopper.json",
)
SUITES = {suite.name: suite for suite in (TRITON, HOPPER)}


@dataclass(frozen=True)
class Record:
    """One run of a GPU suite.

    Attributes:
        digest: of the sources that were tested, see `digest`.
        complete: whether pytest came to its end; False if it was stopped or crashed.
        passed, failed, skipped: numbers of tests. Errors count as failed, expected failures as skipped.
        failures: names of the failed tests, sorted.
        unfinished: names of the tests that were running when pytest was stopped.
        arguments: of pytest, beyond the choice of the suite.
        device: name of the first GPU.
        devices: number of GPUs.
        machine: one line about it.
        versions: of CUDA, its driver, torch, triton, Python, tilefold.
        date: when the run began, YYYY-MM-DD.
        seconds: how long it took.
        part: "2/3" for the second of three parts of the suite, see `part_of`.
    """

    digest: str
    complete: bool
    passed: int
    failed: int
    skipped: int
    failures: tuple[str, ...]
    unfinished: tuple[str, ...]
    arguments: tuple[str, ...]
    device: str
    devices: int
    machine: str
    versions: dict[str, str]
    date: str
    seconds: float
    part: str = "1/1"

    def text(self, kernels: str = "GPU kernels") -> str:
        """As the file holds it: JSON, with the title and the rows that every results file has."""
        rows = [
            {"case": "tests that passed", "measured": self.passed},
            {"case": "tests that failed", "measured": self.failed, "ceiling": 0},
            {"case": "tests that were skipped", "measured": self.skipped},
        ]
        if not self.complete:
            rows.append({"case": "the run", "measured": "stopped before its end"})
        document = {"title": f"The tests of the {kernels}", **dataclasses.asdict(self), "rows": rows}
        return json.dumps(document, indent=1) + "\n"


@dataclass(frozen=True)
class State:
    """How the record stands to the kernels.

    Attributes:
        kind: "matches" if all is well; else what is not, see `state`.
        sentence: for people, without a full stop.
    """

    kind: Kind
    sentence: str

    @property
    def ok(self) -> bool:
        """Whether these very kernels passed the whole suite on a GPU."""
        return self.kind == "matches"


def package() -> Path:
    """The folder of the package that is running, installed or in a checkout."""
    return Path(__file__).parents[1]


def checkout(folder: Path) -> Path | None:
    """The root of the repository whose package lies in `folder`; None for an installed package."""
    root = folder.parents[1]
    return root if folder == root / "src" / folder.name and (root / "pyproject.toml").is_file() else None


def digest(folder: Path | None = None, suite: Suite = TRITON) -> str:
    """SHA-256 over the names and contents of the sources of a suite's kernels, in the order of their names.

    Names are relative to the package and line ends do not count, so a checkout and an installation of the
    same version agree.

    Args:
        folder: of the package; default the one that is running.
        suite: which kernels.

    Raises:
        FileNotFoundError: a pattern of the suite's sources finds nothing there.
    """
    folder = folder or package()
    sources: dict[str, Path] = {}
    for pattern in suite.sources:
        found = {path.relative_to(folder).as_posix(): path for path in folder.glob(pattern)}
        if not found:
            raise FileNotFoundError(f"no file of {folder} matches {pattern}")
        sources |= found
    total = hashlib.sha256()
    for name, path in sorted(sources.items()):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        # Digests have one length, so no content can be moved from one file to the next.
        total.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(content).digest())
    return total.hexdigest()


def read(path: Path) -> Record:
    """The record in the file at `path`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a record; the message says why.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {type(found).__name__}")
    fields = dataclasses.fields(Record)
    # Records that are older than parts have none.
    found = {"part": Record.part} | found
    kinds = {field.name: KINDS[str(field.type)] for field in fields}
    wrong = [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]
    if wrong:
        raise ValueError(f"missing or of the wrong kind: {', '.join(wrong)}")
    values: dict[str, Any] = {
        name: tuple(found[name]) if kind is list else found[name] for name, kind in kinds.items()
    }
    return Record(**values)


def numbers_of(part: str) -> tuple[int, int]:
    """`(2, 3)` of "2/3"; ValueError for what names no part."""
    if (found := re.fullmatch(r"(\d+)/(\d+)", part)) and 1 <= int(found[1]) <= int(found[2]):
        return int(found[1]), int(found[2])
    raise ValueError(f"expected a part like 2/3, got {part!r}")


def part_of(test: str, parts: int) -> int:
    """In which of so many parts of its suite a test is, from 1 on: the same on every machine."""
    return zlib.crc32(test.encode()) % parts + 1


def join(records: Sequence[Record]) -> Record:
    """The record of a whole suite from those of its parts.

    Raises:
        ValueError: they are not all parts of one suite, each once, of the same sources run alike; the message
            says what differs.
    """
    first = records[0]
    for name in ("digest", "arguments", "device", "versions"):
        found = {str(getattr(one, name)) for one in records}
        if len(found) > 1:
            raise ValueError(f"parts differ in {name}: {', '.join(sorted(found))}")
    numbers = sorted(one.part for one in records)
    wanted = sorted(f"{n}/{len(records)}" for n in range(1, len(records) + 1))
    if numbers != wanted:
        raise ValueError(f"expected the parts {', '.join(wanted)}, got {', '.join(numbers)}")
    return dataclasses.replace(
        first,
        complete=all(one.complete for one in records),
        passed=sum(one.passed for one in records),
        failed=sum(one.failed for one in records),
        skipped=sum(one.skipped for one in records),
        failures=tuple(sorted(name for one in records for name in one.failures)),
        unfinished=tuple(name for one in records for name in one.unfinished),
        devices=min(one.devices for one in records),
        date=min(one.date for one in records),
        seconds=round(sum(one.seconds for one in records), 1),
        part="1/1",
    )


def state(folder: Path | None = None, suite: Suite = TRITON) -> State:
    """What the record in the repository says about a suite's kernels in `folder`.

    Kinds, in the order in which they are looked for: "absent" (there is no record, or no repository around
    the package), "unreadable", "changed" (the kernels are not those that were tested), "failures",
    "incomplete" (the run was stopped), "part" (pytest was told which tests to run), "matches".

    Args:
        folder: of the package; default the one that is running.
        suite: which kernels.
    """
    folder = folder or package()
    root = checkout(folder)
    if root is None:
        return State(
            "absent",
            f"there is no GPU record of the {suite.kernels}: it lies in the repository ({suite.place}), "
            "not in the installed package",
        )
    try:
        record = read(root / suite.place)
    except FileNotFoundError:
        return State(
            "absent",
            f"there is no GPU record of the {suite.kernels}: run {COMMAND} on a machine with a GPU",
        )
    except ValueError as error:
        return State(
            "unreadable", f"the GPU record of the {suite.kernels} ({suite.place}) cannot be read: {error}"
        )
    return judge(record, digest(folder, suite), suite.kernels)


def judge(record: Record, current: str, kernels: str) -> State:
    """The state of a record beside the digest of the `kernels` there are."""
    where, done = f"on {record.device}, {record.date}", record.passed + record.failed
    if record.digest != current:
        return State(
            "changed",
            f"the {kernels} have changed since their GPU record of {record.date}: "
            f"run {COMMAND} on a machine with a GPU",
        )
    if record.failed:
        stopped = "" if record.complete else ", before the run was stopped"
        return State(
            "failures",
            f"the GPU record of the {kernels} has failures: {record.failed} of "
            f"{done} failed {where}{stopped}: "
            f"{_listed(record.failures)}",
        )
    if not record.complete:
        running = f" in {_listed(record.unfinished)}" if record.unfinished else ""
        return State(
            "incomplete",
            f"the GPU record of the {kernels} is incomplete: the run was stopped{running} "
            f"({_passed(record)} {where}): run {COMMAND} again",
        )
    if record.part != "1/1":
        return State(
            "part",
            f"the GPU record of the {kernels} is part {record.part} of the suite "
            f"({_passed(record)} {where}): join it with the others",
        )
    if not all(HARMLESS.fullmatch(argument) for argument in record.arguments):
        return State(
            "part",
            f"the GPU record of the {kernels} may cover only a part of the suite: pytest ran with "
            f"`{shlex.join(record.arguments)}` ({_passed(record)} {where})",
        )
    return State("matches", f"the GPU record matches the {kernels} ({_passed(record)} {where})")


def _passed(record: Record) -> str:
    return f"{record.passed} passed" + (f", {record.skipped} skipped" if record.skipped else "")


def _listed(names: tuple[str, ...]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
