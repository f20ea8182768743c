"""The choice of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilefold.errors import BackendError
from tilefold.problem import Problem

from .backend import KNOWN_BACKENDS, Backend
from .plan import Plan


def choose(problem: Problem, form: Any, load: Callable[[str], Backend | str]) -> Plan:
    """The first willing backend, or the one that was asked for by name.

    Args:
        problem: the question.
        form: the lowered mask.
        load: gives a backend by name, or the sentence that says why it is not there.

    Raises:
        BackendError: the backend asked for by name declines, with all of its reasons; or nobody is willing.
    """
    refusals: list[tuple[str, tuple[str, ...]]] = []
    for name in KNOWN_BACKENDS if problem.backend is None else (problem.backend,):
        backend = load(name)
        reasons = (backend,) if isinstance(backend, str) else tuple(backend.why_not(problem, form))
        if not reasons:
            return Plan(name, tuple(refusals))
        refusals.append((name, reasons))
    listed = "; ".join(f"{name}: {reason}" for name, reasons in refusals for reason in reasons)
    if problem.backend is not None:
        raise BackendError(
            f"backend: expected one that runs this call on {problem.device}, got {problem.backend!r}, "
            f"which declines: {listed}",
            tuple(reason for _, reasons in refusals for reason in reasons),
        )
    raise BackendError(f"backend: no backend runs this call on {problem.device}: {listed}")
