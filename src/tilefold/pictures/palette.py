"""The colours of masks, the same in a terminal and in a file."""

from __future__ import annotations

from itertools import pairwise

Colour = tuple[int, int, int]

#: Of tiles by state: empty, partial, full.
STATES: tuple[Colour, Colour, Colour] = (44, 48, 58), (232, 170, 60), (72, 184, 140)
NAMES = ("empty", "partial", "full")
#: Of the visible share: 0, then from just above 0 to 1.
NOTHING: Colour = (44, 48, 58)
RAMP: tuple[Colour, ...] = (32, 78, 118), (44, 140, 176), (168, 236, 240)


def ramp(share: float) -> Colour:
    """The colour of a visible share in [0, 1]; any share above 0 is told apart from 0."""
    if share <= 0.0:
        return NOTHING
    at = min(share, 1.0) * (len(RAMP) - 1)
    low, high = list(pairwise(RAMP))[min(int(at), len(RAMP) - 2)]
    return blend(low, high, at - min(int(at), len(RAMP) - 2))


def blend(a: Colour, b: Colour, weight: float) -> Colour:
    """`a` at weight 0, `b` at weight 1."""
    red, green, blue = (round(x + (y - x) * weight) for x, y in zip(a, b, strict=True))
    return red, green, blue


def code(colour: Colour) -> str:
    """As `#rrggbb`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)
