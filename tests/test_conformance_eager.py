"""The eager backend obeys every law and declines nothing, on each of its routes and at any tile size."""

from __future__ import annotations

import random

import pytest

from tilefold.backends import eager
from tilefold.backends.eager import fold
from tilefold.testing import conformance
from tilefold.testing.cases import Case
from tilefold.testing.law import LAWS, Law


@pytest.mark.parametrize("law, case", conformance.parameters(), ids=conformance.identify)
def test_eager_obeys(law: Law, case: Case) -> None:
    conformance.run(law, case, "eager")


MATCHES = LAWS["matches_the_reference"]
SOME = random.Random(0).sample(conformance.cases(MATCHES), 100)


@pytest.mark.parametrize("case", SOME, ids=conformance.identify)
def test_the_fold_obeys_with_the_smallest_tiles(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fused kernels, and tiles of 16 x 16, so that every mask is cut in many places."""
    monkeypatch.setattr(eager, "_fuses", lambda problem: False)
    monkeypatch.setattr(fold, "look_up", lambda key, device: 1)
    conformance.run(MATCHES, case, "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("law, case", conformance.parameters(), ids=conformance.identify)
def test_eager_obeys_on_a_gpu(law: Law, case: Case) -> None:
    conformance.run(law, case, "eager", "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("law", conformance.laws(), ids=conformance.identify)
def test_eager_obeys_on_the_full_grid(law: Law) -> None:
    for case in conformance.cases(law, full=True):
        conformance.run(law, case, "eager")


def test_eager_declines_nothing() -> None:
    declined = {
        case.name: reasons for case in conformance.cases() if (reasons := conformance.why_not(case, "eager"))
    }
    assert declined == {}
