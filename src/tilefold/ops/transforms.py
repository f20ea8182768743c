"""The ops under functorch transforms and forward mode: `autograd.Function`s that also carry a `jvp`.

Dynamo takes no Function with a `jvp`, and such a Function costs more host time, so ordinary calls do without.
"""

from __future__ import annotations

from typing import Any

from torch.autograd import Function

from tilefold import tangents

from .autograd import Rest, SecondOrder, second_order_gradients
from .kernels import backward_op, forward_op, heads_outside, in_order
from .prepare import DIFFERENTIABLE, make_setting, make_six


class TransformedForward(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return forward_op(*args[:7], *args[7].args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:7], *output)
        ctx.save_for_forward(*inputs[:7])
        ctx.rest = inputs[7]

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *seven, out, lse = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        gradients = TransformedBackward.apply(dout, dlse, out, lse, *seven, Rest(ctx.rest.args, needs))
        return (*(g if need else None for g, need in zip(gradients, needs, strict=True)), None, None)

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        args = (*ctx.saved_tensors[:7], *ctx.rest.args)
        t_out, t_lse = tangents.forward(args[:DIFFERENTIABLE], make_six(directions), make_setting(args))
        return in_order(t_out, heads_outside(args[0])), in_order(t_lse, heads_first=False)


class TransformedBackward(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dlse, out, lse, *seven, rest = args
        return backward_op(dout, dlse, out, lse, rest.needs, *seven, *rest.args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        dout, dlse, _, _, *seven, rest = inputs
        ctx.save_for_backward(dout, dlse, *seven)
        ctx.save_for_forward(dout, dlse, *seven)
        ctx.rest = rest

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        *upstream, q, k, v, bias, sink, slopes, seed = ctx.saved_tensors
        args = (q, k, v, bias, sink, slopes, seed, *ctx.rest.args)
        results = SecondOrder.apply(*upstream, *cotangents, *args[:7], Rest(args[7:], ctx.rest.needs))
        gradients = second_order_gradients(results, tuple(upstream), args)
        return (*gradients[:4], *gradients[5:], None, None)

    @staticmethod
    def jvp(ctx: Any, t_dout: Any, t_dlse: Any, _out: Any, _lse: Any, *directions: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dlse, *seven = ctx.saved_tensors
        args = (*seven, *ctx.rest.args)
        results = tangents.backward(
            args[:DIFFERENTIABLE], dout, dlse, make_six(directions), t_dout, t_dlse, make_setting(args)
        )
        # A tangent has the layout of what it is the tangent of.
        return tuple(
            seven[0].new_zeros(0)
            if not need or r is None
            else in_order(r, heads_first=False)
            if index < 3
            else r
            for index, (r, need) in enumerate(zip(results, ctx.rest.needs, strict=True))
        )
