"""Trapezoids cut into the rectangles that ATen's kernels take, forward and backward. Pure integers.

Rows that move with their keys (windows) become stripes of equal shape under one small shared mask; the
forward cuts between rows, the backward between keys, which makes its matrix products tall and leaves a single
gradient to be summed. Long ramps become one rectangle without a mask beside one `is_causal` square. An
`is_causal` call costs less than a masked one, but skips only blocks of 512 keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from .pieces import STRIPE, Box, Trapezoid, cost

#: Rectangles with fewer rows gain nothing from `is_causal` (the kernel takes all of their keys at once).
CAUSAL_ROWS = 768
#: With fewer keys than a vector register holds, the kernel without a mask takes a row of NaN for one without
#: keys.
FEW_KEYS = 16
#: Most elements of a mask (8 MiB in float32).
MASK_ELEMENTS = 1 << 21
#: Heights of stripes to choose from.
STRIPES = (64, 128, 256, 512, 1024)
#: Rows of a stripe of a window too wide for a mask.
WIDE_STRIPE = 2048
#: Cost of adding one row of a gradient into its sum, in the units of `pieces.cost`.
ADDED_ROW = 80


class Rect(NamedTuple):
    """`n` rectangles of equal shape: rows `q0 + i * q_step ...`, keys `k0 + i * k_step ...`.

    Attributes:
        kind: "full"; "causal" (key - row <= 0 from the rectangle's own corner); "flipped" (key - row >= 0,
            square); "band" (`lo <= key - row <= hi` from the corner, None = unbounded); "table" (the form's
            own elements).
        first: none of its rows has been written before.
        parts: for "table", the spans of keys `(start, end)` in which some element is hidden; in between all
            are visible.
        interval: for "table", which interval of a `Rows` table counts; -1 = the whole form.
    """

    kind: str
    q0: int
    rows: int
    k0: int
    keys: int
    n: int = 1
    q_step: int = 0
    k_step: int = 0
    lo: int | None = None
    hi: int | None = None
    first: bool = False
    parts: tuple[tuple[int, int], ...] = ()
    interval: int = -1


def solid(q0: int, rows: int, k0: int, keys: int) -> Rect:
    """A rectangle without hidden elements. Narrow ones get a mask that hides nothing, see `FEW_KEYS`."""
    return Rect("full" if keys >= FEW_KEYS else "band", q0, rows, k0, keys)


def forward_rects(pieces: Iterable[Trapezoid | Box]) -> tuple[Rect, ...]:
    """The rectangles of a forward pass, in the order of their rows, each marked whether it is the first on
    its rows.
    """
    rects = [rect for piece in pieces for rect in _cut(piece)]
    return _marked(merged(rects))


def backward_rects(pieces: Iterable[Trapezoid | Box]) -> tuple[Rect, ...]:
    """The rectangles of a backward pass. Long windows are cut between keys, together with their ends."""
    rects: list[Rect] = []
    waiting = list(pieces)[::-1]
    while waiting:
        found = _long_window(waiting)
        if found is None:
            rects.extend(_cut(waiting.pop()))
        else:
            region, used = found
            del waiting[-used:]
            rects.extend(_key_stripes(region, _stripe(region.hi - region.lo + 1, backward=True)))
    return tuple(merged(rects))


class _Region(NamedTuple):
    """Rows `[r0, r1)` and keys `[k0, k1)` with `lo <= key - row <= hi`."""

    r0: int
    r1: int
    k0: int
    k1: int
    lo: int
    hi: int


def _long_window(waiting: list[Trapezoid | Box]) -> tuple[_Region, int] | None:
    """The region that the last pieces of a stack make if they are a long window with or without ends, and how
    many they are.
    """
    ahead = [t if isinstance(t, Trapezoid) else None for t in (*waiting[-1:-4:-1], None, None)]
    head = ahead[0] if ahead[0] is not None and (ahead[0].ds, ahead[0].de) == (0, 1) else None
    body, tail = ahead[1:3] if head else ahead[:2]
    if body is None or not (body.ds and body.de):
        return None
    lo, hi = body.start - body.r0, body.end - 1 - body.r0
    if body.rows < 2 * (hi - lo + 1) or STRIPE * (hi - lo + STRIPE) > MASK_ELEMENTS:
        return None
    if head and not (
        head.r1 == body.r0 and head.last == body.end - 1 and head.start in (body.start, body.start - 1)
    ):
        return None
    r0, k0 = (head.r0, head.start) if head else (body.r0, body.start)
    r1, k1, used = body.r1, body.last, 1 + (head is not None)
    if tail and (tail.ds, tail.de) == (1, 0) and (tail.r0, tail.start, tail.end) == (r1, r1 + lo, k1):
        r1, used = tail.r1, used + 1
    return _Region(r0, r1, k0, k1, lo, hi), used


def _cut(piece: Trapezoid | Box) -> Iterator[Rect]:
    if isinstance(piece, Box):
        rows, keys = piece.r1 - piece.r0, piece.last - piece.start
        yield Rect(
            "table",
            piece.r0,
            rows,
            piece.start,
            keys,
            parts=((piece.start, piece.last),),
            interval=piece.interval,
        )
    elif piece.ds == piece.de == 0:
        yield solid(piece.r0, piece.rows, piece.start, piece.end - piece.start)
    elif piece.ds and piece.de:
        yield from _window(piece)
    else:
        yield from _ramp(piece)


def _ramp(t: Trapezoid) -> Iterator[Rect]:
    """Either end moves: the part that all rows see, and a triangle."""
    rows, keys = t.rows, t.last - t.start
    stripe = min(rows, STRIPE)
    if t.de and t.end - t.start == 1:
        yield _triangle("causal", t.r0, t.start, rows)
    elif rows < CAUSAL_ROWS and stripe * keys <= MASK_ELEMENTS:
        yield from _ramp_stripes(t, stripe)
    elif t.de:
        yield solid(t.r0, rows, t.start, t.end - 1 - t.start)
        yield _triangle("causal", t.r0, t.end - 1, rows)
    else:
        if t.end - t.start > rows:
            yield solid(t.r0, rows, t.start + rows, t.end - t.start - rows)
        yield _triangle("flipped", t.r0, t.start, rows)


def _triangle(kind: str, q0: int, k0: int, rows: int) -> Rect:
    """A "causal" or "flipped" square; a small one gets a mask, see `FEW_KEYS`."""
    if rows >= FEW_KEYS:
        return Rect(kind, q0, rows, k0, rows)
    lo, hi = (None, 0) if kind == "causal" else (0, None)
    return Rect("band", q0, rows, k0, rows, lo=lo, hi=hi)


def _ramp_stripes(t: Trapezoid, stripe: int) -> Iterator[Rect]:
    for a in range(0, t.rows, stripe):
        rows = min(stripe, t.rows - a)
        start, end = t.start + t.ds * a, t.end + t.de * (a + rows - 1)
        width = end - start
        lo, hi = (0, None) if t.ds else (None, width - rows)
        if rows == 1:
            yield solid(t.r0 + a, 1, start, width)
        else:
            yield Rect("band", t.r0 + a, rows, start, width, lo=lo, hi=hi)


def _window(t: Trapezoid) -> Iterator[Rect]:
    """Both ends move."""
    width = t.end - t.start
    if STRIPE * (width + STRIPE) > MASK_ELEMENTS:
        return _wide_window(t)
    return _row_stripes(t, _stripe(width, backward=False))


def _stripe(width: int, backward: bool) -> int:
    """The height of stripes (or their width in keys, backward) that makes a row of a window `width` keys wide
    cheapest.
    """

    def price(stripe: int) -> float:
        long = width + stripe - 1
        if backward:
            return (cost(long, stripe, 8) + ADDED_ROW * long) / stripe
        return cost(stripe, long, 8) / stripe

    sizes = [s for s in STRIPES if s * (s + width) <= MASK_ELEMENTS]
    return min(sizes, key=price)


def _row_stripes(t: Trapezoid, stripe: int) -> Iterator[Rect]:
    width = t.end - t.start
    n, rest = divmod(t.rows, stripe)
    if n:
        long = width + stripe - 1
        yield Rect("band", t.r0, stripe, t.start, long, n, stripe, stripe, 0, width - 1)
    a = n * stripe
    if rest == 1:
        yield solid(t.r0 + a, 1, t.start + a, width)
    elif rest:
        yield Rect("band", t.r0 + a, rest, t.start + a, width + rest - 1, lo=0, hi=width - 1)


def _key_stripes(t: _Region, stripe: int) -> Iterator[Rect]:
    """Cut between keys: key c is seen by rows `c - hi ... c - lo`, as far as there are any."""
    first, last = max(t.k0, t.r0 + t.lo), min(t.k1, t.r1 + t.hi)
    inner = min(max(first, t.r0 + t.hi), last)
    n = max((t.r1 + t.lo - inner) // stripe, 0)

    def at(c0: int, c1: int, n: int = 1) -> Rect:
        a, b = max(t.r0, c0 - t.hi), min(t.r1, c1 - t.lo)
        return Rect("band", a, b - a, c0, c1 - c0, n, stripe, stripe, t.lo + a - c0, t.hi + a - c0)

    yield from (at(c, min(c + stripe, inner)) for c in range(first, inner, stripe))
    if n:
        yield at(inner, inner + stripe, n)
    yield from (at(c, min(c + stripe, last)) for c in range(inner + n * stripe, last, stripe))


def _wide_window(t: Trapezoid) -> Iterator[Rect]:
    """Stripes of rows, each a core that all of its rows see between two triangles."""
    width = t.end - t.start
    for a in range(0, t.rows, WIDE_STRIPE):
        rows = min(WIDE_STRIPE, t.rows - a, width)
        r0, start = t.r0 + a, t.start + a
        yield solid(r0, rows, start + rows - 1, width - rows + 1)
        if rows > 1:
            yield from _ramp(Trapezoid(r0, r0 + rows - 1, start, start + rows - 1, 1, 0))
            yield from _ramp(Trapezoid(r0 + 1, r0 + rows, start + width, start + width + 1, 0, 1))


def merged(rects: Iterable[Rect]) -> list[Rect]:
    """Consecutive rectangles of equal shape at equal distances as one."""
    result: list[Rect] = []
    for rect in rects:
        if result and (grown := _grown(result[-1], rect)) is not None:
            result[-1] = grown
        else:
            result.append(rect)
    return result


def _grown(a: Rect, b: Rect) -> Rect | None:
    same = a.kind == b.kind != "table" and (a.rows, a.keys, a.lo, a.hi) == (b.rows, b.keys, b.lo, b.hi)
    if not same or b.n != 1 or a.kind == "flipped":
        return None
    q_step, k_step = (b.q0 - a.q0, b.k0 - a.k0) if a.n == 1 else (a.q_step, a.k_step)
    follows = b.q0 == a.q0 + a.n * q_step and b.k0 == a.k0 + a.n * k_step
    return (
        a._replace(n=a.n + 1, q_step=q_step, k_step=k_step)
        if follows and q_step >= a.rows and k_step >= 0
        else None
    )


def _marked(rects: list[Rect]) -> tuple[Rect, ...]:
    """Each rectangle that begins below all rows so far is the first on its rows."""
    reached, result = 0, []
    for rect in rects:
        result.append(rect._replace(first=rect.q0 >= reached))
        reached = max(reached, rect.q0 + (rect.n - 1) * rect.q_step + rect.rows)
    return tuple(result)


def covers(rects: Iterable[Rect], length: int, *, keys: bool) -> tuple[bool, bool]:
    """(no row is in two rectangles, every row is in one) of rows `[0, length)`, or the same of keys."""
    spans = []
    for r in rects:
        first, size, step = (r.k0, r.keys, r.k_step) if keys else (r.q0, r.rows, r.q_step)
        if r.n > 1 and step == size:
            spans.append((first, first + r.n * size))
        else:
            spans.extend((first + i * step, first + i * step + size) for i in range(r.n))
    spans.sort()
    once = all(a[1] <= b[0] for a, b in pairwise(spans))
    reached, whole = 0, True
    for a, b in spans:
        whole = whole and a <= reached
        reached = max(reached, b)
    return once, whole and reached >= length
