"""The visible part of the score matrix as trapezoids: pure integers, no tensor but the table that is read
once.

A trapezoid is a run of rows whose first and last visible key each stand still or move one key per row. Bands
give one to three of them, documents one or two each, key tables (`Cols`) as many as they have runs. The
trapezoids of a mask share no element and miss none.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

#: What one element of the score matrix, one block of rows that a kernel call works on, and one call cost,
#: forward and backward together, in nanoseconds on one core pair. Only their ratios matter: they decide which
#: short runs are worth a call of their own.
ELEMENT, BLOCK, CALL = 4, 15_000, 80_000
#: Runs of fewer rows may be joined into one masked rectangle of at most this many rows.
STRIPE = 256


class Trapezoid(NamedTuple):
    """Rows `r0 <= r < r1`; row r sees keys `start + ds * (r - r0) <= key < end + de * (r - r0)`, at least
    one.
    """

    r0: int
    r1: int
    start: int
    end: int
    ds: int
    de: int

    @property
    def rows(self) -> int:
        return self.r1 - self.r0

    @property
    def last(self) -> int:
        """End of the keys that any of its rows sees."""
        return self.end + self.de * (self.rows - 1)


class Box(NamedTuple):
    """Rows and keys around several runs; which elements are visible, the table says (its interval number
    `interval`).
    """

    r0: int
    r1: int
    start: int
    last: int
    interval: int


def rows_per_block(rows: int) -> int:
    """How many rows ATen's CPU kernel works on at once in a call of that many rows."""
    return 256 if rows >= 768 else 64 if rows >= 192 else 32


def cost(rows: int, keys: int, pairs: int) -> float:
    """Nanoseconds per (batch element, head) of one call on a rectangle that serves `pairs` of them."""
    blocks = -(-rows // rows_per_block(rows)) * -(-keys // 512)
    return CALL / pairs + BLOCK * blocks + ELEMENT * rows * keys


def region(r0: int, r1: int, k0: int, k1: int, lo: int | None, hi: int | None) -> list[Trapezoid]:
    """Trapezoids of rows `[r0, r1)` and keys `[k0, k1)` with `lo <= key - row <= hi` (None = unbounded)."""
    if lo is not None:
        r1 = min(r1, k1 - lo)
    if hi is not None:
        r0 = max(r0, k0 - hi)
    if r0 >= r1 or k0 >= k1 or (lo is not None and hi is not None and lo > hi):
        return []
    # From row `leaves` on the first key moves, up to row `arrives` the last one does; where both values agree
    # the longer run takes the row.
    leaves = r1 if lo is None else r0 if k0 - lo <= r0 else k0 - lo + 1
    arrives = r0 if hi is None else k1 - hi
    cuts = {r0, r1, min(max(leaves, r0), r1), min(max(arrives, r0), r1)}
    result = []
    for a, b in pairwise(sorted(cuts)):
        ds, de = a >= leaves, a < arrives
        start = a + lo if ds and lo is not None else k0
        end = a + hi + 1 if de and hi is not None else k1
        moves = b - a > 1
        result.append(Trapezoid(a, b, start, end, int(ds and moves), int(de and moves)))
    return result


def band_trapezoids(lo: int | None, hi: int | None, q_length: int, k_length: int) -> list[Trapezoid]:
    """One to three trapezoids of a band whose bounds `lo <= key - row <= hi` are absolute."""
    return region(0, q_length, 0, k_length, lo, hi)


def runs(start: Tensor, end: Tensor) -> Iterator[Trapezoid]:
    """Maximal runs of lines with a steady start and end, from int tensors `[N]`; lines with `start >= end`
    are passed over.
    """
    count = start.shape[0]
    if count == 0:
        return
    alive = start < end
    ds, de = start.diff(), end.diff()
    steady = (ds >= 0) & (ds <= 1) & (de >= 0) & (de <= 1) & (alive[1:] == alive[:-1])
    slopes = torch.where(steady, ds * 2 + de, -1)
    # A change of slope breaks after the line it leads to; the step that breaks is not compared with the one
    # that follows it.
    changes = (slopes[1:] != slopes[:-1]) & (slopes[:-1] >= 0)
    breaks = ~steady
    breaks[1:] |= changes
    firsts = torch.cat([breaks.new_ones(1), breaks]).nonzero().squeeze(1)
    columns = [x[firsts].tolist() for x in (start, end, alive)]
    after = torch.cat([slopes, slopes.new_full((1,), -1)])[firsts].tolist()
    firsts = [*firsts.tolist(), count]
    for (a, b), s, e, lives, slope in zip(pairwise(firsts), *columns, after, strict=True):
        if lives:
            ds_, de_ = divmod(slope, 2) if b - a > 1 else (0, 0)
            yield Trapezoid(a, b, s, e, ds_, de_)


def row_pieces(bounds: Tensor, pairs: int) -> list[Trapezoid | Box]:
    """Pieces of one table of `Rows`, int32 `[Lq, 2 * n]`, by their first rows; short runs are joined."""
    result: list[Trapezoid | Box] = []
    for n in range(bounds.shape[1] // 2):
        result.extend(joined(runs(bounds[:, 2 * n], bounds[:, 2 * n + 1]), n, pairs))
    return sorted(result, key=lambda piece: piece.r0)


def joined(pieces: Iterator[Trapezoid], interval: int, pairs: int) -> Iterator[Trapezoid | Box]:
    """Short runs joined into masked boxes of at most `STRIPE` rows wherever one larger call costs less than
    two small ones.
    """
    held: list[Trapezoid] = []
    box, price = (0, 0, 0, 0), 0.0
    for piece in pieces:
        alone = cost(piece.rows, piece.last - piece.start, pairs)
        if held:
            grown = (box[0], piece.r1, min(box[2], piece.start), max(box[3], piece.last))
            both = cost(grown[1] - grown[0], grown[3] - grown[2], pairs)
            if grown[1] - grown[0] <= STRIPE and both <= price + alone:
                held.append(piece)
                box, price = grown, both
                continue
            yield held[0] if len(held) == 1 else Box(*box, interval)
        held, box, price = [piece], (piece.r0, piece.r1, piece.start, piece.last), alone
    if held:
        yield held[0] if len(held) == 1 else Box(*box, interval)


def column_pieces(bounds: Tensor, q_length: int, limit: int) -> list[Trapezoid] | None:
    """Trapezoids of one table of `Cols`, int32 `[Lk, 2 * n]` hidden query intervals per key; None if it has
    more than `limit` runs.

    What a key's hidden intervals leave is at most n + 1 visible intervals of rows; a run of keys is a
    trapezoid on its side, whose rows are found by `region`.
    """
    result: list[Trapezoid] = []
    for start, end in visible_intervals(bounds, q_length):
        sideways = list(runs(start, end))
        limit -= len(sideways)
        if limit < 0:
            return None
        for run in sideways:
            lo = run.r0 - run.end + 1 if run.de else None
            hi = run.r0 - run.start if run.ds else None
            result.extend(region(run.start, run.last, run.r0, run.r1, lo, hi))
    return sorted(result)


def visible_intervals(bounds: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
    """The n + 1 intervals (some of them empty) that hidden intervals `[N, 2 * n]` leave of `[0, length)`."""
    hidden = [(bounds[:, 2 * n], bounds[:, 2 * n + 1]) for n in range(bounds.shape[1] // 2)]
    # An unused interval is (0, 0); moved to the end it hides nothing and cuts nothing.
    moved = [(torch.where(s < e, s, length), torch.where(s < e, e, length)) for s, e in hidden]
    if len(moved) == 2:
        (s1, e1), (s2, e2) = moved
        swap = s2 < s1
        moved = [
            (torch.where(swap, s2, s1), torch.where(swap, e2, e1)),
            (torch.where(swap, s1, s2), torch.where(swap, e1, e2)),
        ]
    starts = [torch.zeros_like(moved[0][0]), *(e for _, e in moved)]
    ends = [*(s for s, _ in moved), torch.full_like(moved[0][0], length)]
    return list(zip(starts, ends, strict=True))
