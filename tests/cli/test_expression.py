"""What users type: shapes, lengths, dtypes and masks become values, or one line of complaint."""

from __future__ import annotations

import pytest
import torch

from tilefold import masks
from tilefold.cli import expression
from tilefold.errors import DtypeError, MaskError, ShapeError

SHARED = [[True, False], [False, True]]


@pytest.mark.parametrize(
    "text", ["1x8x4096x64", "1,8,4096,64", " 1X8x4096X64 ", "1×8×4096×64", "1, 8, 4096, 64"]
)
def test_a_shape_is_four_sizes(text: str) -> None:
    assert expression.shape("q", text) == (1, 8, 4096, 64)


@pytest.mark.parametrize(
    "text",
    [
        "1x8x64",
        "1x8x4096x64x2",
        "1x8x0x64",
        "1x-8x4x64",
        "1x8x4.5x64",
        "",
        "q",
        "1xx4x64",
        "1x8x999999999999999x640",
    ],
)
def test_anything_else_is_no_shape(text: str) -> None:
    with pytest.raises(ShapeError, match="k: expected four positive sizes BxHxLxD") as caught:
        expression.shape("k", text)
    assert repr(text) in str(caught.value)


def test_keys_default_to_queries_and_values_to_keys() -> None:
    q, k, v = "1x8x16x64", "1x2x32x64", "1x2x32x128"
    assert expression.shapes([q]) == ((1, 8, 16, 64),) * 3
    assert expression.shapes([q, k]) == ((1, 8, 16, 64), (1, 2, 32, 64), (1, 2, 32, 64))
    assert expression.shapes([q, k, v]) == ((1, 8, 16, 64), (1, 2, 32, 64), (1, 2, 32, 128))


@pytest.mark.parametrize(
    "texts, message",
    [
        ([], r"shapes: expected one to three of them \(q, k, v\), got 0"),
        (["1x1x1x1"] * 4, "shapes: expected one to three .* got 4"),
        (["1x8x4x64", "2x8x4x64"], r"k: expected B and D of q, \[1, 64\], got \[2, 64\]"),
        (["1x8x4x64", "1x8x4x32"], r"k: expected B and D of q, \[1, 64\], got \[1, 32\]"),
        (["1x8x4x64", "1x3x4x64"], "k: expected a number of heads that divides those of q, 8, got 3"),
        (["1x8x4x64", "1x8x4x64", "1x8x5x64"], r"v: expected B, H and L of k, \[1, 8, 4\], got \[1, 8, 5\]"),
    ],
)
def test_shapes_that_do_not_belong_together(texts: list[str], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        expression.shapes(texts)


def test_lengths_are_one_or_two() -> None:
    assert expression.lengths("512") == (512, 512)
    assert expression.lengths("512x1024") == expression.lengths("512,1024") == (512, 1024)
    for text in ("", "0", "5x0", "1x2x3", "many"):
        with pytest.raises(ShapeError, match="lengths: expected a positive length or LqxLk"):
            expression.lengths(text)


def test_dtypes_have_short_and_long_names() -> None:
    names = {"bf16": "bfloat16", "fp16": "half", "fp32": "float", "fp64": "double"}
    for short, long in names.items():
        wanted = getattr(torch, long)
        assert expression.dtype(short) == expression.dtype(long) == expression.dtype(str(wanted)) == wanted
    with pytest.raises(DtypeError, match=r"dtype: expected fp64, fp32, fp16, bf16 .* got 'int8'"):
        expression.dtype("int8")


@pytest.mark.parametrize(
    "text, mask",
    [
        ("causal()", masks.causal()),
        ("masks.causal() & tilefold.masks.window(3, None)", masks.causal() & masks.window(3, None)),
        ("~window(-2, 5) | prefix(3)", ~masks.window(-2, 5) | masks.prefix(3)),
        ("causal(align='top-left')", masks.causal(align="top-left")),
        ("padding([5, 9])", masks.padding(torch.tensor([5, 9]))),
        ("padding(key_lengths=[5, 9], side='left')", masks.padding(torch.tensor([5, 9]), side="left")),
        (
            "documents([0, 3, 8], [0, 4, 10], within=causal() & window(2, 0)) | global_tokens([1])",
            masks.documents(
                torch.tensor([0, 3, 8]), torch.tensor([0, 4, 10]), masks.causal() & masks.window(2, 0)
            )
            | masks.global_tokens([1]),
        ),
        ("block_sparse([[1, 0], [0, 1]], block=5)", masks.block_sparse(torch.tensor(SHARED), 5)),
        ("shift(causal(), 2, -0, 20, 20)", masks.shift(masks.causal(), 2, 0, 20, 20)),
        (
            "columns([[[[3], [4], [5], [6], [7], [8], [8], [8], [8], [8]]]], causal=True)",
            masks.columns(
                torch.tensor([3, 4, 5, 6, 7, 8, 8, 8, 8, 8], dtype=torch.int32).view(1, 1, 10, 1), causal=True
            ),
        ),
    ],
)
def test_a_mask_means_what_the_constructors_mean(text: str, mask: masks.Mask) -> None:
    read = expression.mask(text)
    assert torch.equal(read.materialize(2, 1, 8, 10), mask.materialize(2, 1, 8, 10))


def test_lists_are_tensors_of_the_dtype_that_the_mask_needs() -> None:
    text = "dense([[True, False], [0, 1]]) & padding([2]) & columns([[[[0], [1]]]], causal=True)"
    _, tensors = expression.mask(text).spec()
    assert [tensor.dtype for tensor in tensors] == [torch.bool, torch.int64, torch.int32]
    assert tensors[0].tolist() == SHARED
    assert tensors[2].shape == (1, 1, 2, 1)


def test_an_empty_list_keeps_its_dtype() -> None:
    (tensor,) = expression.mask("global_tokens([])").spec()[1]
    assert (tensor.dtype, tensor.shape) == (torch.int64, (0,))


@pytest.mark.parametrize(
    "mask",
    [
        masks.full() & masks.empty(),
        masks.causal() & (masks.window(1023, 0) | masks.prefix(4)),
        masks.bigbird(window=1, block=8, seed=3) | ~masks.longformer(12, 2),
        masks.random_blocks(0.25, block=16, seed=-1) & masks.dilated(9, 3),
        masks.global_tokens((1, 7)) | masks.butterfly(block=4) | masks.strided(7),
    ],
    ids=repr,
)
def test_reads_what_masks_write_of_themselves(mask: masks.Mask) -> None:
    assert expression.mask(repr(mask)) == mask


@pytest.mark.parametrize(
    "text, message",
    [
        ("causal(", "expected an expression such as"),
        ("", "expected an expression such as"),
        ("\0", "expected an expression such as"),
        ("causal() & " * 5000 + "causal()", "expected an expression such as"),
        ("casual()", "expected one of bigbird, .*, window, got 'casual'"),
        ("predicate(f)", "expected one of .* got 'predicate'"),
        ("built('rows', 2, 2, [[1]])", "expected one of .* got 'built'"),
        ("__import__('os')", "expected one of .* got '__import__'"),
        ("causal().to('meta')", "expected one of .* got 'causal\\(\\).to'"),
        ("causal", r"expected a value or a mask, got 'causal' .* \(write causal\(\)\)"),
        ("documents(t0)", "expected a value or a mask, got 't0'"),
        ("causal() and full()", "expected constructors of masks, plain values and & | ~"),
        ("window(*[1, 2])", "expected constructors of masks, plain values and & | ~"),
        ("~5", "expected a mask beside & | ~, got '5'"),
        ("5", "expected the spelling of a mask, got '5'"),
        ("[1]", r"expected lists inside of masks only, got \[1\]"),
        ("padding([1.5])", r"expected ints that fit torch.int64, got \[1.5\]"),
        ("padding([True])", r"expected ints that fit torch.int64, got \[True\]"),
        (f"padding([{2**63}])", "expected ints that fit torch.int64"),
        (f"columns([[[[{2**31}]]]], causal=True)", "expected ints that fit torch.int32"),
        ("dense([[2]])", r"expected True and False, or 1 and 0, got \[\[2\]\]"),
        ("padding([[1], [2, 3]])", r"expected lists of equal lengths, got \[\[1\], \[2, 3\]\]"),
        ("padding([[1], 2])", "expected lists of equal lengths"),
        ("padding([x])", r"expected a list of numbers, got \[x\]"),
        ("causal(1, 2, 3)", "positional arguments but 3 were given"),
        ("strided(0)", "n: expected an int of at least 1, got 0"),
        ("window(2, 'a')", "right: expected an int, got str"),
    ],
)
def test_a_bad_mask_gets_one_line_that_holds_its_text(text: str, message: str) -> None:
    with pytest.raises(MaskError, match=message) as caught:
        expression.mask(text)
    said = str(caught.value)
    assert "\n" not in said
    assert repr(text) in said
    assert said.startswith("mask: ")
