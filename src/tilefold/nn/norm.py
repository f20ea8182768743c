"""Root-mean-square normalisation (Zhang and Sennrich 2019, section 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension, then scales each channel.

    The mean is taken in float32 for half-precision inputs, and the result has the dtype of the input.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.

    Shape:
        `[..., dim]` -> `[..., dim]`.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,), self.weight.to(x.dtype), self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"
