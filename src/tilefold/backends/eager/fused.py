"""Attention on a CPU by PyTorch's fused kernels: rectangles of the score matrix, merged by lse.

`aten::_scaled_dot_product_flash_attention_for_cpu` returns `(out, lse)`, and its backward takes the global
ones, under which each rectangle's probabilities and delta are right; so gradients of rectangles simply add
up. Its limits are met here: hidden elements are additive -inf there, through which NaN and inf leak, so
results that are not finite are given up (None: the caller runs the fold, which selects); rows without a key
get lse 0; sizes of zero never reach it; its heads have one size for keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.problem import Problem, accumulator
from tilefold.select import all_finite

from . import backprop
from .merge import merge_into, merge_sink, usable, widened
from .programs import Group, Pieces, Program, plan
from .rects import Rect
from .views import (
    batches,
    cut,
    gather_mask,
    gathered,
    gathered_batches,
    listed,
    own,
    parts,
    placed,
    rect_mask,
)

__all__ = ["backward", "forward", "plan", "why_not"]

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LEFT_TO_THE_FOLD = ("softcap", "dropout", "bias", "alibi")


def why_not(problem: Problem, form: Any) -> list[str]:
    """Every reason, as a sentence, why the fused kernels do not take the call; empty if they do."""
    reasons = []
    if problem.device != "cpu":
        reasons.append(f"PyTorch's fused CPU kernels run on cpu, not on {problem.device}")
    if problem.dtype not in _DTYPES:
        reasons.append(f"PyTorch's fused CPU kernels do not take {problem.dtype}")
    if used := [name for name in _LEFT_TO_THE_FOLD if name in problem.options]:
        reasons.append(f"PyTorch's fused CPU kernels have no {', '.join(used)}")
    if problem.is_empty or 0 in (problem.k_heads, problem.head_dim, problem.v_head_dim):
        reasons.append("PyTorch's fused CPU kernels do not take sizes of zero")
    return reasons


def forward(
    pieces: Pieces, q: Tensor, k: Tensor, v: Tensor, scale: float, sink: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Attention of a call that `why_not` has nothing against.

    Args:
        pieces: `plan` of the lowered mask.
        q, k, v: `[B, Hq, Lq, D]`, `[B, Hk, Lk, D]`, `[B, Hk, Lk, Dv]`, any strides.
        scale: factor of the scores.
        sink: `[Hq]` or None.

    Returns:
        `(out [B, Hq, Lq, Dv], lse [B, Hq, Lq])` in any memory order; None if hidden elements might have
        leaked into them.
    """
    if pieces.masked and not scale > 0.0:
        return None
    q, k, v = usable(q), usable(k), usable(v)
    size = v.shape[-1]
    if size != q.shape[-1]:
        width = max(size, q.shape[-1])
        q, k, v = widened(q, width), widened(k, width), widened(v, width)
    if pieces.single is not None:
        out, lse = _kernel(q, k, v, 0.0, pieces.single == "causal", scale=scale)
    else:
        out, lse = _run(pieces, q, k, v, scale)
    if pieces.masked and not all_finite(out):
        return None
    out = out if size == out.shape[-1] else out[..., :size]
    if sink is not None:
        merge_sink(out, lse, sink)
    return out, lse


def backward(
    pieces: Pieces,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`(dq, dk, dv)` under the global `out` and `lse` (the sink already in them), in any strides; None as in
    `forward`.
    """
    return backprop.backward(pieces, dout, q, k, v, out, lse, scale, dlse)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The tensors of one group: `[b, h, L, X]` views of the call's, `[b, h, L]` for lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    program: Program


def _run(pieces: Pieces, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    B, H, L, D = q.shape
    stored = pieces.whole and all(g.program.rows_once for g in pieces.groups)
    make = q.new_empty if stored else q.new_zeros
    # The kernel keeps the order of q's dimensions.
    out = make(B, H, L, D) if q.stride(1) >= q.stride(2) else make(B, L, H, D).transpose(1, 2)
    lse = q.new_full((B, L, H), -torch.inf, dtype=accumulator(q.dtype)).transpose(1, 2)
    for group in pieces.groups:
        _run_group(group, q, k, v, out, lse, scale)
    return out, lse


def _run_group(group: Group, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
    """Where rows are merged in a 16-bit type, a few heads at a time in a float32 buffer."""
    buffered = not group.program.rows_once and q.dtype != lse.dtype
    bytes_per_head = (out.shape[2] * out.shape[3] * lse.element_size()) if buffered else 0
    for part in parts(group, bytes_per_head):
        target = own(out, part, queries=True)
        sums = torch.zeros_like(target, dtype=lse.dtype) if buffered else target
        run = _Run(
            own(q, part, queries=True),
            own(k, part),
            own(v, part),
            sums,
            own(lse, part, queries=True),
            scale,
            part.program,
        )
        for rect in part.program.forward:
            _run_rect(run, rect)
        for gather in part.program.gathers:
            _run_gather(run, gather)
        if buffered:
            target.copy_(sums)


def _run_rect(run: _Run, rect: Rect) -> None:
    mask = rect_mask(run.program, rect, run.q.dtype)
    dead = mask.amax(-1) == -torch.inf if mask is not None and rect.kind == "table" else None
    q_bytes, k_bytes = run.q.shape[1] * rect.rows, run.k.shape[1] * rect.keys
    for first, n in batches(
        rect, run.q.shape[0], (q_bytes + k_bytes) * run.q.shape[3] * run.q.element_size()
    ):
        rows, keys = placed(rect, first, n, queries=True), placed(rect, first, n)
        out, lse = _call(rect.kind, cut(run.q, rows), cut(run.k, keys), cut(run.v, keys), mask, run.scale)
        if dead is not None:
            lse.masked_fill_(dead, -torch.inf)
        target, target_lse = cut(run.out, rows), cut(run.lse, rows)
        if rect.first:
            target.copy_(out)
            target_lse.copy_(lse)
        else:
            merge_into(target, target_lse, out, lse)


def _call(
    kind: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    if kind == "flipped":
        out, lse = _kernel(q.flip(2), k.flip(2), v.flip(2), 0.0, True, scale=scale)
        return out.flip(2), lse.flip(2)
    return _kernel(q, k, v, 0.0, kind == "causal", attn_mask=mask, scale=scale)


def _run_gather(run: _Run, gather: Any) -> None:
    for b, rows, keys, spans in gathered_batches(
        gather, run.q.shape[0], run.k.shape[1] * run.k.shape[3] * run.k.element_size()
    ):
        at = slice(b, b + 1)
        q, k, v = (gathered(x[at], index) for x, index in ((run.q, rows), (run.k, keys), (run.v, keys)))
        mask = gather_mask(run.program.form, rows, keys, spans, q.dtype)
        out, lse = _kernel(q, k, v, 0.0, False, attn_mask=mask, scale=run.scale)
        if mask is not None:
            lse.masked_fill_(mask.amax(-1) == -torch.inf, -torch.inf)
        run.out[at].index_copy_(2, rows.flatten(), listed(out).to(run.out.dtype))
        run.lse[at].index_copy_(2, rows.flatten(), listed(lse))
