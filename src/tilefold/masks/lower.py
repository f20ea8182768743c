"""Lowering: the first form of Band, Rows, Cols, Bits that holds a mask exactly.

Band needs no tensor. Rows and Cols come from interval algebra on tensors. Bits classifies granules of 64 x 64
first, and evaluates only those that are not known to be empty or full. Lowered forms are kept, by the
tensors' identity and version.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.errors import ArgumentTypeError, MaskError

from . import intervals
from .band import Band
from .base import Mask
from .bits import GRANULE, Bits, packed
from .cols import Cols
from .context import Points, capturing, indices, key_lines, query_lines
from .intervals import Spans
from .library.built import Built
from .rows import Rows
from .spec import parse

Form = Band | Rows | Cols | Bits

# Granules evaluated in one go: on a CPU few enough to stay in cache, on a GPU enough to fill it.
_CPU_CHUNK = 128
_GPU_CHUNK = 4096


class _Cache:
    """The most recently used forms. An entry dies with its tensors, and counts only for tensors that did not
    change since.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.RLock()
        self._found: OrderedDict[tuple[Any, ...], tuple[Form, tuple[weakref.ref[Any], ...]]] = OrderedDict()

    def get(self, key: tuple[Any, ...], holders: tuple[Any, ...]) -> Form | None:
        with self._lock:
            entry = self._found.get(key)
            if entry is None:
                return None
            form, references = entry
            for reference, holder in zip(references, holders, strict=True):
                if reference() is not holder:
                    return None
            self._found.move_to_end(key)
            return form

    def put(self, key: tuple[Any, ...], holders: tuple[Any, ...], form: Form) -> None:
        def forget(_: object) -> None:
            with self._lock:
                self._found.pop(key, None)

        with self._lock:
            self._found[key] = (form, tuple(weakref.ref(holder, forget) for holder in holders))
            self._found.move_to_end(key)
            while len(self._found) > self._size:
                self._found.popitem(last=False)

    def __len__(self) -> int:
        return len(self._found)

    def clear(self) -> None:
        with self._lock:
            self._found.clear()


cache = _Cache(64)


def lower(
    mask: Mask | str,
    tensors: Sequence[Tensor],
    B: int,
    Hq: int,
    Lq: int,
    Lk: int,
    device: torch.device | str,
    validate: bool = False,
) -> Form:
    """The first form of Band, Rows, Cols, Bits that holds the mask exactly.

    Args:
        mask: a mask, or its spelling with `tensors` (`Mask.spec`).
        tensors: the tensors of a spelling; ignored for a mask.
        B, Hq, Lq, Lk: sizes of the call.
        device: where the tables go.
        validate: also check values of tensors that do not lie on the CPU, which reads the device.

    Raises:
        MaskError: the mask does not fit the call; or its lowering would read the device while a CUDA graph is
            being captured.
    """
    where = torch.device(device) if isinstance(device, str) else device
    holders: tuple[Any, ...]
    if isinstance(mask, str):
        spelling, holders = mask, tuple(tensors)
    elif isinstance(mask, Mask):
        spelling, holders = _unspelled(mask) if mask.needs_build else mask.spec()
    else:
        raise ArgumentTypeError(f"mask: expected a mask or its spelling, got {type(mask).__name__}")
    key = _key(spelling, holders, B, Hq, Lq, Lk, where, validate)
    if key is not None:
        found = cache.get(key, holders)
        if found is not None:
            return found
    whole = parse(mask, tensors) if isinstance(mask, str) else mask
    form = _lowered(whole, B, Hq, Lq, Lk, where, validate)
    # What is made while a CUDA graph is captured holds nothing before the graph is replayed.
    if key is not None and not capturing(where):
        cache.put(key, holders, form)
    return form


def _unspelled(mask: Mask) -> tuple[str, tuple[Any, ...]]:
    """As `Mask.spec`, with the functions of predicates among the tensors: it identifies the mask, no more."""
    held: list[Any] = []
    return mask._write("", held), tuple(held)


def _key(spelling: str, holders: tuple[Any, ...], *call: Any) -> tuple[Any, ...] | None:
    """Equal for equal calls; None where a tensor does not say when it changes, or a function when it dies."""
    marks = []
    for holder in holders:
        if isinstance(holder, Tensor):
            if holder.is_inference():
                return None
            marks.append((id(holder), holder._version))
        elif type(holder).__weakrefoffset__ == 0:
            return None
        else:
            marks.append((id(holder), 0))
    return (spelling, *call, *marks)


@torch.no_grad()
def _lowered(mask: Mask, B: int, Hq: int, Lq: int, Lk: int, device: torch.device, validate: bool) -> Form:
    mask.check(B, Hq, Lq, Lk, device)
    if device.type == "cpu" or validate:
        mask.check_values(Lq, Lk)
    if isinstance(mask, Built):
        return mask.form
    band = mask.band(Lq, Lk)
    if band is not None:
        return band.clipped(Lq, Lk)
    if B == 0 or Hq == 0 or Lq == 0 or Lk == 0:
        return Band(None, None)
    rows = _narrowed(mask.row_spans(query_lines(B, Hq, Lq, Lk, device)), Lk, device)
    if rows is not None:
        return Rows(intervals.table(rows, max(1, rows.count), Lq))
    hidden = _narrowed(mask.hidden_spans(key_lines(B, Hq, Lq, Lk, device)), Lq, device)
    if hidden is not None:
        return Cols(intervals.table(hidden, max(1, hidden.count), Lk))
    return _bits(mask, B, Hq, Lq, Lk, device)


def _narrowed(found: Spans | None, length: int, device: torch.device) -> Spans | None:
    """`found` in at most two intervals per line, or None. Reads the device only where a static bound does not
    do.
    """
    if found is None:
        return None
    found = intervals.canonical(found, length)
    if found.count > 2 or (found.count == 2 and device.type == "cpu"):
        _refuse_capture(device)
        width = intervals.width(found)
        return None if width > 2 else intervals.narrowed(found, width)
    return found


def _refuse_capture(device: torch.device) -> None:
    if capturing(device):
        raise MaskError(
            "mask: expected one whose lowering does not read the device while a CUDA graph is captured, "
            "got one that does (call mask.build(B, Hq, Lq, Lk, device) before the capture)"
        )


def _bits(mask: Mask, B: int, Hq: int, Lq: int, Lk: int, device: torch.device) -> Bits:
    _refuse_capture(device)
    Bm, Hm = _shared(mask, B, Hq, Lq, Lk, device)
    nq, nk = -(-Lq // GRANULE), -(-Lk // GRANULE)
    states = mask.states(B, Hq, Lq, Lk, GRANULE, device).expand(Bm, Hm, nq, nk).clone()
    # Only complete granules may be full.
    for edge, length in ((states[:, :, -1:], Lq), (states[:, :, :, -1:], Lk)):
        if length % GRANULE:
            edge.clamp_(max=1)
    at = (states == 1).nonzero()
    index = torch.full((Bm, Hm, nq, nk), -1, dtype=torch.int32, device=device)
    words = []
    held = 0
    chunk = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
    for first in range(0, at.shape[0], chunk):
        part = at[first : first + chunk]
        granules = _evaluated(mask, part, Lq, Lk)
        some, every = granules.flatten(1).any(1), granules.flatten(1).all(1)
        b, h, x, y = part.unbind(1)
        states[b, h, x, y] = some.to(torch.int8) + every.to(torch.int8)
        mixed = (some & ~every).nonzero().squeeze(-1)
        if mixed.shape[0]:
            place = torch.arange(held, held + mixed.shape[0], dtype=torch.int32, device=device)
            index[b[mixed], h[mixed], x[mixed], y[mixed]] = place
            words.append(packed(granules[mixed]))
            held += mixed.shape[0]
    bits = torch.cat(words) if words else torch.zeros((0, GRANULE), dtype=torch.int64, device=device)
    return Bits(states, index, bits)


def _shared(mask: Mask, B: int, Hq: int, Lq: int, Lk: int, device: torch.device) -> tuple[int, int]:
    """Over how many batch elements and heads the mask differs, read off the shape of its answer for a single
    position.
    """
    b, h = indices(B, Hq, 4, device)
    one = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    shape = (1, 1, 1, 1, *mask.visible(Points(b, h, one, one, Lq, Lk)).shape)[-4:]
    return shape[0], shape[1]


def _evaluated(mask: Mask, at: Tensor, Lq: int, Lk: int) -> Tensor:
    """bool `[M, 64, 64]`: the mask on granules `at` int64 `[M, 4]`; False outside the matrix."""
    b, h, x, y = at.view(-1, 4, 1, 1).unbind(1)
    inner = torch.arange(GRANULE, device=at.device)
    i, j = x * GRANULE + inner.view(1, GRANULE, 1), y * GRANULE + inner.view(1, 1, GRANULE)
    seen = mask.visible(Points(b, h, i.clamp(max=Lq - 1), j.clamp(max=Lk - 1), Lq, Lk))
    return (seen & (i < Lq) & (j < Lk)).expand(-1, GRANULE, GRANULE)


def built(mask: Mask, B: int, Hq: int, Lq: int, Lk: int, device: torch.device) -> Mask:
    """`Mask.build`: the mask itself where it is a band, else one that holds its lowered form."""
    if isinstance(mask, Built):
        mask.check(B, Hq, Lq, Lk, device)
        return mask
    form = lower(mask, (), B, Hq, Lq, Lk, device)
    if isinstance(form, Band):
        return mask if not mask.needs_build else _spelled(form)
    return Built(form.kind, Lq, Lk, *form.tensors())


def _spelled(band: Band) -> Mask:
    """A band, spelled as a mask without tensors."""
    from . import library

    if band.is_empty:
        return library.empty()
    near = library.window(None if band.lo is None else -band.lo, band.hi)
    return near if band.step == 1 else near & library.strided(band.step)
