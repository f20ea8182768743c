"""The choice of a backend: who is asked, in which order, and what is said when nobody runs a call."""

from __future__ import annotations

import pytest
import torch

from tilefold import ops
from tilefold.errors import BackendError
from tilefold.masks.band import Band
from tilefold.planning.backend import KNOWN_BACKENDS, Backend
from tilefold.planning.choose import choose
from tilefold.planning.plan import Plan
from tilefold.problem import Problem

FORM = Band(None, None)


def problem(backend: str | None = None) -> Problem:
    return Problem(1, 2, 2, 8, 8, 16, 16, torch.float32, options=("softcap",), backend=backend)


class Fussy:
    """A backend that is there and declines."""

    name = "triton"

    def why_not(self, problem: Problem, form: object) -> list[str]:
        assert "softcap" in problem.options
        assert form is FORM
        return ["head size 16 is too small", "softcap has no kernel"]


def test_the_first_that_is_there_runs_and_the_plan_lists_who_is_not() -> None:
    plan = choose(problem(), FORM, ops.load)
    assert plan.backend == "eager"
    assert [name for name, _ in plan.refusals] == ["hopper", "triton"]
    for name, reasons in plan.refusals:
        assert reasons == (f"the {name} backend is not part of this version",)


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_one_that_is_not_there_raises_with_its_reasons_when_demanded(name: str) -> None:
    with pytest.raises(BackendError, match=rf"on cpu, got '{name}', which declines: {name}: the") as caught:
        choose(problem(name), FORM, ops.load)
    assert caught.value.reasons == (f"the {name} backend is not part of this version",)


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
