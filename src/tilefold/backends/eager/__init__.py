"""Attention in PyTorch, on any device and in any float dtype.

On a CPU, rectangles of the score matrix go to PyTorch's fused kernels wherever those compute the same thing
(`fused.py`); everything else runs in the tiled fold (`fold.py`).
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from tilefold.cost.steps import Bias, Declaration
from tilefold.planning.backend import Gradients, Work
from tilefold.problem import Problem

from . import fold, fused
from .merge import sink_gradient


@functools.lru_cache(maxsize=4096)
def _fuses(problem: Problem) -> bool:
    return not fused.why_not(problem, None)


class EagerBackend:
    """The backend that runs everything."""

    name = "eager"
    keeps_layouts = False

    def why_not(self, problem: Problem, form: Any) -> list[str]:
        """Nothing: this backend takes every call."""
        return []

    def forward(self, work: Work) -> tuple[Tensor, Tensor]:
        """See `planning.backend.Backend.forward`."""
        if _fuses(work.problem):
            scores = work.scores
            result = fused.forward(_pieces(work), work.q, work.k, work.v, scores.scale, scores.sink)
            if result is not None:
                return result
        return fold.forward(work)

    def backward(
        self,
        work: Work,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        needs: tuple[bool, ...],
    ) -> Gradients:
        """See `planning.backend.Backend.backward`."""
        if _fuses(work.problem):
            scores, sink = work.scores, work.scores.sink
            wanted = any(needs[:3])
            result = (
                fused.backward(_pieces(work), dout, work.q, work.k, work.v, out, lse, scores.scale, dlse)
                if wanted
                else (None, None, None)
            )
            if result is not None:
                dq, dk, dv = (x if need else None for x, need in zip(result, needs, strict=False))
                dsink = sink_gradient(sink, dout, out, lse, dlse) if sink is not None and needs[4] else None
                return Gradients(dq, dk, dv, sink=dsink)
        return fold.backward(work, dout, dlse, out, lse, needs)

    def declare(self, problem: Problem, form: Any, backward: bool, bias: Bias | None) -> Declaration:
        """See `planning.backend.Backend.declare`."""
        from . import predict

        return predict.declare(problem, form, fused.why_not(problem, form), backward, bias)

    def measure(self, dtype: str) -> dict[str, float]:
        """See `planning.backend.Backend.measure`."""
        from . import predict

        return predict.measure(dtype)


def _pieces(work: Work) -> fused.Pieces:
    p = work.problem
    return fused.plan(work.form, p.batch, p.q_heads, p.k_heads, p.q_length, p.k_length)


backend = EagerBackend()
