"""The backward pass over the rectangles of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.select import all_finite

from .merge import usable, widened, with_lse_channels
from .programs import Group, Pieces, Program
from .rects import Rect
from .views import (
    Span,
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

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Three = tuple[Tensor, Tensor, Tensor]


def backward(
    pieces: Pieces,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dlse: Tensor | None,
) -> Three | None:
    """See `fused.backward`."""
    if pieces.masked and not scale > 0.0:
        return None
    if pieces.may_be_empty:
        dout, lse, dlse = _without_empty_rows(dout, lse, dlse)
    sizes = (q.shape[-1], k.shape[-1], v.shape[-1])
    width = max(sizes)
    if dlse is not None:
        extended = with_lse_channels(dout, out, dlse)
        if extended is None:
            return None
        dout, out = extended
        width = -(-max(sizes[0], out.shape[-1]) // 16) * 16
    if dlse is not None or sizes[0] != sizes[2]:
        q, k, v, out, dout = (widened(x, width) for x in (q, k, v, out, dout))
    q, k, v, out = usable(q), usable(k), usable(v), usable(out)
    if pieces.single is not None:
        gradients = _kernel(dout, q, k, v, out, lse, 0.0, pieces.single == "causal", scale=scale)
    else:
        gradients = _run(pieces, Inputs(dout, q, k, v, out, lse, scale))
    # Whatever leaks through a mask, from any of the inputs, arrives in dq or dk as NaN. In 16-bit types it
    # may leak without a mask as well: on CPUs with matrix units a NaN of one row of dout reaches the next.
    leaky = pieces.masked or q.dtype in (torch.bfloat16, torch.float16)
    if leaky and not all_finite(gradients[0], gradients[1]):
        return None
    if sizes[0] == sizes[2] == width:
        return gradients
    dq, dk, dv = (x[..., :size] for x, size in zip(gradients, sizes, strict=True))
    return dq, dk, dv


def _without_empty_rows(
    dout: Tensor, lse: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows without any key take no part: their lse becomes a number, and whatever stands in their upstream
    gradients goes.
    """
    dead = lse == -torch.inf
    if not bool(dead.any()):
        return dout, lse, dlse
    dlse = None if dlse is None else dlse.masked_fill(dead, 0.0)
    return dout.masked_fill(dead.unsqueeze(-1), 0.0), lse.masked_fill(dead, 0.0), dlse


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What the kernel takes: of a call, of a group or of a rectangle."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    scale: float

    def of(self, group: Group) -> Inputs:
        """The part that belongs to a group."""
        dout, q, out, lse = (own(x, group, queries=True) for x in (self.dout, self.q, self.out, self.lse))
        return Inputs(dout, q, own(self.k, group), own(self.v, group), out, lse, self.scale)

    def at(self, rows: Span, keys: Span) -> Inputs:
        """The part that belongs to a rectangle."""
        dout, q, out, lse = (cut(x, rows) for x in (self.dout, self.q, self.out, self.lse))
        return Inputs(dout, q, cut(self.k, keys), cut(self.v, keys), out, lse, self.scale)

    def call(self, kind: str, mask: Tensor | None) -> Three:
        """The kernel's gradients."""
        if kind == "flipped":
            dout, q, k, v, out, lse = (
                x.flip(2) for x in (self.dout, self.q, self.k, self.v, self.out, self.lse)
            )
            dq, dk, dv = _kernel(dout, q, k, v, out, lse, 0.0, True, scale=self.scale)
            return dq.flip(2), dk.flip(2), dv.flip(2)
        return _kernel(
            self.dout,
            self.q,
            self.k,
            self.v,
            self.out,
            self.lse,
            0.0,
            kind == "causal",
            attn_mask=mask,
            scale=self.scale,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Where gradients go; `stored` rows (or keys) are written once, others are added to zeros."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows_stored: bool
    keys_stored: bool

    def put(self, gradients: Three, rows: Span, keys: Span) -> None:
        """Take in the gradients of a rectangle."""
        _put(self.q, gradients[0], rows, self.rows_stored)
        _put(self.k, gradients[1], keys, self.keys_stored)
        _put(self.v, gradients[2], keys, self.keys_stored)


def _put(target: Tensor, value: Tensor, span: Span, stored: bool) -> None:
    if stored:
        cut(target, span).copy_(value)
    elif span.n == 1 or span.step >= span.size:
        cut(target, span).add_(value)
    else:
        for i in range(span.n):
            target.narrow(2, span.first + i * span.step, span.size).add_(value[i : i + 1])


def _run(pieces: Pieces, inputs: Inputs) -> Three:
    programs = [g.program for g in pieces.groups]
    rows_whole = pieces.whole and all(p.grad_rows == (True, True) for p in programs)
    keys_whole = (
        pieces.keys_whole and not pieces.shared_keys and all(p.grad_keys == (True, True) for p in programs)
    )
    dq = _blank(inputs.q, inputs.q.dtype, zeros=not rows_whole)
    dtype = inputs.lse.dtype if pieces.shared_keys else inputs.k.dtype
    dk, dv = (_blank(x, dtype, zeros=not keys_whole) for x in (inputs.k, inputs.v))
    for group in pieces.groups:
        _run_group(group, inputs, (dq, dk, dv), pieces.shared_keys)
    return dq, dk.to(inputs.k.dtype), dv.to(inputs.v.dtype)


def _blank(like: Tensor, dtype: torch.dtype, zeros: bool) -> Tensor:
    """`[B, H, L, D]` in memory order B, L, H, D, which is that of the kernel's gradients."""
    B, H, L, D = like.shape
    return (like.new_zeros if zeros else like.new_empty)(B, L, H, D, dtype=dtype).transpose(1, 2)


def _run_group(group: Group, inputs: Inputs, results: Three, shared: bool) -> None:
    """Sums of a 16-bit type are kept in float32, of a few heads at a time."""
    program, wide = group.program, inputs.lse.dtype
    narrow = inputs.q.dtype != wide
    sum_rows = narrow and not program.grad_rows[0]
    sum_keys = narrow and not program.grad_keys[0] and not shared
    (_, Hq, Lq, D), (_, Hk, Lk, _) = inputs.q.shape, inputs.k.shape
    bytes_per_head = (Lq * sum_rows + 2 * Lk * sum_keys * Hk // Hq) * D * wide.itemsize
    for part in parts(group, bytes_per_head):
        targets = [own(x, part, queries=x is results[0]) for x in results]
        _run_part(program, inputs.of(part), targets, (sum_rows, sum_keys, sum_keys), not shared)


def _run_part(
    program: Program, inputs: Inputs, targets: list[Tensor], summed: tuple[bool, ...], alone: bool
) -> None:
    """Gradients of some heads into `targets`, by way of float32 sums where `summed` says so."""
    sums = [
        _blank(target, inputs.lse.dtype, zeros=True) if wide else target
        for target, wide in zip(targets, summed, strict=True)
    ]
    q, k, v = sums
    into = _Sums(q, k, v, program.grad_rows[0], program.grad_keys[0] and alone)
    for rect in program.backward:
        _run_rect(program, rect, inputs, into)
    for gather in program.gathers:
        _run_gather(program, gather, inputs, into)
    for target, total in zip(targets, sums, strict=True):
        if target is not total:
            target.copy_(total)


def _run_rect(program: Program, rect: Rect, inputs: Inputs, into: _Sums) -> None:
    mask = rect_mask(program, rect, inputs.q.dtype)
    elements = 3 * inputs.q.shape[1] * rect.rows + 2 * inputs.k.shape[1] * rect.keys
    for first, n in batches(rect, inputs.q.shape[0], elements * inputs.q.shape[3] * inputs.q.element_size()):
        rows, keys = placed(rect, first, n, queries=True), placed(rect, first, n)
        into.put(inputs.at(rows, keys).call(rect.kind, mask), rows, keys)


def _run_gather(program: Program, gather: Any, inputs: Inputs, into: _Sums) -> None:
    wide = 2 * inputs.k.shape[1] * inputs.k.shape[3] * inputs.k.element_size()
    for b, rows, keys, spans in gathered_batches(gather, inputs.q.shape[0], wide):
        at = slice(b, b + 1)
        dout, q, out, lse = (gathered(x[at], rows) for x in (inputs.dout, inputs.q, inputs.out, inputs.lse))
        k, v = (gathered(x[at], keys) for x in (inputs.k, inputs.v))
        mask = gather_mask(program.form, rows, keys, spans, q.dtype)
        dq, dk, dv = _kernel(dout, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=inputs.scale)
        into.q[at].index_copy_(2, rows.flatten(), listed(dq).to(into.q.dtype))
        for total, part in ((into.k, dk), (into.v, dv)):
            total[at].index_add_(2, keys.flatten(), listed(part).to(total.dtype))
