"""`strided`: every n-th key, counted from the query."""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.masks.band import Band
from tilefold.masks.base import Arguments, Mask

from ._checks import an_int
from ._diagonal import Diagonal


@dataclass(frozen=True, eq=False, repr=False)
class Strided(Diagonal):
    n: int

    def _arguments(self) -> Arguments:
        return (("", self.n),)

    def around(self) -> Band:
        return Band(None, None, self.n)


def strided(n: int) -> Mask:
    """Query `i` sees the keys whose distance from its position `p = i + Lk - Lq` is a multiple of `n`, on
    both sides.

    The strided pattern of Sparse Transformers (Child et al. 2019, section 4.2) is `(window(n, 0) |
    strided(n)) & causal()`.

    Args:
        n: the stride, at least 1.

    Raises:
        ArgumentTypeError, MaskError: not an int, or too small.
    """
    return Strided(an_int("n", n, 1))
