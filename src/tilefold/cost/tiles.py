"""Tiles of the score matrix: their states and their sides, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.errors import ArgumentError

EMPTY, PARTIAL, FULL = 0, 1, 2
#: The most tiles of one table that are looked at: their states take some hundred megabytes on the way.
MOST = 1 << 24


def states(form: Any, q_length: int, k_length: int, rows: int, keys: int) -> Tensor:
    """int8 `[Bm, Hm, nq, nk]`: 0 empty, 1 partial, 2 full, as the lowered mask `form` classifies tiles of
    `rows x keys`.

    Raises:
        ArgumentError: more tiles than `MOST`.
    """
    count = -(-q_length // rows) * -(-k_length // keys)
    if count > MOST:
        raise ArgumentError(
            f"q_length, k_length: expected at most {MOST:,} tiles of {rows} x {keys}, got {count:,} "
            f"({q_length:,} x {k_length:,})"
        )
    tables = form.tensors()
    device = tables[0].device if tables else torch.device("cpu")
    return form.tile_states(q_length, k_length, rows, keys, device).cpu()


def sides(length: int, side: int) -> Tensor:
    """int64: the lengths of the pieces of `side` into which `length` is cut; the last one may be shorter."""
    start = torch.arange(0, length, side, device="cpu")
    return (start + side).clamp(max=length) - start
