"""The gated feed-forward layer (SwiGLU; Shazeer 2020, equation 6)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up in one matrix.

    Args:
        dim: channels of input and output.
        hidden: channels in the middle; default 8/3 of `dim`, rounded up to a multiple of 32, which costs as
            much as a plain layer of four times `dim`.
        bias: whether the two projections have one.

    Shape:
        `[..., dim]` -> `[..., dim]`.
    """

    def __init__(self, dim: int, hidden: int | None = None, bias: bool = False) -> None:
        super().__init__()
        hidden = -(-8 * dim // 96) * 32 if hidden is None else hidden
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
