"""Tiles, stages and warp groups of the kernel, by the width of heads and the kind of call; the tables are in
`planning.tuned`, and `tilefold tune` fills them.
"""

from __future__ import annotations

from typing import Any

from tilefold.masks.band import Band
from tilefold.planning import tuned

#: Widths of tiles, for heads up to as wide.
WIDTHS = (64, 128, 256)
#: Keys of a short call at most, by the width of heads.
_FEW = {64: 1024, 128: 1024, 256: 0}


def width_of(head_dim: int, v_head_dim: int) -> int:
    """Columns of the tiles of q, k and v."""
    return next(width for width in WIDTHS if max(head_dim, v_head_dim) <= width)


def kind_of(form: Any, width: int, k_length: int, bias: bool) -> str:
    """Of a call: "bias" with one but for bits, else by its lowered mask "full" or "band", "short full" or
    "short band" where keys are few, "window" (a band with a lower bound), "rows", "cols" or "bits".
    """
    if not isinstance(form, Band):
        # Bits are read one granule of 64 keys at a time, with a bias or without.
        return "bias" if bias and form.kind != "bits" else form.kind
    if bias:
        return "bias"
    if not form.is_full and form.lo is not None:
        return "window"
    kind = "full" if form.is_full else "band"
    return f"short {kind}" if k_length <= _FEW[width] else kind


def sizes_of(width: int, kind: str) -> dict[str, Any]:
    """What the tables say, the user's before the one that is shipped; `kind` of `kind_of`. See
    `variant.Variant` for the names.
    """
    return tuned.hopper_sizes(width, kind)
