"""The meeting of the public call with autograd, functorch and `torch.compile`; nothing outside knows
`torch.library`.

`tilefold::forward` and `tilefold::backward` are opaque ops: inside, on real shapes, a backend is chosen and
run (`prepare`, `kernels`). Their autograd rules serve ordinary and compiled calls (`autograd`); functorch and
forward mode take the same ops through Functions that carry a `jvp` (`transforms`). Second order comes from
`tangents`; third order is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilefold.partial import Partial
from tilefold.planning.backend import Backend, Gradients, Work
from tilefold.planning.choose import choose
from tilefold.problem import Problem
from tilefold.scores import Scores

from . import autograd, kernels, transforms, vmap
from .autograd import Forward, any_requires_grad, apply, flat
from .kernels import forward_op
from .prepare import DIFFERENTIABLE, encode, load, plan_of

__all__ = ["attend", "backward", "encode", "forward", "load", "plan_of"]

kernels.register()
autograd.register()
vmap.register()


def attend(*args: Any) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of one validated call, by the road that the active transforms need. Arguments are those of
    the op.
    """
    if torch.compiler.is_compiling():
        return forward_op(*args)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return transforms.attend(args)
    direct = kernels.unwatched(*args[:7], *args[7], *args[8])
    if torch.is_grad_enabled() and any_requires_grad(args[:DIFFERENTIABLE]):
        # What the op's own autograd rule does, one dispatch earlier.
        return apply(Forward, *flat(args, direct=direct))
    return kernels.run_forward(*args) if direct else forward_op(*args)


def _runner(problem: Problem, form: Any) -> Backend:
    runner = load(choose(problem, form, load).backend)
    assert not isinstance(runner, str)
    return runner


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: Any,
    scores: Scores,
    tables: tuple[Tensor, ...] = (),
) -> Partial:
    """Attention of one rectangle, without autograd: decoding and distributed runs build on it.

    Args:
        problem: the rectangle; its `positions` say where it lies.
        q, k, v: `[B, Hq, Lq, D]`, `[B, Hk, Lk, D]`, `[B, Hk, Lk, Dv]`.
        form: its lowered mask (`masks.lower`).
        scores: leave the sink out if the result will be merged.
        tables: the position tables iff `problem.positions.tables`.
    """
    with torch.no_grad():
        return Partial(*_runner(problem, form).forward(Work(problem, q, k, v, form, scores, tables)))


def backward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: Any,
    scores: Scores,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    needs: tuple[bool, ...] = (True, True, True, False, False, False),
    tables: tuple[Tensor, ...] = (),
) -> Gradients:
    """Gradients of one rectangle under the *global* `out` and `lse`; the gradients of all rectangles add up
    to the whole's.

    Shapes as in `forward`; `dout` and `out` `[B, Hq, Lq, Dv]`, `lse` and `dlse` `[B, Hq, Lq]`.
    """
    with torch.no_grad():
        return _runner(problem, form).backward(
            Work(problem, q, k, v, form, scores, tables), dout, dlse, out, lse, needs
        )
