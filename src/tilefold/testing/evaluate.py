"""Results and gradients of one call: from a backend, from the reference in float64, and from the reference in the call's dtype."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilefold

from .. import reference
from . import tolerance
from .cases import Call, Case, build
from .poison import poison

Function = Callable[[Call], tuple[Tensor, Tensor]]
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """Who is tested: a backend's name (None: the automatic choice) on a device."""

    backend: str | None
    device: str = "cpu"

    def attention(self, call: Call, **extra: Any) -> tuple[Tensor, Tensor]:
        """`(out, lse)` of the public call."""
        options = call.options | extra
        return tilefold.attention(call.q, call.k, call.v, return_lse=True, backend=self.backend, **options)


def gradients(function: Function, call: Call, wanted: Iterable[str] | None = None) -> Results:
    """`out`, `lse` and `grad <argument>` for the wanted arguments (default: all), under the incoming gradients of `call`.

    The gradient of an `lse` of -inf is dropped: such a row has no score that could change.
    """
    names = tuple(call.arguments if wanted is None else wanted)
    leaves = {name: x.detach().requires_grad_(name in names) for name, x in call.arguments.items()}
    out, lse = function(call.with_arguments(**leaves))
    results = {"out": out.detach(), "lse": lse.detach()}
    pairs: list[tuple[Tensor, Tensor]] = []
    if call.dout is not None:
        pairs.append((out, call.dout.to(out.dtype)))
    if call.dlse is not None:
        pairs.append((lse, torch.where(lse.detach().isfinite(), call.dlse, 0.0).to(lse.dtype)))
    if pairs and names:
        outputs, incoming = zip(*pairs, strict=True)
        inputs = [leaves[name] for name in names]
        found = torch.autograd.grad(outputs, inputs, incoming, allow_unused=True, materialize_grads=True)
        results |= {f"grad {name}": x for name, x in zip(names, found, strict=True)}
    return results


def observe(subject: Subject, call: Call, wanted: Iterable[str] | None = None, **extra: Any) -> Results:
    """What the backend makes of `call`, with poisoned allocations."""
    return under_poison(lambda c: subject.attention(c, **extra), call, wanted)


def under_poison(function: Function, call: Call, wanted: Iterable[str] | None = None) -> Results:
    """`gradients` while fresh memory is filled with NaN."""
    with poison():
        return gradients(function, call, wanted)


def by_reference(call: Call) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the definition, in the dtype of the call's tensors."""
    options = dict(call.options)
    if isinstance(options.get("seed"), int):
        options["seed"] = torch.tensor(options["seed"], device=call.q.device)
    return reference.attention(call.q, call.k, call.v, **options)


def truth(call: Call, wanted: Iterable[str] | None = None) -> Results:
    """The definition in float64."""
    return gradients(by_reference, call.map(torch.Tensor.double), wanted)


def baseline(call: Call, truths: Results, wanted: Iterable[str] | None = None) -> Results:
    """The definition as plain PyTorch computes it in the dtype of the call; in float32 where that overflows and the truth does not."""
    dtype = tolerance.baseline_dtype(call.q.dtype)
    found = gradients(by_reference, call.map(lambda x: x.to(dtype)), wanted)
    broken = [name for name, x in found.items() if bool((~x.isfinite() & truths[name].isfinite()).any())]
    if broken:
        wide = gradients(by_reference, call.map(torch.Tensor.float), wanted)
        found |= {name: wide[name] for name in broken}
    return found


def terms(call: Call) -> dict[str, float]:
    """Magnitude of the terms whose difference each gradient is; see `tolerance.rounding_unit`."""
    call = call.map(torch.Tensor.double)
    (B, Hq, Lq, D), (Hk, Lk) = call.q.shape, call.k.shape[1:3]
    if 0 in (B, Lq, Lk):
        return {}
    k, v = (x.repeat_interleave(Hq // Hk, dim=1) for x in (call.k, call.v))
    ds = call.q.new_zeros(B, Hq, Lq, Lk)
    if call.dout is not None:
        ds = ds + (call.dout @ v.transpose(-1, -2)).abs()
    if call.dlse is not None:
        ds = ds + call.dlse.abs()[..., None]
    ds = torch.where(call.visible(), ds, 0.0)
    scale = call.options.get("scale") or 1 / math.sqrt(D)
    sizes = {
        "grad q": scale * (ds @ k.abs()).max(),
        "grad k": scale * (ds.transpose(-1, -2) @ call.q.abs()).max() * (Hq // Hk),
    }
    if "bias" in call.options:
        sizes["grad bias"] = ds.sum_to_size(call.options["bias"].shape).max()
    if "alibi_slopes" in call.options:
        rows, keys = torch.arange(Lq, device=ds.device), torch.arange(Lk, device=ds.device)
        distance = (rows[:, None] + Lk - Lq - keys).abs()
        sizes["grad alibi_slopes"] = (ds * distance).sum((-1, -2)).max() * B
    return {name: float(size) for name, size in sizes.items()}


@dataclass(frozen=True)
class Expectation:
    """What a call must give, and how far off plain PyTorch is."""

    truths: Results
    baselines: Results
    terms: dict[str, float]

    def check(self, results: Results, context: str) -> None:
        """Assert that `results` (some or all of the expected ones) are within the error budget."""
        truths = {name: x for name, x in self.truths.items() if name in results}
        tolerance.check(results, truths, self.baselines, terms=self.terms, context=context)

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Expectation:
        """The expectation of results that are all changed in the same way, such as sliced."""
        return dataclasses.replace(
            self,
            truths={name: function(name, x) for name, x in self.truths.items()},
            baselines={name: function(name, x) for name, x in self.baselines.items()},
        )


def expect(call: Call, wanted: Iterable[str] | None = None) -> Expectation:
    """The expectation of `call`."""
    truths = truth(call, wanted)
    return Expectation(truths, baseline(call, truths, wanted), terms(call))


@functools.lru_cache(maxsize=32)
def prepare(case: Case, device: str) -> tuple[Call, Expectation]:
    """The tensors of a case and its expectation. Kept, since several laws look at the same cases."""
    call = build(case, device)
    return call, expect(call)
