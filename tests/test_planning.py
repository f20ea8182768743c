"""The choice of a backend: who is asked, in which order, and what is said when nobody runs a call."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tilefold import ops
from tilefold.errors import BackendError
from tilefold.masks.band import Band
from tilefold.ops import prepare
from tilefold.planning.backend import KNOWN_BACKENDS, Backend
from tilefold.planning.choose import choose
from tilefold.planning.plan import Plan
from tilefold.problem import Problem

FORM = Band(None, None)

#: What backends say that are not there, or that do not run on CPUs.
REASONS = {
    "hopper": (
        "it runs on Hopper GPUs, and the tensors are on cpu"
        if find_spec("triton")
        else "Triton is not installed (pip install 'tilefold[triton]')"
    ),
    "triton": (
        "it runs on GPUs, and the tensors are on cpu"
        if find_spec("triton")
        else "Triton is not installed (pip install 'tilefold[triton]')"
    ),
}


def problem(backend: str | None = None) -> Problem:
    return Problem(1, 2, 2, 8, 8, 16, 16, torch.float32, options=("softcap",), backend=backend)


class Fussy:
    """A backend that is there and declines."""

    name = "triton"

    def why_not(self, problem: Problem, form: object) -> list[str]:
        assert "softcap" in problem.options
        assert form is FORM
        return ["head size 16 is too small", "softcap has no kernel"]


def test_the_first_that_is_willing_runs_and_the_plan_lists_who_is_not() -> None:
    plan = choose(problem(), FORM, ops.load)
    assert plan.backend == "eager"
    assert plan.refusals == tuple((name, (reason,)) for name, reason in REASONS.items())


@pytest.mark.parametrize("name", list(REASONS))
def test_one_that_is_not_there_or_not_willing_raises_with_its_reasons_when_demanded(name: str) -> None:
    start = f"on cpu, got '{name}', which declines: {name}: {REASONS[name]}"
    with pytest.raises(BackendError, match=re.escape(start)) as caught:
        choose(problem(name), FORM, ops.load)
    assert caught.value.reasons == (REASONS[name],)


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
def test_on_a_gpu_the_kernels_come_before_the_fold() -> None:
    plan = choose(dataclasses.replace(problem(), device="cuda"), FORM, ops.load)
    assert plan.backend == "triton"
    assert [name for name, _ in plan.refusals] == ["hopper"]


def test_without_triton_its_backend_says_how_to_get_it() -> None:
    code = """
import sys
class Nothing:
    def find_spec(self, name, path, target=None):
        if name == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Nothing())
from tilefold import ops
print(ops.load("triton"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Triton is not installed (pip install 'tilefold[triton]')\n"


@pytest.mark.parametrize(
    "name, missing", [("triton", "triton.language"), ("triton", "zlib"), ("eager", "triton")]
)
def test_other_modules_that_are_missing_are_errors(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(module: str) -> None:
        raise ModuleNotFoundError(f"no {missing}", name=missing)

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(ModuleNotFoundError, match=f"no {missing}"):
        prepare.load.__wrapped__(name)


def test_one_that_is_demanded_is_the_only_one_asked() -> None:
    assert choose(problem("eager"), FORM, ops.load) == Plan("eager", ())


def test_all_reasons_of_one_that_declines_are_kept() -> None:
    def load(name: str) -> Backend | str:
        return Fussy() if name == "triton" else ops.load(name)  # type: ignore[return-value]

    plan = choose(problem(), FORM, load)
    assert plan.backend == "eager"
    assert dict(plan.refusals)["triton"] == ("head size 16 is too small", "softcap has no kernel")
    with pytest.raises(BackendError, match="triton: head size 16 is too small; triton: softcap") as caught:
        choose(problem("triton"), FORM, load)
    assert caught.value.reasons == ("head size 16 is too small", "softcap has no kernel")


def test_when_nobody_is_willing_everybody_is_heard() -> None:
    with pytest.raises(BackendError, match="no backend runs this call on cpu: ") as caught:
        choose(problem(), FORM, lambda name: f"{name} is away")
    for name in KNOWN_BACKENDS:
        assert f"{name}: {name} is away" in str(caught.value)


def test_plans_are_equal_by_what_they_say() -> None:
    assert choose(problem(), FORM, ops.load) == choose(problem(), FORM, ops.load)
    assert hash(choose(problem(), FORM, ops.load)) == hash(choose(problem(), FORM, ops.load))
