"""One row per error: its class, and the words it is said in.

A message names the argument, what was expected and what came, and shows q, k and v. `match` is searched in
the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import tilefold
from tilefold import Partial, attention, attention_varlen, errors, masks, merge

ARGUMENT, SHAPE, DTYPE, DEVICE, MASK = (
    errors.ArgumentError,
    errors.ShapeError,
    errors.DtypeError,
    errors.DeviceError,
    errors.MaskError,
)
KIND, BACKEND = errors.ArgumentTypeError, errors.BackendError


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(*shape, dtype=dtype, device=device)


def tensors(**changes: Any) -> dict[str, Any]:
    """A right call, q `[2, 4, 8, 16]`, k and v `[2, 2, 6, 16]`, with some arguments changed."""
    return {"q": ones(2, 4, 8, 16), "k": ones(2, 2, 6, 16), "v": ones(2, 2, 6, 16), **changes}


def packed(**changes: Any) -> dict[str, Any]:
    """A right packed call, 8 tokens in 2 documents."""
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    sequences = {"q": ones(8, 4, 16), "k": ones(8, 2, 16), "v": ones(8, 2, 16)}
    return {**sequences, "cu_seqlens_q": cu, "cu_seqlens_k": cu, **changes}


@dataclass
class Row:
    """One wrong call: which argument is named, what was expected and what came (regular expressions)."""

    id: str
    kind: type[Exception]
    argument: str
    expected: str
    got: str
    arguments: dict[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        self.pattern = rf"^{self.argument}( of documents)?: expected .*{self.expected}.*, got .*{self.got}"


META = torch.device("meta")
DENSE = [
    Row("q is no tensor", KIND, "q", "a tensor", "list", tensors(q=[1.0])),
    Row("k is no tensor", KIND, "k", "a tensor", "NoneType", tensors(k=None)),
    Row("v is no tensor", KIND, "v", "a tensor", "float", tensors(v=1.0)),
    Row("q of rank 3", SHAPE, "q", r"4 dimensions \[B, H, L, D\]", "3", tensors(q=ones(4, 8, 16))),
    Row("k of rank 5", SHAPE, "k", r"4 dimensions \[B, H, L, D\]", "5", tensors(k=ones(1, 2, 2, 6, 16))),
    Row("v of rank 2", SHAPE, "v", r"4 dimensions \[B, H, L, D\]", "2", tensors(v=ones(6, 16))),
    Row(
        "k of another batch",
        SHAPE,
        "k",
        "q's batch size 2",
        "3",
        tensors(k=ones(3, 2, 6, 16), v=ones(3, 2, 6, 16)),
    ),
    Row("v of another batch", SHAPE, "v", "q's batch size 2", "1", tensors(v=ones(1, 2, 6, 16))),
    Row("3 query heads, 2 key heads", SHAPE, "q", "2 key heads divide", "3", tensors(q=ones(2, 3, 8, 16))),
    Row("33 query heads, 2 key heads", SHAPE, "q", "2 key heads divide", "33", tensors(q=ones(2, 33, 8, 16))),
    Row(
        "more key heads than query heads", SHAPE, "q", "2 key heads divide", "1", tensors(q=ones(2, 1, 8, 16))
    ),
    Row(
        "no key head",
        SHAPE,
        "k",
        "at least one key head",
        "0",
        tensors(k=ones(2, 0, 6, 16), v=ones(2, 0, 6, 16)),
    ),
    Row("v of other heads", SHAPE, "v", "k's 2 heads", "4", tensors(v=ones(2, 4, 6, 16))),
    Row("v longer than k", SHAPE, "v", "k's length 6", "7", tensors(v=ones(2, 2, 7, 16))),
    Row("v shorter than k", SHAPE, "v", "k's length 6", "5", tensors(v=ones(2, 2, 5, 16))),
    Row("k of another head size", SHAPE, "k", "q's head size 16", "8", tensors(k=ones(2, 2, 6, 8))),
    Row(
        "head size 0",
        SHAPE,
        "q",
        "head size of at least 1",
        "0",
        tensors(q=ones(2, 4, 8, 0), k=ones(2, 2, 6, 0)),
    ),
    Row("value head size 0", SHAPE, "v", "head size of at least 1", "0", tensors(v=ones(2, 2, 6, 0))),
    Row(
        "integer q",
        DTYPE,
        "q",
        "float64, float32, float16 or bfloat16",
        "int64",
        tensors(q=ones(2, 4, 8, 16).long()),
    ),
    Row(
        "complex v",
        DTYPE,
        "v",
        "float64, float32, float16 or bfloat16",
        "complex64",
        tensors(v=ones(2, 2, 6, 16, dtype=torch.complex64)),
    ),
    Row(
        "mixed dtypes",
        DTYPE,
        "q, k, v",
        "one dtype outside autocast",
        "float32, torch.float32 and torch.float16",
        tensors(v=ones(2, 2, 6, 16).half()),
    ),
    Row(
        "mixed halves",
        DTYPE,
        "q, k, v",
        "one dtype",
        "float16, torch.bfloat16 and torch.bfloat16",
        {n: x.half() if n == "q" else x.bfloat16() for n, x in tensors().items()},
    ),
    Row("k elsewhere", DEVICE, "k", "q's device cpu", "meta", tensors(k=ones(2, 2, 6, 16, device="meta"))),
    Row("bias elsewhere", DEVICE, "bias", "q's device cpu", "meta", tensors(bias=ones(8, 6, device="meta"))),
    Row("sink elsewhere", DEVICE, "sink", "q's device cpu", "meta", tensors(sink=ones(4, device="meta"))),
    Row(
        "seed elsewhere",
        DEVICE,
        "seed",
        "on q's device",
        "meta",
        tensors(dropout_p=0.1, seed=torch.zeros((), dtype=torch.int64, device="meta")),
    ),
    Row(
        "bias of a wrong length",
        SHAPE,
        "bias",
        r"broadcasts to \[B, Hq, Lq, Lk\] = \[2, 4, 8, 6\]",
        r"\[8, 5\]",
        tensors(bias=ones(8, 5)),
    ),
    Row(
        "bias of wrong heads",
        SHAPE,
        "bias",
        r"broadcasts to .* \[2, 4, 8, 6\]",
        r"\[2, 8, 6\]",
        tensors(bias=ones(2, 8, 6)),
    ),
    Row(
        "bias of rank 5",
        SHAPE,
        "bias",
        r"broadcasts to",
        r"\[1, 1, 1, 8, 6\]",
        tensors(bias=ones(1, 1, 1, 8, 6)),
    ),
    Row(
        "bias of another batch",
        SHAPE,
        "bias",
        r"broadcasts to",
        r"\[3, 1, 1, 6\]",
        tensors(bias=ones(3, 1, 1, 6)),
    ),
    Row("integer bias", DTYPE, "bias", "floating-point", "int64", tensors(bias=ones(8, 6).long())),
    Row(
        "boolean bias",
        DTYPE,
        "bias",
        r"floating-point.*masks\.dense",
        "bool",
        tensors(bias=ones(8, 6).bool()),
    ),
    Row("bias is no tensor", KIND, "bias", "a tensor or None", "int", tensors(bias=3)),
    Row(
        "sink per key head", SHAPE, "sink", r"one logit per query head \[4\]", r"\[2\]", tensors(sink=ones(2))
    ),
    Row("sink of rank 2", SHAPE, "sink", r"\[4\]", r"\[1, 4\]", tensors(sink=ones(1, 4))),
    Row("sink is a number", KIND, "sink", "a tensor or None", "float", tensors(sink=1.0)),
    Row("integer sink", DTYPE, "sink", "floating-point", "int32", tensors(sink=ones(4).int())),
    Row(
        "slopes per key head",
        SHAPE,
        "alibi_slopes",
        r"\[Hq\] = \[4\] or \[B, Hq\] = \[2, 4\]",
        r"\[2\]",
        tensors(alibi_slopes=ones(2)),
    ),
    Row(
        "slopes of another batch",
        SHAPE,
        "alibi_slopes",
        r"\[2, 4\]",
        r"\[3, 4\]",
        tensors(alibi_slopes=ones(3, 4)),
    ),
    Row(
        "slopes of rank 3",
        SHAPE,
        "alibi_slopes",
        r"\[2, 4\]",
        r"\[2, 4, 1\]",
        tensors(alibi_slopes=ones(2, 4, 1)),
    ),
    Row(
        "integer slopes",
        DTYPE,
        "alibi_slopes",
        "floating-point",
        "int64",
        tensors(alibi_slopes=ones(4).long()),
    ),
    *(
        Row(f"scale {x}", ARGUMENT, "scale", "a finite number or None", str(x), tensors(scale=x))
        for x in (float("nan"), float("inf"), -float("inf"))
    ),
    Row("scale beyond floats", ARGUMENT, "scale", "a finite number", "1329 bits", tensors(scale=10**400)),
    Row("a long negative scale", ARGUMENT, "scale", "a finite number", "bits", tensors(scale=-(10**5000))),
    Row("softcap beyond floats", ARGUMENT, "softcap", "finite", "1329 bits", tensors(softcap=10**400)),
    Row("dropout beyond floats", ARGUMENT, "dropout_p", "", "1329 bits", tensors(dropout_p=10**400)),
    Row("a seed of many digits", ARGUMENT, "seed", "an int", "bits", tensors(dropout_p=0.1, seed=10**5000)),
    *(
        Row(
            f"sparse {n}",
            ARGUMENT,
            n,
            "a dense tensor",
            "sparse_coo",
            tensors(**{n: tensors()[n].to_sparse()}),
        )
        for n in "qkv"
    ),
    Row(
        "sparse bias", ARGUMENT, "bias", "a dense tensor", "sparse_coo", tensors(bias=ones(8, 6).to_sparse())
    ),
    Row("scale is a tensor", KIND, "scale", "a finite number", "Tensor", tensors(scale=ones(1))),
    Row("scale is a bool", KIND, "scale", "a finite number", "bool", tensors(scale=True)),
    *(
        Row(
            f"softcap {x}",
            ARGUMENT,
            "softcap",
            "a positive finite number or None",
            re.escape(str(x)),
            tensors(softcap=x),
        )
        for x in (0.0, -1.0, float("nan"), float("inf"))
    ),
    Row("softcap is a string", KIND, "softcap", "a positive finite number", "str", tensors(softcap="50")),
    *(
        Row(
            f"dropout {x}",
            ARGUMENT,
            "dropout_p",
            r"a number in \[0, 1\)",
            re.escape(str(x)),
            tensors(dropout_p=x),
        )
        for x in (1.0, 1.5, -0.1, float("nan"))
    ),
    Row("no dropout rate", KIND, "dropout_p", r"a number in \[0, 1\)", "NoneType", tensors(dropout_p=None)),
    Row("seed is a float", KIND, "seed", "an int", "float", tensors(dropout_p=0.1, seed=1.5)),
    Row("seed is a bool", KIND, "seed", "an int", "bool", tensors(dropout_p=0.1, seed=True)),
    Row("seed past 64 bits", ARGUMENT, "seed", "an int", str(2**63), tensors(dropout_p=0.1, seed=2**63)),
    Row(
        "seed of int32",
        DTYPE,
        "seed",
        "int64 tensor",
        "int32",
        tensors(dropout_p=0.1, seed=torch.tensor(1, dtype=torch.int32)),
    ),
    Row(
        "seed of rank 1",
        SHAPE,
        "seed",
        "without dimensions",
        r"\[1\]",
        tensors(dropout_p=0.1, seed=torch.tensor([1])),
    ),
    Row("deterministic is an int", KIND, "deterministic", "a bool", "int", tensors(deterministic=1)),
    Row("validate is None", KIND, "validate", "a bool", "NoneType", tensors(validate=None)),
    Row("return_lse is a string", KIND, "return_lse", "a bool", "str", tensors(return_lse="yes")),
    Row(
        "mask is a boolean tensor",
        KIND,
        "mask",
        r"a Mask or None .*masks\.dense\(t\)",
        "bool",
        tensors(mask=ones(8, 6).bool()),
    ),
    Row(
        "mask is an integer tensor",
        KIND,
        "mask",
        r"a Mask or None .*masks\.dense\(t\)",
        "int64",
        tensors(mask=ones(8, 6).long()),
    ),
    Row(
        "mask is an additive tensor",
        KIND,
        "mask",
        r"a Mask or None .*bias= an additive one",
        "float32",
        tensors(mask=ones(8, 6)),
    ),
    Row("mask is a name", KIND, "mask", "a Mask or None", "str", tensors(mask="causal")),
    Row(
        "unknown backend",
        BACKEND,
        "backend",
        "one of 'hopper', 'triton', 'eager' or None",
        "'cuda'",
        tensors(backend="cuda"),
    ),
    Row("backend is no name", KIND, "backend", "a name or None", "int", tensors(backend=3)),
]
PACKED = [
    Row("q of rank 4", SHAPE, "q", r"3 dimensions \[T, H, D\]", "4", packed(q=ones(1, 4, 8, 16))),
    Row("3 query heads, 2 key heads", SHAPE, "q", "2 key heads divide", "3", packed(q=ones(8, 3, 16))),
    Row("no key head", SHAPE, "k", "at least one key head", "0", packed(k=ones(8, 0, 16), v=ones(8, 0, 16))),
    Row("sparse k", ARGUMENT, "k", "a dense tensor", "sparse_coo", packed(k=ones(8, 2, 16).to_sparse())),
    Row("v of another total", SHAPE, "v", "k's length 8", "9", packed(v=ones(9, 2, 16))),
    Row("v of other heads", SHAPE, "v", "k's 2 heads", "1", packed(v=ones(8, 1, 16))),
    Row(
        "offsets are a list",
        KIND,
        "cu_seqlens_q",
        "int32 or int64 tensor",
        "list",
        packed(cu_seqlens_q=[0, 3, 8]),
    ),
    Row(
        "offsets are floats",
        DTYPE,
        "cu_seqlens_k",
        "int32 or int64",
        "float32",
        packed(cu_seqlens_k=torch.tensor([0.0, 3.0, 8.0])),
    ),
    Row(
        "offsets of rank 2",
        SHAPE,
        "cu_seqlens_q",
        r"\[documents \+ 1\]",
        r"\[1, 3\]",
        packed(cu_seqlens_q=torch.tensor([[0, 3, 8]])),
    ),
    Row(
        "no offsets",
        SHAPE,
        "cu_seqlens_q",
        r"\[documents \+ 1\]",
        r"\[0\]",
        packed(cu_seqlens_q=torch.tensor([], dtype=torch.int32)),
    ),
    Row(
        "different numbers of documents",
        SHAPE,
        "cu_seqlens_k",
        r"as many offsets as cu_seqlens_q \[3\]",
        r"\[2\]",
        packed(cu_seqlens_k=torch.tensor([0, 8])),
    ),
    Row(
        "offsets elsewhere",
        DEVICE,
        "cu_seqlens_q",
        "q's device cpu",
        "meta",
        packed(cu_seqlens_q=torch.tensor([0, 3, 8], device="meta")),
    ),
    Row(
        "offsets that decrease",
        MASK,
        "cu_seqlens_q",
        "never decrease",
        "8 after 9",
        packed(cu_seqlens_q=torch.tensor([0, 9, 8])),
    ),
    Row(
        "key offsets that decrease",
        MASK,
        "cu_seqlens_k",
        "never decrease",
        "4 after 5",
        packed(cu_seqlens_k=torch.tensor([0, 5, 4])),
    ),
    Row(
        "offsets past the tensor",
        MASK,
        "cu_seqlens_q",
        "8",
        "768",
        packed(cu_seqlens_q=torch.tensor([0, 3, 768])),
    ),
    Row(
        "key offsets past the tensor",
        MASK,
        "cu_seqlens_k",
        "8",
        "9",
        packed(cu_seqlens_k=torch.tensor([0, 3, 9])),
    ),
    Row("first offset not 0", MASK, "cu_seqlens_q", "0", "1", packed(cu_seqlens_q=torch.tensor([1, 3, 8]))),
    Row("a negative offset", MASK, "cu_seqlens_k", "0", "-1", packed(cu_seqlens_k=torch.tensor([-1, 3, 8]))),
    Row(
        "slopes of another number of documents",
        SHAPE,
        "alibi_slopes",
        r"\[2, 4\]",
        r"\[3, 4\]",
        packed(alibi_slopes=ones(3, 4)),
    ),
    Row("sink per key head", SHAPE, "sink", r"\[4\]", r"\[2\]", packed(sink=ones(2))),
    Row("dropout 1", ARGUMENT, "dropout_p", r"\[0, 1\)", "1.0", packed(dropout_p=1.0)),
    Row("unknown backend", BACKEND, "backend", "one of", "'best'", packed(backend="best")),
    Row(
        "mixed dtypes",
        DTYPE,
        "q, k, v",
        "one dtype outside autocast",
        "float16",
        packed(q=ones(8, 4, 16).half()),
    ),
]


def name_of(row: Row) -> str:
    return row.id


def check_message(row: Row, caught: pytest.ExceptionInfo[Exception]) -> None:
    assert type(caught.value) is row.kind
    assert isinstance(caught.value, TypeError if row.kind is KIND else ValueError)
    assert isinstance(caught.value, errors.TilefoldError)
    assert re.search(row.pattern, str(caught.value), re.DOTALL), f"{caught.value}\ndoes not say {row.pattern}"


@pytest.mark.parametrize("row", DENSE, ids=name_of)
def test_a_wrong_dense_call_says_what_is_wrong(row: Row) -> None:
    with pytest.raises(row.kind) as caught:
        attention(**row.arguments)
    check_message(row, caught)
    if all(isinstance(row.arguments[name], Tensor) for name in "qkv"):
        for name in "qkv":
            x = row.arguments[name]
            assert f"{name} {list(x.shape)} {x.dtype} {x.device}" in str(caught.value)


@pytest.mark.parametrize("row", PACKED, ids=name_of)
def test_a_wrong_packed_call_says_what_is_wrong(row: Row) -> None:
    with pytest.raises(row.kind) as caught:
        attention_varlen(**row.arguments)
    check_message(row, caught)


@pytest.mark.parametrize("row", [row for row in DENSE if row.kind in (SHAPE, DTYPE)], ids=name_of)
def test_the_same_is_said_on_the_meta_device(row: Row) -> None:
    arguments = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in row.arguments.items()}
    with pytest.raises(row.kind) as caught:
        attention(**arguments)
    check_message(row, caught)


def test_the_right_calls_are_right() -> None:
    assert attention(**tensors()).shape == (2, 4, 8, 16)
    assert attention_varlen(**packed()).shape == (8, 4, 16)
    assert attention_varlen(**packed(cu_seqlens_q=torch.tensor([0, 3, 8]))).shape == (8, 4, 16)


def test_a_wrong_call_stays_wrong_after_a_right_one() -> None:
    """Checks are remembered by metadata; equal numbers of another kind must not slip through."""
    attention(**tensors(scale=1, dropout_p=0.0, deterministic=True, return_lse=True))
    for wrong in ({"scale": True}, {"dropout_p": False}, {"deterministic": 1}, {"return_lse": 1}):
        arguments = tensors(
            **{"scale": 1, "dropout_p": 0.0, "deterministic": True, "return_lse": True, **wrong}
        )
        with pytest.raises(KIND):
            attention(**arguments)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nested_tensors_are_refused(name: str, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([ones(3, 4, 16), ones(5, 4, 16)], layout=layout).transpose(1, 2)
    words = (
        rf"^{name}: expected a dense tensor \(attention_varlen takes packed sequences\), got a nested tensor"
    )
    with pytest.raises(ARGUMENT, match=words):
        attention(**tensors(**{name: nested}))
    with pytest.raises(ARGUMENT, match=words):
        attention_varlen(**packed(**{name: nested}))


def test_a_sparse_call_stays_wrong_after_a_dense_one() -> None:
    attention(**tensors())
    with pytest.raises(ARGUMENT, match=r"^v: expected a dense tensor"):
        attention(**tensors(v=tensors()["v"].to_sparse()))


def test_float_arguments_of_a_compiled_function_are_checked() -> None:
    def function(q: Tensor, scale: float, softcap: float) -> Tensor:
        return attention(q, q, q, scale=scale, softcap=softcap)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
    q = torch.randn(1, 2, 5, 4)
    for scale, softcap in ((0.5, 3.0), (0.7, 4.5), (-1.0, 0.1)):
        torch.testing.assert_close(compiled(q, scale, softcap), function(q, scale, softcap))
    torch._dynamo.reset()


def test_no_argument_is_ignored() -> None:
    with pytest.raises(TypeError, match="dropout"):
        attention(**tensors(dropout=0.1))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="bias"):
        attention_varlen(**packed(bias=ones(8, 8)))  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        attention(*tensors().values(), masks.causal())  # type: ignore[misc]


# Masks.


def dense(*shape: int, dtype: torch.dtype = torch.bool) -> masks.Mask:
    return masks.dense(torch.ones(shape, dtype=dtype))


MASKS: list[tuple[str, Callable[[], Any], str]] = [
    ("dense of another length", lambda: dense(8, 7), r"\[8, 7\]"),
    ("dense of other heads", lambda: dense(3, 8, 6), r"\[3, 8, 6\]"),
    ("dense of another batch", lambda: dense(3, 1, 8, 6), r"\[3, 1, 8, 6\]"),
    ("dense of rank 5", lambda: dense(1, 1, 1, 8, 6), r"\[1, 1, 1, 8, 6\]"),
    ("integer dense", lambda: dense(8, 6, dtype=torch.int64), "int64"),
    ("additive dense", lambda: dense(8, 6, dtype=torch.float32), "float32"),
    ("padding of another batch", lambda: masks.padding(torch.tensor([1, 2, 3])), "3"),
    ("padding longer than the keys", lambda: masks.padding(torch.tensor([6, 7])), "7"),
    ("negative padding", lambda: masks.padding(torch.tensor([6, -1])), "-1"),
    ("padding of floats", lambda: masks.padding(torch.tensor([6.0, 1.0])), "float32"),
    ("prefix of another batch", lambda: masks.prefix(torch.tensor([1, 2, 3])), "3"),
    (
        "documents that decrease",
        lambda: masks.documents(torch.tensor([0, 9, 8]), torch.tensor([0, 3, 6])),
        "",
    ),
    (
        "documents past the rows",
        lambda: masks.documents(torch.tensor([0, 3, 9]), torch.tensor([0, 3, 6])),
        "9",
    ),
    (
        "documents past the keys",
        lambda: masks.documents(torch.tensor([0, 3, 8]), torch.tensor([0, 3, 7])),
        "7",
    ),
    ("documents not from 0", lambda: masks.documents(torch.tensor([1, 3, 8]), torch.tensor([0, 3, 6])), "1"),
    (
        "documents of different numbers",
        lambda: masks.documents(torch.tensor([0, 8]), torch.tensor([0, 3, 6])),
        "",
    ),
    (
        "columns of another length",
        lambda: masks.columns(torch.zeros(1, 1, 8, 2, dtype=torch.int32), causal=True),
        "8",
    ),
    (
        "layout of another size",
        lambda: masks.block_sparse(torch.ones(1, 5, 5, dtype=torch.bool), 4),
        r"\[1, 5, 5\]",
    ),
    ("layout of other heads", lambda: masks.block_sparse(torch.ones(3, 2, 2, dtype=torch.bool), 4), "3"),
    (
        "built for another length",
        lambda: masks.predicate(lambda b, h, q, k: q > k).build(2, 4, 16, 16),
        "Lq = 8",
    ),
    ("built for other heads", lambda: masks.predicate(lambda b, h, q, k: q > k + h).build(2, 2, 8, 6), "2"),
    ("elsewhere", lambda: masks.padding(torch.tensor([1, 2])).to("meta"), "meta"),
    ("shift of other lengths", lambda: masks.shift(dense(9, 9), 0, 0, 8, 6), r"\[9, 9\]"),
]


@pytest.mark.parametrize("build, got", [row[1:] for row in MASKS], ids=[row[0] for row in MASKS])
def test_a_mask_that_does_not_fit_the_call_says_so(build: Callable[[], masks.Mask], got: str) -> None:
    with pytest.raises(MASK, match=rf"(?s)expected .*, got .*{got}") as caught:
        attention(**tensors(mask=build()))
    assert isinstance(caught.value, ValueError)


CONSTRUCTORS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("window of floats", lambda: masks.window(1.5, 0), KIND, "left: expected .*int.*, got .*float"),
    ("window of strings", lambda: masks.window(0, "2"), KIND, "right: expected .*int.*, got .*str"),
    ("window of bools", lambda: masks.window(True, 0), KIND, "left: expected .*int.*, got .*bool"),
    (
        "causal alignment",
        lambda: masks.causal(align="left"),
        ARGUMENT,
        "align: expected .*bottom-right.*top-left.*, got .*left",
    ),
    (
        "padding side",
        lambda: masks.padding(torch.tensor([1]), side="up"),
        ARGUMENT,
        "side: expected .*right.*left.*, got .*up",
    ),
    ("dilation of 0", lambda: masks.dilated(3, 0), ARGUMENT, "dilation: expected .*, got .*0"),
    ("stride of 0", lambda: masks.strided(0), ARGUMENT, "expected .*, got .*0"),
    (
        "a block of 0",
        lambda: masks.random_blocks(0.5, block=0, seed=1),
        ARGUMENT,
        "block: expected .*, got .*0",
    ),
    (
        "a share above 1",
        lambda: masks.random_blocks(1.5, block=8, seed=1),
        ARGUMENT,
        "expected .*, got .*1.5",
    ),
    ("a negative prefix", lambda: masks.prefix(-1), ARGUMENT, "expected .*, got .*-1"),
    (
        "dense of a list",
        lambda: masks.dense([[True]]),
        KIND,
        "t: expected a bool mask broadcastable to .*, got list",
    ),
    ("predicate of no function", lambda: masks.predicate(3), KIND, "expected .*, got .*int"),
    (
        "and with a tensor",
        lambda: masks.causal() & torch.ones(3),
        KIND,
        "expected masks on both sides of &, got Tensor",
    ),
    (
        "or with None",
        lambda: masks.causal() | None,
        KIND,
        r"expected masks on both sides of \|, got NoneType",
    ),
    (
        "documents within a tensor",
        lambda: masks.documents(torch.tensor([0, 1]), within=torch.ones(2)),
        KIND,
        "within: expected .*, got",
    ),
]


@pytest.mark.parametrize(
    "build, kind, match", [row[1:] for row in CONSTRUCTORS], ids=[row[0] for row in CONSTRUCTORS]
)
def test_a_wrong_mask_is_refused_where_it_is_made(
    build: Callable[[], Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        build()


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: a and b,
        lambda a, b: a or b,
        lambda a, b: not a,
        lambda a, b: bool(a),
        lambda a, b: 1 if a else 2,
    ],
    ids=["and", "or", "not", "bool", "if"],
)
def test_masks_have_no_truth_value(combine: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(KIND, match=r"mask: expected & \| ~ between masks, got and / or / not"):
        combine(masks.causal(), masks.window(3, 0))


# Backends.


@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_a_backend_that_cannot_run_gives_all_its_reasons(name: str) -> None:
    with pytest.raises(
        BACKEND, match=rf"^backend: expected one that runs this call on cpu, got '{name}', which declines: "
    ) as caught:
        attention(**tensors(backend=name))
    assert isinstance(caught.value, ValueError)
    assert caught.value.reasons
    assert all(reason in str(caught.value) for reason in caught.value.reasons)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_a_packed_call_is_refused_by_the_same_backends(backend: str) -> None:
    with pytest.raises(BACKEND, match=f"got '{backend}', which declines"):
        attention_varlen(**packed(backend=backend))


# Merging.

PART = Partial(torch.ones(2, 3, 8), torch.ones(2, 3))
MERGES: list[tuple[str, Any, type[Exception], str]] = [
    ("nothing", [], ARGUMENT, "^partials: expected at least one Partial, got none"),
    ("a tuple", [PART, (PART.out, PART.lse)], KIND, r"^partials\[1\]: expected a Partial, got tuple"),
    (
        "other rows",
        [PART, Partial(torch.ones(2, 4, 8), torch.ones(2, 4))],
        SHAPE,
        r"^partials\[1\]\.out: expected .*\[2, 3, 8\], got \[2, 4, 8\]",
    ),
    (
        "lse of another shape",
        [Partial(torch.ones(2, 3, 8), torch.ones(3, 2))],
        SHAPE,
        r"^partials\[0\]\.lse: expected .*\[2, 3\], got \[3, 2\]",
    ),
    (
        "lse with a last dimension",
        [PART, Partial(torch.ones(2, 3, 8), torch.ones(2, 3, 1))],
        SHAPE,
        r"^partials\[1\]\.lse: expected .*\[2, 3\], got \[2, 3, 1\]",
    ),
    (
        "elsewhere",
        [PART, Partial(torch.ones(2, 3, 8, device="meta"), torch.ones(2, 3, device="meta"))],
        DEVICE,
        r"^partials\[1\]\.out: expected device cpu, got meta",
    ),
    ("no sequence", None, KIND, "^partials: expected a sequence of Partial, got NoneType"),
    ("one alone", PART, KIND, "^partials: expected a sequence of Partial, got Partial"),
    ("out is a number", [Partial(1, 2)], KIND, r"^partials\[0\]\.out: expected a tensor, got int"),
    (
        "lse is a number",
        [PART, Partial(PART.out, 2.0)],  # type: ignore
        KIND,
        r"^partials\[1\]\.lse: expected a tensor, got float",
    ),
    (
        "lse elsewhere",
        [Partial(PART.out, PART.lse.to("meta"))],
        DEVICE,
        r"^partials\[0\]\.lse: expected out's device cpu, got meta",
    ),
    (
        "integer out",
        [Partial(PART.out.long(), PART.lse)],
        DTYPE,
        r"^partials\[0\]\.out: expected a floating-point dtype, got torch.int64",
    ),
    (
        "integer lse",
        [PART, Partial(PART.out, PART.lse.int())],
        DTYPE,
        r"^partials\[1\]\.lse: expected a floating-point dtype, got torch.int32",
    ),
    (
        "another dtype",
        [PART, Partial(torch.ones(2, 3, 8).half(), torch.ones(2, 3))],
        DTYPE,
        r"^partials\[1\]\.out: expected .*torch.float32, got torch.float16",
    ),
]


@pytest.mark.parametrize("parts, kind, match", [row[1:] for row in MERGES], ids=[row[0] for row in MERGES])
def test_parts_that_do_not_fit_together_are_refused(
    parts: list[Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        merge(parts)


def test_every_error_is_of_the_tree() -> None:
    for name in ("ArgumentError", "ShapeError", "DtypeError", "DeviceError", "MaskError", "BackendError"):
        kind = getattr(tilefold.errors, name)
        assert issubclass(kind, errors.TilefoldError)
        assert issubclass(kind, ValueError)
    assert issubclass(errors.ArgumentTypeError, TypeError)
    assert issubclass(errors.DerivativeError, NotImplementedError)
