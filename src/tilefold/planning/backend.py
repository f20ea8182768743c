"""What a backend is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tilefold.cost.steps import Bias, Declaration
from tilefold.problem import Problem

#: Known names, fastest first. Automatic choice takes the first that is willing.
KNOWN_BACKENDS = ("hopper", "triton", "eager")


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Gradients of one call; None where none was asked for. Each has the shape and dtype of its argument."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def __iter__(self):
        return iter((self.q, self.k, self.v, self.bias, self.sink, self.alibi_slopes))


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One call as a backend sees it: the question, the tensors, the lowered mask.

    Attributes:
        problem: the question in metadata.
        q, k, v: `[B, Hq, Lq, D]`, `[B, Hk, Lk, D]`, `[B, Hk, Lk, Dv]`.
        form: the lowered mask (`Band`, `Rows`, `Cols` or `Bits`).
        scores: the score options (`Scores`).
        tables: the two position tensors iff `problem.positions.tables`.
    """

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    form: Any
    scores: Any
    tables: tuple[Tensor, ...] = ()


class Backend(Protocol):
    """Hands that run the fold.

    Attributes:
        name: one of `KNOWN_BACKENDS`.
        keeps_layouts: whether the results of `forward` always lie in memory as it says there.
    """

    name: str
    keeps_layouts: bool

    def why_not(self, problem: Problem, form: Any) -> list[str]:
        """Every reason, as a sentence, why this backend does not take the call; empty if it does."""
        ...

    def forward(self, work: Work) -> tuple[Tensor, Tensor]:
        """`(out [B, Hq, Lq, Dv], lse [B, Hq, Lq])`, fresh tensors in any memory order (that of q for out, and
        B, Lq, Hq for lse, are kept without a copy).
        """
        ...

    def backward(
        self, work: Work, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> Gradients:
        """Gradients of the arguments that `needs` marks (q, k, v, bias, sink, alibi_slopes), given the
        *global* out and lse.
        """
        ...

    def declare(self, problem: Problem, form: Any, backward: bool, bias: Bias | None) -> Declaration:
        """What one pass of a call that `why_not` has nothing against will do; `form` as in `Work`."""
        ...

    def measure(self, dtype: str) -> dict[str, float]:
        """Seconds per unit of every rate that `declare` names, on the CPU that runs this process."""
        ...
