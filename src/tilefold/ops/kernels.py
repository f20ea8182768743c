"""The ops of the library, what they run and what they promise about shapes. Opaque: inside, a backend is
chosen and run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold import tangents
from tilefold.problem import accumulator

from .prepare import DIFFERENTIABLE, make_setting, make_six, make_work

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sink, Tensor? alibi_slopes, Tensor? seed, "
    "Tensor[] mask_tensors, Tensor[] tables, str mask, float scale, float? softcap, float dropout_p, "
    "str options"
)
LIBRARY = torch.library.Library("tilefold", "DEF")
LIBRARY.define(f"forward({_ARGUMENTS}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs, {_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    f"second_order(Tensor? dout, Tensor? dlse, Tensor?[] cotangents, bool[] needs, {_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
forward_op = torch.ops.tilefold.forward.default
backward_op = torch.ops.tilefold.backward.default
second_order_op = torch.ops.tilefold.second_order.default


def _forward_kernel(*args: Any) -> tuple[Tensor, Tensor]:
    backend, work = make_work(args)
    return backend.forward(work)


def _backward_kernel(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *args: Any
):
    backend, work = make_work(args)
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = backend.backward(work, dout, dlse, out, lse, tuple(needs))
    return tuple(
        args[0].new_empty(0) if gradient is None else _laid_out_like(gradient, argument)
        for gradient, argument in zip(gradients, args, strict=False)
    )


def _laid_out_like(gradient: Tensor, argument: Tensor) -> Tensor:
    """`gradient` with the strides of `torch.empty_like(argument)`, which is what the fake kernel promises."""
    if gradient.stride() == argument.stride() and argument.is_contiguous():
        return gradient
    like = torch.empty_like(argument)
    return gradient if gradient.stride() == like.stride() else like.copy_(gradient)


def _second_order_kernel(
    dout: Tensor | None, dlse: Tensor | None, cotangents: Any, needs: list[bool], *args: Any
):
    """Gradients of `(dout, dlse, q, k, v, bias, sink, alibi_slopes)` under cotangents of the first-order
    gradients; see `tangents`.
    """
    x, setting = args[:DIFFERENTIABLE], make_setting(args)
    u = make_six(tuple(c if need else None for c, need in zip(cotangents, needs, strict=True)))
    t_out, t_lse = tangents.forward(x, u, setting)
    first = tangents.backward(x, dout, dlse, u, None, None, setting)
    results = (None if dout is None else t_out, None if dlse is None else t_lse, *first)
    like: tuple[Any, ...] = (dout, dlse, *x)
    return tuple(
        args[0].new_empty(0) if result is None else _laid_out_like(result, argument)
        for result, argument in zip(results, like, strict=True)
    )


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, length, heads, dtype=accumulator(q.dtype)).transpose(1, 2)


def _backward_fake(dout: Any, dlse: Any, out: Any, lse: Any, needs: list[bool], *args: Any):
    return tuple(
        torch.empty_like(argument) if need and argument is not None else args[0].new_empty(0)
        for need, argument in zip(needs, args[:DIFFERENTIABLE], strict=True)
    )


def _second_order_fake(dout: Any, dlse: Any, cotangents: Any, needs: list[bool], *args: Any):
    like = (dout, dlse, *args[:DIFFERENTIABLE])
    return tuple(
        args[0].new_empty(0) if argument is None else torch.empty_like(argument) for argument in like
    )


def register() -> None:
    """Attach kernels and fakes to the ops."""
    for name, kernel, fake in (
        ("forward", _forward_kernel, _forward_fake),
        ("backward", _backward_kernel, _backward_fake),
        ("second_order", _second_order_kernel, _second_order_fake),
    ):
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tilefold::{name}", fake, lib=LIBRARY)
