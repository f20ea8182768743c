"""Tuned sizes per architecture: a table that ships with the library, over which a user may lay his own.

`tilefold tune` measures and writes the user's table; without it, nothing is ever tuned at run time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tilefold.cost import store

#: What a table may hold, with the range that makes sense.
KEYS = {"fold_tile_elements": (1 << 12, 1 << 26)}


def architecture(device: torch.device | str) -> str:
    """The name of a table: "cpu", "sm90", or the kind of another device."""
    where = torch.device(device)
    if where.type == "cuda" and torch.cuda.is_available() and torch.version.cuda is not None:
        major, minor = torch.cuda.get_device_capability(where)
        return f"sm{major}{minor}"
    return where.type


#: Values under trial, which go before every table, in every thread: autograd has threads of its own.
_trial: dict[str, int] = {}
#: An architecture that is not here, whose shipped table counts in this context.
_assumed: ContextVar[str | None] = ContextVar("assumed", default=None)


def look_up(key: str, device_type: str) -> int:
    """The tuned value of `key` for devices of a kind; see `KEYS`."""
    if key in _trial:
        return _trial[key]
    assumed = _assumed.get()
    return int((_table(device_type) if assumed is None else shipped(assumed))[key])


@contextmanager
def trying(key: str, value: int) -> Iterator[None]:
    """`key` has `value` inside a `with`, for every device and thread: what tuning measures."""
    before = _trial.get(key)
    _trial[key] = value
    try:
        yield
    finally:
        _trial.pop(key, None)
        if before is not None:
            _trial[key] = before


@contextmanager
def assuming(arch: str | None) -> Iterator[None]:
    """Inside a `with`, and in this thread, sizes are those of another architecture; None changes nothing."""
    token = _assumed.set(_assumed.get() if arch is None else arch)
    try:
        yield
    finally:
        _assumed.reset(token)


@functools.lru_cache(maxsize=8)
def _table(device_type: str) -> dict[str, Any]:
    arch = architecture(device_type)
    return shipped(arch) | own(arch)


@functools.lru_cache(maxsize=16)
def shipped(arch: str) -> dict[str, Any]:
    """The library's table for an architecture; that of "gpu" where nobody has measured it."""
    folder = resources.files("tilefold.planning") / "tables"
    file = folder / f"{arch}.json"
    return json.loads((file if file.is_file() else folder / "gpu.json").read_text())


def own(arch: str) -> dict[str, Any]:
    """The user's table: what `tilefold tune` has written on this machine, as far as it makes sense."""
    found = store.read(f"tuned-{arch}")
    return {
        key: found[key]
        for key, (least, most) in KEYS.items()
        if isinstance(found.get(key), int) and least <= found[key] <= most
    }


def keep(arch: str, values: dict[str, int]) -> Path | None:
    """Write values into the user's table, beside what is there; None where it cannot be written."""
    path = store.write(f"tuned-{arch}", store.read(f"tuned-{arch}") | values)
    _table.cache_clear()
    return path
