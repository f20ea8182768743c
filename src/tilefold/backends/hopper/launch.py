"""From a call to the forward kernel: its variant, and the list of work of every program."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.backends.triton.arguments import FAR, Kept, MaskArguments, dtypes, of_mask, rows_of
from tilefold.backends.triton.lists import lists_of
from tilefold.cost.grid import section
from tilefold.masks.band import Band
from tilefold.masks.context import capturing
from tilefold.planning.backend import Work

from .dialect import Run
from .forward import forward_kernel
from .repair import repair
from .sizes import sizes_of, width_of
from .variant import KINDS, LINES, LOG2E, Variant

#: Scales above this are positive in float32 too.
LEAST_SCALE = 1e-30
#: Beside its tiles, a line of tiles takes as long as so many.
_FIXED_COST = 0.7
#: Of the L2 cache, what keys and values of the pairs at work may take.
_CACHED_BYTES = 24 << 20


def variant_of(work: Work) -> Variant:
    """The kernel of a call."""
    p, form = work.problem, work.form
    band = isinstance(form, Band)
    slopes = work.scores.alibi_slopes
    softcap, alibi = work.scores.softcap is not None, slopes is not None
    width = width_of(p.head_dim, p.v_head_dim)
    sizes = sizes_of(width, "full" if band and form.is_full else form.kind)
    masked = not (band and form.is_full and p.k_length % sizes["BN"] == 0)
    return Variant(
        D=width, DV=width, MASK=KINDS[form.kind], MASKED=masked, CAREFUL=not (band and form.is_full),
        INTERVALS=getattr(form, "count", 1), STEPPED=band and form.step != 1,
        BELOW=not band or form.lo is not None, FIXED=p.dtype == torch.bfloat16,
        PLAIN=not softcap and not alibi and work.scores.scale > LEAST_SCALE, SOFTCAP=softcap, ALIBI=alibi,
        TABLES=alibi and p.positions.tables,
        SLOPE_ROWS=slopes is not None and slopes.dim() == 2 and p.positions.tables,
        SINK=work.scores.sink is not None, **sizes,
    )  # fmt: skip


# The list of work.


def visits(form: Band, q_length: int, k_length: int, rows: int, keys: int) -> list[int]:
    """How many tiles of keys each line of tiles visits, as the kernel finds them."""
    found, away = [], k_length - q_length
    lo, hi = (-FAR if form.lo is None else form.lo), (FAR if form.hi is None else form.hi)
    for first in range(0, q_length, rows):
        last = min(first + rows, q_length) - 1
        start = min(max(first + away + lo, 0), k_length)
        end = max(min(last + away + hi + 1, k_length), start)
        found.append(-(-end // keys) - start // keys if end > start else 0)
    return found


def assign(
    costs: Sequence[float] | None, lines: int, pairs: int, span: int, programs: int
) -> list[list[int]]:
    """The places `pair * lines + line` of each program: pairs in sections of `span`, whose keys and values
    fit the L2 cache together; in a section the longest lines first, each to whoever is done first. Without
    `costs`, which only the device knows, lines are sorted already and go round, back and forth.
    """
    work: list[list[int]] = [[] for _ in range(programs)]
    order = range(lines) if costs is None else sorted(range(lines), key=lambda n: -costs[n])
    heap, turn = [(0.0, n) for n in range(programs)], 0
    for first in range(0, pairs, span):
        for line in order:
            for pair in range(first, min(first + span, pairs)):
                if costs is None:
                    lap, n = divmod(turn, programs)
                    work[n if lap % 2 == 0 else programs - 1 - n].append(pair * lines + line)
                    turn += 1
                else:
                    spent, n = heap[0]
                    work[n].append(pair * lines + line)
                    heapq.heapreplace(heap, (spent + costs[line] + _FIXED_COST, n))
    return work


class Schedule(NamedTuple):
    """The lists of all programs, int32: `work [programs, longest]`, of which `amounts [programs]` count."""

    programs: int
    longest: int
    work: Tensor
    amounts: Tensor


@functools.cache
def _cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def schedule(work: Work, rows: int, keys: int) -> Schedule:
    """Who does what."""
    p, form, device = work.problem, work.form, work.q.device
    lines, pairs, group = -(-p.q_length // rows), p.batch * p.q_heads, max(p.group, 1)
    programs = min(_cores(device), lines * pairs)
    size = p.k_length * (p.head_dim + p.v_head_dim) * p.dtype.itemsize
    span, costs = section(pairs, _CACHED_BYTES // max(size, 1) * group, group), None
    if isinstance(form, Band):
        costs = [float(n) for n in visits(form, p.q_length, p.k_length, rows, keys)]
        span = group if form.is_full else span
    if capturing(device):
        return _round(lines, pairs, programs, isinstance(form, Band) and form.hi is not None, device)
    found = assign(costs, lines, pairs, span, programs)
    longest = max(map(len, found))
    table = torch.tensor([x + [0] * (longest - len(x)) for x in found], dtype=torch.int32, device="cpu")
    amounts = torch.tensor([len(x) for x in found], dtype=torch.int32, device="cpu")
    return Schedule(programs, longest, table.to(device), amounts.to(device))


def _round(lines: int, pairs: int, programs: int, reverse: bool, device: torch.device) -> Schedule:
    """Lists made on the device alone, as the capture of a graph asks for: places go round the programs, the
    last lines first if `reverse`.
    """
    longest = -(-lines * pairs // programs)
    turn = torch.arange(longest, device=device) * programs + torch.arange(programs, device=device)[:, None]
    line, pair = turn // pairs, turn % pairs
    place = pair * lines + (lines - 1 - line if reverse else line)
    amounts = (turn < lines * pairs).sum(1, dtype=torch.int32)
    return Schedule(programs, longest, place.to(torch.int32), amounts)


# The call.


class _Made(NamedTuple):
    """What one kind of call needs of the host, worked out once."""

    run: Run
    careful: bool
    schedule: Schedule
    numbers: list[Any]
    mask: MaskArguments


@functools.cache
def _run(variant: Variant, types: tuple[Any, ...]) -> Run:
    """`types`: dtypes of what the variant does not tell: sink and slopes."""
    C = variant
    blocks = ((1, 1, LINES, C.D), (1, 1, C.BN, C.D), (1, 1, C.BN, C.DV), (1, 1, LINES, C.DV))
    return Run(forward_kernel, C, blocks)


def _make(work: Work, _: str, __: Any) -> _Made:
    p, form, C = work.problem, work.form, variant_of(work)
    rows, lists = LINES * C.GROUPS, None
    if not isinstance(form, Band):
        lists = lists_of(form, p.q_length, p.k_length, rows, C.BN, by_key=False)
    numbers = [p.q_heads, max(p.group, 1), p.q_length, p.k_length, -(-p.q_length // rows)]
    mask = of_mask(form, lists)
    if mask.bounds is not None and mask.bounds.numel() == 0:
        # Words of bits without a mixed granule: what is read there counts for nothing, but it is read.
        mask = mask._replace(bounds=mask.bounds.new_zeros(2 * LINES))
    return _Made(_run(C, dtypes(work)[1:3]), C.CAREFUL, schedule(work, rows, C.BN), numbers, mask)


kept = Kept(_make)
#: What graphs read at every replay.
_held_by_graphs: list[_Made] = []


def _made_for(work: Work) -> _Made:
    """What the call needs; what is made inside the capture of a graph is that graph's own."""
    if not capturing(work.q.device):
        return kept.get(work)
    _held_by_graphs.append(_make(work, "", ()))
    return _held_by_graphs[-1]


def forward(work: Work) -> tuple[Tensor, Tensor]:
    """`(out, lse)`: out with its heads outside or inside its rows as q has them, lse in order B, L, H."""
    p = work.problem
    q, k, v = (rows_of(x)[0] for x in (work.q, work.k, work.v))
    made = _made_for(work)
    B, H, L, Dv = p.batch, p.q_heads, p.q_length, p.v_head_dim
    # TMA writes rows that start at multiples of 16 bytes.
    padded, outside = -(-Dv // 8) * 8, work.q.stride(1) >= work.q.stride(2)
    out = q.new_empty(B, H, L, padded) if outside else q.new_empty(B, L, H, padded).transpose(1, 2)
    out = out[..., :Dv]
    lse = torch.empty((B, L, H), dtype=torch.float32, device=q.device).transpose(1, 2)
    jobs, m = made.schedule, made.mask
    # Pointers that a variant has no use for point somewhere.
    tiles, counts, order, bounds, index = (
        jobs.work if x is None else x for x in (m.tiles, m.counts, m.order, m.bounds, m.index)
    )
    flags = jobs.work
    if made.careful:
        flags = torch.empty(B * H * -(-L // LINES), dtype=torch.int32, device=q.device)
    sink = lse if work.scores.sink is None else work.scores.sink.contiguous()
    scores, at = work.scores, p.positions
    cap, slopes = scores.softcap, scores.alibi_slopes
    scale = scores.scale * LOG2E if cap is None else scores.scale / cap
    strides = (0, 0) if slopes is None else (slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))
    row_table, key_table = (x.contiguous() for x in work.tables) if at.tables else (jobs.work, jobs.work)
    diagonal = p.k_length - L if at.diagonal is None else at.diagonal
    arguments = [
        lse, flags, jobs.work, jobs.amounts, jobs.longest, *made.numbers, m.lo, m.hi, m.step, tiles, counts,
        order, m.capacity, m.table_b, m.table_h, bounds, index, sink,
        lse if slopes is None else slopes, *strides, (cap or 1.0) * LOG2E, at.q_step, at.k_step,
        at.q_origin + diagonal - at.k_origin, row_table, key_table, at.batch_origin, scale,
    ]  # fmt: skip
    made.run(jobs.programs, (q, k, v, out), arguments, q.device)
    if made.careful:
        repair(Work(p, q, k, v, work.form, work.scores, work.tables), flags, out, lse)
    if padded != Dv:
        out = out.contiguous() if outside else out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse
