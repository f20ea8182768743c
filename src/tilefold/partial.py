"""A result that can still be merged, and the merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArgumentError, ArgumentTypeError, DeviceError, DtypeError, ShapeError
from .problem import accumulator


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Attention over some of the keys.

    Attributes:
        out: `[..., Dv]`, normalised over the keys it has seen.
        lse: `[...]`, natural log of the sum of exponentials of those scores; -inf where no key was seen.
    """

    out: Tensor
    lse: Tensor

    def __iter__(self):
        return iter((self.out, self.lse))


def merge(partials: Sequence[Partial]) -> Partial:
    """Merge attention over disjoint sets of keys into attention over their union.

    The order does not matter beyond rounding; a partial that has seen no key (`lse = -inf`) changes nothing,
    bit for bit. Differentiable in every `out` and `lse`. Source: FlashAttention-2 (Dao 2023), section 2.3;
    Flash-Decoding.

    Args:
        partials: at least one; `out [..., Dv]` (any float dtype) and `lse [...]` of equal shapes.

    Returns:
        `Partial` with `out` in the first one's dtype and `lse` in float32 (float64 for float64).

    Raises:
        ArgumentError: no partial.
        ShapeError, DtypeError, DeviceError: shapes, dtypes or devices differ, or a dtype is no float.
        ArgumentTypeError: no sequence, an item that is not a `Partial`, or one that does not hold tensors.
    """
    if isinstance(partials, Partial) or not hasattr(partials, "__iter__"):
        raise ArgumentTypeError(f"partials: expected a sequence of Partial, got {type(partials).__name__}")
    partials = tuple(partials)
    _check(partials)
    if len(partials) == 1:
        return partials[0]
    dtype = accumulator(partials[0].out.dtype)
    lses = [p.lse.to(dtype) for p in partials]
    top = lses[0].detach()
    for lse in lses[1:]:
        top = torch.maximum(top, lse.detach())
    # An empty row would compute -inf - -inf; any finite reference gives the right zero weights.
    reference = torch.where(top == -torch.inf, 0.0, top)
    weights = [torch.exp(lse - reference) for lse in lses]
    total = sum(weights[1:], weights[0])
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    lse = torch.where(seen | total.isnan(), reference + torch.log(safe), -torch.inf)
    out = torch.zeros_like(partials[0].out, dtype=dtype)
    for weight, partial in zip(weights, partials, strict=True):
        share = (weight / safe)[..., None]
        out = out + torch.where(share == 0, 0.0, partial.out.to(dtype)) * share
    alone = _only_one(weights)
    for index, partial in enumerate(partials):
        out = torch.where((alone == index)[..., None], partial.out.to(dtype), out)
        lse = torch.where(alone == index, lses[index], lse)
    return Partial(out.to(partials[0].out.dtype), lse)


def _only_one(weights: list[Tensor]) -> Tensor:
    """Index of the one partial that has seen keys, or -1 where none or several have."""
    seen = torch.stack([w.detach() != 0 for w in weights])
    return torch.where(seen.sum(0) == 1, seen.to(torch.int8).argmax(0), -1)


def _check(partials: tuple[Partial, ...]) -> None:
    if not partials:
        raise ArgumentError("partials: expected at least one Partial, got none")
    for index, partial in enumerate(partials):
        if not isinstance(partial, Partial):
            raise ArgumentTypeError(f"partials[{index}]: expected a Partial, got {type(partial).__name__}")
        for name, x in (("out", partial.out), ("lse", partial.lse)):
            if not isinstance(x, Tensor):
                raise ArgumentTypeError(
                    f"partials[{index}].{name}: expected a tensor, got {type(x).__name__}"
                )
            if not x.is_floating_point():
                raise DtypeError(f"partials[{index}].{name}: expected a floating-point dtype, got {x.dtype}")
        if partial.lse.device != partial.out.device:
            raise DeviceError(
                f"partials[{index}].lse: expected out's device {partial.out.device}, got {partial.lse.device}"
            )
        if partial.out.shape[:-1] != partial.lse.shape:
            raise ShapeError(
                f"partials[{index}].lse: expected the shape of out without its last dimension "
                f"{list(partial.out.shape[:-1])}, got {list(partial.lse.shape)}"
            )
        if partial.out.shape != partials[0].out.shape:
            raise ShapeError(
                f"partials[{index}].out: expected the shape of partials[0].out "
                f"{list(partials[0].out.shape)}, got {list(partial.out.shape)}"
            )
        if partial.out.dtype != partials[0].out.dtype:
            raise DtypeError(
                f"partials[{index}].out: expected the dtype of partials[0].out {partials[0].out.dtype}, "
                f"got {partial.out.dtype}"
            )
        if partial.out.device != partials[0].out.device:
            raise DeviceError(
                f"partials[{index}].out: expected device {partials[0].out.device}, got {partial.out.device}"
            )
