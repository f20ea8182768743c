"""Products with selected rows: weights that the mask has set to zero must not meet NaN or inf, since 0 * NaN
is NaN.

Tensors without such entries, the ordinary case, are multiplied as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """A tensor `[..., n, X]` with its non-finite entries set to zero and, where there were any, the tensor as
    it came.
    """

    clean: Tensor
    raw: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Selected:
        """The same with `function` applied to the tensor."""
        return Selected(function(self.clean), None if self.raw is None else function(self.raw))

    def weighted(self, weights: Tensor, keys: slice, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`weights [..., r, c] @ tensor[..., keys, :]`, where invisible entries do not count."""
        result = weights @ self.clean[..., keys, :].to(dtype)
        if self.raw is None:
            return result
        return result + _spread(self.raw[..., keys, :], visible, weights)

    def gathered(self, weights: Tensor, visible: Tensor) -> Tensor:
        """`weights [..., r, c]^T @ tensor[..., r, X]`, where invisible entries of the tensor do not count."""
        result = weights.transpose(-1, -2) @ self.clean
        if self.raw is None:
            return result
        return result + _spread(self.raw, visible.transpose(-1, -2), weights.transpose(-1, -2))


def finite(x: Tensor) -> Selected:
    """`x`, ready for products that select. Reads values: one reduction, and on a GPU one synchronisation."""
    plain = x
    while _functorch.is_functorch_wrapped_tensor(plain):
        plain = _functorch.get_unwrapped(plain)
    with torch._C._DisableFuncTorch():
        clean = all_finite(plain.detach())
    if clean:
        return Selected(x, None)
    return Selected(torch.where(torch.isfinite(x), x, 0.0), x)


def product(weights: Tensor, x: Tensor, visible: Tensor) -> Tensor:
    """`weights [..., r, c] @ x [..., c, X]`; entries of x that `visible [..., r, c]` hides do not count."""
    return finite(x).weighted(weights, slice(None), visible, weights.dtype)


#: Elements that are summed at once where the sum needs a wider copy of them.
SUMMED = 1 << 20


def all_finite(*tensors: Tensor) -> bool:
    """Is every element of every tensor finite? Reads values. A sum that overflows also says no, which costs
    only time. Takes plain tensors, as ops see them.
    """
    return all(_sums_finitely(x) for x in tensors)


def _sums_finitely(x: Tensor) -> bool:
    if x.dtype != torch.float16:
        # A sum in bfloat16 has the range of float32.
        return math.isfinite(x.sum().item())
    if x.device.type != "cpu" or x.dim() < 2:
        return math.isfinite(x.sum(dtype=torch.float32).item())
    # On a CPU a wider sum copies its operand, so it is taken in pieces.
    rows = max(1, SUMMED * x.shape[-2] // max(x.numel(), 1))
    return all(math.isfinite(part.sum(dtype=torch.float32).item()) for part in x.split(rows, dim=-2))


def _spread(raw: Tensor, visible: Tensor | None, weights: Tensor) -> Tensor:
    """What the non-finite entries add: 0 where none is seen, else inf, -inf or NaN as the sum over the seen
    ones would give.
    """
    dtype = weights.dtype
    seen = (torch.ones_like(weights) if visible is None else visible.to(dtype)) * torch.sign(weights)
    positive, negative = seen.clamp(min=0), (-seen).clamp(min=0)
    plus, minus = (raw == torch.inf).to(dtype), (raw == -torch.inf).to(dtype)
    up = positive @ plus + negative @ minus
    down = positive @ minus + negative @ plus
    broken = (seen != 0).to(dtype) @ raw.isnan().to(dtype) + seen.isnan().to(dtype) @ (~raw.isfinite()).to(
        dtype
    )
    result = torch.where(up > 0, torch.inf, 0.0) + torch.where(down > 0, -torch.inf, 0.0)
    return torch.where(broken > 0, torch.nan, result)
