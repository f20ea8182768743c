"""`dilated`: every n-th key of a window."""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.masks.band import Band
from tilefold.masks.base import Arguments, Mask

from ._checks import an_int
from ._diagonal import Diagonal


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(Diagonal):
    window: int
    dilation: int

    def _arguments(self) -> Arguments:
        return ("", self.window), ("", self.dilation)

    def around(self) -> Band:
        reach = self.window // 2 * self.dilation
        return Band(-reach, reach, self.dilation)


def dilated(window: int, dilation: int) -> Mask:
    """Query `i` sees itself and `window // 2` keys to each side, `dilation` apart: `j = p + t * dilation`
    with `|t| <= window // 2`.

    `p = i + Lk - Lq` is the query's position. Dilated sliding window of Longformer (Beltagy et al. 2020,
    section 3.1).

    Args:
        window: about how many keys are seen, at least 0.
        dilation: how far apart they lie, at least 1; 1 is a plain window.

    Raises:
        ArgumentTypeError, MaskError: not an int, or too small.
    """
    return Dilated(an_int("window", window, 0), an_int("dilation", dilation, 1))
