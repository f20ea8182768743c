"""Tuned sizes per architecture: a table that ships with the library, over which a user may lay his own.

`tilefold tune` measures and writes the user's table; without it, nothing is ever tuned at run time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tilefold.cost import store

#: What a table may hold, with the range that makes sense. Sizes of kernels are lists beside them, by name.
KEYS = {"fold_tile_elements": (1 << 12, 1 << 26)}
#: The most of each number of a kernel's sizes: rows and keys of a tile, warps, stages, and what need not be
#: there: loops, registers of a thread.
SIZES, LEAST_SIZES = (256, 256, 16, 8, 2, 255), 4
#: What sizes of the Hopper kernel are: dicts that hold all of these, and may hold the rest.
HOPPER = {
    "BN": (64, 128), "STAGES": range(2, 9), "GROUPS": (2, 3), "REGISTERS": range(128, 248, 8),
}  # fmt: skip
HOPPER_FLAGS = {"HELD", "TURNS", "EARLY", "JOINED", "HALVES"}
#: With fewer, all that a kernel holds would lie in memory.
LEAST_REGISTERS = 64


def architecture(device: torch.device | str) -> str:
    """The name of a table: "cpu", "sm90", or the kind of another device."""
    where = torch.device(device)
    if where.type == "cuda" and torch.cuda.is_available() and torch.version.cuda is not None:
        major, minor = torch.cuda.get_device_capability(where)
        return f"sm{major}{minor}"
    return where.type


#: Values under trial, which go before every table, in every thread: autograd has threads of its own.
_trial: dict[str, Any] = {}
#: An architecture that is not here, whose shipped table counts in this context.
_assumed: ContextVar[str | None] = ContextVar("assumed", default=None)


def look_up(key: str, device_type: str) -> int:
    """The tuned value of `key` for devices of a kind; see `KEYS`."""
    if key in _trial:
        return _trial[key]
    assumed = _assumed.get()
    return int((_table(device_type) if assumed is None else shipped(assumed))[key])


def sizes(
    names: Sequence[str], device_type: str, otherwise: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """Sizes of a kernel, `(rows, keys, warps, stages[, loops[, registers]])`, under the first of its names
    that the table has, such as "triton/forward/16/128"; None where the table says null there, `otherwise`
    where it has no such name.
    """
    assumed = _assumed.get()
    table = _table(device_type) if assumed is None else shipped(assumed)
    for name in names:
        for place in (_trial, table):
            if name in place:
                return None if place[name] is None else tuple(place[name])
    return otherwise


def entry(name: str, device_type: str) -> Any:
    """What is under trial under a name, or stands in the device's table; None if neither is."""
    if name in _trial:
        return _trial[name]
    return None if _assumed.get() is not None else _table(device_type).get(name)


@functools.cache
def hopper_table() -> dict[str, Any]:
    """The library's sizes of the Hopper kernel, by the width of heads, "hopper/128", and by width and kind of
    call where that is special, "hopper/128/full".
    """
    file = resources.files("tilefold.planning") / "tables" / "hopper" / "sm90.json"
    return json.loads(file.read_text())


def hopper_sizes(width: int, kind: str) -> dict[str, Any]:
    """Sizes of the Hopper kernel for a kind of call: what is under trial or in the user's table, else the
    library's; an entry for one kind of call goes before the one for all, whosever it is.
    """
    names = (f"hopper/{width}/{kind}", f"hopper/{width}")
    for name in names:
        found = entry(name, "cuda") or hopper_table().get(name)
        if found is not None:
            return found
    raise KeyError(names[-1])


def _makes_sense_on_hopper(name: str, value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(HOPPER) <= set(value)
        and all(value[name] in allowed for name, allowed in HOPPER.items())
        and all(type(n) in (int, bool) for n in value.values())
        and set(value) - set(HOPPER) - {"SLOTS"} <= HOPPER_FLAGS
        and all(value.get(flag, 0) in (0, 1) for flag in HOPPER_FLAGS)
        and value.get("SLOTS", 1) in (1, 2)
        # One barrier for both frees keys only with values, of which one tile is always in use.
        and value["STAGES"] >= (3 if value.get("JOINED") else 2)
        # Bits, and whatever has no sizes of its own, take one granule of 64 keys at a time.
        and (value["BN"] == 64 or (name.count("/") == 2 and not name.endswith("/bits")))
    )


def makes_sense(name: str, value: Any) -> bool:
    """Whether an entry of a table can be what it says: nothing else is read from a user's."""
    if name.startswith("hopper/"):
        return _makes_sense_on_hopper(name, value)
    if name in KEYS:
        least, most = KEYS[name]
        return isinstance(value, int) and least <= value <= most
    if value is None:
        # dK and dV take a kernel each.
        return "/keys/" in name
    if "/" not in name or not isinstance(value, list) or not LEAST_SIZES <= len(value) <= len(SIZES):
        return False
    if not all(type(n) is int and 1 <= n <= most for n, most in zip(value, SIZES, strict=False)):
        return False
    if len(value) == len(SIZES) and value[-1] < LEAST_REGISTERS:
        return False
    rows, keys, warps = value[:3]
    # Triton's tensors have sides that are powers of two, and matrix units take 16 at least.
    return min(rows, keys) >= 16 and all(n & (n - 1) == 0 for n in (rows, keys, warps))


#: Called whenever sizes of kernels have changed.
_listeners: list[Callable[[], None]] = []


def on_change(forget: Callable[[], None]) -> None:
    """Have `forget` called whenever sizes of kernels change, so that a backend drops what it has worked out
    with the old ones.
    """
    _listeners.append(forget)


def _changed(names: Iterable[str]) -> None:
    if any("/" in name for name in names):
        for forget in _listeners:
            forget()


_ABSENT = object()


@contextmanager
def trying(key: str, value: Any) -> Iterator[None]:
    """`key` has `value` inside a `with`, for every device and thread: what tuning measures."""
    before = _trial.get(key, _ABSENT)
    _trial[key] = value
    _changed([key])
    try:
        yield
    finally:
        if before is _ABSENT:
            del _trial[key]
        else:
            _trial[key] = before
        _changed([key])


@contextmanager
def assuming(arch: str | None) -> Iterator[None]:
    """Inside a `with`, and in this thread, sizes are those of another architecture; None changes nothing."""
    token = _assumed.set(_assumed.get() if arch is None else arch)
    try:
        yield
    finally:
        _assumed.reset(token)


def assumed() -> str | None:
    """The architecture that counts in this context and thread, if it is not that of the device."""
    return _assumed.get()


@functools.lru_cache(maxsize=8)
def _table(device_type: str) -> dict[str, Any]:
    arch = architecture(device_type)
    return shipped(arch) | own(arch)


@functools.lru_cache(maxsize=16)
def shipped(arch: str) -> dict[str, Any]:
    """The library's table for an architecture, over that of "gpu", which holds where nobody has measured."""
    return (alone("gpu") if arch != "cpu" else {}) | alone(arch)


def alone(arch: str) -> dict[str, Any]:
    """The library's table for an architecture without what lies beneath it; empty where there is none."""
    file = resources.files("tilefold.planning") / "tables" / f"{arch}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def own(arch: str) -> dict[str, Any]:
    """The user's table: what `tilefold tune` has written on this machine, as far as it makes sense."""
    found = store.read(f"tuned-{arch}")
    return {name: value for name, value in found.items() if makes_sense(name, value)}


def keep(arch: str, values: dict[str, Any]) -> Path | None:
    """Write values into the user's table, beside what is there; None where it cannot be written."""
    path = store.write(f"tuned-{arch}", store.read(f"tuned-{arch}") | values)
    _table.cache_clear()
    _changed(values)
    return path
