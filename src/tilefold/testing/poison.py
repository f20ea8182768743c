"""Uninitialised memory that is never zero by luck: fresh `torch.empty` tensors are filled with NaN.

A kernel which forgets to write an element, or reads one before it was written, then shows it at once. The
functions themselves are replaced, not observed through a dispatch mode: a mode is not active inside the
implementation of an op nor in another thread, which is where a library allocates.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOUD = 0x5A  # 90 repeated in every byte: an offset or a length of that size fails in any check


@dataclass
class Poisoned:
    """How many allocations were filled so far."""

    allocations: int = 0


def fill(x: Tensor) -> Tensor:
    """Fill `x` in place with NaN, or with a loud integer, or with True."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return x.fill_(float("nan"))
    if x.dtype == torch.bool:
        return x.fill_(True)
    return x.fill_(int.from_bytes(bytes([LOUD] * x.element_size()), "little"))


@contextlib.contextmanager
def poison() -> Iterator[Poisoned]:
    """Within, `torch.empty` and its relatives return tensors filled by `fill`, also inside ops written in
    Python.
    """
    count = Poisoned()

    def poisoned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            result = function(*args, **kwargs)
            count.allocations += 1
            with torch.no_grad():
                fill(result.detach())
            return result

        return allocate

    places = [(torch, name) for name in ("empty", "empty_like", "empty_strided", "empty_permuted")]
    places += [(torch.Tensor, name) for name in ("new_empty", "new_empty_strided")]
    with contextlib.ExitStack() as restore:
        for owner, name in places:
            original = getattr(owner, name)
            own = name in vars(owner)
            setattr(owner, name, poisoned(original))
            restore.callback(setattr, owner, name, original) if own else restore.callback(
                delattr, owner, name
            )
        yield count
