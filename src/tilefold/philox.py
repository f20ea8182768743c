"""The dropout generator: Philox4x32-10 in tensors.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A random word is a pure
function of the seed and
of the place `(b, h, q, k)` of a probability, so every backend, tile order and split draws the same mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random 32-bit words per counter.

    Args:
        counter: four int64 tensors, broadcastable to one shape, each in [0, 2^32).
        key: two int64 tensors, each in [0, 2^32).

    Returns:
        Four int64 tensors of the broadcast shape, each in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps to the low 64 bits of the true one, so both of its halves are exact.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3


def keep(seed: Tensor, dropout_p: float, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Which probabilities survive dropout: lane `k % 4` of counter `(k // 4, q, h, b)` is at least `floor(p *
    2^32)`.

    Args:
        seed: int64, no dimensions.
        dropout_p: in [0, 1).
        b, h, q: int64 index tensors `[B, 1, 1]`, `[H, 1]` or any shapes that broadcast, without the key
            dimension.
        k: int64 `[Lk]`, the key positions.

    Returns:
        bool, the broadcast shape of b, h, q with `Lk` appended.
    """
    seed = seed.to(torch.int64)
    key = (seed & _WORD, (seed >> 32) & _WORD)
    if k.numel() == 0:
        return torch.zeros(
            (*torch.broadcast_shapes(b.shape, h.shape, q.shape), 0), dtype=torch.bool, device=k.device
        )
    groups, place = torch.unique(k >> 2, return_inverse=True)
    words = philox((groups, q[..., None], h[..., None], b[..., None]), key)
    shape = torch.broadcast_shapes(*(w.shape for w in words))
    lanes = torch.stack([w.expand(shape) for w in words], dim=-1).flatten(-2)
    return lanes.index_select(-1, place * 4 + (k & 3)) >= int(dropout_p * 2.0**32)
