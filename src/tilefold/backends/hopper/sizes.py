"""Tiles, stages and warp groups of the kernel, by the width of heads and the kind of mask."""

from __future__ import annotations

from typing import Any

from tilefold.masks.band import Band

#: Widths of tiles, for heads up to as wide.
WIDTHS = (64, 128, 256)
#: Keys of a short band at most, by the width of heads, and of a long one at least.
_FEW, _MANY = {64: 512, 128: 1024, 256: 0}, 16384

_SHORT = {"BN": 64, "STAGES": 4, "GROUPS": 2, "REGISTERS": 240, "HELD": True, "EARLY": True}
_MASKED = {"BN": 64, "STAGES": 4, "GROUPS": 3, "REGISTERS": 160, "SLOTS": 2, "JOINED": True}
#: By width, and by width and kind where that is special; see `variant.Variant`.
_SIZES: dict[str, dict[str, Any]] = {
    "64": _MASKED,
    "64/full": {"BN": 128, "STAGES": 3, "GROUPS": 3, "REGISTERS": 160, "SLOTS": 2, "JOINED": True},
    "64/short band": {"BN": 128, "STAGES": 3, "GROUPS": 2, "REGISTERS": 240, "SLOTS": 2, "JOINED": True},
    "128": _SHORT,
    "128/band": {"BN": 64, "STAGES": 3, "GROUPS": 3, "REGISTERS": 160},
    "128/long band": {"BN": 128, "STAGES": 2, "GROUPS": 2, "REGISTERS": 240, "HELD": True},
    "128/short band": _SHORT | {"EARLY": False},
    "128/full": {
        "BN": 128, "STAGES": 2, "GROUPS": 2, "REGISTERS": 240, "HELD": True, "TURNS": True,
    },
    "256": {"BN": 64, "STAGES": 2, "GROUPS": 2, "REGISTERS": 240, "HALVES": True},
}  # fmt: skip


def width_of(head_dim: int, v_head_dim: int) -> int:
    """Columns of the tiles of q, k and v."""
    return next(width for width in WIDTHS if max(head_dim, v_head_dim) <= width)


def kind_of(form: Any, width: int, k_length: int) -> str:
    """Of a lowered mask: "full", "band", with few keys "short band" and with many "long band", "window" (a
    band with a lower bound), "rows", "cols" or "bits".
    """
    if not isinstance(form, Band):
        return form.kind
    if form.is_full or form.lo is not None:
        return "full" if form.is_full else "window"
    return "short band" if k_length <= _FEW[width] else "band" if k_length < _MANY else "long band"


def sizes_of(width: int, kind: str) -> dict[str, Any]:
    """What the table says; `kind` of `kind_of`."""
    return _SIZES.get(f"{width}/{kind}", _SIZES[str(width)])
