"""What tilefold is compared with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tilefold import masks


def standard(
    q: Tensor, k: Tensor, v: Tensor, *, mask: masks.Mask | Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Attention as in the textbook: the whole score matrix, a softmax of its rows, a product with v.

    Shape:
        q `[B, Hq, Lq, D]`, k and v `[B, Hk, Lk, D]` -> `[B, Hq, Lq, D]`; memory grows with `Lq * Lk`.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~dense(mask, q, k), float("-inf"))
    return F.dropout(scores.softmax(dim=-1), dropout_p) @ v


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, mask: masks.Mask | Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """PyTorch's fused attention, which takes any mask but its own causal one as a dense boolean matrix."""
    visible = None if mask is None else dense(mask, q, k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout_p, enable_gqa=True)


def dense(mask: masks.Mask | Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The matrix that defines `mask`, bool `[1, 1, Lq, Lk]`, shared by batch elements and heads."""
    if isinstance(mask, Tensor):
        return mask
    return mask.materialize(1, 1, q.shape[2], k.shape[2], device=q.device)
