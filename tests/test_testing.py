"""The instruments themselves: a tolerance that accepts everything, or a poison that fills nothing, would
prove nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from tilefold.testing import cases, evaluate, inputs, textbook, tolerance
from tilefold.testing.poison import poison

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def test_a_tolerance_is_twice_the_baseline_and_one_unit() -> None:
    truth = torch.tensor([1.0, -4.0], dtype=torch.float64)
    verdict = tolerance.judge("x", truth.float(), truth, [truth.float(), (truth + 1e-6).float()])
    assert verdict.unit == 4 * torch.finfo(torch.float32).eps
    assert verdict.baseline == pytest.approx(1e-6, rel=0.3)
    assert verdict.allowed == 2 * verdict.baseline + verdict.unit


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_error_of_three_baselines_and_a_unit_is_over_budget(dtype: torch.dtype) -> None:
    truth = torch.linspace(-1, 1, 33, dtype=torch.float64)
    wide = tolerance.baseline_dtype(dtype)
    baseline = truth.to(wide) + 8 * torch.finfo(wide).eps
    unit = torch.finfo(dtype).eps
    near = {"x": (truth + 8 * unit).to(dtype)}
    far = {"x": (truth + 40 * unit).to(dtype)}
    tolerance.check(near, {"x": truth}, {"x": baseline})
    with pytest.raises(AssertionError, match=r"OVER x: error .* ratio"):
        tolerance.check(far, {"x": truth}, {"x": baseline})


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.0])
def test_infinities_must_match_exactly(wrong: float) -> None:
    truth = torch.tensor([0.5, -torch.inf], dtype=torch.float64)
    assert tolerance.judge("lse", truth.float(), truth, [truth.float()]).ok
    assert not tolerance.judge("lse", torch.tensor([0.5, wrong]), truth, [truth.float()]).ok
    assert not tolerance.judge("lse", torch.tensor([-torch.inf, -torch.inf]), truth, [truth.float()]).ok


def test_pooling_compares_the_largest_error_with_the_largest_baseline() -> None:
    lucky, usual = tolerance.Verdict("x", 3.0, 0.1, 0.5), tolerance.Verdict("x", 1.0, 1.5, 0.25)
    other = tolerance.Verdict("y", 9.0, 1.0, 1.0)
    pooled = {verdict.name: verdict for verdict in tolerance.pool([[lucky, other], [usual, other]])}
    assert pooled["x"] == tolerance.Verdict("x", 3.0, 1.5, 0.5)
    assert pooled["x"].ok
    assert not pooled["y"].ok


def test_a_missing_result_is_an_error() -> None:
    truth = {"out": torch.zeros(2, dtype=torch.float64), "lse": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(AssertionError, match="were expected"):
        tolerance.check({"out": torch.zeros(2)}, truth, truth)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.int64, torch.int8, torch.bool])
def test_fresh_memory_is_poisoned(dtype: torch.dtype) -> None:
    like = torch.zeros(3, dtype=dtype)
    with poison() as count:
        fresh = [
            torch.empty(3, dtype=dtype),
            torch.empty_like(like),
            torch.empty_strided((3, 2), (2, 1), dtype=dtype),
            like.new_empty(3),
            like.new_empty_strided((3,), (1,)),
        ]
    for x in fresh:
        loud = x.isnan() if dtype.is_floating_point else x != 0
        assert bool(loud.all())
    assert count.allocations >= len(fresh)


def test_poison_ends_with_its_block() -> None:
    before = torch.empty, torch.Tensor.new_empty
    with pytest.raises(KeyError), poison():
        raise KeyError
    assert (torch.empty, torch.Tensor.new_empty) == before


def test_the_grid_meets_every_pair_of_options() -> None:
    axes = cases._AXES
    chosen = cases.pairwise(axes)
    for (a, xs), (b, ys) in itertools.combinations(axes.items(), 2):
        met = {(getattr(case, a), getattr(case, b)) for case in chosen}
        assert met >= set(itertools.product(xs, ys)), (a, b)


def test_the_grid_is_the_same_every_time() -> None:
    assert [case.name for case in cases.grid()] == [case.name for case in cases.grid()]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "strided"])
def test_a_layout_changes_no_value(layout: str) -> None:
    x = torch.randn(2, 3, 5, 7)
    laid_out = inputs.LAYOUTS[layout](x)
    assert torch.equal(laid_out, x)
    assert (laid_out.stride() == x.stride()) == (layout == "contiguous")


@pytest.mark.parametrize("mask", cases.MASKS)
def test_a_case_builds_the_same_tensors_every_time(mask: str) -> None:
    case = dataclasses.replace(cases.Case(), mask=mask, bias="1H1K", alibi="BH", sink=True, dropout_p=0.5)
    first, second = cases.build(case), cases.build(case)
    for name, x in first.arguments.items():
        assert torch.equal(x, second.arguments[name]), name
    assert torch.equal(first.visible(), second.visible())
    assert mask in ("none", "full") or not first.visible().all()


OPTIONS = [
    {},
    {"mask": "causal", "scale": 0.3, "softcap": 15.0},
    {"mask": "dense_each", "sink": True, "bias": "1H1K", "loss": "both"},
    {"mask": "window_negative", "alibi": "BH", "dropout_p": 0.25, "loss": "lse", "bias": "B1QK"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_textbook_and_the_definition_are_one(options: dict[str, Any]) -> None:
    """Two independent computations of every result and gradient, in float64."""
    call = cases.build(cases.Case(dtype="fp64", lengths=(30, 41), heads=(6, 2), **options))
    by_hand, by_autograd = textbook.results(call), evaluate.truth(call)
    assert by_hand.keys() == by_autograd.keys()
    for name, x in by_hand.items():
        torch.testing.assert_close(x, by_autograd[name], rtol=1e-11, atol=1e-11)
