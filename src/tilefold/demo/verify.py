"""The proof: loss and gradients of a whole model with tilefold, against the same with standard attention."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

import tilefold
from tilefold.nn import GPT, Attend

from .corpus import Window
from .standard import sdpa, standard

# Double precision leaves about 1e-15 per operation; a model of a few layers gathers some hundred of these.
FLOAT64_TOLERANCE = 1e-11
# Half of the digits. A single call is held to twice the error of plain PyTorch, but a whole model magnifies
# the last digit of everything in it: attention computed in float64 inside a float32 model can miss by more.
FLOAT32_TOLERANCE = torch.finfo(torch.float32).eps ** 0.5


@dataclass(frozen=True)
class Comparison:
    """Relative differences: of the loss, and the largest of any element of any parameter's gradient, over
    that gradient's largest.

    Attributes:
        what: the two sides.
        loss, gradients: the differences.
        allowed: how large they may be; None for a line that is there to compare with.
        worst: the parameter with the largest difference.
    """

    what: str
    loss: float
    gradients: float
    allowed: float | None
    worst: str

    @property
    def holds(self) -> bool:
        return self.allowed is None or max(self.loss, self.gradients) <= self.allowed


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass: the loss and the gradient of every parameter, in float64."""

    loss: Tensor
    gradients: dict[str, Tensor]


def run(model: GPT, window: Window, attend: Attend, dtype: torch.dtype) -> Pass:
    """One pass of a copy of `model` in `dtype` whose attention is `attend`."""
    twin = copy.deepcopy(model).to(dtype).eval()
    for layer in twin.attention_layers():
        layer.attend = attend
    loss = twin.loss(window.tokens, window.targets, window.mask, window.positions)
    loss.backward()
    gradients = {name: _gradient(parameter) for name, parameter in twin.named_parameters()}
    return Pass(loss.detach().double(), gradients)


def verify(model: GPT, window: Window) -> list[Comparison]:
    """Compares in float64, where both must agree to the last digits, and in float32 with the float64 result.

    The float32 errors of standard attention and of SDPA are there to compare with.
    """
    truth = run(model, window, standard, torch.float64)
    doubles = run(model, window, tilefold.attention, torch.float64)
    lines = [compare("float64: tilefold against standard", doubles, truth, FLOAT64_TOLERANCE)]
    for name, attend, allowed in (
        ("standard", standard, None),
        ("SDPA", sdpa, None),
        ("tilefold", tilefold.attention, FLOAT32_TOLERANCE),
    ):
        singles = run(model, window, attend, torch.float32)
        lines.append(compare(f"float32: {name} against float64", singles, truth, allowed))
    return lines


def compare(what: str, ours: Pass, truth: Pass, allowed: float | None) -> Comparison:
    """Relative differences of `ours` from `truth`."""
    loss = float((ours.loss - truth.loss).abs() / truth.loss.abs())
    differences = {
        name: float((ours.gradients[name] - expected).abs().max() / expected.abs().max())
        for name, expected in truth.gradients.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    return Comparison(what, loss, differences[worst], allowed, worst)


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter of the model received no gradient")
    return parameter.grad.double()
