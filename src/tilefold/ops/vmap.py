"""vmap over the ops: the mapped dimension joins the batch where nothing depends on the batch index, else one
call for each element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import LIBRARY, backward_op, forward_op, second_order_op

Dims = tuple[Any, ...]


def _pick(value: Any, dim: Any, index: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_pick(v, d, index) for v, d in zip(value, dim, strict=True)]
    return value.select(dim, index) if isinstance(dim, int) else value


def _one_by_one(
    op: Any, size: int, in_dims: Dims, args: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    calls = [op(*(_pick(a, d, i) for a, d in zip(args, in_dims, strict=True))) for i in range(size)]
    stacked = tuple(torch.stack(column) for column in zip(*calls, strict=True))
    return stacked, (0,) * len(stacked)


def _joins_batch(in_dims: Dims, args: tuple[Any, ...]) -> bool:
    """Whether the arguments of `forward` other than q, k and v are the same for every batch element and for
    every mapped one.
    """
    _, _, _, bias, _, slopes, _, mask_tensors, tables, _, _, _, dropout_p, _ = args
    shared = bias is None or bias.dim() < 4 or bias.shape[0] == 1
    alone = slopes is None or slopes.dim() == 1
    mapped = any(args[n] is not None and in_dims[n] is not None for n in range(3, 7))
    # A mask without tensors does not read the batch index.
    return shared and alone and not mapped and not mask_tensors and not tables and dropout_p == 0.0


def _join(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """`[B, ...]` with a mapped dimension -> `[size * B, ...]`."""
    if x is None:
        return None
    mapped = x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
    return mapped.flatten(0, 1)


def _part(x: Tensor, size: int) -> Tensor:
    return x.unflatten(0, (size, -1)) if x.shape[0] else x.reshape(size, 0, *x.shape[1:])


def _forward_rule(info: Any, in_dims: Dims, *args: Any) -> Any:
    size = info.batch_size
    if not _joins_batch(in_dims, args):
        return _one_by_one(forward_op, size, in_dims, args)
    q, k, v = (_join(x, d, size) for x, d in zip(args[:3], in_dims[:3], strict=True))
    out, lse = forward_op(q, k, v, *args[3:])
    return (_part(out, size), _part(lse, size)), (0, 0)


def _backward_rule(info: Any, in_dims: Dims, *args: Any) -> Any:
    size, needs = info.batch_size, args[4]
    if any(needs[3:]) or not _joins_batch(in_dims[5:], args[5:]):
        return _one_by_one(backward_op, size, in_dims, args)
    upstream = (_join(x, d, size) for x, d in zip(args[:4], in_dims[:4], strict=True))
    q, k, v = (_join(x, d, size) for x, d in zip(args[5:8], in_dims[5:8], strict=True))
    gradients = backward_op(*upstream, needs, q, k, v, *args[8:])
    mapped = tuple(
        _part(g, size) if need else g.expand(size, 0) for g, need in zip(gradients, needs, strict=True)
    )
    return mapped, (0,) * len(mapped)


def _second_order_rule(info: Any, in_dims: Dims, *args: Any) -> Any:
    return _one_by_one(second_order_op, info.batch_size, in_dims, args)


def register() -> None:
    """Attach the rules to the ops."""
    for name, rule in (
        ("forward", _forward_rule),
        ("backward", _backward_rule),
        ("second_order", _second_order_rule),
    ):
        torch.library.register_vmap(f"tilefold::{name}", rule, lib=LIBRARY)
