"""What to do for one call on a lowered mask: rectangles, for each group of heads and batch elements that
share a table.

Made once per form and shape, from integers; the only tensors are index lists of gathered stripes.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from . import granules, pieces, rects
from .granules import Gather
from .rects import Rect

#: How many plans of bands are remembered.
_MEMORY = 1024


@dataclass(frozen=True, eq=False)
class Program:
    """The rectangles of one table.

    Attributes:
        forward, backward: rectangles of views.
        gathers: stripes with gathered keys, for both directions.
        rows_once, rows_whole: no row is in two forward rectangles; every row is in one.
        grad_rows, grad_keys: the same pairs for the rows and keys of the backward rectangles.
        masked: some rectangle has hidden elements, which NaN would leak through.
        may_be_empty: some row of a rectangle may see no key there.
        form: the form of this table alone; None if no rectangle reads it.
    """

    forward: tuple[Rect, ...]
    backward: tuple[Rect, ...]
    gathers: tuple[Gather, ...]
    rows_once: bool
    rows_whole: bool
    grad_rows: tuple[bool, bool]
    grad_keys: tuple[bool, bool]
    masked: bool
    may_be_empty: bool
    form: Any = None


@dataclass(frozen=True, eq=False)
class Group:
    """Batch elements `b0 ... b1`, query heads `h0 ... h1` on key heads `k0 ... k1`; rows and keys are every
    `step`-th from an origin.
    """

    b0: int
    b1: int
    h0: int
    h1: int
    k0: int
    k1: int
    program: Program
    q_origin: int = 0
    k_origin: int = 0
    step: int = 1


@dataclass(frozen=True, eq=False)
class Pieces:
    """Everything decided about one form at one shape.

    Attributes:
        groups: run one after the other.
        single: "full" or "causal" if the whole call is one call of the kernel, else None.
        masked, may_be_empty: of any program.
        whole: every row of the call is in some rectangle.
        keys_whole: every key of the call is among those of some group.
        shared_keys: several groups add to the gradient of one key head.
    """

    groups: tuple[Group, ...]
    single: str | None
    masked: bool
    may_be_empty: bool
    whole: bool
    keys_whole: bool
    shared_keys: bool


def plan(form: Any, B: int, Hq: int, Hk: int, Lq: int, Lk: int) -> Pieces:
    """The pieces of a lowered mask at one shape; remembered. All sizes are at least 1."""
    if form.kind == "band":
        return _plan_band(form, B, Hq, Hk, Lq, Lk)
    known = _tables.setdefault(form, {})
    key = (B, Hq, Hk, Lq, Lk)
    if key not in known:
        known[key] = _plan_table(form, *key)
    return known[key]


_tables: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Pieces]] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=_MEMORY)
def _plan_band(form: Any, B: int, Hq: int, Hk: int, Lq: int, Lk: int) -> Pieces:
    groups = []
    for rho in range(min(form.step, Lq)):
        kappa = (rho + Lk - Lq) % form.step
        rows, keys = -(-(Lq - rho) // form.step), -(-(Lk - kappa) // form.step)
        # Row rho + step * a and key kappa + step * b are (b - a - shift) steps apart.
        shift = (rho + Lk - Lq - kappa) // form.step
        lo = None if form.lo is None else -(-form.lo // form.step) + shift
        hi = None if form.hi is None else form.hi // form.step + shift
        program = _program(pieces.band_trapezoids(lo, hi, rows, keys), rows, keys)
        if program.forward:
            groups.append(Group(0, B, 0, Hq, 0, Hk, program, rho, kappa, form.step))
    return _pieces(groups, Lq, Lk, len(groups) == min(form.step, Lq), len(groups) == form.step)


def _plan_table(form: Any, B: int, Hq: int, Hk: int, Lq: int, Lk: int) -> Pieces:
    groups = []
    for b0, b1, h0, h1 in _equal_tables(form, B, Hq):
        program = _table_program(form, b0, h0, (b1 - b0) * (h1 - h0), Lq, Lk)
        if program.forward or program.gathers:
            groups.extend(Group(b0, b1, *heads, program) for heads in _by_key_heads(h0, h1, Hq // Hk))
    covered = sum((g.b1 - g.b0) * (g.h1 - g.h0) for g in groups)
    return _pieces(groups, Lq, Lk, covered == B * Hq, covered == B * Hq)


def _pieces(groups: list[Group], Lq: int, Lk: int, all_rows: bool, all_keys: bool) -> Pieces:
    programs = [g.program for g in groups]
    single = None
    if (
        len(groups) == 1
        and all_rows
        and groups[0].step == 1
        and len(programs[0].forward) == 1
        and not programs[0].gathers
    ):
        rect = programs[0].forward[0]
        if rect.kind in ("full", "causal") and (rect.rows, rect.keys, rect.n) == (Lq, Lk, 1):
            single = rect.kind
    return Pieces(
        tuple(groups),
        single,
        masked=any(p.masked for p in programs),
        may_be_empty=not all_rows or any(p.may_be_empty for p in programs),
        whole=all_rows and all(p.rows_whole for p in programs),
        keys_whole=all_keys,
        shared_keys=_shared_keys(groups),
    )


def _shared_keys(groups: list[Group]) -> bool:
    """Do two groups with tables of their own read one key head? (The residue classes of a stepped band never
    share a key.)
    """
    read = [(g.b0, k) for g in groups if g.step == 1 for k in range(g.k0, g.k1)]
    return len(set(read)) < len(read)


def _program(found: list[Any], rows: int, keys: int, form: Any = None, gathered: Any = ((), ())) -> Program:
    """A program from pieces, or from the rectangles and gathered stripes `gathered`."""
    loose, gathers = gathered
    forward = rects.forward_rects(found) or tuple(loose)
    backward = rects.backward_rects(found) or tuple(loose)
    once, whole = rects.covers(forward, rows, keys=False)
    extra = sum(g.rows.numel() for g in gathers)
    if gathers:
        whole = sum(r.rows * r.n for r in forward) + extra == rows
    tabled = any(r.kind == "table" for r in forward) or any(any(g.parts) for g in gathers)
    overlap = not gathers
    return Program(
        forward,
        backward,
        tuple(gathers),
        once,
        whole,
        rects.covers(backward, rows, keys=False) if overlap else (True, whole),
        rects.covers(backward, keys, keys=True) if overlap else (False, False),
        masked=tabled or any(r.kind != "full" for r in forward),
        may_be_empty=tabled or not whole,
        form=form if tabled else None,
    )


def _table_program(form: Any, b: int, h: int, pairs: int, Lq: int, Lk: int) -> Program:
    alone = _alone(form, b, h)
    if form.kind == "rows":
        return _program(list(pieces.row_pieces(alone.bounds[0, 0], pairs)), Lq, Lk, alone)
    if form.kind == "cols":
        found = pieces.column_pieces(alone.bounds[0, 0], Lq, limit=max(16, Lk // 64))
        if found is not None:
            return _program(list(found), Lq, Lk, alone)
    device = alone.tensors()[0].device
    return _program([], Lq, Lk, alone, granules.stripes(alone, Lq, Lk, device, pairs))


def _alone(form: Any, b: int, h: int) -> Any:
    """The form with the table of batch element `b` and head `h` only."""
    changes = {}
    for name in ("bounds", "states", "index"):
        table = getattr(form, name, None)
        if table is not None:
            b_, h_ = min(b, table.shape[0] - 1), min(h, table.shape[1] - 1)
            changes[name] = table[b_ : b_ + 1, h_ : h_ + 1]
    return dataclasses.replace(form, **changes, _cache={})


def _equal_tables(form: Any, B: int, Hq: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of batch elements, and within them of heads, with equal tables: `(b0, b1, h0, h1)`."""
    table = form.states if form.kind == "bits" else form.bounds
    Bm, Hm = table.shape[:2]
    compare = form.kind != "bits"
    for b0, b1 in _equal_runs(table, B) if compare and Bm > 1 else _trivial_runs(Bm, B):
        of_b = table[min(b0, Bm - 1)]
        for h0, h1 in _equal_runs(of_b, Hq) if compare and Hm > 1 else _trivial_runs(Hm, Hq):
            yield b0, b1, h0, h1


def _trivial_runs(count: int, total: int) -> list[tuple[int, int]]:
    return [(0, total)] if count == 1 else [(n, n + 1) for n in range(total)]


def _equal_runs(table: Tensor, total: int) -> list[tuple[int, int]]:
    """Runs of equal consecutive entries along the first dimension."""
    same = (table[1:] == table[:-1]).flatten(1).all(1).tolist()
    cuts = [0, *(n + 1 for n, equal in enumerate(same) if not equal), total]
    return list(pairwise(cuts))


def _by_key_heads(h0: int, h1: int, group: int) -> Iterator[tuple[int, int, int, int]]:
    """Query heads `[h0, h1)` cut so that each part reads whole key heads or lies within one: `(h0, h1, k0,
    k1)`.
    """
    while h0 < h1:
        if h0 % group == 0 and h1 - h0 >= group:
            end = h0 + (h1 - h0) // group * group
        else:
            end = min(h1, (h0 // group + 1) * group)
        yield h0, end, h0 // group, -(-end // group)
        h0 = end
