"""Seeded inputs that find bugs: not only Gaussian values, and not only contiguous tensors.

Every generator draws on the CPU from its own generator, in float32, and then rounds to the wanted dtype. So
the values do not depend on the device, and those of a float64 tensor are exact in float32 too, which lets a
float32 run serve as its baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    """A CPU generator with a fixed seed."""
    return torch.Generator().manual_seed(seed)


def normal(shape: Sequence[int], draw: torch.Generator, factor: float = 1.0) -> Tensor:
    """Gaussian float32 values of standard deviation `factor`."""
    return torch.randn(*shape, generator=draw) * factor


Shape = tuple[int, int, int, int]  # [B, H, L, D]
Values = Callable[[Shape, Shape, Shape, torch.Generator], tuple[Tensor, Tensor, Tensor]]


def gaussian(q: Shape, k: Shape, v: Shape, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Independent unit Gaussians: flat probabilities."""
    return normal(q, draw), normal(k, draw), normal(v, draw)


def large_logits(q: Shape, k: Shape, v: Shape, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with a standard deviation near 36: nearly one-hot probabilities, and exponentials that
    underflow.
    """
    return normal(q, draw, 6.0), normal(k, draw, 6.0), normal(v, draw)


def structured(q: Shape, k: Shape, v: Shape, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A common component of rank two plus an offset in q, k and v: gradients that are small differences of
    large terms.
    """

    def low_rank(shape: Shape, offset: float) -> Tensor:
        B, H, L, D = shape
        return normal((B, H, L, 2), draw) @ normal((1, 1, 2, D), draw) + offset + normal(shape, draw, 0.05)

    return low_rank(q, 0.5), low_rank(k, 0.5), low_rank(v, 2.0)


def extremes(q: Shape, k: Shape, v: Shape, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """What fp16 can just hold: dot products past 65504 which differ little from key to key, and tiny and huge
    values.
    """
    query = 256.0 + torch.zeros(q)
    key = 256.0 + torch.zeros(k)
    if q[-1] > 0:
        key[..., 0] += torch.randint(-3, 4, k[:-1], generator=draw) * 0.25
    sizes = 2.0 ** torch.randint(-20, 14, v, generator=draw).float()
    return query, key, normal(v, draw) * sizes


VALUES: Mapping[str, Values] = {
    "gaussian": gaussian,
    "large": large_logits,
    "structured": structured,
    "extremes": extremes,
}


def make(
    values: str,
    q: Shape,
    k: Shape,
    v: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the given shapes, `values` one of `VALUES`, contiguous."""
    drawn = VALUES[values](q, k, v, generator(seed))
    query, key, value = (x.to(dtype).to(device) for x in drawn)
    return query, key, value


def contiguous(x: Tensor) -> Tensor:
    """`[B, H, L, D]` in memory."""
    return x.contiguous()


def transposed(x: Tensor) -> Tensor:
    """`[B, L, H, D]` in memory, as a projection leaves it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(x: Tensor) -> Tensor:
    """A window into a larger buffer whose other elements are NaN; no dimension is dense and the start is not
    aligned.
    """
    B, H, L, D = x.shape
    buffer = x.new_full((B + 1, H + 1, L + 3, D + 5), float("nan"))
    view = buffer[1:, :H, 2 : L + 2, 3 : D + 3]
    view.copy_(x)
    return view


def strided(x: Tensor) -> Tensor:
    """Stride 2 in the last dimension; the elements between are NaN."""
    buffer = x.new_full((*x.shape[:-1], x.shape[-1] * 2), float("nan"))
    view = buffer[..., ::2]
    view.copy_(x)
    return view


def head_expanded(x: Tensor) -> Tensor:
    """One head shown as all heads: stride 0. Changes the values to those of head 0."""
    return x[:, :1].expand_as(x) if x.shape[1] else x


def batch_expanded(x: Tensor) -> Tensor:
    """One batch element shown as all: stride 0. Changes the values to those of element 0."""
    return x[:1].expand_as(x) if x.shape[0] else x


def scalar_expanded(x: Tensor) -> Tensor:
    """One number shown everywhere: all strides 0, as the gradient of a sum is. Changes the values."""
    return x.flatten()[:1].reshape(1, 1, 1, 1).expand_as(x) if x.numel() else x


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "contiguous": contiguous,
    "transposed": transposed,
    "sliced": sliced,
    "strided": strided,
    "head_expanded": head_expanded,
    "batch_expanded": batch_expanded,
    "scalar_expanded": scalar_expanded,
}
