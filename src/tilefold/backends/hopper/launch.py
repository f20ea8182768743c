"""From a call to the forward kernel: its variant, and the list of work of every program."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.backends.triton.arguments import Kept, MaskArguments, dtypes, of_mask, strides_of_bias
from tilefold.backends.triton.lists import lists_of
from tilefold.cost.grid import section
from tilefold.cost.tiles import PARTIAL
from tilefold.masks.band import Band
from tilefold.masks.context import capturing
from tilefold.planning.backend import Work
from tilefold.problem import Problem

from .dialect import Maps, Run, Tail
from .forward import forward_kernel
from .lines import Listed, of_band, of_lists
from .schedule import Schedule, of_costs, of_lines, of_ranks, scheduled
from .sizes import kind_of, sizes_of, width_of
from .tails import Tails
from .variant import KINDS, LINES, LOG2E, Variant, blocks_of

#: Scales above this are positive in float32 too.
LEAST_SCALE = 1e-30
#: Keys from which on a pass that is for nothing costs more than looking for it.
_LONG = 4096
#: Rows with which the query heads of a key head share tiles.
_FEW_ROWS = (1, 2, 4, 8, 16, 32)
#: Of the L2 cache, what keys and values of the pairs at work may take.
_CACHED_BYTES = 32 << 20


def variant_of(work: Work, period: int = 0) -> Variant:
    """The kernel of a call; `period` of `_period`."""
    p, form = work.problem, work.form
    band = isinstance(form, Band)
    slopes = work.scores.alibi_slopes
    softcap, alibi = work.scores.softcap is not None, slopes is not None
    width = width_of(p.head_dim, p.v_head_dim)
    bias = work.scores.bias is not None
    sizes = sizes_of(width, kind_of(form, width, p.k_length, bias))
    # A bias may hide the first tiles, whose scores would be a poor reference.
    fixed = p.dtype == torch.bfloat16 and not bias
    masked = not (band and form.is_full and p.k_length % sizes["BN"] == 0)
    return Variant(
        D=width, DV=width, MASK=KINDS[form.kind], MASKED=masked, CAREFUL=not (band and form.is_full),
        INTERVALS=getattr(form, "count", 1), STEPPED=band and form.step != 1,
        BELOW=band and form.lo is not None, FIXED=fixed, TRIAL=fixed and p.k_length >= _LONG,
        PLAIN=not (softcap or alibi or bias) and work.scores.scale > LEAST_SCALE, SOFTCAP=softcap,
        ALIBI=alibi, BIAS=bias,
        TABLES=alibi and p.positions.tables,
        SLOPE_ROWS=slopes is not None and slopes.dim() == 2 and p.positions.tables,
        SINK=work.scores.sink is not None, PERIOD=period, PADDED=p.v_head_dim != width, **sizes,
    )  # fmt: skip


@functools.cache
def _cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _period(work: Work) -> int:
    """Rows of a head, if there are so few that the query heads of a key head share tiles, else 0."""
    p, scores, q = work.problem, work.scores, work.q
    few = p.group > 1 and p.q_length in _FEW_ROWS and isinstance(work.form, Band)
    plain = scores.bias is None and scores.sink is None and scores.alibi_slopes is None
    # Rows and heads have to lie in memory as one dimension, of dense rows.
    in_line = q.stride(3) == 1 and (p.q_length == 1 or q.stride(1) == p.q_length * q.stride(2))
    return p.q_length if few and plain and in_line else 0


def _shared(x: Tensor, heads: int) -> Tensor:
    """`x [B, H, L, D]` as `[B, heads, H / heads * L, D]`."""
    B, H, L, D = x.shape
    row = x.stride(1) if L == 1 else x.stride(2)
    return x.as_strided((B, heads, H // heads * L, D), (x.stride(0), H // heads * x.stride(1), row, 1))


def schedule(
    p: Problem, form: Any, device: torch.device, C: Variant, listed: Listed | None, mask: MaskArguments
) -> Schedule:
    """Who does what; `p` with heads and rows as the kernel sees them."""
    rows, keys = LINES * C.GROUPS, C.BN
    lines, pairs, group = -(-p.q_length // rows), p.batch * p.q_heads, max(p.group, 1)
    programs = min(_cores(device), lines * pairs)
    size = p.k_length * (p.head_dim + p.v_head_dim) * p.dtype.itemsize
    span = section(pairs, _CACHED_BYTES // max(size, 1) * group, group)
    if listed is not None:
        about = listed.lines
        batches, heads = (torch.arange(n, device=device) for n in (p.batch, p.q_heads))
        tables = (batches[:, None] * mask.table_b + heads * mask.table_h).flatten()
        order = of_lines(listed.costs, tables, programs)
    elif capturing(device):
        about = of_band(mask, p.q_length, p.k_length, C, device)
        order = of_ranks(lines, pairs, span, programs, form.hi is not None, device)
    else:
        about = of_band(mask, p.q_length, p.k_length, C, torch.device("cpu"))
        span = group if form.is_full else span
        order = of_costs(about.counts[0].tolist(), keys, pairs, span, programs)
    made = scheduled(order, about, p.q_heads, group, mask, rows)
    return Schedule(*(x.to(device) for x in made))


# The call.


class Origin:
    """The stream on which tensors were made that calls on any stream read."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, None
        if device.type == "cuda" and not capturing(device):
            self._stream = torch._C._cuda_getCurrentRawStream(device.index)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def before(self) -> None:
        """Have the current stream wait for them, unless it is theirs. A capture cannot wait for what began
        outside of it; `torch.cuda.graph` begins one when all else has ended.
        """
        if self._event is None or torch._C._cuda_getCurrentRawStream(self._device.index) == self._stream:
            return
        if not capturing(self._device):
            torch.cuda.current_stream(self._device).wait_event(self._event)


class _Made(NamedTuple):
    """What one kind of call needs of the host, worked out once."""

    run: Run
    origin: Origin
    maps: tuple[Maps, ...]
    #: Without a tensor among the options of the score: their arguments may be kept.
    bare: bool
    schedule: Schedule
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_strides: tuple[int, ...]
    numbers: list[Any]
    tails: Tails[Tail]

    def tail(self, work: Work) -> Tail:
        """The kernel's arguments behind `lse`."""

        def make() -> Tail:
            return Tail([*self.numbers, *_of_scores(work, self.schedule.work)])

        return self.tails.get(work.scores, make) if self.bare else make()


def _of_scores(work: Work, nothing: Tensor) -> list[Any]:
    """From `bias` to `scale`. Pointers that a variant has no use for point to `nothing`."""
    scores, p = work.scores, work.problem
    at, cap, slopes = p.positions, scores.softcap, scores.alibi_slopes
    unit = LOG2E if scores.bias is None else 1.0
    scale = scores.scale * unit if cap is None else scores.scale / cap
    bias = (nothing, 0, 0, 0, 0) if scores.bias is None else (scores.bias, *strides_of_bias(scores.bias))
    strides = (0, 0) if slopes is None else (slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))
    row_table, key_table = (x.contiguous() for x in work.tables) if at.tables else (nothing, nothing)
    diagonal = p.k_length - p.q_length if at.diagonal is None else at.diagonal
    return [
        *bias, nothing if scores.sink is None else scores.sink.contiguous(),
        nothing if slopes is None else slopes, *strides, (cap or 1.0) * unit, at.q_step, at.k_step,
        at.q_origin + diagonal - at.k_origin, row_table, key_table, at.batch_origin, scale,
    ]  # fmt: skip


@functools.cache
def _run(variant: Variant, types: tuple[Any, ...]) -> Run:
    """`types`: dtypes of what the variant does not tell."""
    return Run(forward_kernel, variant)


#: Of each mask, lists as the kernel takes them, by what they depend on; and where they, and what they are
#: made from, were made first, for calls on other streams.
_kept_lists: weakref.WeakKeyDictionary[Any, dict[Any, Listed]] = weakref.WeakKeyDictionary()
_origins: weakref.WeakKeyDictionary[Any, list[Origin]] = weakref.WeakKeyDictionary()


def _listed(form: Any, p: Problem, C: Variant, device: torch.device) -> tuple[MaskArguments, Listed]:
    """Lists of a mask, whichever stream they were made on, and its other arguments."""
    for origin in _origins.get(form, ()):
        origin.before()
    lists = lists_of(form, p.q_length, p.k_length, LINES * C.GROUPS, C.BN, by_key=False)
    mask, found = of_mask(form, lists), _kept_lists.setdefault(form, {})
    name = p.q_length, p.k_length, C.GROUPS, C.BN, C.FIXED
    listed = found.get(name)
    if listed is None:
        listed = of_lists(lists, _states(form, p, C.BN, device), mask.index, C)
        if not capturing(device):
            found[name] = listed
            _origins.setdefault(form, []).append(Origin(device))
    return mask._replace(tiles=listed.tiles), listed


def _states(form: Any, p: Problem, keys: int, device: torch.device) -> Tensor:
    """What each 64 rows see of each tile of keys, for `of_lists`."""
    states = form.tile_states(p.q_length, p.k_length, LINES, keys, device).flatten(0, 1)
    if p.k_length % keys:
        # A tile over the edge needs a mask, whatever it shows.
        states = torch.cat([states[..., :-1], states[..., -1:].clamp(max=PARTIAL)], -1)
    return states


def _make(work: Work, _: str, more: Any) -> _Made:
    heads_outside, period = more
    p, form, C = work.problem, work.form, variant_of(work, period)
    B, H, L = p.batch, p.q_heads, p.q_length
    if period:
        p = replace(p, q_heads=p.k_heads, q_length=p.group * L)
    if isinstance(form, Band):
        mask, listed = of_mask(form, None), None
    else:
        mask, listed = _listed(form, p, C, work.q.device)
    if mask.bounds is not None and mask.bounds.numel() == 0:
        # Words of bits without a mixed granule: what is read there counts for nothing, but it is read.
        mask = mask._replace(bounds=mask.bounds.new_zeros(2 * LINES))
    jobs = schedule(p, form, work.q.device, C, listed, mask)
    tiles, bounds = (jobs.work if x is None else x for x in (mask.tiles, mask.bounds))
    # TMA writes rows that start at multiples of 16 bytes.
    d = -(-p.v_head_dim // 8) * 8
    strides = (H * L * d, L * d, d, 1) if heads_outside else (L * H * d, d, H * d, 1)
    numbers = [
        *jobs, p.q_heads, p.q_length, p.k_length, mask.lo, mask.hi, mask.step, tiles, mask.capacity, bounds,
    ]  # fmt: skip
    options = (work.scores.bias, work.scores.sink, work.scores.alibi_slopes)
    bare = all(x is None for x in options) and not p.positions.tables
    return _Made(
        _run(C, dtypes(work)), Origin(work.q.device), tuple(map(Maps, blocks_of(C))), bare, jobs,
        (B, H, L, d), strides, (L * H, 1, H), numbers, Tails(),
    )  # fmt: skip


class _NotMadeError(Exception):
    """A band's tables are not there yet, and a graph is being captured."""


def _make_to_keep(work: Work, name: str, more: Any) -> _Made:
    if isinstance(work.form, Band) and capturing(work.q.device):
        raise _NotMadeError
    return _make(work, name, more)


kept = Kept(_make_to_keep)
#: What graphs read at every replay, beside what `Kept` holds for them.
_held_by_graphs: list[_Made] = []


def _made_for(work: Work, period: int) -> _Made:
    """What the call needs. A graph reads what was made before its capture; else a band's tables are made anew
    by every replay, in the graph's own memory.
    """
    more = work.q.stride(1) >= work.q.stride(2), period
    try:
        made = kept.get(work, "", more)
    except _NotMadeError:
        return _make(work, "", more)
    if capturing(work.q.device):
        _held_by_graphs.append(made)
    return made


def forward(work: Work) -> tuple[Tensor, Tensor]:
    """`(out, lse)`: out with its heads outside or inside its rows as q has them, lse in order B, L, H."""
    q, period = work.q, _period(work)
    made, device = _made_for(work, period), q.device
    room = torch.empty_strided(made.out_shape, made.out_strides, dtype=q.dtype, device=device)
    lse = torch.empty_strided(made.out_shape[:3], made.lse_strides, dtype=torch.float32, device=device)
    width = work.problem.v_head_dim
    out = room if width == made.out_shape[3] else room[..., :width]
    mapped = (q, work.k, work.v, out)
    if period:
        heads = work.problem.k_heads
        mapped = (_shared(q, heads), work.k, work.v, _shared(out, heads))
    made.origin.before()
    made.run(made.schedule.programs, made.maps, mapped, (lse,), made.tail(work), device)
    if out is not room:
        outside = made.out_strides[1] >= made.out_strides[2]
        out = out.contiguous() if outside else out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse
