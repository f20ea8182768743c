"""Tiles, stages and warp groups of the kernel, by the width of heads and the kind of mask."""

from __future__ import annotations

from typing import Any

#: Widths of tiles, for heads up to as wide.
WIDTHS = (64, 128, 256)

#: By width, and by width and kind where that is special; see `variant.Variant`.
_SIZES: dict[str, dict[str, Any]] = {
    "64": {"BN": 128, "STAGES": 3, "GROUPS": 3, "REGISTERS": 160, "OWN_OUT": True, "JOINED": True},
    "64/full": {"BN": 128, "STAGES": 3, "GROUPS": 3, "REGISTERS": 160, "OWN_OUT": True, "JOINED": True},
    "128": {"BN": 128, "STAGES": 2, "GROUPS": 2, "REGISTERS": 240, "OWN_OUT": True, "HELD": True},
    "128/full": {
        "BN": 128, "STAGES": 2, "GROUPS": 2, "REGISTERS": 240, "OWN_OUT": True, "HELD": True, "TURNS": True,
    },
    "256": {"BN": 64, "STAGES": 2, "GROUPS": 2, "REGISTERS": 240, "OWN_OUT": False},
}  # fmt: skip


def width_of(head_dim: int, v_head_dim: int) -> int:
    """Columns of the tiles of q, k and v."""
    return next(width for width in WIDTHS if max(head_dim, v_head_dim) <= width)


def sizes_of(width: int, kind: str) -> dict[str, Any]:
    """What the table says; `kind` is "full" where no tile needs a mask, else that of the lowered mask."""
    return _SIZES.get(f"{width}/{kind}", _SIZES[str(width)])
