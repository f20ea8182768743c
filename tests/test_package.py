"""The package as a whole: its door, its weight, who may import whom, how long files may be."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilefold

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tilefold"

# Part -> the parts that it may import besides itself and `errors`; `door` is `from tilefold import merge`.
# A part that is not in this table may import nothing: a new folder states its arrows here.
ARROWS = {
    "door": {"api", "explaining", "masks", "partial", "problem"},
    "errors": set(),
    "philox": set(),
    "problem": set(),
    "masks": set(),
    "scores": {"philox", "problem"},
    "partial": {"problem"},
    "reference": {"philox", "problem", "scores", "masks"},
    "select": {"problem"},
    "tangents": {"philox", "problem", "scores", "select"},
    "cost": {"problem"},
    "planning": {"cost", "problem"},
    "checks": {"masks", "planning", "problem", "scores"},
    "backends": set(),
    "backends.eager": {"cost", "masks", "partial", "philox", "planning", "problem", "scores", "select"},
    "backends.triton": {"cost", "masks", "partial", "philox", "planning", "problem", "scores"},
    "backends.hopper": {
        "backends.triton",
        "cost",
        "masks",
        "partial",
        "philox",
        "planning",
        "problem",
        "scores",
    },
    "ops": {"masks", "partial", "planning", "problem", "scores", "tangents"},
    "api": {"checks", "masks", "ops", "partial", "planning", "problem", "scores"},
    "explaining": {"api", "checks", "cost", "masks", "ops", "planning", "problem", "scores"},
    "decode": {"masks", "ops", "partial", "planning", "problem", "scores"},
    "distributed": {"masks", "ops", "partial", "planning", "problem", "scores"},
    "engine": {"decode", "door", "masks"},
    "nn": {"door", "masks"},
    "compat": {"door", "masks"},
    "pictures": {"cost", "door", "masks", "planning"},
    "bench": {"cost", "door", "masks", "planning", "testing"},
    "cli": {"bench", "cost", "demo", "door", "masks", "ops", "pictures", "planning", "testing"},
    "demo": {"bench", "door", "masks", "nn"},
    "testing": {
        "backends.triton",
        "door",
        "masks",
        "ops",
        "philox",
        "planning",
        "problem",
        "reference",
        "scores",
    },
}
# Only these parts may import the package on the left.
RESERVED = {
    "torch.library": {"ops"},
    "torch.autograd": {"ops", "demo", "testing", "bench"},
    "triton": {"backends.triton", "backends.hopper", "testing"},
}


def part_of(module: tuple[str, ...]) -> str:
    """`("tilefold", "masks", "base")` -> `masks`; each backend is a part; the package itself is the door."""
    if len(module) == 1:
        return "door"
    return ".".join(module[1:3]) if module[1] == "backends" else module[1]


def imports(source: str, module: tuple[str, ...], is_package: bool) -> Iterator[tuple[str, ...]]:
    """Every dotted name that `source` imports, absolute, imports inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module if is_package else module[:-1]
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)


def wrong_arrows(source: str, module: tuple[str, ...], is_package: bool = False) -> list[str]:
    """Sentences about imports in `source`, the text of `module`, that the tables above do not allow."""
    here, wrong = part_of(module), []
    for name in imports(source, module, is_package):
        if name[0] == "tilefold":
            is_part = (
                len(name) > 1 and (SOURCE / name[1]).with_suffix(".py").exists() | (SOURCE / name[1]).is_dir()
            )
            there = part_of(name) if is_part else "door"
            if there not in ARROWS.get(here, set()) | {here, "errors"}:
                wrong.append(f"{'.'.join(module)}: {here} may not import {there}")
        for package, parts in RESERVED.items():
            if ".".join(name).startswith(package) and name[0] == package.split(".")[0] and here not in parts:
                wrong.append(f"{'.'.join(module)}: {here} may not import {package}")
    return wrong


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def in_fresh_interpreter(code: str) -> str:
    """What `code` prints. Compiled files are kept, as they are for a user after the first run."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    return run.stdout.strip()


def test_the_door_exports_every_public_name() -> None:
    public = {
        name
        for name, value in vars(tilefold).items()
        if not name.startswith("_") and name != "annotations" and not inspect.ismodule(value)
    }
    modules = {name for name in tilefold.__all__ if inspect.ismodule(getattr(tilefold, name))}
    assert set(tilefold.__all__) == public | modules
    assert {"errors", "masks"} <= modules


@pytest.mark.parametrize("name", ["tilefold", "tilefold.masks", "tilefold.nn"])
def test_exports_are_sorted_and_exist(name: str) -> None:
    module = importlib.import_module(name)
    exports = module.__all__
    # Constants, then classes, then functions and modules: the order in which linters sort them.
    kinds = [0 if export.isupper() else 1 if export[0].isupper() else 2 for export in exports]
    assert [*zip(kinds, exports, strict=True)] == sorted(zip(kinds, exports, strict=True))
    assert len(set(exports)) == len(exports)
    assert [export for export in exports if not hasattr(module, export)] == []


def test_import_takes_at_most_50_ms_beyond_torch() -> None:
    # Processor time, and the best of several: other programs on the machine can only add.
    code = "import time, torch; t = time.process_time(); import tilefold; print(time.process_time() - t)"
    times: list[float] = []
    while not times or (min(times) > 0.050 and len(times) < 9):
        times.append(float(in_fresh_interpreter(code)))
    assert min(times) <= 0.050, f"seconds in fresh interpreters: {times}"


def test_import_brings_nothing_beyond_torch_and_the_standard_library() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import tilefold; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    brought = set(in_fresh_interpreter(code).split())
    assert brought - sys.stdlib_module_names - {"torch"} == {"tilefold"}


def test_computes_where_triton_cannot_be_imported() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch; from tilefold import attention, masks; "
        "q = torch.ones(1, 2, 5, 8); print(attention(q, q, q, mask=masks.causal()).sum().item())"
    )
    assert float(in_fresh_interpreter(code)) == pytest.approx(80.0)


def test_imports_follow_the_arrows_of_the_design() -> None:
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        module = ("tilefold", *path.relative_to(SOURCE).with_suffix("").parts)
        is_package = module[-1] == "__init__"
        wrong += wrong_arrows(path.read_text(), module[:-1] if is_package else module, is_package)
    assert wrong == []


@pytest.mark.parametrize(
    "source, module, expected",
    [
        (
            "from ..reference import attention",
            "tilefold.backends.eager",
            "backends.eager may not import reference",
        ),
        ("import tilefold.backends.eager", "tilefold.masks.base", "masks may not import backends.eager"),
        ("def f():\n    from tilefold.ops import attend", "tilefold.nn.gpt", "nn may not import ops"),
        ("from tilefold import attention", "tilefold.planning.plan", "planning may not import door"),
        (
            "from torch.autograd import Function",
            "tilefold.backends.eager.fold",
            "may not import torch.autograd",
        ),
        ("import torch.library", "tilefold.api", "may not import torch.library"),
        ("import triton.language as tl", "tilefold.ops.kernels", "may not import triton"),
        ("from ..masks import Mask", "tilefold.unheard_of.thing", "unheard_of may not import masks"),
    ],
)
def test_a_wrong_arrow_is_found(source: str, module: str, expected: str) -> None:
    (sentence,) = wrong_arrows(source, tuple(module.split(".")))
    assert sentence.endswith(expected)


def test_a_right_arrow_is_not_reported() -> None:
    source = "import torch\nfrom . import fold\nfrom ...masks import Band\nfrom ...errors import BackendError"
    assert wrong_arrows(source, ("tilefold", "backends", "eager", "fused")) == []


def test_every_arrow_leads_to_a_part_of_the_table() -> None:
    assert {there for parts in ARROWS.values() for there in parts} <= set(ARROWS)


def test_files_are_short() -> None:
    long = []
    for path in python_files("src", "examples", "benchmarks", "tests"):
        relative = path.relative_to(ROOT)
        kernels = relative.parts[2:4] == ("backends", "triton") or relative.parts[2:4] == (
            "backends",
            "hopper",
        )
        budget = 700 if kernels else 800 if relative.parts[0] == "tests" else 400
        lines = path.read_text().count("\n")
        if lines > budget:
            long.append(f"{relative}: {lines} lines, budget {budget}")
    assert long == []


def test_nothing_is_left_to_do_without_an_anchor() -> None:
    open_ends = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b(?!\(#\d+\))")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in python_files("src", "examples", "benchmarks", "tests")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if open_ends.search(line)
    ]
    assert found == []


def test_one_version_everywhere() -> None:
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    changes = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project is not None and changes is not None
    assert tilefold.__version__ == project[1] == changes[1]


def test_types_are_shipped() -> None:
    assert (SOURCE / "py.typed").exists()
