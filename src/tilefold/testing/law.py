"""What a law is. Each law is a function of one case and one subject: it asserts what is exact, and returns
verdicts on the rest.

The name of a law is a sentence; its docstring says what is asserted. `applies` says for which cases it means
something, `limit` how many of them the short run takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case
from .evaluate import Subject
from .tolerance import Verdict

Run = Callable[[Case, Subject], list[Verdict]]


@dataclass(frozen=True)
class Law:
    """One law: `run(case, subject)` raises AssertionError where an exact part of it is broken, and returns
    the error budgets.
    """

    name: str
    run: Run
    applies: Callable[[Case], bool]
    limit: int | None

    @property
    def meaning(self) -> str:
        return self.run.__doc__ or ""


LAWS: dict[str, Law] = {}


def law(
    *, applies: Callable[[Case], bool] = lambda case: not case.empty, limit: int | None = None
) -> Callable[[Run], Run]:
    """Register a function as a law under its own name."""

    def register(run: Run) -> Run:
        LAWS[run.__name__] = Law(run.__name__, run, applies, limit)
        return run

    return register


def contiguous(x: Tensor) -> Tensor:
    """A fresh contiguous copy without history, which a law may write to."""
    return x.detach().clone(memory_format=torch.contiguous_format)
