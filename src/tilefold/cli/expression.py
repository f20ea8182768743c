"""What users type: shapes, lengths, dtypes and masks."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold import masks
from tilefold.errors import ArgumentError, ArgumentTypeError, DtypeError, MaskError, ShapeError

Shape = tuple[int, int, int, int]

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
}

# Elements of at most eight bytes that 64 bits can address.
_ADDRESSED = 2**60
# What the tensor of a mask holds where that is not int64.
_TENSORS = {"dense": torch.bool, "block_sparse": torch.bool, "columns": torch.int32}
# A predicate is a Python function, which cannot be typed.
_NAMES = tuple(name for name in masks.__all__ if name not in ("Mask", "predicate"))


def sizes(text: str) -> tuple[int, ...] | None:
    """The ints of `1x8x64` or `1,8,64`, or None where `text` is no such list of positive ints, or where a
    tensor of that shape could not be addressed.
    """
    parts = re.split(r"[x×,]", text.strip().lower())
    if not all(re.fullmatch(r"[0-9]{1,18}", part.strip()) for part in parts):
        return None
    found = tuple(int(part) for part in parts)
    return found if 0 < math.prod(found) < _ADDRESSED else None


def shape(argument: str, text: str) -> Shape:
    """`[B, H, L, D]` of `1x8x4096x64` or `1,8,4096,64`.

    Raises:
        ShapeError: not four positive ints.
    """
    match sizes(text):
        case (int(B), int(H), int(L), int(D)):
            return B, H, L, D
    raise ShapeError(f"{argument}: expected four positive sizes BxHxLxD such as 1x8x4096x64, got {text!r}")


def shapes(texts: Sequence[str]) -> tuple[Shape, Shape, Shape]:
    """Shapes of q, k and v: k defaults to that of q, and v to that of k.

    Raises:
        ShapeError: not one to three shapes, or shapes that do not belong to one call.
    """
    if not 1 <= len(texts) <= 3:
        raise ShapeError(f"shapes: expected one to three of them (q, k, v), got {len(texts)}")
    found = [shape(name, text) for name, text in zip("qkv", texts, strict=False)]
    q, k, v = found + [found[-1]] * (3 - len(found))
    for name, got, wanted in (("k", (k[0], k[3]), (q[0], q[3])), ("v", v[:3], k[:3])):
        if got != wanted:
            like, what = ("q", "B and D") if name == "k" else ("k", "B, H and L")
            raise ShapeError(f"{name}: expected {what} of {like}, {list(wanted)}, got {list(got)}")
    if q[1] % k[1]:
        raise ShapeError(f"k: expected a number of heads that divides those of q, {q[1]}, got {k[1]}")
    return q, k, v


def lengths(text: str) -> tuple[int, int]:
    """`(Lq, Lk)` of `512` or `512x1024`.

    Raises:
        ShapeError: not one or two positive ints.
    """
    match sizes(text):
        case (int(both),):
            return both, both
        case (int(Lq), int(Lk)):
            return Lq, Lk
    raise ShapeError(f"lengths: expected a positive length or LqxLk such as 512x1024, got {text!r}")


def dtype(text: str) -> torch.dtype:
    """The dtype of a short or a PyTorch name.

    Raises:
        DtypeError: another name.
    """
    found = DTYPES.get(text.strip().lower().removeprefix("torch."))
    if found is None:
        raise DtypeError(f"dtype: expected fp64, fp32, fp16, bf16 or PyTorch's name of one, got {text!r}")
    return found


def mask(text: str) -> masks.Mask:
    """The mask of an expression such as `documents([0, 700, 2048], within=causal()) & window(255, 0)`.

    The grammar is that of `masks.parse`, with lists in place of tensors. `masks.` before a name is allowed.

    Raises:
        MaskError: not a mask; one line that holds the text.
    """
    reader = _Reader(text)
    try:
        spelling = ast.unparse(reader.visit(ast.parse(text.strip(), mode="eval")))
    except MaskError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise MaskError(
            f"mask: expected an expression such as causal() & window(255, 0), got {text!r}"
        ) from None
    try:
        return masks.parse(spelling, reader.tensors)
    except (ArgumentError, ArgumentTypeError, TypeError) as error:
        message = str(error)
        if message.startswith("spec: "):
            # The parser speaks of the spelling, in which the lists are names.
            message = message.removeprefix("spec: ").removesuffix(f" in {spelling!r}")
        raise MaskError(f"mask: {message}, in {text!r}") from None


class _Reader(ast.NodeTransformer):
    """Takes the lists out of an expression into `tensors`; the names t0, t1, ... take their place."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tensors: list[Tensor] = []
        self._around: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = ast.unparse(node.func)
        name = name.removeprefix("tilefold.").removeprefix("masks.")
        if name not in _NAMES:
            raise MaskError(f"mask: expected one of {', '.join(_NAMES)}, got {name!r} in {self.text!r}")
        self._around.append(name)
        arguments = [self.visit(argument) for argument in node.args]
        keywords = [ast.keyword(keyword.arg, self.visit(keyword.value)) for keyword in node.keywords]
        self._around.pop()
        return ast.Call(ast.Name(name, ast.Load()), arguments, keywords)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        hint = f" (write {node.id}())" if node.id in _NAMES else ""
        raise MaskError(f"mask: expected a value or a mask, got {node.id!r} in {self.text!r}{hint}")

    def visit_List(self, node: ast.List) -> ast.AST:
        written = ast.unparse(node)
        if not self._around:
            raise MaskError(f"mask: expected lists inside of masks only, got {written} in {self.text!r}")
        try:
            values = ast.literal_eval(node)
        except ValueError:
            raise MaskError(f"mask: expected a list of numbers, got {written} in {self.text!r}") from None
        wanted = _TENSORS.get(self._around[-1], torch.int64)
        self.tensors.append(self._tensor(values, wanted, written))
        return ast.Name(f"t{len(self.tensors) - 1}", ast.Load())

    def _tensor(self, values: list[Any], wanted: torch.dtype, written: str) -> Tensor:
        expected = "True and False, or 1 and 0" if wanted == torch.bool else f"ints that fit {wanted}"
        if _shape_of(values) is None:
            raise MaskError(f"mask: expected lists of equal lengths, got {written} in {self.text!r}")
        if not all(_fits(value, wanted) for value in _flat(values)):
            raise MaskError(f"mask: expected {expected}, got {written} in {self.text!r}")
        return torch.tensor(values, dtype=wanted)


def _shape_of(values: Any) -> tuple[int, ...] | None:
    """The shape of nested lists, or None where they are ragged."""
    if not isinstance(values, list):
        return ()
    inner = {_shape_of(value) for value in values}
    if len(inner) > 1 or None in inner:
        return None
    return len(values), *(inner.pop() or () if inner else ())


def _flat(values: Any) -> list[Any]:
    return [leaf for value in values for leaf in _flat(value)] if isinstance(values, list) else [values]


def _fits(value: Any, wanted: torch.dtype) -> bool:
    if wanted == torch.bool:
        return isinstance(value, (bool, int)) and value in (0, 1)
    limits = torch.iinfo(wanted)
    return isinstance(value, int) and not isinstance(value, bool) and limits.min <= value <= limits.max
