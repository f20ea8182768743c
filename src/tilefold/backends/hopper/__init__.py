"""Attention on Hopper (compute capability 9.0) in Gluon: TMA, warp specialisation, a softmax with a fixed
reference. Forward only: gradients run in the Triton kernels, which this backend needs beside its own, as it
does for lists of tiles.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilefold.backends import triton
from tilefold.backends.triton.arguments import interpreted
from tilefold.cost.steps import Bias, Declaration
from tilefold.planning import tuned
from tilefold.planning.backend import Gradients, Work
from tilefold.problem import Problem

#: What its kernels are compiled for.
ARCHITECTURE = "sm90"
#: The widest head that the kernel holds, and the most query heads.
WIDEST, MOST_HEADS = 256, (1 << 16) - 1
#: Rows, and columns of heads, of calls that it gets without being asked for.
FEWEST_ROWS, FEWEST_COLUMNS = 64, 32
#: Columns of heads up to which it leaves masks of blocks to others if more than this share of all blocks is
#: mixed.
NARROW, MOST_MIXED = 64, 0.25


def _refusal(device: str) -> str | None:
    """Why calls on such a device are not for Hopper's kernels."""
    if device != "cuda":
        return f"it runs on Hopper GPUs, and the tensors are on {device}"
    if interpreted():
        return "TRITON_INTERPRET is set, and Triton's interpreter does not know Gluon"
    arch = tuned.assumed() or _architecture()
    if arch is None:
        return "it runs on Hopper GPUs, and there is no NVIDIA GPU here"
    if arch != ARCHITECTURE:
        return f"it runs on Hopper GPUs ({ARCHITECTURE}), and this one is {arch}"
    return None


@functools.cache
def _architecture() -> str | None:
    """Of the current NVIDIA GPU; None if there is none."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return tuned.architecture("cuda")


def _better_elsewhere(problem: Problem, form: Any) -> list[str]:
    """Why a call that names no backend is left to the Triton kernels: `backend="hopper"` runs it, too."""
    reasons, widest, mixed = [], max(problem.head_dim, problem.v_head_dim), _mixed(form)
    if not problem.lies_aligned:
        reasons.append(
            "it copies by TMA, which takes dense rows at multiples of 16 bytes; q, k or v lie otherwise, and "
            "would first be copied"
        )
    if widest <= NARROW and mixed > MOST_MIXED:
        reasons.append(
            f"heads have up to {NARROW} columns and {mixed:.0%} of the mask's blocks of 64 x 64 show "
            "some of their elements only, with which the Triton kernels are faster"
        )
    if problem.q_length < FEWEST_ROWS:
        reasons.append(
            f"its tiles have {FEWEST_ROWS} rows and more, this call {problem.q_length}, and the Triton "
            "kernels plan a call of new lengths sooner"
        )
    if widest < FEWEST_COLUMNS:
        reasons.append(
            f"its tiles have 64 columns and more, of which heads of {problem.head_dim} (q, k) and "
            f"{problem.v_head_dim} (v) fill less than half"
        )
    if tuned.assumed() is None and not _alone():
        reasons.append("not all GPUs here are Hopper's")
    return reasons


def _mixed(form: Any) -> float:
    """The share of mixed blocks among those of a mask that is one of blocks."""
    return len(form.words) / max(form.states.numel(), 1) if form.kind == "bits" else 0.0


@functools.cache
def _alone() -> bool:
    """Whether all GPUs that PyTorch sees are Hopper's: a call's metadata do not say which one it is on."""
    return all(torch.cuda.get_device_capability(n) == (9, 0) for n in range(torch.cuda.device_count()))


class HopperBackend:
    """The forward pass on Hopper."""

    name = "hopper"
    keeps_layouts = True

    def why_not(self, problem: Problem, form: Any) -> list[str]:
        """See `planning.backend.Backend.why_not`."""
        refusal = _refusal(problem.device)
        if refusal is not None:
            return [refusal]
        reasons = list(triton.backend.why_not(problem, form))
        if problem.dtype not in (torch.bfloat16, torch.float16):
            name = str(problem.dtype).removeprefix("torch.")
            reasons.append(f"its matrix instructions take bfloat16 and float16, and the inputs are {name}")
        for name, size in (("query and key", problem.head_dim), ("value", problem.v_head_dim)):
            if not 1 <= size <= WIDEST:
                reasons.append(f"its kernel holds {name} heads of size 1 to {WIDEST}, not {size}")
        if "dropout" in problem.options:
            reasons.append("its kernel does not have dropout")
        if problem.q_heads > MOST_HEADS:
            reasons.append(f"its tables have room for {MOST_HEADS} query heads, not {problem.q_heads}")
        if problem.is_empty:
            reasons.append("it copies by TMA, which takes no empty tensor")
        if problem.backend is None:
            reasons += _better_elsewhere(problem, form)
        return reasons

    def forward(self, work: Work) -> tuple[Tensor, Tensor]:
        """See `planning.backend.Backend.forward`."""
        from .launch import forward

        return forward(work)

    def backward(
        self, work: Work, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> Gradients:
        """See `planning.backend.Backend.backward`."""
        return triton.backend.backward(work, dout, dlse, out, lse, needs)

    def declare(self, problem: Problem, form: Any, backward: bool, bias: Bias | None) -> Declaration:
        """See `planning.backend.Backend.declare`."""
        if backward:
            return triton.backend.declare(problem, form, backward, bias)
        from .predict import declare

        return declare(problem, form, bias)

    def measure(self, dtype: str) -> dict[str, float]:
        """See `planning.backend.Backend.measure`."""
        return {}


backend = HopperBackend()


def forget() -> None:
    """Drop what was worked out with sizes of tiles that no longer hold."""
    import sys

    module = sys.modules.get(f"{__name__}.launch")
    if module is not None:
        module.kept.clear()


tuned.on_change(forget)
