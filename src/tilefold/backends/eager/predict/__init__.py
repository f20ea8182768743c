"""What this backend will do for a call, and what that takes on this CPU: its side of the cost model."""

from __future__ import annotations

from typing import Any

import torch

from tilefold.cost.io import fold_traffic
from tilefold.cost.steps import Bias, Declaration
from tilefold.problem import Problem

from ..fold import block_of
from ..granules import GRANULE
from ..pieces import rows_per_block
from ..programs import Pieces
from ..programs import plan as plan_pieces
from . import fold, fused
from .bill import Bill
from .calibrate import KEY_BLOCK, measure

__all__ = ["declare", "measure"]


def declare(
    problem: Problem, form: Any, reasons: list[str], backward: bool, bias: Bias | None
) -> Declaration:
    """One pass of a call.

    Args:
        problem: the question.
        form: the lowered mask, with its tables on the CPU.
        reasons: why the fused kernels do not take the call; empty if they do.
        backward: the backward pass instead of the forward pass.
        bias: the additive bias, if there is one.
    """
    if not reasons:
        p = problem
        pieces = plan_pieces(form, p.batch, p.q_heads, p.k_heads, p.q_length, p.k_length)
        if backward:
            empty = pieces.may_be_empty and bool(form.empty_rows(p.q_length, p.k_length, "cpu").any())
            bill = fused.backward(problem, pieces, empty)
        else:
            bill = fused.forward(problem, pieces)
        scattered = any(group.program.gathers for group in pieces.groups)
        sides = (GRANULE, GRANULE) if scattered else (rows_per_block(p.q_length), KEY_BLOCK)
        return _declaration(problem, problem.dtype, bill, _how(pieces), *sides, backward)
    bill, block = fold.declare(problem, form, backward, bias), block_of(problem)
    shape, dtype = (None, None) if bias is None else (bias.shape, bias.dtype)
    moved = fold_traffic(problem, form, block, block, backward, bias_shape=shape, bias_dtype=dtype)
    if bias is not None and not bias.gradient:
        moved.pop("dbias", None)
    bill.traffic.update(moved)
    how = f"the tiled fold in PyTorch operations, tiles of {block} x {block} ({'; '.join(reasons)})"
    return _declaration(problem, problem.accumulator, bill, how, block, block, backward, bias)


def _declaration(
    problem: Problem,
    products: torch.dtype,
    bill: Bill,
    how: str,
    rows: int,
    keys: int,
    backward: bool,
    bias: Bias | None = None,
) -> Declaration:
    results = _result_bytes(problem, backward, bias)
    if not backward:
        # Rows that see nothing are written too.
        least = results - problem.batch * problem.q_heads * problem.q_length * problem.accumulator.itemsize
        bill.traffic["out"] = max(bill.traffic["out"], float(least))
    p, size = problem, problem.dtype.itemsize
    arguments = (p.batch * p.q_heads * p.q_length * p.head_dim) * size
    arguments += p.batch * p.k_heads * p.k_length * (p.head_dim + p.v_head_dim) * size
    arguments += 0 if bias is None else bias.elements * bias.dtype.itemsize
    # The backward reads the results of the forward and their gradient as well.
    arguments += 2 * _result_bytes(problem, False, None) if backward else 0
    return Declaration(
        how=how,
        steps=bill.steps(),
        rows=rows,
        keys=keys,
        traffic=dict(bill.traffic),
        products=str(products).removeprefix("torch."),
        argument_bytes=arguments,
        result_bytes=results,
        extra_bytes=bill.heap.peak,
    )


def _result_bytes(p: Problem, backward: bool, bias: Bias | None) -> int:
    size, rows = p.dtype.itemsize, p.batch * p.q_heads * p.q_length
    if not backward:
        return rows * (p.v_head_dim * size + p.accumulator.itemsize)
    keys = p.batch * p.k_heads * p.k_length
    other = bias.elements * bias.dtype.itemsize if bias is not None and bias.gradient else 0
    return (rows * p.head_dim + keys * (p.head_dim + p.v_head_dim)) * size + other


def _how(pieces: Pieces) -> str:
    """What the fused path does, in words."""
    if pieces.single is not None:
        return f"one call of PyTorch's fused CPU kernel ({pieces.single})"
    rectangles = sum(rect.n for group in pieces.groups for rect in group.program.forward)
    gathered = sum(gather.rows.shape[0] for group in pieces.groups for gather in group.program.gathers)
    parts = []
    if rectangles:
        parts.append(f"{rectangles} rectangle{'s' * (rectangles != 1)} of views")
    if gathered:
        parts.append(f"{gathered} stripe{'s' * (gathered != 1)} with gathered keys")
    if not parts:
        return "nothing to compute: no query sees a key"
    return f"PyTorch's fused CPU kernels on {' and '.join(parts)}, merged by lse"
