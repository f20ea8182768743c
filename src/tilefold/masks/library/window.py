"""`window`: keys near the query."""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.masks.band import Band
from tilefold.masks.base import Arguments, Mask

from ._checks import an_int
from ._diagonal import Diagonal


@dataclass(frozen=True, eq=False, repr=False)
class Window(Diagonal):
    left: int | None
    right: int | None

    def _arguments(self) -> Arguments:
        return ("", self.left), ("", self.right)

    def around(self) -> Band:
        return Band(None if self.left is None else -self.left, self.right)


def window(left: int | None = None, right: int | None = None) -> Mask:
    """Query `i` sees keys `p - left <= j <= p + right` around its position `p = i + Lk - Lq`.

    Bounds are inclusive offsets in tokens: `window(1023, 0)` shows 1,024 keys. None is unbounded. A negative
    bound is honoured exactly: `window(None, -1)` is strictly causal, and `window(-2, 5)` shows keys from 2 to
    5 after the query.

    Args:
        left: how far back, or None.
        right: how far ahead, or None.

    Raises:
        ArgumentTypeError: a bound that is neither an int nor None.
    """
    for name, bound in (("left", left), ("right", right)):
        if bound is not None:
            an_int(name, bound)
    return Window(left, right)
