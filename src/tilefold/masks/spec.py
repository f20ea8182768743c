"""Spellings back to masks: a small, safe grammar, so that an exported program runs in another process.

    mask  = name(arguments) | mask & mask | mask "|" mask | ~mask
    value = int | float | None | True | False | string | tuple | mask | t0 | t1 | ...

Names are the constructors of `tilefold.masks`, and `built`; nothing else is called or looked up.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilefold.errors import MaskError

from . import library
from .base import And, Mask, Not, Or
from .library.built import built

_CONSTRUCTORS = {name: getattr(library, name) for name in library.__all__ if name != "predicate"} | {
    "built": built
}


def parse(spec: str, tensors: Sequence[Tensor] = ()) -> Mask:
    """The mask that `Mask.spec` spelled.

    Args:
        spec: the string of `Mask.spec`.
        tensors: its tensors, in order.

    Raises:
        MaskError: not a spelling of a mask, or tensors that are missing or left over.
    """
    tree, count = _tree(spec)
    if count != len(tensors):
        raise MaskError(f"tensors: expected {count} for the mask {spec!r}, got {len(tensors)}")
    mask = _value(tree, tensors, spec)
    if not isinstance(mask, Mask):
        raise MaskError(f"spec: expected the spelling of a mask, got {spec!r}")
    return mask


@functools.lru_cache(maxsize=256)
def _tree(spec: str) -> tuple[ast.expr, int]:
    """The expression, and how many tensors it names."""
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError as error:
        raise MaskError(f"spec: expected the spelling of a mask, got {spec!r}") from error
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id[1:].isdigit()}
    return tree, len(names)


def _value(node: ast.expr, tensors: Sequence[Tensor], spec: str) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, (bool, int, float, str)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if isinstance(value, (int, float)):
            return -value
        case ast.Tuple(elts=elements):
            return tuple(_value(element, tensors, spec) for element in elements)
        case ast.Name(id=name) if name[:1] == "t" and name[1:].isdigit() and int(name[1:]) < len(tensors):
            return tensors[int(name[1:])]
        case ast.UnaryOp(op=ast.Invert(), operand=inner):
            return Not(_mask(inner, tensors, spec))
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return And(_mask(left, tensors, spec), _mask(right, tensors, spec))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Or(_mask(left, tensors, spec), _mask(right, tensors, spec))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in _CONSTRUCTORS:
            given = [_value(argument, tensors, spec) for argument in arguments]
            named = {keyword.arg: _value(keyword.value, tensors, spec) for keyword in keywords if keyword.arg}
            if len(named) == len(keywords):
                return _CONSTRUCTORS[name](*given, **named)
    raise MaskError(
        f"spec: expected constructors of masks, plain values and & | ~, got {ast.unparse(node)!r} in {spec!r}"
    )


def _mask(node: ast.expr, tensors: Sequence[Tensor], spec: str) -> Mask:
    value = _value(node, tensors, spec)
    if not isinstance(value, Mask):
        raise MaskError(f"spec: expected a mask beside & | ~, got {ast.unparse(node)!r} in {spec!r}")
    return value
