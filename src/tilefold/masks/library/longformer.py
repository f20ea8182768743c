"""`longformer`: a window, dilated or not, and global tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilefold.masks.base import Mask

from ._checks import an_int
from .dilated import dilated
from .global_tokens import global_tokens
from .window import window as plain_window


def longformer(window: int = 512, index: int | Sequence[int] | Tensor = 0, dilation: int = 1) -> Mask:
    """Longformer (Beltagy et al. 2020, section 3.1): `window // 2` keys to each side, `dilation` apart, and
    global tokens.

    The result is `window(window // 2, window // 2) | global_tokens(index)`, or `dilated(window, dilation) |
    global_tokens(index)`.

    Args:
        window: about how many keys are seen in all, at least 0.
        index: the global tokens, as in `global_tokens`.
        dilation: how far apart keys of the window lie, at least 1.

    Raises:
        ArgumentTypeError, MaskError: as of the masks of which it is made.
    """
    side = an_int("window", window, 0) // 2
    near = plain_window(side, side) if an_int("dilation", dilation, 1) == 1 else dilated(window, dilation)
    return near | global_tokens(index)
