"""Keys and values of the tokens seen so far, for one attention layer."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Room for `capacity` tokens, filled from the front.

    Because a causal mask is aligned to the bottom right, `attention(q, *cache.append(k, v),
    mask=masks.causal())` is right for a prompt and for a single token alike.

    Args:
        batch, kv_heads, capacity, head_dim: shape of the keys and of the values.
        dtype, device: of both; torch's defaults where left out.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.keys = torch.empty(batch, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores `k` and `v`, `[B, Hk, L, D]`, and returns views of all keys and values so far.

        Raises:
            ValueError: the capacity does not suffice.
        """
        start, stop = self.length, self.length + k.shape[2]
        if stop > self.capacity:
            raise ValueError(f"KVCache: expected at most {self.capacity} tokens, got {start} + {k.shape[2]}")
        self.keys[:, :, start:stop] = k
        self.values[:, :, start:stop] = v
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]
