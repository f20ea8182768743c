"""Looking things up in tables that batch or heads may share, elementwise; binary search in sorted ones."""

from __future__ import annotations

import torch
from torch import Tensor


def shared(index: Tensor, size: int) -> Tensor | int:
    """An index along a dimension of `size`; a dimension of 1 is shared by all."""
    return 0 if size == 1 else index


def search(table: Tensor, b: Tensor, values: Tensor, right: bool) -> Tensor:
    """int64: how many entries of `table` (`[n]`, or row `b` of `[B, n]`, sorted) are `< value`, or `<= value`
    with `right`.
    """
    if table.dim() == 2 and table.shape[0] == 1:
        table = table[0]
    if table.dim() == 1:
        return torch.searchsorted(table.long(), values.contiguous(), right=right)
    # One search for all rows: every row's values and entries move to a range of their own.
    rows, n = table.shape
    span = 2**32
    lift = b * span
    lifted = table.long() + torch.arange(rows, device=table.device).unsqueeze(1) * span
    found = torch.searchsorted(lifted.flatten(), (values + lift).contiguous(), right=right)
    return found - lift // span * n


def entry(table: Tensor, b: Tensor, at: Tensor) -> Tensor:
    """int64: entry `at` of `table` (`[n]`, or row `b` of `[B, n]`); `at` is clamped into the table, which
    must not be empty.
    """
    at = at.clamp(0, table.shape[-1] - 1)
    found = table[at] if table.dim() == 1 else table[shared(b, table.shape[0]), at]
    return found.long()
