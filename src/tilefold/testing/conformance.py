"""One suite of laws for every backend.

A backend's own test file is short::

    @pytest.mark.parametrize("law, case", conformance.parameters(), ids=conformance.identify) def
    test_law(law, case): conformance.run(law, case, "mine", "cuda")

and states the backend's limits by what `why_not` answers for the cases of the grid. A case which the backend
declines is not skipped: the call must then raise a `BackendError` with exactly those reasons.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from .. import errors, masks, ops
from ..problem import Problem
from ..scores import Scores
from . import laws as _laws
from . import selection as _selection
from . import tolerance
from .cases import Case, build, grid
from .evaluate import Subject
from .law import LAWS, Law


def laws() -> list[Law]:
    """Every law, in the order of their files."""
    modules = [_laws.__name__, _selection.__name__]
    return sorted(LAWS.values(), key=lambda law: modules.index(law.run.__module__))


def cases(law: Law | None = None, *, full: bool = False) -> list[Case]:
    """The cases of a law (default: of the whole grid): all to which it applies, or a seeded choice of
    `law.limit` of them.

    Args:
        full: no limit, and 3000 random points of the grid more.
    """
    found = grid(full=full)
    if law is None:
        return found
    found = [case for case in found if law.applies(case)]
    if full or law.limit is None or law.limit >= len(found):
        return found
    return random.Random(law.name).sample(found, law.limit)


def parameters(*, full: bool = False) -> list[tuple[Law, Case]]:
    """Every law with each of its cases, for `pytest.mark.parametrize`."""
    return [(law, case) for law in laws() for case in cases(law, full=full)]


def identify(value: Law | Case) -> str:
    """The pytest id of a law or a case."""
    return value.name


def why_not(case: Case, backend: str, device: str = "cpu") -> list[str]:
    """Every reason why the backend declines the case; empty if it takes it."""
    runner = ops.load(backend)
    if isinstance(runner, str):
        return [runner]
    call = build(case, device)
    q, k, v, given = call.q, call.k, call.v, call.options
    B, Hq, Lq, D = q.shape
    Hk, Lk = k.shape[1:3]
    tensors = {name: given.get(name) for name in ("bias", "sink", "alibi_slopes")}
    scores = Scores(1.0, given.get("softcap"), given.get("dropout_p", 0.0), **tensors)
    problem = Problem(
        B, Hq, Hk, Lq, Lk, D, v.shape[3], q.dtype, q.device.type, options=scores.flags, backend=backend
    )  # fmt: skip
    mask = call.mask if call.mask is not None else masks.full()
    if mask.needs_build:
        mask = mask.build(B, Hq, Lq, Lk, q.device)
    spec, held = mask.spec()
    return runner.why_not(problem, masks.lower(spec, held, B, Hq, Lq, Lk, q.device))


#: How many more draws of a case are taken where a maximum over one draw may be a matter of luck.
DRAWS = 24


def run(law: Law, case: Case, backend: str, device: str = "cpu") -> None:
    """Assert that `backend` obeys `law` in `case`, or that it declines the case in the words of `why_not`.

    Where one draw of the case is over its error budget, `DRAWS` more are taken, and the largest error of all
    of them is held against the largest baseline of all of them; see `tolerance`.

    Raises:
        AssertionError: it does not.
    """
    subject = Subject(backend, device)
    reasons = why_not(case, backend, device)
    if not reasons:
        verdicts = law.run(case, subject)
        if not all(verdict.ok for verdict in verdicts):
            more = [
                law.run(dataclasses.replace(case, seed=case.seed + 10_000 * n), subject)
                for n in range(1, DRAWS + 1)
            ]
            verdicts = tolerance.pool([verdicts, *more])
        tolerance.assert_within(verdicts, f"{law.name}, {case.name}")
        return
    refusal = _refusal(case, subject)
    assert isinstance(refusal, errors.BackendError), f"declined with {reasons}, but the call gave {refusal!r}"
    assert refusal.reasons == tuple(reasons)


def _refusal(case: Case, subject: Subject) -> Any:
    """What a declined call gives: the error, or the results that should not be."""
    try:
        return subject.attention(build(case, subject.device))
    except errors.BackendError as error:
        return error
