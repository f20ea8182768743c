"""Masks without structure: stripes of rows, each with the granules of 64 keys that some row of it sees.

A stripe whose granules lie side by side is a rectangle of views. Otherwise its keys are gathered, and stripes
that see equally many keys run as one batch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .pieces import cost
from .rects import Rect, solid

GRANULE = 64
#: Heights of stripes, in granules; 12 of them (768 rows) let the kernel work on 256 rows at once.
_HEIGHTS = (1, 2, 4, 12)
#: A span of keys is taken whole, without gathering, if no more than this share of it is empty.
_SLACK = 0.125


class Gather(NamedTuple):
    """Stripes of equal shape with gathered keys.

    Attributes:
        rows: int64 `[n, S]`, the rows of each stripe.
        keys: int64 `[n, W]`, the keys it sees, ascending.
        parts: per stripe, the spans `(column, start, end)` in which some element is hidden: keys `start ...
            end` at that column.
    """

    rows: Tensor
    keys: Tensor
    parts: tuple[tuple[tuple[int, int, int], ...], ...]


def stripes(
    form: Any, q_length: int, k_length: int, device: torch.device, pairs: int
) -> tuple[list[Rect], list[Gather]]:
    """Rectangles and gathered stripes of a form with a single table; every row is in one of them at most."""
    states = form.tile_states(q_length, k_length, GRANULE, GRANULE, device)[0, 0]
    height, some, every = _height(states, pairs)
    rects: list[Rect] = []
    loose: dict[tuple[int, int], list[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]]] = {}
    for m, (seen, full) in enumerate(zip(some.tolist(), every.tolist(), strict=True)):
        q0 = m * height * GRANULE
        rows = min(height * GRANULE, q_length - q0)
        visible, hidden = (
            _spans(seen, k_length),
            _spans([s and not f for s, f in zip(seen, full, strict=True)], k_length),
        )
        if not visible:
            continue
        total = sum(b - a for a, b in visible)
        start, end = visible[0][0], visible[-1][1]
        if end - start <= (1 + _SLACK) * total:
            gaps = [(a[1], b[0]) for a, b in pairwise(visible)]
            parts = tuple(sorted([*hidden, *gaps]))
            rect = solid(q0, rows, start, end - start)._replace(first=True)
            rects.append(rect._replace(kind="table", parts=parts) if parts else rect)
        else:
            loose.setdefault((rows, total), []).append((q0, visible, hidden))
    return rects, [_gather(rows, members, device) for (rows, _), members in loose.items()]


def _height(states: Tensor, pairs: int) -> tuple[int, Tensor, Tensor]:
    """(height of a stripe in granules, granules that some row sees, granules that every row sees in full),
    the cheapest.
    """
    best: tuple[float, int, Tensor, Tensor] | None = None
    for height in _HEIGHTS:
        spare = -states.shape[0] % height
        padded = torch.cat([states, states[-1:].expand(spare, -1)]) if spare else states
        blocks = padded.unflatten(0, (-1, height))
        some, every = blocks.amax(1) > 0, blocks.amin(1) == 2
        price = sum(cost(height * GRANULE, n * GRANULE, pairs) for n in some.sum(1).tolist() if n)
        if best is None or price < best[0]:
            best = price, height, some, every
        if height >= states.shape[0]:
            break
    assert best is not None
    return best[1:]


def _spans(flags: list[bool], length: int) -> list[tuple[int, int]]:
    """Runs of set flags as spans of keys."""
    result: list[tuple[int, int]] = []
    for n, flag in enumerate(flags):
        if flag:
            start, end = n * GRANULE, min((n + 1) * GRANULE, length)
            if result and result[-1][1] == start:
                result[-1] = (result[-1][0], end)
            else:
                result.append((start, end))
    return result


def _gather(rows: int, members: list[Any], device: torch.device) -> Gather:
    starts = torch.tensor([q0 for q0, _, _ in members], device=device)
    keys = torch.stack(
        [torch.cat([torch.arange(a, b, device=device) for a, b in visible]) for _, visible, _ in members]
    )
    parts = tuple(tuple(_placed(visible, hidden)) for _, visible, hidden in members)
    return Gather(starts[:, None] + torch.arange(rows, device=device), keys, parts)


def _placed(visible: list[tuple[int, int]], hidden: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Hidden spans, each of which lies in a visible one, with the column at which they stand among the
    gathered keys.
    """
    result, column, at = [], 0, 0
    for start, end in visible:
        while at < len(hidden) and hidden[at][0] < end:
            a, b = hidden[at]
            result.append((column + a - start, a, b))
            at += 1
        column += end - start
    return result
