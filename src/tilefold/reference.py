"""The definition of attention, dense and short. Every backend is tested against it; none imports it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .philox import keep
from .problem import Positions, key_positions, query_positions


# fmt: off
def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, scale=None, softcap=None, bias=None,
              alibi_slopes=None, sink=None, dropout_p=0.0, seed: Any = None, positions: Any = None):
    """`(out [B, Hq, Lq, Dv], lse [B, Hq, Lq])` of the whole score matrix, in the dtype of its inputs."""
    (B, Hq, Lq, D), (Hk, Lk) = q.shape, k.shape[1:3]
    k, v = (x.repeat_interleave(Hq // Hk, dim=1) for x in (k, v))
    at: Any = positions or Positions(diagonal=Lk - Lq)
    i, j = query_positions(at, Lq, q.device), key_positions(at, Lk, q.device)
    s = (q @ k.transpose(-1, -2)) * (D**-0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap is not None else s
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s.dtype).reshape(-1, Hq, 1, 1) * (i[:, None] + at.diagonal - j).abs()
    s = s + bias.to(s.dtype) if bias is not None else s
    visible = mask.materialize(B, Hq, Lq, Lk, q.device) if mask is not None else torch.ones_like(s).bool()
    s = torch.where(visible, s, -torch.inf)
    sink = s.new_full((Hq,), -torch.inf) if sink is None else sink.to(s.dtype)
    columns = torch.cat([s, sink[:, None, None].expand(B, Hq, Lq, 1)], dim=-1)
    alive = columns.detach().amax(-1, keepdim=True) > -torch.inf
    lse = torch.logsumexp(torch.where(alive, columns, 0.0), -1, keepdim=True)
    p = torch.where(visible & alive, torch.softmax(torch.where(alive, columns, 0.0), -1)[..., :Lk], 0.0)
    if dropout_p > 0.0:
        b, h = (torch.arange(n, device=q.device) for n in (B, Hq))
        kept = keep(seed, dropout_p, b[:, None, None] + at.batch_origin, h[:, None] + at.head_origin, i, j)
        p = torch.where(kept, p / (1 - dropout_p), 0.0)
    return p @ v, torch.where(alive, lse, -torch.inf)[..., 0]
# fmt: on
