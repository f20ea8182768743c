"""Views of a call's tensors as the rectangles of a program see them, and the masks of those rectangles."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .granules import GRANULE, Gather
from .programs import Group, Program
from .rects import Rect

#: Bytes of tensors that one batch of stripes makes, and of sums that live at once.
BATCH_BYTES = 4 << 20
SUM_BYTES = 8 << 20
_CPU = torch.device("cpu")
#: Bytes of masks that are kept between calls.
KEPT_BYTES = 16 << 20


class Span(NamedTuple):
    """`n` spans of `size` positions from `first` on, `step` apart."""

    first: int
    size: int
    n: int
    step: int


def own(x: Tensor, group: Group, queries: bool = False) -> Tensor:
    """The part of `x [B, H, L, ...]` that belongs to a group."""
    h0, h1, origin = (group.h0, group.h1, group.q_origin) if queries else (group.k0, group.k1, group.k_origin)
    x = x[group.b0 : group.b1, h0:h1]
    return x if group.step == 1 else x[:, :, origin :: group.step]


def parts(group: Group, bytes_per_head: int) -> Iterator[Group]:
    """The group's heads, as few at a time as keep sums of `bytes_per_head` for each query head small and all
    threads busy.
    """
    heads = group.k1 - group.k0
    per = (group.h1 - group.h0) // heads
    few = heads
    if bytes_per_head:
        few = max(
            SUM_BYTES // (bytes_per_head * per * (group.b1 - group.b0)), -(-torch.get_num_threads() // per)
        )
    for k0 in range(group.k0, group.k1, few):
        k1 = min(k0 + few, group.k1)
        h0 = group.h0 + (k0 - group.k0) * per
        yield dataclasses.replace(group, h0=h0, h1=h0 + (k1 - k0) * per, k0=k0, k1=k1)


def batches(rect: Rect, batch: int, bytes_each: int) -> Iterator[tuple[int, int]]:
    """`(first, n)`: stripes that run as one call. Stripes take the place of the batch dimension, so only one
    batch element has it free.
    """
    if rect.n == 1 or batch > 1:
        yield from ((i, 1) for i in range(rect.n))
        return
    threads = torch.get_num_threads()
    per = max(1, BATCH_BYTES // bytes_each)
    per = per // threads * threads or per
    for first in range(0, rect.n, per):
        yield first, min(per, rect.n - first)


def placed(rect: Rect, first: int, n: int, queries: bool = False) -> Span:
    """Where stripes `first ... first + n` of a rectangle lie among rows or keys."""
    if queries:
        return Span(rect.q0 + first * rect.q_step, rect.rows, n, rect.q_step)
    return Span(rect.k0 + first * rect.k_step, rect.keys, n, rect.k_step)


def cut(x: Tensor, span: Span) -> Tensor:
    """`[b, H, L, ...]` -> `[b, H, size, ...]`, or `[1, H, L, ...]` -> `[n, H, size, ...]` for several spans,
    which may overlap.
    """
    if span.n == 1:
        return x.narrow(2, span.first, span.size)
    step = x.stride(2)
    shape = (span.n, x.shape[1], span.size, *x.shape[3:])
    strides = (span.step * step, *x.stride()[1:])
    return x.as_strided(shape, strides, x.storage_offset() + span.first * step)


def gathered_batches(
    gather: Gather, batch: int, bytes_per_key: int
) -> Iterator[tuple[int, Tensor, Tensor, tuple[tuple[tuple[int, int, int], ...], ...]]]:
    """`(b, rows [n, S], keys [n, W], spans)` of stripes that run as one call."""
    n, width = gather.keys.shape
    per = min(n, max(1, BATCH_BYTES // (2 * width * bytes_per_key)))
    for first in range(0, n, per):
        some = slice(first, first + per)
        for b in range(batch):
            yield b, gather.rows[some], gather.keys[some], gather.parts[some]


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """`[1, H, L, X]` at `index [n, S]` -> `[n, H, S, X]`, a view of the gathered rows. The index is made of
    whole granules, except that the last one may be cut off by the end of `x`.
    """
    n, width = index.shape
    whole = width % GRANULE == 0 and x.shape[2] % GRANULE == 0
    if whole and x.dim() == 4 and x.stride()[2:] == (x.shape[3], 1):
        # Granules are long runs of memory, which are copied several times as fast as rows.
        first = index[:, ::GRANULE].flatten() // GRANULE
        found = x.unflatten(2, (-1, GRANULE)).flatten(3).index_select(2, first)
        return found[0].view(x.shape[1], n, width, x.shape[3]).transpose(0, 1)
    return x.index_select(2, index.flatten())[0].unflatten(1, index.shape).transpose(0, 1)


def listed(x: Tensor) -> Tensor:
    """`[n, H, S, ...]` in memory order n, S, H -> `[1, H, n * S, ...]`, a view."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def rect_mask(program: Program, rect: Rect, dtype: torch.dtype) -> Tensor | None:
    """The additive mask of a rectangle, `[rows, keys]`, or None if it needs none."""
    if rect.kind == "band":
        return band_mask((rect.rows, rect.keys, rect.lo, rect.hi, dtype))
    if rect.kind != "table":
        return None
    mask = torch.zeros(rect.rows, rect.keys, dtype=dtype, device=_CPU)
    for start, end in rect.parts:
        hidden = _hidden(program.form, rect.q0, rect.q0 + rect.rows, start, end, rect.interval)
        mask[:, start - rect.k0 : end - rect.k0].masked_fill_(hidden, -torch.inf)
    return mask


def band_mask(key: tuple[int, int, int | None, int | None, torch.dtype]) -> Tensor:
    """`(rows, keys, lo, hi, dtype)` -> `[rows, keys]`, 0 where `lo <= key - row <= hi`, else -inf. The last
    ones used are kept.
    """
    with _lock:
        found = _kept.pop(key, None)
        if found is None:
            found = _made(*key)
        _kept[key] = found
        while len(_kept) > 1 and sum(m.numel() * m.element_size() for m in _kept.values()) > KEPT_BYTES:
            del _kept[next(iter(_kept))]
    return found


_kept: dict[Any, Tensor] = {}
_lock = threading.Lock()


def _made(rows: int, keys: int, lo: int | None, hi: int | None, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(rows, keys, dtype=dtype, device=_CPU)
    if hi is not None:
        mask += torch.full_like(mask, -torch.inf).triu_(hi + 1)
    if lo is not None:
        mask += torch.full_like(mask, -torch.inf).tril_(lo - 1)
    return mask


def gather_mask(
    form: Any, rows: Tensor, keys: Tensor, spans: tuple[Any, ...], dtype: torch.dtype
) -> Tensor | None:
    """The additive mask of gathered stripes, `[n, 1, S, W]`, or None if nothing in them is hidden."""
    if not any(spans):
        return None
    (n, size), width = rows.shape, keys.shape[1]
    mask = torch.zeros(n, 1, size, width, dtype=dtype, device=_CPU)
    for i, (q0, parts_of) in enumerate(zip(rows[:, 0].tolist(), spans, strict=True)):
        for column, start, end in parts_of:
            hidden = _hidden(form, q0, q0 + size, start, end, -1)
            mask[i, 0, :, column : column + end - start].masked_fill_(hidden, -torch.inf)
    return mask


def _hidden(form: Any, q0: int, q1: int, k0: int, k1: int, interval: int) -> Tensor:
    """bool `[q1 - q0, k1 - k0]`: elements that the form hides, or that lie outside one interval of a `Rows`
    table.
    """
    if interval < 0:
        # Tables answer by position alone, so any lengths do.
        return ~form.tile(q0, q1, k0, k1, q1, k1, _CPU)[0, 0]
    start, end = (
        form.bounds[0, 0, q0:q1, 2 * interval, None],
        form.bounds[0, 0, q0:q1, 2 * interval + 1, None],
    )
    keys = torch.arange(k0, k1, dtype=form.bounds.dtype, device=_CPU)
    return (keys < start).logical_or_(keys >= end)
