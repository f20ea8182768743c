"""Options are tied to each other: one option expressed by another gives the same attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold import attention, masks, reference
from tilefold.testing import evaluate, tolerance
from tilefold.testing.cases import Call

DTYPES = [torch.float32, torch.bfloat16]
B, HQ, HK, LQ, LK, D = 2, 4, 2, 70, 90, 32


def tensors(dtype: torch.dtype = torch.float32, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(B, sizes.get("Hq", HQ), sizes.get("Lq", LQ), sizes.get("D", D), dtype=dtype)
    k, v = (
        torch.randn(B, sizes.get("Hk", HK), sizes.get("Lk", LK), sizes.get("D", D), dtype=dtype)
        for _ in range(2)
    )
    return q, k, v


def agree(
    one: Callable[..., tuple[Tensor, Tensor]],
    other: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **more: Tensor,
) -> None:
    """`one(q, k, v, ...)` is `attention(q, k, v, **other)`: both within the error budget of the reference of
    `other`.
    """
    dout = torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype)
    call = Call(q, k, v, dout, torch.randn(q.shape[:3]), {**other, **more})
    expected = evaluate.expect(call)

    def first(c: Call) -> tuple[Tensor, Tensor]:
        return one(c.q, c.k, c.v, **{name: c.options[name] for name in more})

    expected.check(evaluate.gradients(first, call), "one")
    expected.check(evaluate.observe(evaluate.Subject(None), call), "other")


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_are_repeated_heads(dtype: torch.dtype) -> None:
    """Dao-AILab/flash-attention family: query head h reads key head h // (Hq // Hk), in blocks."""

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(HQ // HK, dim=1) for x in (k, v))
        return attention(q, k, v, return_lse=True)

    agree(repeated, {}, *tensors(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi_is_a_bias_of_negative_distances(dtype: torch.dtype) -> None:
    slopes = torch.rand(HQ, dtype=dtype)
    distance = (torch.arange(LQ)[:, None] + LK - LQ - torch.arange(LK)).abs().to(dtype)

    def biased(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor) -> tuple[Tensor, Tensor]:
        # float32: a bfloat16 bias could not hold the products.
        bias = -alibi_slopes.float()[:, None, None] * distance.float()
        return attention(q, k, v, bias=bias, return_lse=True)

    agree(biased, {}, *tensors(dtype), alibi_slopes=slopes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_is_one_more_key_with_that_score_and_value_zero(dtype: torch.dtype) -> None:
    sink = torch.randn(HQ, dtype=dtype)

    def one_more(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2) for x in (k, v))
        bias = torch.cat([sink.new_zeros(HQ, 1, LK), sink[:, None, None]], dim=-1)
        return attention(q, k, v, bias=bias, return_lse=True)

    agree(one_more, {}, *tensors(dtype), sink=sink)


def test_a_bias_of_minus_infinity_hides_like_a_mask() -> None:
    q, k, v = tensors()
    hidden = torch.rand(LQ, LK) < 0.5
    hidden[3] = True
    bias = torch.zeros(LQ, LK).masked_fill(hidden, -torch.inf)
    masked = attention(q, k, v, mask=masks.dense(~hidden), return_lse=True)
    biased = attention(q, k, v, bias=bias, return_lse=True)
    for x, y in zip(masked, biased, strict=True):
        assert not y.isnan().any()
        torch.testing.assert_close(x, y)
    assert not biased[0][:, :, 3].any()
    assert bool((biased[1][:, :, 3] == -torch.inf).all())


@pytest.mark.parametrize("scale", [0.5, 1.0, -0.7])
def test_a_scale_is_a_factor_of_the_query(scale: float) -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q * scale, k, v, scale=1.0, return_lse=True)

    agree(scaled, {"scale": scale}, *tensors())


def test_a_scale_of_zero_is_the_mean_of_the_visible_values() -> None:
    q, k, v = tensors()
    out, lse = attention(q, k, v, mask=masks.causal(), scale=0.0, return_lse=True)
    visible = masks.causal().materialize(B, HQ, LQ, LK).double()
    wide = v.double().repeat_interleave(HQ // HK, dim=1)
    expected = visible @ wide / visible.sum(-1, keepdim=True)
    assert tolerance.max_error(out, expected) <= 8 * torch.finfo(torch.float32).eps * float(v.abs().max())
    torch.testing.assert_close(lse, visible.sum(-1).log().float())


def test_a_softcap_far_above_the_scores_changes_next_to_nothing() -> None:
    q, k, v = tensors()
    capped, plain = attention(q, k, v, softcap=1e4), attention(q, k, v)
    # tanh(x) = x - x^3 / 3: at a score of 6 and a cap of 10^4 that is below one part in 10^6.
    torch.testing.assert_close(capped, plain, rtol=1e-5, atol=1e-5)
    assert not torch.equal(attention(q, k, v, softcap=1.0), plain)


def test_a_softcap_bounds_the_weights() -> None:
    q, k, _ = tensors()
    v = torch.eye(LK).expand(B, HK, LK, LK)
    weights = attention(q * 100, k, v, softcap=2.0)
    assert float((weights.amax(-1) / weights.amin(-1)).max()) <= torch.e**4 * 1.001


def test_the_order_of_options_is_scale_softcap_alibi_bias_mask_sink() -> None:
    """Each pair of neighbours does not commute, so a backend that swaps two of them shows here, against
    numbers written out.
    """
    q, k, v = (torch.randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(3))
    bias, slopes, sink = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 3), (1,), (1,)))
    s = 2.0 * q[0, 0] @ k[0, 0].T
    s = 1.5 * torch.tanh(s / 1.5)
    s = s - slopes * (torch.arange(3)[:, None] - torch.arange(3)).abs()
    s = (s + bias).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    columns = torch.cat([s, sink.expand(3, 1)], dim=-1)
    expected = columns.softmax(-1)[:, :3] @ v[0, 0]
    options: dict[str, Any] = {
        "scale": 2.0,
        "softcap": 1.5,
        "alibi_slopes": slopes,
        "bias": bias,
        "sink": sink,
    }
    for run in (attention, reference.attention):
        result = run(q, k, v, mask=masks.causal(), **options)
        out = result[0] if isinstance(result, tuple) else result
        torch.testing.assert_close(out[0, 0], expected)
    _, lse = attention(q, k, v, mask=masks.causal(), return_lse=True, **options)
    torch.testing.assert_close(lse[0, 0], columns.logsumexp(-1))


def test_lse_is_taken_before_dropout() -> None:
    q, k, v = tensors()
    _, plain = attention(q, k, v, return_lse=True)
    _, dropped = attention(q, k, v, dropout_p=0.5, seed=3, return_lse=True)
    torch.testing.assert_close(plain, dropped)


def test_dropout_keeps_the_mean() -> None:
    """Averaged over seeds, dropout is unbiased: within four standard errors of the plain result."""
    q, k, v = tensors(Lq=4, Lk=64)
    runs = torch.stack([attention(q, k, v, dropout_p=0.3, seed=seed) for seed in range(400)])
    error = (runs.mean(0) - attention(q, k, v)) / (runs.std(0) / 20)
    assert float(error.abs().max()) < 5.0
    assert float(error.std()) == pytest.approx(1.0, abs=0.2)


def test_without_a_seed_the_default_generator_decides() -> None:
    q, k, v = tensors()
    torch.manual_seed(5)
    first, second = attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(attention(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)


def test_dropout_of_zero_draws_nothing() -> None:
    q, k, v = tensors()
    state = torch.get_rng_state()
    out = attention(q, k, v, dropout_p=0.0, seed=11)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(out, attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_options_of_another_float_dtype_are_converted_exactly(dtype: torch.dtype) -> None:
    """pytorch/pytorch#191612: an fp32 bias was read as if it were fp16."""
    q, k, v = tensors(dtype)
    for other in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        narrow = torch.randn(HQ, 1, LK).to(torch.bfloat16)
        options = {
            "bias": narrow.to(other),
            "sink": narrow[:, 0, 0].to(other),
            "alibi_slopes": narrow[:, 0, 1].abs().to(other),
        }
        own = {name: x.to(dtype) for name, x in options.items()}
        if dtype == torch.float16:  # bfloat16 values of this size are not all exact in float16
            options, own = ({n: x.half().to(x.dtype) for n, x in group.items()} for group in (options, own))
            if other == torch.bfloat16:
                continue
        leaves = {name: x.requires_grad_() for name, x in options.items()}
        out = attention(q, k, v, **leaves)
        assert torch.equal(out, attention(q, k, v, **own)), other
        out.float().sum().backward()
        assert {name: x.grad.dtype for name, x in leaves.items() if x.grad is not None} == dict.fromkeys(
            leaves, other
        )
