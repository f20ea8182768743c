"""From a call to the forward kernel: its variant, the list of work of every program, tensor maps."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilefold.backends.triton.arguments import FAR, rows_of
from tilefold.backends.triton.lists import lists_of
from tilefold.cost.grid import section
from tilefold.masks.band import Band
from tilefold.planning.backend import Work

from .dialect import shared_layout
from .forward import forward_kernel
from .variant import KINDS, LINES, Variant

LOG2E = 1.4426950408889634
#: Beside its tiles, a line of tiles takes as long as so many.
_FIXED_COST = 0.7
SIZES: dict[int, dict[str, Any]] = {
    64: dict(BN=128, STAGES=3, GROUPS=3, REGISTERS=160, OWN_OUT=True, JOINED=True),
    128: dict(BN=128, STAGES=2, GROUPS=2, REGISTERS=240, OWN_OUT=True, HELD=True),
    256: dict(BN=64, STAGES=2, GROUPS=2, REGISTERS=240, OWN_OUT=False),
}


def width_of(size: int) -> int:
    """Columns of a tile for heads of `size`."""
    return next(width for width in SIZES if size <= width)


def variant_of(work: Work, **changes: Any) -> Variant:
    p, form = work.problem, work.form
    width = width_of(max(p.head_dim, p.v_head_dim))
    sizes = SIZES[width] | changes
    band = isinstance(form, Band)
    masked = not (band and form.is_full and p.k_length % sizes["BN"] == 0)
    if width == 64 and masked:
        sizes = {**sizes, "REGISTERS": 168} | changes
    turns = width == 128 and not masked and "TURNS" not in changes
    found: dict[str, Any] = {
        "D": width, "DV": width, "MASK": KINDS[form.kind], "MASKED": masked, "INTERVALS": getattr(form, "count", 1),
        "STEPPED": band and form.step != 1, "BELOW": band and form.lo is not None,
        "FIXED": p.dtype == torch.bfloat16, "SINK": work.scores.sink is not None, "TURNS": turns,
    }  # fmt: skip
    return Variant(**(found | sizes))


def visits(form: Band, q_length: int, k_length: int, rows: int, keys: int) -> list[int]:
    """How many tiles of keys each line of tiles visits, as the kernel finds them."""
    found = []
    away = k_length - q_length
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
    """The places `pair * lines + line` of each program: pairs in sections of `span`, whose keys and values fit the
    L2 cache together; the longest lines of a section first, each to whoever is done first. Without `costs`,
    which only the device knows, lines are sorted already and go round, back and forth.
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


@functools.lru_cache(maxsize=256)
def schedule(
    form: Band | None,
    q_length: int,
    k_length: int,
    rows: int,
    keys: int,
    pairs: int,
    span: int,
    device: torch.device,
) -> tuple[int, int, Tensor, Tensor]:
    """`(programs, longest, work [programs, longest], amounts [programs])`, int32."""
    lines = -(-q_length // rows)
    programs = min(torch.cuda.get_device_properties(device).multi_processor_count, lines * pairs)
    costs = None if form is None else [float(n) for n in visits(form, q_length, k_length, rows, keys)]
    work = assign(costs, lines, pairs, span, programs)
    longest = max(map(len, work))
    table = torch.tensor([x + [0] * (longest - len(x)) for x in work], dtype=torch.int32)
    amounts = torch.tensor([len(x) for x in work], dtype=torch.int32)
    return programs, longest, table.to(device), amounts.to(device)


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A tensor map of `[B, H, L, X]`."""
    block = (1, 1, rows, columns)
    layout = shared_layout(block, "bf16" if x.dtype == torch.bfloat16 else "fp16")
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def forward(work: Work, **changes: Any) -> tuple[Tensor, Tensor]:
    """`(out, lse)` as `Backend.forward` has them."""
    p, form = work.problem, work.form
    C = variant_of(work, **changes)
    q, k, v = (rows_of(x)[0] for x in (work.q, work.k, work.v))
    B, H, L, Dv = p.batch, p.q_heads, p.q_length, p.v_head_dim
    if work.q.stride(1) >= work.q.stride(2):
        out = q.new_empty(B, H, L, Dv)
    else:
        out = q.new_empty(B, L, H, Dv).transpose(1, 2)
    lse = torch.empty(B, L, H, dtype=torch.float32, device=q.device).transpose(1, 2)
    rows = LINES * C.GROUPS
    lines, pairs = -(-L // rows), B * H
    band = isinstance(form, Band)
    tiles = counts = order = bounds = None
    capacity = table_b = table_h = 0
    if not band:
        lists = lists_of(form, L, p.k_length, rows, C.BN, by_key=False)
        tiles, counts, order, capacity = lists.tiles, lists.counts, lists.order, lists.capacity
        tables = form.tensors()[0]
        bounds = tables.contiguous()
        batches, heads = tables.shape[:2]
        table_b, table_h = (heads if batches > 1 else 0), (1 if heads > 1 else 0)
    size = p.k_length * (p.head_dim + p.v_head_dim) * p.dtype.itemsize
    group = max(p.group, 1)
    full = band and form.is_full
    span = group if full else section(pairs, (24 << 20) // max(size, 1) * group, group)
    programs, longest, table, amounts = schedule(
        form if band else None, L, p.k_length, rows, C.BN, pairs, span, q.device
    )
    lo = -FAR if not band or form.lo is None else max(form.lo, -FAR)
    hi = FAR if not band or form.hi is None else min(form.hi, FAR)
    some = table
    sink = lse if work.scores.sink is None else work.scores.sink
    forward_kernel[(programs,)](
        descriptor(q, LINES, C.D), descriptor(k, C.BN, C.D), descriptor(v, C.BN, C.DV),
        descriptor(out, LINES, C.DV), lse, table, amounts, longest, H, group, L, p.k_length, lines, lo, hi,
        min(form.step, FAR) if band else 1, some if tiles is None else tiles, some if counts is None else counts,
        some if order is None else order, capacity, table_b, table_h, some if bounds is None else bounds, sink,
        work.scores.scale * LOG2E, C, num_warps=4,
    )  # fmt: skip
    return out, lse
