"""Derivatives of the ops for ordinary and compiled calls, up to the second order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Function

from tilefold.errors import DerivativeError

from .kernels import LIBRARY, backward_op, forward_op, second_order_op
from .prepare import COUNT, DIFFERENTIABLE


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """What a transformed call carries beside its seven tensors. Opaque, since functorch would take a tuple or
    list apart.
    """

    args: tuple[Any, ...]
    needs: list[bool] = field(default_factory=list)


class Forward(Function):
    """The forward op with its gradient. Seven tensors, and the other arguments as one: it costs less."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        args = (*inputs[:7], *inputs[7].args)
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = forward_op(*args)
        _save(ctx, args, (out, lse))
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        args, (out, lse) = _saved(ctx)
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        if torch.is_grad_enabled():
            gradients = backward_op(dout, dlse, out, lse, needs, *args)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                gradients = backward_op(dout, dlse, out, lse, needs, *args)
        return (*(g if need else None for g, need in zip(gradients, needs, strict=True)), None, None)


class _Backward(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch._C._AutoDispatchBelowAutograd():
            gradients = backward_op(*args)
        _save(ctx, args[5:], args[:2])
        ctx.needs = args[4]
        return gradients

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        args, upstream = _saved(ctx)
        results = second_order_op(*upstream, list(cotangents), ctx.needs, *args)
        return (*second_order_gradients(results, upstream, args), *(None,) * (COUNT - DIFFERENTIABLE))


class SecondOrder(Function):
    """The end of the road: says what a third derivative runs into."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, rest = args
        with torch._C._AutoDispatchBelowAutograd():
            return second_order_op(*tensors[:2], list(tensors[2:8]), rest.needs, *tensors[8:], *rest.args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise DerivativeError(_NO_THIRD)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise DerivativeError(_NO_THIRD)


_NO_THIRD = "attention: expected derivatives of at most second order, got a third"


def second_order_gradients(results: Any, upstream: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results of the second-order op as gradients of `(dout, dlse, out, lse, needs, q, k, v, bias, sink,
    alibi_slopes)`.

    out and lse are functions of the others and accounted for there.
    """
    like = (*upstream, *args[:DIFFERENTIABLE])
    present = [None if argument is None else result for result, argument in zip(results, like, strict=True)]
    return (*present[:2], None, None, None, *present[2:])


def _save(ctx: Any, args: tuple[Any, ...], more: tuple[Any, ...]) -> None:
    """Keep a call: tensors through `save_for_backward`, the rest on the context."""
    ctx.set_materialize_grads(False)
    mask_tensors, tables = args[7], args[8]
    ctx.save_for_backward(*args[:7], *more, *mask_tensors, *tables)
    ctx.counts = len(more), len(mask_tensors)
    ctx.plain = args[9:]


def _saved(ctx: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    tensors = ctx.saved_tensors
    more, held = ctx.counts
    middle = 7 + more
    args = (*tensors[:7], list(tensors[middle : middle + held]), list(tensors[middle + held :]), *ctx.plain)
    return args, tensors[7:middle]


def _forward_autograd(*args: Any) -> Any:
    if torch.is_grad_enabled() and any_requires_grad(args[:DIFFERENTIABLE]):
        return Forward.apply(*args[:7], Rest(args[7:]))
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op(*args)


def _backward_autograd(*args: Any) -> Any:
    if torch.is_grad_enabled() and any_requires_grad((*args[:2], *args[5 : 5 + DIFFERENTIABLE])):
        return _Backward.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return backward_op(*args)


def _second_order_autograd(*args: Any) -> Any:
    dout, dlse, cotangents, needs, *rest = args
    tensors = (dout, dlse, *cotangents, *rest[:DIFFERENTIABLE])
    if torch.is_grad_enabled() and any_requires_grad(tensors):
        return SecondOrder.apply(dout, dlse, *cotangents, *rest[:7], Rest(tuple(rest[7:]), needs))
    with torch._C._AutoDispatchBelowAutograd():
        return second_order_op(*args)


def any_requires_grad(tensors: tuple[Any, ...]) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def register() -> None:
    """Attach the rules to the ops."""
    LIBRARY.impl("forward", _forward_autograd, "Autograd")
    LIBRARY.impl("backward", _backward_autograd, "Autograd")
    LIBRARY.impl("second_order", _second_order_autograd, "Autograd")
