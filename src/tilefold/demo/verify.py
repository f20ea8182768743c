"""The proof: loss and gradients of a whole model with tilefold, against the same with standard attention."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

import tilefold
from tilefold.nn import GPT, Attend

from .corpus import Window
from .standard import standard

# Double precision leaves about 1e-15 per operation; a model of a few layers gathers some hundred of these.
FLOAT64_TOLERANCE = 1e-11


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
    """Compares in float64, where both must agree to the last digits, and in float32, where tilefold may be
    off the truth by twice as much as standard attention is, plus one rounding unit."""
    truth = run(model, window, standard, torch.float64)
    doubles = run(model, window, tilefold.attention, torch.float64)
    theirs = compare(
        "float32: standard against float64", run(model, window, standard, torch.float32), truth, None
    )
    ours = run(model, window, tilefold.attention, torch.float32)
    budget = 2 * max(theirs.loss, theirs.gradients) + torch.finfo(torch.float32).eps
    return [
        compare("float64: tilefold against standard", doubles, truth, FLOAT64_TOLERANCE),
        theirs,
        compare("float32: tilefold against float64", ours, truth, budget),
    ]


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
