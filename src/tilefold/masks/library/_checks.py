"""Checks of constructor arguments that several masks share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.errors import ArgumentTypeError, MaskError
from tilefold.masks.base import Mask


def an_int(argument: str, value: Any, least: int | None = None) -> Any:
    """`value`, an int of at least `least`."""
    expected = "an int" if least is None else f"an int of at least {least}"
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ArgumentTypeError(f"{argument}: expected {expected}, got {type(value).__name__}")
    if least is not None and value < least:
        raise MaskError(f"{argument}: expected {expected}, got {value}")
    return value


def a_mask(argument: str, value: Any) -> Mask:
    """`value`, a mask."""
    if not isinstance(value, Mask):
        raise ArgumentTypeError(f"{argument}: expected a mask, got {type(value).__name__}")
    return value


def a_tensor(
    argument: str, value: Any, expected: str, dtypes: tuple[torch.dtype, ...], ranks: tuple[int, ...]
) -> Tensor:
    """`value`, a tensor of one of these dtypes and ranks; `expected` says so in words."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"{argument}: expected {expected}, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise MaskError(f"{argument}: expected {expected}, got {value.dtype}")
    if value.dim() not in ranks:
        raise MaskError(f"{argument}: expected {expected}, got shape {list(value.shape)}")
    return value


INTEGERS = (torch.int32, torch.int64)


def check_shared(argument: str, what: str, got: int, wanted: int) -> None:
    """Raise unless a table's size along batch or heads is `wanted`, or 1 and shared."""
    # Symbolic sizes can be compared, but not looked up in a tuple.
    if got != 1 and got != wanted:
        expected = f"{wanted}" if wanted == 1 else f"1 or {wanted}"
        raise MaskError(f"{argument}: expected {expected} along {what}, got {got}")
