"""Every example runs, and so does every Python block of the README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2
    assert len(BLOCKS) >= 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path: Path) -> None:
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_readme_block(index: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BLOCKS[index]], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
