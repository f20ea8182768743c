"""How arguments of masks are written, and how masks speak of their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.errors import MaskError


def write_value(value: Any, held: list[Any] | None) -> str:
    """One argument as source text. What cannot be written goes to `held`; None writes a readable stand-in."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        # A symbolic size becomes its number: a spelling outlives the trace in which its symbol has a meaning.
        return f"{int(value)}"
    if value is None or isinstance(value, (bool, float, str, tuple)):
        return f"{value!r}"
    if held is not None:
        held.append(value)
        return f"t{len(held) - 1}"
    if isinstance(value, Tensor):
        return f"<{value.dtype} {list(value.shape)}>"
    return f"<{getattr(value, '__qualname__', value)}>"


def check_device(argument: str, tensor: Tensor, device: torch.device | str) -> None:
    """Raise `MaskError` unless `tensor` lies on `device` (without an index: on any device of its kind)."""
    wanted = torch.device(device) if isinstance(device, str) else device
    same_index = wanted.index is None or tensor.device.index is None or wanted.index == tensor.device.index
    if tensor.device.type != wanted.type or not same_index:
        moved = "mask.to(device) moves it"
        raise MaskError(f"{argument}: expected a tensor on {wanted}, got one on {tensor.device} ({moved})")
