"""The fused routes against dense attention in float64, forward and backward, for every form and option."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold import masks
from tilefold.backends.eager import fused, programs
from tilefold.backends.eager.merge import sink_gradient
from tilefold.masks.band import Band
from tilefold.masks.rows import Rows
from tilefold.problem import Problem, accumulator
from tilefold.testing.cases import Call
from tilefold.testing.evaluate import expect
from tilefold.testing.tolerance import Verdict, assert_within, pool

from .forms import KINDS, draw, visible

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMES: tuple[str, ...] = ("out", "lse", "grad q", "grad k", "grad v")


def run(inputs: dict[str, Tensor], form: Any, scale: float) -> dict[str, Tensor]:
    """The same by the fused routes."""
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    sink, dlse = inputs.get("sink"), inputs.get("dlse")
    pieces = fused.plan(form, q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    result = fused.forward(pieces, q, k, v, scale, sink)
    assert result is not None
    out, lse = result
    gradients = fused.backward(pieces, dout, q, k, v, out, lse, scale, dlse)
    assert gradients is not None
    assert out.dtype == q.dtype and lse.dtype == accumulator(q.dtype)
    results = dict(zip(NAMES, (out, lse, *gradients), strict=False))
    if sink is not None:
        results["grad sink"] = sink_gradient(sink, dout, out, lse, dlse)
    return results


def make(
    B: int, Hq: int, Hk: int, Lq: int, Lk: int, D: int, Dv: int, dtype: torch.dtype, layout: str = "plain"
) -> dict[str, Tensor]:
    """Inputs that are exact in `dtype`."""

    def tensor(*shape: int) -> Tensor:
        if layout == "rows first":
            return torch.randn(shape[0], shape[2], shape[1], shape[3]).to(dtype).transpose(1, 2)
        if layout == "channels first":
            return torch.randn(shape[0], shape[1], shape[3], shape[2]).to(dtype).transpose(2, 3)
        if layout == "expanded":
            return torch.randn(1, 1, *shape[2:]).to(dtype).expand(shape)
        return torch.randn(shape).to(dtype)

    q, k, v = tensor(B, Hq, Lq, D), tensor(B, Hk, Lk, D), tensor(B, Hk, Lk, Dv)
    return {"q": q, "k": k, "v": v, "dout": tensor(B, Hq, Lq, Dv)}


def verdicts(inputs: dict[str, Tensor], form: Any, context: str = "") -> list[Verdict]:
    """The error budget's verdict on every result."""
    q, k = inputs["q"], inputs["k"]
    seen = visible(form, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    options: dict[str, Any] = {"mask": masks.dense(seen.contiguous())}
    if "sink" in inputs:
        options["sink"] = inputs["sink"]
    call = Call(q, k, inputs["v"], inputs["dout"], inputs.get("dlse"), options)
    return expect(call).judge(run(inputs, form, q.shape[-1] ** -0.5), context)


def compare(inputs: dict[str, Tensor], form: Any, context: str) -> None:
    assert_within(verdicts(inputs, form), context)


def compare_draws(*arguments: Any, form: Any, context: str, factor: float = 1.0) -> None:
    """Several draws as one, where a single one is too small to say how far off plain PyTorch is."""
    draws = []
    for _ in range(8):
        inputs = make(*arguments)
        inputs["q"] = inputs["q"] * factor
        draws.append(verdicts(inputs, form))
    assert_within(pool(draws), context)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_forms(kind: str, dtype: torch.dtype) -> None:
    rng = random.Random(f"{kind} {dtype}")
    programs._plan_band.cache_clear()
    for Lq, Lk, (B, Hq, Hk) in ((200, 200, (1, 2, 2)), (90, 150, (2, 4, 2)), (150, 90, (2, 2, 1))):
        form = draw(rng, kind, B, Hq, Lq, Lk)
        compare(make(B, Hq, Hk, Lq, Lk, 16, 16, dtype), form, f"{kind} Lq {Lq} Lk {Lk} B {B}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("band", [Band(None, None), Band(None, 0), Band(-255, 0), Band(-100, 200)], ids=str)
def test_long(band: Band, dtype: torch.dtype) -> None:
    compare(make(1, 2, 1, 1100, 1100, 32, 32, dtype), band, str(band))


@pytest.mark.parametrize("options", [("sink",), ("dlse",), ("sink", "dlse")], ids=" ".join)
@pytest.mark.parametrize("kind", ["band", "window", "documents", "bits"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sink_and_lse_gradient(kind: str, dtype: torch.dtype, options: tuple[str, ...]) -> None:
    draws = []
    for seed in range(4):
        form = draw(random.Random(seed), kind, 2, 4, 100, 100)
        inputs = make(2, 4, 2, 100, 100, 16, 16, dtype)
        if "sink" in options:
            inputs["sink"] = torch.randn(4).to(dtype)
        if "dlse" in options:
            inputs["dlse"] = torch.randn(2, 4, 100, dtype=torch.promote_types(dtype, torch.float32))
        draws.append(verdicts(inputs, form))
    assert_within(pool(draws), f"{kind} {options}")


@pytest.mark.parametrize("sizes_of", [(1, 1), (16, 8), (8, 16), (7, 3), (33, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(dtype: torch.dtype, sizes_of: tuple[int, int]) -> None:
    for form in (Band(None, None), Band(None, 0), Band(-9, 2)):
        compare_draws(2, 4, 2, 70, 70, *sizes_of, dtype, form=form, context=f"{form} {sizes_of}")


@pytest.mark.parametrize("layout", ["rows first", "channels first", "expanded"])
def test_strides(layout: str) -> None:
    for form in (Band(None, None), Band(None, 0), Band(-9, 2), Band(-60, 60, 3)):
        compare(make(1, 4, 2, 150, 150, 16, 16, torch.float32, layout), form, f"{form} {layout}")


@pytest.mark.parametrize("group", [1, 3, 6])
def test_tables_of_single_heads(group: int) -> None:
    Hq = 6
    starts = torch.randint(0, 40, (2, Hq, 80), generator=torch.Generator().manual_seed(group))
    bounds = torch.stack([starts, starts + 30], -1).to(torch.int32)
    for dtype in DTYPES:
        compare(make(2, Hq, Hq // group, 80, 80, 16, 16, dtype), Rows(bounds), f"group {group} {dtype}")


@pytest.mark.parametrize("form", [Band(None, 0), Band(-200, 0), Band(None, 0, 3)], ids=str)
def test_large_logits(form: Band) -> None:
    compare_draws(1, 2, 2, 500, 500, 32, 32, torch.float32, form=form, context=str(form), factor=40.0)


def test_rows_that_are_one_row() -> None:
    """Expanded along the length, which matrix products cannot take as it is."""
    v = torch.randn(1, 2, 1, 16).expand(1, 2, 90, 16)
    q, k = torch.randn(1, 2, 90, 16), torch.randn(1, 2, 1, 16).expand(1, 2, 90, 16)
    for form in (Band(None, None), Band(None, 0), Band(-9, 0)):
        result = fused.forward(fused.plan(form, 1, 2, 2, 90, 90), q, k, v, 0.25)
        assert result is not None
        torch.testing.assert_close(result[0], v)


def test_rows_without_keys() -> None:
    inputs = make(1, 2, 2, 64, 16, 16, 16, torch.float32)
    results = run(inputs, Band(None, 0), 0.25)
    empty = slice(0, 48)
    assert torch.all(results["lse"][:, :, empty] == -torch.inf)
    for name in ("out", "grad q"):
        assert torch.all(results[name][:, :, empty] == 0)
    results = run(inputs, Band(0, -1), 0.25)
    assert torch.all(results["lse"] == -torch.inf)
    assert all(torch.all(results[name] == 0) for name in ("out", *NAMES[2:]))


def test_runs_repeat_bit_for_bit() -> None:
    inputs = make(1, 4, 2, 700, 700, 16, 16, torch.bfloat16)
    for form in (Band(-99, 0), draw(random.Random(3), "bits", 1, 4, 700, 700)):
        first, second = run(inputs, form, 0.25), run(inputs, form, 0.25)
        assert all(torch.equal(first[name], second[name]) for name in first)


def problem(**changes: object) -> Problem:
    usual = {
        "batch": 1, "q_heads": 2, "k_heads": 2, "q_length": 4, "k_length": 4, "head_dim": 8, "v_head_dim": 8,
        "dtype": torch.float32,
    }  # fmt: skip
    return Problem(**{**usual, **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        ({"options": ("sink",)}, None),
        ({"device": "cuda"}, "run on cpu, not on cuda"),
        ({"dtype": torch.float8_e4m3fn}, "do not take torch.float8_e4m3fn"),
        ({"options": ("softcap", "alibi")}, "have no softcap, alibi"),
        ({"k_length": 0}, "do not take sizes of zero"),
        ({"q_heads": 0, "k_heads": 0}, "do not take sizes of zero"),
        ({"v_head_dim": 0}, "do not take sizes of zero"),
    ],
)
def test_why_not(changes: dict[str, object], words: str | None) -> None:
    reasons = fused.why_not(problem(**changes), None)
    assert (not reasons) if words is None else (len(reasons) == 1 and words in reasons[0])
