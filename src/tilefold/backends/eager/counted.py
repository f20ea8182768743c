"""The eager fold, run as it is and counted: bytes between slow and fast memory, by tensor.

`forward` and `backward` call those of `fold.py` under an observer of PyTorch's operators, so the count cannot
drift from what runs. Fast memory holds one region of every tensor of the call, and all temporaries for
nothing. Reading another region is a load; a region that was written is stored when another one replaces it,
and at the end. `cost/io.py` predicts these counts (`fold_traffic`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tilefold.errors import ArgumentError
from tilefold.planning.backend import Gradients, Work
from tilefold.select import finite

from . import fold

#: Operators that write all of their first argument without reading it.
_OVERWRITES = ("copy_", "fill_", "zero_")
_Region = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that crossed between slow and fast memory in one pass, by tensor.

    Attributes:
        loaded: from slow to fast memory.
        stored: from fast to slow memory.
    """

    loaded: dict[str, int]
    stored: dict[str, int]

    @property
    def moved(self) -> dict[str, int]:
        """Both ways."""
        names = (*self.loaded, *(name for name in self.stored if name not in self.loaded))
        return {name: self.loaded.get(name, 0) + self.stored.get(name, 0) for name in names}

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.moved.values())


def forward(work: Work) -> tuple[tuple[Tensor, Tensor], Traffic]:
    """`fold.forward(work)` and what it moves, under "q", "k", "v", "bias", "mask", "out" and "lse".

    Vectors of one number per head or position (sink, slopes, positions) are not counted.

    Raises:
        ArgumentError: q, k or v has an entry that is not finite, so that the fold works on copies; or tensors
            of the call share memory.
    """
    observer = _observer(work)
    with torch.no_grad(), observer:
        out, lse = fold.forward(work)
    observer.name(("out", out), ("lse", lse))
    return (out, lse), observer.traffic()


def backward(
    work: Work, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
) -> tuple[Gradients, Traffic]:
    """`fold.backward(...)` and what it moves: beside the tensors of `forward` "dout", "dlse", "dq", "dk",
    "dv" and "dbias". A gradient's name covers its sum and, if of another dtype, the rounded result.

    Raises:
        ArgumentError: as `forward`.
    """
    observer = _observer(work, ("dout", dout), ("dlse", dlse), ("out", out), ("lse", lse))
    with torch.no_grad(), observer:
        found = fold.backward(work, dout, dlse, out, lse, needs)
    observer.name(("dq", found.q), ("dk", found.k), ("dv", found.v), ("dbias", found.bias))
    return found, observer.traffic()


def _observer(work: Work, *more: tuple[str, Tensor | None]) -> _Observer:
    problem, given = work.problem, (("q", work.q), ("k", work.k), ("v", work.v))
    for name, x in given:
        if finite(x).raw is not None:
            raise ArgumentError(f"{name}: expected finite values with a finite sum, got NaN or inf")
    # Forms keep the states of their tiles; only what a pass itself reads is counted.
    block = fold._Fold(work).block
    work.form.tile_states(problem.q_length, problem.k_length, block, block, work.q.device)
    observer = _Observer()
    observer.name(*given, ("bias", work.scores.bias), *more)
    observer.name(*(("mask", table) for table in work.form.tensors()))
    return observer


@dataclass(slots=True, eq=False)
class _Slot:
    """Fast memory of one storage: the region it holds, whether that was written, and the bytes moved."""

    storage: StorageWeakRef
    region: _Region | None = None
    size: int = 0
    dirty: bool = False
    loaded: int = 0
    stored: int = 0
    made_from: list[_Slot] = field(default_factory=list)

    def touch(self, x: Tensor, reads: bool, writes: bool) -> None:
        """An access to the region of `x`, a view of the storage."""
        region, elements = _region(x)
        if region != self.region:
            self.flush()
            self.region, self.size = region, elements * x.element_size()
            self.loaded += self.size if reads else 0
        self.dirty |= writes

    def gather(self, size: int) -> None:
        """A read of `size` bytes from places that depend on values: no region that could be held."""
        self.flush()
        self.region = None
        self.loaded += size

    def flush(self) -> None:
        """Store what was written."""
        self.stored += self.size if self.dirty else 0
        self.dirty = False


class _Observer(TorchDispatchMode):
    """Sees every operator of a pass and keeps a slot for every storage that it meets. Only those that get a
    name are reported: the others are temporaries.
    """

    def __init__(self) -> None:
        super().__init__()
        self._slots: dict[int, _Slot] = {}
        self._names: dict[str, list[_Slot]] = {}

    def name(self, *pairs: tuple[str, Tensor | None]) -> None:
        """Report the slots of these tensors, and of those that they were rounded from, under these names."""
        for name, x in pairs:
            if x is not None:
                slot = self._slot(x)
                for other, slots in self._names.items():
                    if slot in slots:
                        raise ArgumentError(
                            f"{name}: expected memory of its own, got that of {other}; clone it first"
                        )
                self._names.setdefault(name, []).extend((slot, *slot.made_from))

    def traffic(self) -> Traffic:
        """What crossed so far; what is still to be stored is stored now."""
        loaded: dict[str, int] = {}
        stored: dict[str, int] = {}
        for name, slots in self._names.items():
            for slot in slots:
                slot.flush()
            loaded[name] = sum(slot.loaded for slot in slots)
            stored[name] = sum(slot.stored for slot in slots)
        return Traffic(loaded, stored)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kind = func._schema.name.removeprefix("aten::")
        if _is_view(func):
            return result
        if not kind.startswith("new_") and not kind.endswith("_like"):
            for at, argument in enumerate(func._schema.arguments):
                given = args[at] if at < len(args) else kwargs.get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for x in _tensors(given):
                    self._access(kind, x, writes, result)
        if "empty" not in kind:
            self._made(result)
        return result

    def _access(self, kind: str, x: Tensor, writes: bool, result: Any) -> None:
        slot = self._slot(x)
        if kind == "index":
            slot.gather(result.numel() * x.element_size())
            return
        slot.touch(x, reads=not (writes and kind in _OVERWRITES), writes=writes)
        if kind == "_to_copy" and slot.size == x.untyped_storage().nbytes():
            self._slot(result).made_from.append(slot)

    def _made(self, result: Any) -> None:
        """A tensor of its own storage that an operator has made is written as a whole."""
        for x in _tensors(result):
            if self._slot(x).region is None:
                self._slot(x).touch(x, reads=False, writes=True)

    def _slot(self, x: Tensor) -> _Slot:
        key = x.untyped_storage()._cdata
        if key not in self._slots:
            # A reference that does not keep the data alive, but keeps its address from being used again.
            self._slots[key] = _Slot(StorageWeakRef(x.untyped_storage()))
            if len(self._slots) % 64 == 0:
                self._forget()
        return self._slots[key]

    def _forget(self) -> None:
        """Drop the slots of temporaries that are gone."""
        self._slots = {key: slot for key, slot in self._slots.items() if not slot.storage.expired()}


def _tensors(given: Any) -> list[Tensor]:
    """The tensors of an argument or result, which may be a list."""
    return [x for x in (given if isinstance(given, list | tuple) else (given,)) if isinstance(x, Tensor)]


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _region(x: Tensor) -> tuple[_Region, int]:
    """The elements of a view, in a form that transposing, flattening and expanding do not change, and their
    number.
    """
    dims = sorted(
        (
            (stride, size)
            for size, stride in zip(x.shape, x.stride(), strict=True)
            if size != 1 and stride != 0
        ),
        reverse=True,
    )
    merged: list[tuple[int, int]] = []
    for stride, size in dims:
        if merged and merged[-1][0] == stride * size:
            size *= merged.pop()[1]
        merged.append((stride, size))
    elements = 0 if 0 in x.shape else prod(size for _, size in merged)
    return (x.storage_offset(), *merged), elements
