"""Small pieces of arithmetic around the kernel: merging by lse, channels that fill up, sums that say whether
all is finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.select import all_finite

#: Rows that are taken at once where a product of two large tensors is only summed.
_ROWS = 4096


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result `(part [..., S, Dv], part_lse [..., S])` into `(out, lse)` in place; rows of lse
    -inf hold nothing yet.

    The weights come from differences of lse, which are exact where they matter, so that they add up to one
    whatever its size.
    """
    weight = torch.sigmoid(torch.nan_to_num(part_lse - lse))
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))
    lse.copy_(torch.logaddexp(lse, part_lse))


def merge_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Let the sink logits `[Hq]` join the denominator of `(out [B, Hq, L, Dv], lse [B, Hq, L])`, in place."""
    logits = sink.to(lse.dtype)[None, :, None]
    out.mul_(torch.sigmoid(torch.nan_to_num(lse - logits)).unsqueeze(-1).to(out.dtype))
    lse.copy_(torch.logaddexp(lse, logits.expand_as(lse)))


def sink_gradient(sink: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """`-sum exp(sink - lse) (delta - dlse)` over batch and rows, `[Hq]`; `delta = rowsum(dout * out)`."""
    dtype = lse.dtype
    total = torch.zeros(sink.shape, dtype=dtype, device=sink.device)
    for at in range(0, lse.shape[2], _ROWS):
        rows = slice(at, at + _ROWS)
        delta = (dout[:, :, rows].to(dtype) * out[:, :, rows].to(dtype)).sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, :, rows].to(dtype)
        # A sink of -inf leaves rows without keys at lse -inf.
        share = torch.exp(sink.to(dtype)[None, :, None] - lse[:, :, rows])
        total -= (torch.where(lse[:, :, rows] == -torch.inf, 0.0, share * delta)).sum((0, 2))
    return total.to(sink.dtype)


def widened(x: Tensor, width: int) -> Tensor:
    """`x` with its last dimension filled up to `width` with zeros."""
    missing = width - x.shape[-1]
    return x if missing == 0 else torch.nn.functional.pad(x, (0, missing))


def with_lse_channels(dout: Tensor, out: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor] | None:
    """`dout` and `out` with two more channels, so that `rowsum(dout * out)` becomes `delta - dlse`; None
    where the dtype of `dout` cannot hold `dlse`.

    Two, because one number of a 16-bit type would round `dlse`; the second carries the rest.
    """
    high = dlse.to(dout.dtype)
    if not all_finite(high):
        return None
    low = (dlse - high.to(dlse.dtype)).to(dout.dtype)
    minus = out.new_full((*out.shape[:-1], 2), -1.0)
    return torch.cat([dout, torch.stack([high, low], -1)], -1), torch.cat([out, minus], -1)


def usable(x: Tensor) -> Tensor:
    """`x` with contiguous channels and rows that do not overlap, which is what matrix products need."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()
