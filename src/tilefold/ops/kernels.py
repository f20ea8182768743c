"""The ops of the library, what they run and what they promise about shapes. Opaque: inside, a backend is
chosen and run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

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


_PLAIN = (Tensor, torch.nn.Parameter)


# Layouts, which compiled code relies on: `out` has its heads outside or inside its rows as q has, `lse` and
# the gradients of q, k and v have the memory order B, L, H, other gradients that of `torch.empty_like`.


def heads_outside(q: Tensor) -> bool:
    """Whether the heads of `[B, H, L, D]` lie outside its rows in memory, as in a contiguous tensor."""
    return q.stride(1) >= q.stride(2)


def in_order(x: Tensor, heads_first: bool) -> Tensor:
    """`x [B, H, L, ...]` dense in the memory order B, H, L or B, L, H; itself if it is."""
    if heads_first:
        return x.contiguous()
    by_row = x.transpose(1, 2)
    return x if by_row.is_contiguous() else by_row.contiguous().transpose(1, 2)


def unwatched(*tensors: Tensor | None) -> bool:
    """Whether nobody would notice that an op is run without PyTorch's dispatcher, which costs more host time
    than all else: no transform, no mode, no profiler, no trace, no kind of tensor of its own.
    """
    # A loop, since it is faster than a generator and this is part of every call.
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.is_meta):
            return False
    return (
        not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        and torch._C._get_tracing_state() is None
    )


def run_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """What the forward op runs."""
    backend, work = make_work(args)
    out, lse = backend.forward(work)
    if backend.keeps_layouts:
        return out, lse
    return in_order(out, heads_outside(work.q)), in_order(lse, heads_first=False)


def run_backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *args: Any
):
    backend, work = make_work(args)
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = backend.backward(work, dout, dlse, out, lse, tuple(needs))
    return _promised(gradients, args)


def _promised(gradients: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Gradients of the six in their layouts; an empty tensor for None."""
    dq, dk, dv, *rest = gradients
    qkv = (args[0].new_empty(0) if x is None else in_order(x, heads_first=False) for x in (dq, dk, dv))
    others = (
        args[0].new_empty(0) if gradient is None else _laid_out_like(gradient, argument)
        for gradient, argument in zip(rest, args[3:DIFFERENTIABLE], strict=True)
    )
    return (*qkv, *others)


def _laid_out_like(gradient: Tensor, argument: Tensor) -> Tensor:
    """`gradient` with the strides of `torch.empty_like(argument)`."""
    # Its strides, without its memory.
    strides = torch.empty_like(argument, device="meta").stride()
    return gradient if gradient.stride() == strides else torch.empty_like(argument).copy_(gradient)


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
    t_dout = args[0].new_empty(0) if dout is None else _laid_out_like(t_out, dout)
    t_dlse = args[0].new_empty(0) if dlse is None else _laid_out_like(t_lse, dlse)
    return t_dout, t_dlse, *_promised(first, args)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    batch, heads, length, _ = q.shape
    if heads_outside(q):
        out = q.new_empty(batch, heads, length, v.shape[3])
    else:
        out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, length, heads, dtype=accumulator(q.dtype)).transpose(1, 2)


def _promised_fake(needs: list[bool], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(
        args[0].new_empty(0)
        if not need or x is None
        else x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
        if index < 3
        else torch.empty_like(x)
        for index, (need, x) in enumerate(zip(needs, args[:DIFFERENTIABLE], strict=True))
    )


def _backward_fake(dout: Any, dlse: Any, out: Any, lse: Any, needs: list[bool], *args: Any):
    return _promised_fake(needs, args)


def _second_order_fake(dout: Any, dlse: Any, cotangents: Any, needs: list[bool], *args: Any):
    upstream = (args[0].new_empty(0) if x is None else torch.empty_like(x) for x in (dout, dlse))
    return (*upstream, *_promised_fake([True] * DIFFERENTIABLE, args))


def register() -> None:
    """Attach kernels and fakes to the ops."""
    for name, kernel, fake in (
        ("forward", run_forward, _forward_fake),
        ("backward", run_backward, _backward_fake),
        ("second_order", _second_order_kernel, _second_order_fake),
    ):
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tilefold::{name}", fake, lib=LIBRARY)
