"""Set-up for all tests: fresh memory is poisoned, draws are seeded, caches are their own, hypothesis has no
deadline.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tilefold.cost import store
from tilefold.cost.hardware import MACHINES
from tilefold.testing.poison import Poisoned, poison

hypothesis.settings.register_profile("tilefold", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tilefold")


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements and tuned sizes are kept apart from the user's, for child processes too."""
    before = os.environ.get(store.VARIABLE)
    os.environ[store.VARIABLE] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ[store.VARIABLE]
    if before is not None:
        os.environ[store.VARIABLE] = before


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[Poisoned]:
    """Every `torch.empty` of every test returns NaN."""
    with poison() as count:
        yield count


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tests that draw from the default generator draw the same in any order."""
    torch.manual_seed(0)


@pytest.fixture
def fixed_rates(monkeypatch: pytest.MonkeyPatch, rate_names: set[str]) -> None:
    """A CPU on which every unit of work takes a nanosecond, so that nothing is measured."""
    rates = dict.fromkeys(rate_names, 1e-9)
    machine = dataclasses.replace(
        MACHINES["A100"], name="toy CPU", device="cpu", architecture="cpu", launch=1e-6, rates=rates
    )
    monkeypatch.setattr("tilefold.cost.measure.this_cpu", lambda dtype, measure: machine)


@pytest.fixture
def rate_names() -> set[str]:
    """Names of the rates that the eager backend measures on a CPU."""
    both = ("forward", "backward")
    return {
        *(
            f"{what} {direction}, {rows} rows, D {size}"
            for what in ("kernel", "kernel block")
            for direction in ("forward", "backward", "backward alone")
            for rows in (1, 8, 32, 64, 256)
            for size in (32, 64, 128)
        ),
        *(f"fold {direction}, D {size}" for direction in both for size in (32, 64, 128)),
        *(
            f"fold {option} {direction}"
            for option in ("softcap", "alibi", "bias", "shared bias", "bias gradient", "dropout", "mask")
            for direction in both
        ),
        *(
            f"{what} {direction}"
            for what in ("kernel mask", "rectangle", "kernel call", "call")
            for direction in both
        ),
        *("copy", "add", "sum", "fill", "merge", "gather", "scatter", "hidden span", "hidden element"),
    }


@pytest.fixture
def check_memory() -> Callable[..., None]:
    """Runs a script under CUDA's memory checker, which has to find nothing; skips where it cannot run."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("compute-sanitizer, of CUDA's toolkit, is not installed")

    def check(script: Path, *arguments: str) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        }
        command = [tool, "--tool", "memcheck", "--error-exitcode", "99", sys.executable, str(script)]
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
        if "Device not supported" in said:
            pytest.skip("compute-sanitizer does not support this device here")
        assert done.returncode == 0, said[-4000:]
        assert "ERROR SUMMARY: 0 errors" in said

    return check
