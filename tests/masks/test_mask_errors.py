"""What masks refuse, with the sentence they say."""

# Wrong arguments are the point of this file.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tilefold import masks
from tilefold.errors import ArgumentTypeError, MaskError
from tilefold.masks import Mask, lower, parse

INT, LONG, BOOL = torch.int32, torch.int64, torch.bool


def zeros(*shape: int, dtype: torch.dtype = LONG) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: masks.causal("left"), MaskError, "align: expected 'bottom-right' or 'top-left', got 'left'"),
        (lambda: masks.window(1.5, 0), ArgumentTypeError, "left: expected an int, got float"),
        (lambda: masks.window(None, True), ArgumentTypeError, "right: expected an int, got bool"),
        (lambda: masks.dilated(4, 0), MaskError, "dilation: expected an int of at least 1, got 0"),
        (lambda: masks.dilated(-1, 2), MaskError, "window: expected an int of at least 0, got -1"),
        (lambda: masks.strided(0), MaskError, "n: expected an int of at least 1, got 0"),
        (lambda: masks.prefix(-1), MaskError, "n: expected an int of at least 0, got -1"),
        (
            lambda: masks.prefix(zeros(2, dtype=torch.float32)),
            MaskError,
            "n: expected an int, or int32 or int64 of shape [B], got torch.float32",
        ),
        (
            lambda: masks.padding([3, 4]),
            ArgumentTypeError,
            "key_lengths: expected int32 or int64 of shape [B], got list",
        ),
        (
            lambda: masks.padding(zeros(2, 2)),
            MaskError,
            "key_lengths: expected int32 or int64 of shape [B], got shape [2, 2]",
        ),
        (
            lambda: masks.padding(zeros(2), side="both"),
            MaskError,
            "side: expected 'right' or 'left', got 'both'",
        ),
        (
            lambda: masks.documents(None),
            ArgumentTypeError,
            "cu_seqlens_q: expected int32 or int64 of shape [documents + 1]",
        ),
        (
            lambda: masks.documents(zeros(0)),
            MaskError,
            "cu_seqlens_q: expected int32 or int64 of shape [documents + 1]",
        ),
        (
            lambda: masks.documents(zeros(3), zeros(4)),
            MaskError,
            "cu_seqlens_k: expected as many offsets as cu_seqlens_q has, 3, got 4",
        ),
        (
            lambda: masks.documents(zeros(3), within="causal"),
            ArgumentTypeError,
            "within: expected a mask, got str",
        ),
        (lambda: masks.global_tokens(-2), MaskError, "index: expected an int of at least 0, got -2"),
        (lambda: masks.global_tokens([1, -2]), MaskError, "index: expected an int of at least 0, got -2"),
        (lambda: masks.random_blocks(1.5), MaskError, "p: expected a number in [0, 1], got 1.5"),
        (lambda: masks.random_blocks("a lot"), ArgumentTypeError, "p: expected a number in [0, 1], got str"),
        (lambda: masks.random_blocks(0.5, block=0), MaskError, "block: expected an int of at least 1, got 0"),
        (lambda: masks.bigbird(3, -1), MaskError, "global_blocks: expected an int of at least 0, got -1"),
        (lambda: masks.butterfly("64"), ArgumentTypeError, "block: expected an int of at least 1, got str"),
        (
            lambda: masks.longformer(8, dilation=0),
            MaskError,
            "dilation: expected an int of at least 1, got 0",
        ),
        (
            lambda: masks.block_sparse(zeros(2, 2), 64),
            MaskError,
            "layout: expected bool of shape [nq, nk] or [Hq or 1, nq, nk], got torch.int64",
        ),
        (lambda: masks.columns(zeros(1, 1, 8, 1), causal=True), MaskError, "index: expected int32 of shape"),
        (
            lambda: masks.columns(zeros(1, 1, 8, 4, dtype=INT), causal=True),
            MaskError,
            "Lk, 1 or 2] with causal=True, got shape [1, 1, 8, 4]",
        ),
        (
            lambda: masks.columns(zeros(1, 1, 8, 1, dtype=INT), causal=False),
            MaskError,
            "Lk, 2 or 4] with causal=False, got shape [1, 1, 8, 1]",
        ),
        (
            lambda: masks.columns(zeros(1, 1, 8, 1, dtype=INT), causal=1),
            ArgumentTypeError,
            "causal: expected a bool, got int",
        ),
        (
            lambda: masks.dense(zeros(4, 4, dtype=INT)),
            MaskError,
            "t: expected a bool mask broadcastable to [B, Hq, Lq, Lk], got torch.int32",
        ),
        (
            lambda: masks.dense(zeros(4, 4, dtype=torch.float32)),
            MaskError,
            "t: expected a bool mask broadcastable to [B, Hq, Lq, Lk], got torch.float32",
        ),
        (
            lambda: masks.dense([[True]]),
            ArgumentTypeError,
            "t: expected a bool mask broadcastable to [B, Hq, Lq, Lk], got list",
        ),
        (lambda: masks.dense(zeros(1, 1, 1, 4, 4, dtype=BOOL)), MaskError, "got shape [1, 1, 1, 4, 4]"),
        (lambda: masks.predicate(3), ArgumentTypeError, "fn: expected a function of (b, h, q, k), got int"),
        (lambda: masks.shift(None, 0, 0, 4, 4), ArgumentTypeError, "mask: expected a mask, got NoneType"),
        (
            lambda: masks.shift(masks.causal(), 0, 0, -4, 4),
            MaskError,
            "Lq: expected an int of at least 0, got -4",
        ),
        (
            lambda: masks.causal() & zeros(4, 4, dtype=BOOL),
            ArgumentTypeError,
            "mask: expected masks on both sides of &, got Tensor",
        ),
        (
            lambda: masks.causal() | None,
            ArgumentTypeError,
            "mask: expected masks on both sides of |, got NoneType",
        ),
        (lambda: 3 & masks.causal(), ArgumentTypeError, "mask: expected masks on both sides of &, got int"),
        (
            lambda: masks.causal() and masks.full(),
            ArgumentTypeError,
            "mask: expected & | ~ between masks, got and / or / not",
        ),
        (lambda: not masks.causal(), ArgumentTypeError, "a mask has no truth value"),
    ],
)
def test_constructors_refuse(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)
    assert isinstance(caught.value, TypeError if error is ArgumentTypeError else ValueError)


B, H, L = 2, 4, 16


@pytest.mark.parametrize(
    "mask, message",
    [
        (
            masks.dense(zeros(8, 16, dtype=BOOL)),
            "t of dense: expected a shape that broadcasts to [B, Hq, Lq, Lk] = [2, 4, 16, 16], got [8, 16]",
        ),
        (masks.dense(zeros(3, 1, 16, 16, dtype=BOOL)), "got [3, 1, 16, 16], which does not fit B"),
        (masks.dense(zeros(2, 2, 16, 16, dtype=BOOL)), "which does not fit Hq"),
        (masks.padding(zeros(3)), "key_lengths of padding: expected 1 or 2 along the batch, got 3"),
        (masks.prefix(zeros(5)), "n of prefix: expected 1 or 2 along the batch, got 5"),
        (masks.documents(zeros(3, 4)), "cu_seqlens of documents: expected 1 or 2 along the batch, got 3"),
        (masks.global_tokens(zeros(3, 4)), "index of global_tokens: expected 1 or 2 along the batch, got 3"),
        (
            masks.global_tokens([3, 16]),
            "index of global_tokens: expected positions below 16, the length of the keys, got 16",
        ),
        (
            masks.columns(zeros(1, 1, 8, 1, dtype=INT), causal=True),
            "index of columns: expected one row per key, 16, got 8",
        ),
        (
            masks.columns(zeros(1, 2, 16, 1, dtype=INT), causal=True),
            "index of columns: expected 1 or 4 along the query heads, got 2",
        ),
        (
            masks.block_sparse(zeros(4, 4, dtype=BOOL), 8),
            "layout of block_sparse: expected 2 blocks of 8 for Lq = 16, got [1, 4, 4]",
        ),
        (
            masks.block_sparse(zeros(3, 2, 2, dtype=BOOL), 8),
            "layout of block_sparse: expected 1 or 4 along the query heads, got 3",
        ),
        (
            masks.shift(masks.causal(), 4, 0, 16, 16),
            "mask shift: expected a call inside the original lengths (16, 16), got queries [4, 20)",
        ),
        (masks.shift(masks.causal(), -1, 0, 32, 32), "got queries [-1, 15)"),
        (masks.padding(zeros(2)).to("meta"), "mask padding: expected a tensor on cpu, got one on meta"),
        (
            masks.causal() & ~masks.documents(zeros(3), within=masks.padding(zeros(3))),
            "key_lengths of padding: expected 1 or 2",
        ),
    ],
)
def test_masks_that_do_not_fit_the_call(mask: Mask, message: str) -> None:
    for use in (
        lambda: mask.check(B, H, L, L, "cpu"),
        lambda: mask.check(B, H, L, L, torch.device("cpu")),
        lambda: lower(mask, (), B, H, L, L, "cpu"),
        lambda: mask.materialize(B, H, L, L, "cpu"),
    ):
        with pytest.raises(MaskError) as caught:
            use()
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "mask, message",
    [
        (
            masks.documents(torch.tensor([0, 9, 5, 16])),
            "cu_seqlens_q of documents: expected offsets that never decrease, got 5 after 9",
        ),
        (
            masks.documents(torch.tensor([1, 9, 16])),
            "cu_seqlens_q of documents: expected offsets that start at 0, got 1",
        ),
        (
            masks.documents(torch.tensor([0, 9, 17])),
            "cu_seqlens_q of documents: expected offsets of at most 16, the length of the tensor, got 17",
        ),
        (
            masks.documents(torch.tensor([0, 16]), torch.tensor([0, 20])),
            "cu_seqlens_k of documents: expected offsets of at most 16",
        ),
        (
            masks.documents(torch.tensor([[0, 9], [-3, 8]])),
            "cu_seqlens_q of documents: expected offsets that start at 0, got -3",
        ),
        (
            masks.documents(torch.tensor([0, 9]), within=masks.documents(torch.tensor([0, 3, 2]))),
            "that never decrease, got 2 after 3",
        ),
        (
            masks.padding(torch.tensor([3, 17])),
            "key_lengths of padding: expected lengths in [0, 16], the length of the keys, got 17",
        ),
        (
            masks.padding(torch.tensor([-1, 3])),
            "key_lengths of padding: expected lengths in [0, 16], the length of the keys, got -1",
        ),
        (masks.prefix(torch.tensor([-1, 3])), "n of prefix: expected lengths of at least 0, got -1"),
        (
            masks.global_tokens(torch.tensor([3, 16])),
            "index of global_tokens: expected positions in [-1, 16), got 16",
        ),
    ],
)
def test_values_that_do_not_fit(mask: Mask, message: str) -> None:
    mask.check(B, H, L, L, "cpu")
    for use in (lambda: lower(mask, (), B, H, L, L, "cpu"), lambda: mask.materialize(B, H, L, L)):
        with pytest.raises(MaskError) as caught:
            use()
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "result", [lambda b, h, q, k: q - k, lambda b, h, q, k: True, lambda b, h, q, k: (q - k).float()]
)
def test_predicates_return_bool_tensors(result: Callable[..., object]) -> None:
    with pytest.raises(
        MaskError, match="fn of predicate: expected a function that returns a bool tensor, got"
    ):
        masks.predicate(result).build(B, H, L, L)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "spec, count",
    [
        ("", 0),
        ("causal(", 0),
        ("causal", 0),
        ("1", 0),
        ("'causal()'", 0),
        ("causal() & 1", 0),
        ("causal() + causal()", 0),
        ("predicate(t0)", 1),
        ("open('x')", 0),
        ("__import__('os').system('true')", 0),
        ("().__class__", 0),
        ("causal().build(1, 1, 1, 1)", 0),
        ("window(*t0)", 1),
        ("window(**t0)", 1),
        ("window(left=[x for x in (1,)], right=0)", 0),
        ("masks.causal()", 0),
        ("documents(t0)", 0),
        ("documents(t0)", 2),
        ("documents(t1)", 1),
    ],
)
def test_parse_refuses_everything_else(spec: str, count: int) -> None:
    with pytest.raises(MaskError):
        parse(spec, tuple(zeros(2) for _ in range(count)))


def test_masks_with_tensors_are_equal_only_for_the_same_tensors() -> None:
    lengths = zeros(2)
    assert masks.padding(lengths) == masks.padding(lengths)
    assert masks.padding(lengths) != masks.padding(lengths.clone())
    assert masks.causal() == masks.causal()
    assert masks.causal() != masks.causal("top-left")
    assert masks.window(3, 0) != masks.window(4, 0)
    assert masks.prefix(1) != masks.global_tokens(1)
    assert (masks.causal() == 3) is False
    assert len({masks.causal() & masks.window(1, 0), masks.causal() & masks.window(1, 0)}) == 1
