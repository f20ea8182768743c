"""Rotary position embedding (Su et al. 2021, section 3.2.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns pairs of channels of queries and keys by an angle proportional to their position.

    After it, a score depends on `query position - key position` alone. Angles are computed in float32
    whatever the dtype of the module: bfloat16 cannot even hold position 257.

    Args:
        head_dim: channels per head, even.
        base: the slowest pair turns once in about `2 * pi * base` tokens.
        interleaved: pairs are neighbours `(0, 1), (2, 3), ...` as in the paper, instead of halves `(0, D/2),
            (1, D/2 + 1), ...` as in most checkpoints.

    Raises:
        ValueError: `head_dim` is odd or not positive.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0, interleaved: bool = False) -> None:
        super().__init__()
        if head_dim <= 0 or head_dim % 2:
            raise ValueError(f"head_dim: expected a positive even number, got {head_dim}")
        self.head_dim = head_dim
        self.base = base
        self.interleaved = interleaved

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `positions`, to be shared by all layers of a model.

        Args:
            positions: integers, `[L]` or `[B, L]`.

        Returns:
            Two float32 tensors, `[L, D/2]` or `[B, 1, L, D/2]`.
        """
        exponents = (
            torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions.device) / self.head_dim
        )
        turns = positions.to(torch.float32)[..., None] * self.base**-exponents
        if positions.dim() == 2:
            turns = turns[:, None]
        return turns.cos(), turns.sin()

    def forward(self, x: Tensor, positions: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Rotates `x`.

        Args:
            x: queries or keys, `[B, H, L, D]`.
            positions: integers `[L]` or `[B, L]`, or what `angles` made of them; default `0 .. L - 1`.

        Returns:
            A tensor like `x`.
        """
        if positions is None:
            positions = torch.arange(x.shape[-2], device=x.device)
        cos, sin = self.angles(positions) if isinstance(positions, Tensor) else positions
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}, interleaved={self.interleaved}"
