"""Laws of merging partial results."""

from __future__ import annotations

import math

import pytest
import torch

from tilefold import Partial, errors, merge


def _partial(*shape: int, seed: int, dtype: torch.dtype = torch.float32, lse: float | None = None) -> Partial:
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    logs = torch.randn(*shape[:-1], generator=g, dtype=torch.float64) * 3
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    return Partial(out, (logs if lse is None else torch.full_like(logs, lse)).to(acc))


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Partial:
    return Partial(torch.zeros(*shape, dtype=dtype), torch.full(shape[:-1], -math.inf))


def test_a_merge_is_the_weighted_mean_of_outs_and_the_logsumexp_of_lses():
    parts = [_partial(2, 3, 4, 5, seed=s, dtype=torch.float64) for s in range(3)]
    out, lse = merge(parts)
    logs = torch.stack([p.lse for p in parts])
    expected = (torch.softmax(logs, 0)[..., None] * torch.stack([p.out for p in parts])).sum(0)
    torch.testing.assert_close(lse, torch.logsumexp(logs, 0), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_empty_with_finite_is_the_finite_one_bit_for_bit_on_either_side(dtype):
    full, nothing = _partial(1, 2, 7, 64, seed=1, dtype=dtype), _empty(1, 2, 7, 64, dtype=dtype)
    for parts in ([full, nothing], [nothing, full], [nothing, full, nothing]):
        out, lse = merge(parts)
        assert torch.equal(out, full.out)
        assert torch.equal(lse, full.lse)


def test_empty_with_empty_is_empty_and_never_nan():
    """flashinfer-ai/flashinfer#4051: -inf minus -inf."""
    for count in (2, 3):
        out, lse = merge([_empty(1, 1, 64, dtype=torch.float16)] * count)
        assert torch.equal(out, torch.zeros_like(out))
        assert bool((lse == -math.inf).all())


def test_order_does_not_matter_beyond_rounding():
    parts = [_partial(2, 2, 6, 8, seed=s) for s in range(4)]
    a, b = merge(parts), merge(parts[::-1])
    torch.testing.assert_close(a.out, b.out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.lse, b.lse, rtol=1e-6, atol=1e-6)


def test_a_nan_that_was_seen_is_not_hidden():
    bad = _partial(1, 1, 2, 4, seed=0)
    bad.lse[0, 0, 0] = math.nan
    out, lse = merge([bad, _partial(1, 1, 2, 4, seed=1)])
    assert bool(out[0, 0, 0].isnan().all())
    assert bool(lse[0, 0, 0].isnan())
    assert not bool(out[0, 0, 1].isnan().any())


def test_a_merge_is_differentiable_in_every_out_and_lse():
    parts = [_partial(1, 2, 3, 2, seed=s, dtype=torch.float64) for s in range(3)]
    flat = [t.requires_grad_() for p in parts for t in p]

    def function(*tensors):
        return tuple(merge([Partial(*tensors[i : i + 2]) for i in range(0, 6, 2)]))

    assert torch.autograd.gradcheck(function, flat)
    assert torch.autograd.gradgradcheck(function, flat)


def test_merging_with_an_empty_one_has_the_gradient_of_the_other_alone():
    full, nothing = _partial(1, 1, 3, 4, seed=2), _empty(1, 1, 3, 4)
    full.out.requires_grad_()
    full.lse.requires_grad_()
    out, lse = merge([nothing, full])
    (out.sum() + 2 * lse.sum()).backward()
    assert torch.equal(full.out.grad, torch.ones_like(full.out))
    assert torch.equal(full.lse.grad, torch.full_like(full.lse, 2.0))


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ([], errors.ArgumentError, "partials: expected at least one Partial, got none"),
        ([_empty(1, 2), "x"], errors.ArgumentTypeError, r"partials\[1\]: expected a Partial, got str"),
        (
            [_empty(1, 2), _empty(2, 2)],
            errors.ShapeError,
            r"partials\[1\].out: expected the shape of partials\[0\].out",
        ),
        (
            [Partial(torch.zeros(2, 3), torch.zeros(3))],
            errors.ShapeError,
            r"partials\[0\].lse: expected .*\[2\], got \[3\]",
        ),
    ],
)
def test_bad_partials_are_named(parts, error, words):
    with pytest.raises(error, match=words):
        merge(parts)
