"""Attention, its derivatives, and its parts put together again.

Run: python examples/01_attention.py
"""

from __future__ import annotations

import torch

from tilefold import Partial, attention, masks, merge

torch.manual_seed(0)


def main() -> None:
    # Layout [B, H, L, D] as in PyTorch's SDPA. Two query heads share each key/value head; nothing is repeated
    # in memory.
    q = torch.randn(2, 8, 300, 64, requires_grad=True)
    k = torch.randn(2, 4, 300, 64, requires_grad=True)
    v = torch.randn(2, 4, 300, 64, requires_grad=True)

    out = attention(q, k, v, mask=masks.causal())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    difference = (out - expected).abs().max()
    print(f"causal attention: {list(out.shape)}, largest difference from SDPA {difference:.1e}")

    # Options combine, and everything that asks for a gradient gets one: here a logit per head.
    sink = torch.zeros(8, requires_grad=True)
    out = attention(q, k, v, mask=masks.causal() & masks.window(127, 0), softcap=30.0, sink=sink)
    dq, dsink = torch.autograd.grad(out.square().mean(), (q, sink))
    print(f"window, soft cap and sink: gradients for q {list(dq.shape)} and sink {list(dsink.shape)}")

    # Attention over some keys is a partial result, which merges exactly with the rest: the idea behind all of
    # the library.
    left = Partial(*attention(q, k[:, :, :100], v[:, :, :100], return_lse=True))
    right = Partial(*attention(q, k[:, :, 100:], v[:, :, 100:], return_lse=True))
    difference = (merge([left, right]).out - attention(q, k, v)).abs().max()
    print(f"two parts merged: largest difference from the whole {difference:.1e}")

    # Second derivatives: the gradient of a gradient's norm, as in gradient penalties.
    q64, k64, v64 = (x.detach().double()[:, :, :40].requires_grad_() for x in (q, k, v))
    (dq,) = torch.autograd.grad(attention(q64, k64, v64).sum(), q64, create_graph=True)
    (dk,) = torch.autograd.grad(dq.square().sum(), k64)
    print(f"second order: a penalty on the gradient of q reaches k, largest element {dk.abs().max():.3f}")


if __name__ == "__main__":
    main()
