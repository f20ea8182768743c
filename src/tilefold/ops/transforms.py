"""The ops under functorch transforms and forward mode: `autograd.Function`s that also carry a `jvp`.

Dynamo takes no Function with a `jvp`, and such a Function costs more host time, so ordinary calls do without.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import Function, forward_ad

from tilefold import tangents
from tilefold.errors import DerivativeError

from .autograd import NO_THIRD, Rest, flat, second_order_arguments, second_order_gradients
from .kernels import backward_op, forward_op, heads_outside, in_order, second_order_op
from .prepare import DIFFERENTIABLE, make_setting, make_six

_Kind = _functorch.TransformType


class TransformedForward(Function):
    """The forward op with its gradient and its tangent."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, rest = inputs
        return forward_op(*rest.arguments(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, rest = inputs
        ctx.set_materialize_grads(False)
        # The same in both: functorch keeps one record of mapped dimensions for the two.
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.rest = rest

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, out, lse = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        rest = Rest(ctx.rest.plain, ctx.rest.masks, needs)
        gradients = TransformedBackward.apply(dout, dlse, out, lse, *tensors, rest)
        wanted = (g if need else None for g, need in zip(gradients, needs, strict=True))
        return (*wanted, *(None,) * (len(tensors) - DIFFERENTIABLE + 1))

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        args = ctx.rest.arguments(ctx.saved_tensors[:-2])
        t_out, t_lse = tangents.forward(args[:DIFFERENTIABLE], make_six(directions), _setting(args))
        return in_order(t_out, heads_outside(args[0])), in_order(t_lse, heads_first=False)


class TransformedBackward(Function):
    """The backward op with its gradient and its tangent."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dlse, out, lse, *tensors, rest = inputs
        return backward_op(dout, dlse, out, lse, rest.needs, *rest.arguments(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        dout, dlse, _, _, *tensors, rest = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dout, dlse, *tensors)
        ctx.save_for_forward(dout, dlse, *tensors)
        ctx.rest = rest

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        dout, dlse, *tensors = ctx.saved_tensors
        results = TransformedSecondOrder.apply(dout, dlse, *cotangents, *tensors, ctx.rest)
        return second_order_gradients(results, (dout, dlse), tensors)

    @staticmethod
    def jvp(ctx: Any, t_dout: Any, t_dlse: Any, _out: Any, _lse: Any, *directions: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dlse, *tensors = ctx.saved_tensors
        args = ctx.rest.arguments(tensors)
        results = tangents.backward(
            args[:DIFFERENTIABLE], dout, dlse, make_six(directions), t_dout, t_dlse, _setting(args)
        )
        # A tangent has the layout of what it is the tangent of.
        return tuple(
            tensors[0].new_zeros(0)
            if not need or r is None
            else in_order(r, heads_first=False)
            if index < 3
            else r
            for index, (r, need) in enumerate(zip(results, ctx.rest.needs, strict=True))
        )


class TransformedSecondOrder(Function):
    """The second-order op, which has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return second_order_op(*second_order_arguments(inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise DerivativeError(NO_THIRD)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise DerivativeError(NO_THIRD)


def _setting(args: tuple[Any, ...]) -> tangents.Setting:
    """The setting of a tangent, whose formulas need the lowered mask and thus the values in its tensors."""
    if any(_is_mapped(t) for t in args[7]):
        raise DerivativeError(
            "mask: expected one whose tensors are not mapped by vmap under forward mode, got mapped tensors "
            "(map over masks outside of jvp, or take the gradient in reverse mode)"
        )
    return make_setting(args)


def _is_mapped(x: Tensor) -> bool:
    """Whether vmap has mapped `x` at any level."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def attend(args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | Any:
    """`(out, lse)` under the functorch transforms and the forward mode that are active."""
    kinds = [level.key() for level in _functorch.get_interpreter_stack() or ()]
    forwards = kinds.count(_Kind.Jvp) or int(forward_ad._current_level >= 0)
    if forwards + kinds.count(_Kind.Grad) == 0:
        return forward_op(*args)
    if forwards > 1 or forwards + kinds.count(_Kind.Grad) > 2:
        # PyTorch drops the tangents of outer levels inside a Function's jvp, and gradients end at the second
        # order; operations that it differentiates itself have neither limit.
        return tangents.attention(args[:DIFFERENTIABLE], _setting(args))
    return TransformedForward.apply(*flat(args))
