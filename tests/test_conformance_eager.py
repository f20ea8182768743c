"""The eager backend obeys every law and declines nothing."""

from __future__ import annotations

import pytest

from tilefold.testing import conformance
from tilefold.testing.cases import Case
from tilefold.testing.laws import Law


@pytest.mark.parametrize("law, case", conformance.parameters(), ids=conformance.identify)
def test_eager_obeys(law: Law, case: Case) -> None:
    conformance.run(law, case, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("law", conformance.laws(), ids=conformance.identify)
def test_eager_obeys_on_the_full_grid(law: Law) -> None:
    for case in conformance.cases(law, full=True):
        conformance.run(law, case, "eager")


def test_eager_declines_nothing() -> None:
    declined = {case.name: reasons for case in conformance.cases() if (reasons := conformance.why_not(case, "eager"))}
    assert declined == {}
