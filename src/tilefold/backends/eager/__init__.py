"""Attention in PyTorch, on any device and in any float dtype.

On a CPU, rectangles of the score matrix go to PyTorch's fused kernels wherever those compute the same thing
(`fused.py`); everything
else runs in the tiled fold (`fold.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilefold.planning.backend import Gradients, Work
from tilefold.problem import Problem

from . import fold


class EagerBackend:
    """The backend that runs everything."""

    name = "eager"

    def why_not(self, problem: Problem, form: Any) -> list[str]:
        """Nothing: this backend takes every call."""
        return []

    def forward(self, work: Work) -> tuple[Tensor, Tensor]:
        """See `planning.backend.Backend.forward`."""
        return fold.forward(work)

    def backward(
        self, work: Work, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> Gradients:
        """See `planning.backend.Backend.backward`."""
        return fold.backward(work, dout, dlse, out, lse, needs)


backend = EagerBackend()
