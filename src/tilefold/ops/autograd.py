"""Derivatives of the ops for ordinary and compiled calls, up to the second order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd.function import _SingleLevelFunction

from tilefold.errors import DerivativeError

from .kernels import LIBRARY, backward_op, forward_op, run_backward, run_forward, second_order_op, unwatched
from .prepare import DIFFERENTIABLE


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """What a Function takes beside the tensors of a call. One opaque argument is cheaper than many, and
    functorch would take a tuple apart. Mask tensors and tables go as tensors, so that vmap can see them.
    `direct`: the ops may be run without PyTorch's dispatcher (`kernels.unwatched`).
    """

    plain: tuple[Any, ...]
    masks: int
    needs: list[bool] = field(default_factory=list)
    direct: bool = False

    def arguments(self, tensors: Any) -> tuple[Any, ...]:
        """The op's arguments from the tensors that `flat` made of them."""
        end = 7 + self.masks
        return (*tensors[:7], list(tensors[7:end]), list(tensors[end:]), *self.plain)


def flat(args: tuple[Any, ...], needs: list[bool] | None = None, direct: bool = False) -> tuple[Any, ...]:
    """The op's arguments as a Function takes them: tensors, then one `Rest`."""
    mask_tensors, tables = args[7], args[8]
    # Tensors made in inference mode cannot be saved for backward; tables are small.
    held = (t.clone() if t.is_inference() else t for t in (*mask_tensors, *tables))
    return (*args[:7], *held, Rest(args[9:], len(mask_tensors), needs or [], direct))


def apply(function: Any, *inputs: Any) -> Any:
    """`function.apply` for this level of autograd alone.

    The autograd rule of an op is reached for one level at a time, also under functorch (which compiled code
    brings along), whose own levels call the op again.
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*inputs)
    before = _functorch.get_single_level_autograd_function_allowed()
    _functorch.set_single_level_autograd_function_allowed(True)
    try:
        return function.apply(*inputs)
    finally:
        _functorch.set_single_level_autograd_function_allowed(before)


class Forward(_SingleLevelFunction):
    """The forward op with its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, rest = inputs
        # Below view tracking as well: the results are the caller's, who may write into them.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            run = run_forward if rest.direct else forward_op
            out, lse = run(*rest.arguments(tensors))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.rest = rest
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, out, lse = ctx.saved_tensors
        args, needs = ctx.rest.arguments(tensors), list(ctx.needs_input_grad[:DIFFERENTIABLE])
        if torch.is_grad_enabled():
            gradients = backward_op(dout, dlse, out, lse, needs, *args)
        elif ctx.rest.direct and unwatched(dout, dlse, out, lse, *tensors):
            gradients = run_backward(dout, dlse, out, lse, needs, *args)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                gradients = backward_op(dout, dlse, out, lse, needs, *args)
        wanted = (g if need else None for g, need in zip(gradients, needs, strict=True))
        return (*wanted, *(None,) * (len(tensors) - DIFFERENTIABLE + 1))


class Backward(_SingleLevelFunction):
    """The backward op with its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dlse, out, lse, *tensors, rest = inputs
        with torch._C._AutoDispatchBelowADInplaceOrView():
            gradients = backward_op(dout, dlse, out, lse, rest.needs, *rest.arguments(tensors))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dout, dlse, *tensors)
        ctx.rest = rest
        return gradients

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dlse, *tensors = ctx.saved_tensors
        args = ctx.rest.arguments(tensors)
        results = second_order_op(dout, dlse, list(cotangents), ctx.rest.needs, *args)
        return second_order_gradients(results, (dout, dlse), tensors)


class SecondOrder(_SingleLevelFunction):
    """The end of the road: says what a third derivative runs into."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return second_order_op(*second_order_arguments(inputs))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise DerivativeError(NO_THIRD)


def second_order_arguments(inputs: Any) -> tuple[Any, ...]:
    """The second-order op's arguments from the inputs of a Function."""
    dout, dlse, *others, rest = inputs
    cotangents, tensors = others[:DIFFERENTIABLE], others[DIFFERENTIABLE:]
    return (dout, dlse, cotangents, rest.needs, *rest.arguments(tensors))


NO_THIRD = "attention: expected derivatives of at most second order, got a third"


def second_order_gradients(results: Any, upstream: tuple[Any, ...], tensors: Any) -> tuple[Any, ...]:
    """Results of the second-order op as gradients of the inputs of `Backward`.

    out and lse are functions of the others and accounted for there.
    """
    like = (*upstream, *tensors[:DIFFERENTIABLE])
    present = [None if argument is None else result for result, argument in zip(results, like, strict=True)]
    return (*present[:2], None, None, *present[2:], *(None,) * (len(tensors) - DIFFERENTIABLE + 1))


def _forward_autograd(*args: Any) -> Any:
    if torch.is_grad_enabled() and any_requires_grad(args[:DIFFERENTIABLE]):
        return apply(Forward, *flat(args))
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op(*args)


def _backward_autograd(*args: Any) -> Any:
    dout, dlse, out, lse, needs, *rest = args
    if torch.is_grad_enabled() and any_requires_grad((dout, dlse, *rest[:DIFFERENTIABLE])):
        return apply(Backward, dout, dlse, out, lse, *flat(tuple(rest), needs))
    with torch._C._AutoDispatchBelowAutograd():
        return backward_op(*args)


def _second_order_autograd(*args: Any) -> Any:
    dout, dlse, cotangents, needs, *rest = args
    if torch.is_grad_enabled() and any_requires_grad((dout, dlse, *cotangents, *rest[:DIFFERENTIABLE])):
        return apply(SecondOrder, dout, dlse, *cotangents, *flat(tuple(rest), needs))
    with torch._C._AutoDispatchBelowAutograd():
        return second_order_op(*args)


def any_requires_grad(tensors: tuple[Any, ...]) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def register() -> None:
    """Attach the rules to the ops."""
    LIBRARY.impl("forward", _forward_autograd, "Autograd")
    LIBRARY.impl("backward", _backward_autograd, "Autograd")
    LIBRARY.impl("second_order", _second_order_autograd, "Autograd")
