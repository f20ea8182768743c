"""Partial results form a commutative monoid: the merge is associative, has an identity, and keeps the order
of parts out of it.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tilefold
from tilefold import Partial, merge
from tilefold.testing import tolerance

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def parts_of(scores: Tensor, v: Tensor, cuts: list[int]) -> list[Partial]:
    """Softmax attention over pieces of the keys. scores `[L, K]`, v `[K, D]`."""
    edges = [0, *cuts, scores.shape[-1]]
    parts = []
    for start, end in itertools.pairwise(edges):
        piece = scores[:, start:end]
        lse = torch.logsumexp(piece, -1) if end > start else scores.new_full(scores.shape[:1], -torch.inf)
        weights = torch.exp(piece - torch.where(lse.isfinite(), lse, 0.0)[:, None])
        parts.append(Partial(weights @ v[start:end], lse))
    return parts


def empty_like(part: Partial) -> Partial:
    return Partial(torch.zeros_like(part.out), torch.full_like(part.lse, -torch.inf))


def some_part(dtype: torch.dtype, shape: tuple[int, ...] = (2, 3, 5)) -> Partial:
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    return Partial(torch.randn(*shape, 8, dtype=dtype), torch.randn(shape, dtype=accumulator) * 5)


@given(
    cuts=st.lists(st.integers(0, 40), max_size=5).map(sorted),
    factor=st.sampled_from([1.0, 30.0, 3000.0]),
    hidden=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
def test_any_split_of_the_keys_merges_to_the_whole(
    cuts: list[int], factor: float, hidden: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, 40, generator=draw, dtype=torch.float64) * factor
    scores = scores.masked_fill(torch.rand(6, 40, generator=draw) < hidden, -torch.inf)
    v = torch.randn(40, 3, generator=draw, dtype=torch.float64)
    (whole,) = parts_of(scores, v, [])
    (narrow,) = parts_of(scores.float(), v.float(), [])
    parts = parts_of(scores.float(), v.float(), cuts)
    merged = merge(parts)
    lses = torch.stack([part.lse for part in parts])
    written_out = (lses.softmax(0)[..., None] * torch.stack([part.out for part in parts])).sum(0)
    baselines = [
        {"out": narrow.out, "lse": narrow.lse},
        {"out": written_out.nan_to_num(0.0), "lse": lses.logsumexp(0)},
    ]
    truth = {"out": whole.out, "lse": whole.lse}
    verdicts = tolerance.judge_all({"out": merged.out, "lse": merged.lse}, truth, baselines)
    tolerance.assert_within(verdicts, f"cuts {cuts}")


@given(order=st.permutations(range(4)), seed=st.integers(0, 1000))
def test_the_order_of_parts_does_not_matter(order: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    parts = [
        Partial(torch.randn(5, 3, generator=draw), torch.randn(5, generator=draw) * 10) for _ in range(4)
    ]
    wide = merge([Partial(part.out.double(), part.lse.double()) for part in parts])
    for candidate in (merge([parts[i] for i in order]), merge([merge(parts[:2]), merge(parts[2:])])):
        # Four terms of weight at most one: as many rounding units as there are additions and scalings.
        assert tolerance.max_error(candidate.out, wide.out) <= 8 * torch.finfo(
            torch.float32
        ).eps * parts_size(parts)
        assert tolerance.max_error(candidate.lse, wide.lse) <= 4 * torch.finfo(torch.float32).eps * 40


def parts_size(parts: list[Partial]) -> float:
    return max(float(part.out.abs().max()) for part in parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_part_changes_no_bit(dtype: torch.dtype, place: int) -> None:
    """flashinfer-ai/flashinfer#4051: -inf minus -inf."""
    part = some_part(dtype)
    alone = [empty_like(part)] * 2
    alone.insert(place, part)
    merged = merge(alone)
    assert torch.equal(merged.out, part.out)
    assert torch.equal(merged.lse, part.lse)
    assert merged.out.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_empty_parts_merge_to_an_empty_part(dtype: torch.dtype, count: int) -> None:
    """flashinfer-ai/flashinfer#4051, as reported with two states of fp16 `[1, 1, 64]`."""
    empty = empty_like(some_part(dtype, (1, 1)))
    merged = merge([empty] * count)
    assert torch.equal(merged.out, empty.out)
    assert torch.equal(merged.lse, empty.lse)


def test_rows_are_merged_one_by_one() -> None:
    first, second = some_part(torch.float32), some_part(torch.float32)
    first.lse[0, 0, :2] = -torch.inf
    second.lse[0, 0, 1:3] = -torch.inf
    merged = merge([first, second])
    assert torch.equal(merged.out[0, 0, 0], second.out[0, 0, 0])
    assert float(merged.lse[0, 0, 1]) == -torch.inf
    assert not merged.out[0, 0, 1].any()
    assert torch.equal(merged.out[0, 0, 2], first.out[0, 0, 2])
    assert not merged.out.isnan().any()


def test_what_an_empty_row_stores_is_ignored() -> None:
    part = some_part(torch.float32)
    empty = empty_like(part)
    junk = Partial(torch.full_like(part.out, float("nan")), empty.lse)
    assert torch.equal(merge([part, junk]).out, part.out)
    assert not merge([junk, empty]).out.any()


def test_far_apart_lse_do_not_overflow() -> None:
    near, far = some_part(torch.float32), some_part(torch.float32)
    near.lse.fill_(80000.0)
    far.lse.fill_(-80000.0)
    merged = merge([far, near])
    assert torch.equal(merged.out, near.out)
    assert torch.equal(merged.lse, near.lse)


@pytest.mark.parametrize("with_empty_rows", [False, True])
def test_the_merge_is_differentiable_in_every_out_and_lse(with_empty_rows: bool) -> None:
    outs = [torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(2, 4, dtype=torch.float64) for _ in range(3)]
    if with_empty_rows:
        lses[0][0, 0] = lses[1][0, 1] = -torch.inf
    hidden = [lse == -torch.inf for lse in lses]
    leaves = [torch.where(hide, 0.0, lse).requires_grad_() for hide, lse in zip(hidden, lses, strict=True)]

    def merged(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            Partial(out, torch.where(hide, -torch.inf, lse))
            for out, hide, lse in zip(tensors[:3], hidden, tensors[3:], strict=True)
        ]
        whole = merge(parts)
        return whole.out, whole.lse

    assert torch.autograd.gradcheck(merged, (*outs, *leaves))


def test_a_row_empty_everywhere_sends_back_zero_gradients() -> None:
    out = torch.randn(2, 3, requires_grad=True)
    lse = torch.full((2,), -torch.inf, requires_grad=True)
    whole = merge([Partial(out, lse), Partial(out * 2, lse)])
    (whole.out.sum() + torch.where(whole.lse.isfinite(), whole.lse, 0.0).sum()).backward()
    assert out.grad is not None
    assert lse.grad is not None
    assert not out.grad.any()
    assert not lse.grad.any()


def test_merging_returns_new_tensors_and_leaves_its_parts_alone() -> None:
    parts = [some_part(torch.float32) for _ in range(2)]
    before = [(part.out.clone(), part.lse.clone()) for part in parts]
    merge(parts).out.fill_(0.0)
    for part, (out, lse) in zip(parts, before, strict=True):
        assert torch.equal(part.out, out)
        assert torch.equal(part.lse, lse)


@pytest.mark.parametrize("cuts", [[1], [64], [13, 14, 90]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_sink_is_counted_once_over_any_number_of_parts(cuts: list[int], dtype: torch.dtype) -> None:
    """NVIDIA/TransformerEngine#2541: a sink of 20, where dropping it or counting it per chunk shows."""
    shape = (1, 4, 128, 64)
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    sink = torch.full((4,), 20.0, dtype=dtype, requires_grad=True)
    mask = tilefold.masks.causal()

    def split(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for start, end in itertools.pairwise([0, *cuts, 128]):
            shifted = tilefold.masks.shift(mask, 0, start, 128, 128)
            part = tilefold.attention(
                q, k[:, :, start:end], v[:, :, start:end], mask=shifted, return_lse=True
            )
            parts.append(Partial(*part))
        lse = sink.to(parts[0].lse.dtype)[:, None].expand_as(parts[0].lse)
        whole = merge([*parts, Partial(torch.zeros_like(parts[0].out), lse)])
        return whole.out, whole.lse

    dout = torch.randn(shape, dtype=dtype)
    for _, run in (("split", split), ("whole", whole_call)):
        out, lse = run(q, k, v, sink)
        (gradient,) = torch.autograd.grad((out * dout).sum(), sink)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v, sink)]
        true_out, true_lse = tilefold.reference.attention(*wide[:3], mask=mask, sink=wide[3])
        (true_gradient,) = torch.autograd.grad((true_out * dout.double()).sum(), wide[3])
        plain = [x.detach().requires_grad_() for x in (q, k, v, sink)]
        plain_out, plain_lse = tilefold.reference.attention(*plain[:3], mask=mask, sink=plain[3])
        (plain_gradient,) = torch.autograd.grad((plain_out * dout).sum(), plain[3])
        tolerance.check(
            {"out": out, "lse": lse, "grad sink": gradient},
            {"out": true_out, "lse": true_lse, "grad sink": true_gradient},
            {"out": plain_out, "lse": plain_lse, "grad sink": plain_gradient},
        )
        assert gradient.abs().min() > 0


def whole_call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    return tilefold.attention(q, k, v, mask=tilefold.masks.causal(), sink=sink, return_lse=True)
