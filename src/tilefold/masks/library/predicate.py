"""`predicate`: any rule, as a function of index tensors."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.errors import ArgumentTypeError, MaskError
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Points

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Predicate(Mask):
    fn: Rule

    def _arguments(self) -> Arguments:
        return (("", self.fn),)

    @property
    def needs_build(self) -> bool:
        return True

    def visible(self, p: Points) -> Tensor:
        seen = self.fn(p.b, p.h, p.i, p.j)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            got = f"a tensor of {seen.dtype}" if isinstance(seen, Tensor) else type(seen).__name__
            raise MaskError(f"fn of predicate: expected a function that returns a bool tensor, got {got}")
        return seen

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.fn, types.FunctionType) and "<" in self.fn.__qualname__:
            raise MaskError(
                "fn of predicate: expected a function of a module, which can be pickled by name, "
                f"got {self.fn.__qualname__} (mask.build(B, Hq, Lq, Lk) gives a mask that can be pickled)"
            )
        return super().__getstate__()

    def __copy__(self) -> Mask:
        return self


def predicate(fn: Rule) -> Mask:
    """A query sees the keys for which `fn(b, h, q, k)` is true.

    Args:
        fn: called with int64 tensors that broadcast together (batch element, query head, query, key); returns
            bool, elementwise. It must always answer alike: the mask is evaluated once per size of call and
            kept. Inside `documents`, q and k are the document's.

    Raises:
        ArgumentTypeError: not callable.
        MaskError: when used, if `fn` returns something else than a bool tensor.
    """
    if not callable(fn):
        raise ArgumentTypeError(f"fn: expected a function of (b, h, q, k), got {type(fn).__name__}")
    return Predicate(fn)
