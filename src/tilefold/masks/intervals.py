"""Sets of positions as a few intervals per line, in tensors: union, intersection, complement, without a
device read.

A `Spans` holds `n` half-open intervals for every line. The canonical form is clipped to `[0, length]`,
sorted, disjoint, merged where intervals touch; what is left over stands at the end as `[length, length)`. `n`
is a static bound: how many intervals a line really has depends on the tensors, and asking for it (`width`)
reads the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .context import Length

# More intervals per line than this are not worth tables: the caller falls back to bits.
MAX_WIDTH = 32


@dataclass(frozen=True)
class Spans:
    """`start`, `end`: int64 `[n, Bm, Hm, N]`, half-open; both of one shape."""

    start: Tensor
    end: Tensor

    @property
    def count(self) -> int:
        return self.start.shape[0]


def spans(*pairs: tuple[Length, Length], like: Tensor) -> Spans:
    """Intervals of ints or of tensors that broadcast with `like` `[Bm, Hm, N]`."""
    if not pairs:
        nothing = like.new_zeros((0, 1, 1, 1))
        return Spans(nothing, nothing)
    bounds = [_tensor(bound, like) for pair in pairs for bound in pair]
    shape = _broadcast((1, 1, 1), *(bound.shape for bound in bounds))
    bounds = [bound.expand(shape) for bound in bounds]
    return Spans(torch.stack(bounds[0::2]), torch.stack(bounds[1::2]))


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """`torch.broadcast_shapes` of at most three dimensions, without the third of a second that its first call
    takes to import.
    """
    padded = [(1,) * (3 - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def _tensor(bound: Length, like: Tensor) -> Tensor:
    return bound if isinstance(bound, Tensor) else like.new_full((1, 1, 1), bound)


def canonical(x: Spans, length: Length) -> Spans:
    """Clipped, sorted, disjoint, merged where touching; empty ones last, as `[length, length)`."""
    start, end = (_clip(bound, length) for bound in (x.start, x.end))
    void = end <= start
    start = torch.where(void, length, start)
    end = torch.where(void, length, end)
    if x.count < 2:
        return Spans(start, end)
    keys = _sorted((start << 32) | end)
    start, end = keys >> 32, torch.cummax(keys & 0xFFFFFFFF, dim=0).values
    opens = torch.ones_like(void)
    opens[1:] = start[1:] > end[:-1]
    closes = torch.ones_like(void)
    closes[:-1] = opens[1:]
    return Spans(_sorted(torch.where(opens, start, length)), _sorted(torch.where(closes, end, length)))


def _clip(bound: Tensor, length: Length) -> Tensor:
    if isinstance(length, Tensor):
        return torch.minimum(bound.clamp(min=0), length)
    return bound.clamp(0, length)


def _sorted(x: Tensor) -> Tensor:
    """Ascending along dimension 0; a few lines are sorted by a network, which needs no sorting kernel."""
    n = x.shape[0]
    if n > 4:
        return torch.sort(x, dim=0).values
    lines = list(x.unbind(0))
    for last in range(n - 1, 0, -1):
        for at in range(last):
            lines[at], lines[at + 1] = (
                torch.minimum(lines[at], lines[at + 1]),
                torch.maximum(lines[at], lines[at + 1]),
            )
    return torch.stack(lines)


def _aligned(a: Spans, b: Spans) -> tuple[Spans, Spans]:
    shape = _broadcast(a.start.shape[1:], b.start.shape[1:])
    first, second = (Spans(x.start.expand(-1, *shape), x.end.expand(-1, *shape)) for x in (a, b))
    return first, second


def union(a: Spans | None, b: Spans | None, length: Length) -> Spans | None:
    """Positions in `a` or in `b`; None where one is not known or the result would be too wide."""
    if a is None or b is None or a.count + b.count > MAX_WIDTH:
        return None
    a, b = _aligned(a, b)
    return canonical(Spans(torch.cat([a.start, b.start]), torch.cat([a.end, b.end])), length)


def intersection(a: Spans | None, b: Spans | None, length: Length) -> Spans | None:
    """Positions in both; None where one is not known or the result would be too wide."""
    if a is None or b is None:
        return None
    if a.count == 0 or b.count == 0:
        return a if a.count == 0 else b
    width = a.count + b.count - 1
    if width > MAX_WIDTH:
        return None
    # Every pair meets in at most one interval, and of n and m disjoint ones at most n + m - 1 pairs meet.
    a, b = _aligned(canonical(a, length), canonical(b, length))
    start = torch.maximum(a.start[:, None], b.start[None]).flatten(0, 1)
    end = torch.minimum(a.end[:, None], b.end[None]).flatten(0, 1)
    met = canonical(Spans(start, end), length)
    return Spans(met.start[:width], met.end[:width])


def complement(x: Spans | None, length: Length) -> Spans | None:
    """Positions of `[0, length)` that are not in `x`."""
    if x is None or x.count + 1 > MAX_WIDTH:
        return None
    x = canonical(x, length)
    shape = x.start.shape[1:]
    if isinstance(length, Tensor):
        shape = _broadcast(shape, length.shape)
        last = length.expand(shape)[None]
    else:
        last = x.start.new_full((1, *shape), length)
    start = torch.cat([torch.zeros_like(last), x.end.expand(-1, *shape)])
    return canonical(Spans(start, torch.cat([x.start.expand(-1, *shape), last])), length)


def width(x: Spans) -> int:
    """The largest number of non-empty intervals on any line of a canonical `x`. Reads the device."""
    if x.start.numel() == 0:
        return 0
    return int((x.end > x.start).sum(0).amax())


def narrowed(x: Spans, count: int) -> Spans:
    """The first `count` intervals of a canonical `x` that has no more on any line."""
    return Spans(x.start[:count], x.end[:count])


def table(x: Spans, count: int, lines: int) -> Tensor:
    """int32 `[Bm, Hm, lines, 2 * count]`: (s1, e1, s2, e2) of a canonical `x`, unused and empty intervals as
    (0, 0).

    Of two places, a line's only interval takes the second one if it does not start at 0. So a causal line
    whose first interval happens to be empty keeps its other one where its neighbours have theirs, and tiles
    of lines, which compare interval by interval, know that they are hidden.
    """
    shape = _broadcast(x.start.shape[1:], (1, 1, lines))
    bounds = x.start.new_zeros((*shape, 2 * count), dtype=torch.int32)
    lives = x.end[:count] > x.start[:count]
    start, end = torch.where(lives, x.start[:count], 0), torch.where(lives, x.end[:count], 0)
    if start.shape[0] == 2:
        later = ~lives[1] & (start[0] > 0)
        start, end = torch.where(later, start.flip(0), start), torch.where(later, end.flip(0), end)
    used = 2 * start.shape[0]
    bounds[..., 0:used:2], bounds[..., 1:used:2] = start.movedim(0, -1), end.movedim(0, -1)
    return bounds
