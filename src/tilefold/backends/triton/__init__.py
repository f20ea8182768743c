"""Attention in Triton: every option and every mask, fused, forward and backward, on any GPU that Triton
knows."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilefold.cost.steps import Bias, Declaration
from tilefold.planning import tuned
from tilefold.planning.backend import Gradients, Work
from tilefold.problem import Problem

from . import backward as _backward
from . import bias as _bias
from . import forward as _forward
from .arguments import FAR, LONGEST, MOST, interpreted

#: The widest head that the kernels hold.
WIDEST = 576


def _shared_memory_taken(dtype: torch.dtype, widest: int) -> int:
    """Bytes that the largest kernel takes, where that is more than the smallest GPU has."""
    if dtype == torch.float32 and widest > 256:
        return 136 << 10
    # The repair of dK and of dQ, in float32.
    return 101 << 10 if widest > 512 else 0


@functools.cache
def _too_old() -> str | None:
    """The compute capability of an NVIDIA GPU that is too old, else None."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}" if major < 8 else None


@functools.cache
def _shared_memory() -> int:
    """Bytes of shared memory that a program may have; no limit where there is no GPU."""
    if not torch.cuda.is_available():
        return 1 << 30
    return torch.cuda.get_device_properties().shared_memory_per_block_optin


class TritonBackend:
    """The backend of every GPU."""

    name = "triton"
    keeps_layouts = True

    def why_not(self, problem: Problem, form: Any) -> list[str]:
        """See `planning.backend.Backend.why_not`."""
        reasons = []
        if problem.device != "cuda" and not (interpreted() and problem.device == "cpu"):
            reasons.append(f"it runs on GPUs, and the tensors are on {problem.device}")
        elif problem.device == "cuda" and (found := _too_old()) is not None:
            reasons.append(f"its kernels need compute capability 8.0, and this GPU has {found}")
        if problem.dtype == torch.float64:
            reasons.append("its kernels accumulate in float32, and the inputs are float64")
        for name, size in (("query and key", problem.head_dim), ("value", problem.v_head_dim)):
            if not 1 <= size <= WIDEST:
                reasons.append(f"its kernels hold {name} heads of size 1 to {WIDEST}, not {size}")
        widest = max(problem.head_dim, problem.v_head_dim)
        if problem.q_heads * widest >= LONGEST:
            reasons.append(f"its kernels step over rows of fewer than {LONGEST} elements of all heads")
        taken = _shared_memory_taken(problem.dtype, widest)
        if taken > _shared_memory():
            reasons.append(
                f"its kernels for heads of {widest} in this dtype take {taken >> 10} KiB of shared memory, "
                f"and this GPU has {_shared_memory() >> 10}"
            )
        at = problem.positions
        ends = (
            at.q_origin + at.q_step * problem.q_length, at.k_origin + at.k_step * problem.k_length,
            at.q_origin, at.k_origin, at.diagonal or 0, problem.q_length, problem.k_length,
            at.q_origin + (at.diagonal or problem.k_length - problem.q_length) - at.k_origin,
        )  # fmt: skip
        if max(abs(end) for end in ends) >= FAR:
            reasons.append(f"its kernels count positions below 2^{FAR.bit_length() - 1}")
        for name, length in (("rows", problem.q_length), ("keys", problem.k_length)):
            if length >= MOST:
                reasons.append(f"its kernels take fewer than 2^{MOST.bit_length() - 1} {name}")
        return reasons

    def forward(self, work: Work) -> tuple[Tensor, Tensor]:
        """See `planning.backend.Backend.forward`."""
        return _forward.forward(work)

    def backward(
        self, work: Work, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> Gradients:
        """See `planning.backend.Backend.backward`."""
        return _backward.backward(work, dout, dlse, out, lse, needs)

    def declare(self, problem: Problem, form: Any, backward: bool, bias: Bias | None) -> Declaration:
        """See `planning.backend.Backend.declare`."""
        from . import predict

        return predict.declare(problem, form, backward, bias)

    def measure(self, dtype: str) -> dict[str, float]:
        """See `planning.backend.Backend.measure`."""
        from . import predict

        return predict.measure(dtype)


backend = TritonBackend()


def forget() -> None:
    """Drop what was worked out with sizes of tiles that no longer hold. Compiled kernels stay, in Triton's
    own cache.
    """
    for module in (_forward, _backward, _bias):
        module._kept.clear()


tuned.on_change(forget)
