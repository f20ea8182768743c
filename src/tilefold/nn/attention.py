"""Multi-head attention with grouped key/value heads (Ainslie et al. 2023)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from tilefold import attention, masks

from .cache import KVCache
from .rotary import Rotary


class Attend(Protocol):
    """What computes the attention inside a module: `tilefold.attention`, or what is called like it."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: masks.Mask | None, dropout_p: float
    ) -> Tensor: ...


class Attention(nn.Module):
    """Projects to heads, rotates, attends, and projects back.

    Args:
        dim: channels of input and output.
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`; query head `h` reads key/value head `h // (heads //
            kv_heads)`.
            Default: as many as query heads.
        head_dim: channels per head; default `dim // heads`.
        bias: whether the projections have one.
        fused: one matrix `qkv` (rows: query heads, key heads, value heads) instead of three, `q`, `k` and
            `v`.
        rotary: rotates queries and keys; None leaves them.
        dropout: probability with which attention probabilities are dropped, in training only.
        attend: what computes the attention; to compare implementations, assign another to the attribute of
            the same name.

    Shape:
        x `[B, L, dim]` -> `[B, L, dim]`.

    Raises:
        ValueError: the head counts do not divide, or the sizes leave no channel.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        fused: bool = True,
        rotary: Rotary | None = None,
        dropout: float = 0.0,
        attend: Attend = attention,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads={heads}, got {kv_heads}")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim: expected a multiple of heads={heads} or a head_dim, got {dim}")
        self.heads, self.kv_heads = heads, kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.fused = fused
        q_rows, k_rows = heads * self.head_dim, kv_heads * self.head_dim
        if fused:
            self.qkv = nn.Linear(dim, q_rows + 2 * k_rows, bias=bias)
        else:
            self.q = nn.Linear(dim, q_rows, bias=bias)
            self.k = nn.Linear(dim, k_rows, bias=bias)
            self.v = nn.Linear(dim, k_rows, bias=bias)
        self.out = nn.Linear(q_rows, dim, bias=bias)
        self.rotary = rotary
        self.dropout = dropout
        self.attend = attend

    def forward(
        self,
        x: Tensor,
        mask: masks.Mask | None = None,
        positions: Tensor | tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attends from every token of `x` to every token that `mask` shows it.

        Args:
            x: `[B, L, dim]`.
            mask: over `L` queries and `L` keys (with a cache: `cache.length + L` keys); None shows
                everything.
            positions: for the rotary embedding, integers `[L]` or `[B, L]` or `Rotary.angles` of them; by
                default they count on from the cache.
            cache: keys and values of earlier tokens, to which those of `x` are added.

        Returns:
            `[B, L, dim]`.
        """
        q, k, v = self._project(x)
        if self.rotary is not None:
            if positions is None:
                start = 0 if cache is None else cache.length
                positions = torch.arange(start, start + x.shape[1], device=x.device)
            if isinstance(positions, Tensor):
                positions = self.rotary.angles(positions)
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        if cache is not None:
            k, v = cache.append(k, v)
        out = self.attend(q, k, v, mask=mask, dropout_p=self.dropout if self.training else 0.0)
        return self.out(out.transpose(1, 2).flatten(-2))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[B, L, dim]` -> q `[B, Hq, L, D]`, k and v `[B, Hk, L, D]`, views of the projections."""
        if self.fused:
            rows = [self.heads * self.head_dim] + 2 * [self.kv_heads * self.head_dim]
            parts = self.qkv(x).split(rows, dim=-1)
        else:
            parts = (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return q, k, v

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, dropout={self.dropout}"
        )
