"""Results and gradients of one call: from a backend, from the reference in float64, and from the reference in
the call's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilefold

from .. import reference
from . import textbook, tolerance
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
    """`out`, `lse` and `grad <argument>` for the wanted arguments (default: all), under the incoming
    gradients of `call`.

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


def truth(call: Call) -> Results:
    """The definition in float64."""
    return gradients(by_reference, call.map(torch.Tensor.double))


def baselines(call: Call, truths: Results) -> list[Results]:
    """What plain PyTorch makes of the call in its dtype, in two ways: the definition under autograd, and the
    textbook's formulas.

    Where one overflows and the truth does not, as dot products may in float16, it is run in float32, keeping
    `out` in its own dtype. On a GPU that is done a second time with the products of its matrix units, whose
    sums are what every 16-bit product there is made of.
    """
    dtype = tolerance.baseline_dtype(call.q.dtype)
    narrow, wide = (
        call.map(lambda x, d=d: x.to(d)) for d in (dtype, torch.promote_types(dtype, torch.float32))
    )
    found, overflown = [], set()
    for run in (lambda c: gradients(by_reference, c), lambda c: textbook.results(c, stored=dtype)):
        results = run(narrow)
        broken = [
            name for name, x in results.items() if bool((~x.isfinite() & truths[name].isfinite()).any())
        ]
        if broken:
            kept = run(wide)
            results |= {name: kept[name] for name in broken}
        overflown.update(broken)
        found.append(results)
    if overflown and call.q.is_cuda and dtype.itemsize == 2:
        kept = textbook.results(wide, stored=dtype, units=dtype)
        found.append(found[-1] | {name: kept[name] for name in overflown})
    return found


@dataclass(frozen=True)
class Expectation:
    """What a call must give, and how far off plain PyTorch is."""

    truths: Results
    baselines: list[Results]

    def judge(self, results: Results, context: str = "") -> list[tolerance.Verdict]:
        """Verdicts on `results`, which are some or all of the expected ones."""
        truths = {name: x for name, x in self.truths.items() if name in results}
        return tolerance.judge_all(results, truths, self.baselines, context=context)

    def check(self, results: Results, context: str) -> None:
        """Assert that `results` are within the error budget."""
        tolerance.assert_within(self.judge(results), context)

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Expectation:
        """The expectation of results that are all changed in the same way, such as sliced."""

        def change(results: Results) -> Results:
            return {name: function(name, x) for name, x in results.items()}

        return Expectation(change(self.truths), [change(x) for x in self.baselines])


def expect(call: Call) -> Expectation:
    """The expectation of `call`, with the gradients of all arguments."""
    truths = truth(call)
    return Expectation(truths, baselines(call, truths))


@functools.lru_cache(maxsize=32)
def prepare(case: Case, device: str) -> tuple[Call, Expectation]:
    """The tensors of a case and its expectation. Kept, since several laws look at the same cases."""
    call = build(case, device)
    return call, expect(call)
