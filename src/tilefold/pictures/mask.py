"""A mask in the terminal: the visible share of each pixel, the state of each tile, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tilefold.cost.units import percent, size

from .grid import EMPTY, FULL, PARTIAL, Survey
from .palette import NAMES, STATES, Colour, blend, code, ramp

# Pixels along a side at most, and at least while elements are that few.
_MOST = 64
_LEAST = 32
# A frame is not narrower than the title in it.
_FRAME = 24

_SHADES = "·░▒▓█"
_GLYPHS = "·▒█"
_SPLIT = "▀"


class MaskPicture:
    """Draws a survey within the width of its console, with colours where the console has enough of them."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        coloured = console.color_system in ("256", "truecolor")
        q_step, k_step = pixel(self.survey, (options.max_width - 6) // 2)
        longest = max(-(-self.survey.size.q_length // q_step), -(-self.survey.size.k_length // k_step))
        down = across = next(zoom for zoom in (4, 2, 1) if longest * zoom <= _LEAST or zoom == 1)
        if not coloured:
            # A character is twice as high as wide, and without colours there is nothing smaller.
            q_step, down = (q_step, down // 2) if down > 1 else (2 * q_step, 1)
        yield _facts(self.survey)
        yield Text()
        yield Columns(self._pictures(q_step, k_step, down, across, coloured), padding=(0, 2))
        yield _legend(coloured)
        what = "pixel" if coloured else "character"
        elements = f"{q_step} x {k_step} elements are" if q_step * k_step > 1 else "one element is"
        pixels = f"{down} x {across} {what}s" if across > 1 else f"one {what}"
        yield Text(f"Queries run down and keys to the right; {elements} {pixels}.", style="dim")

    def _pictures(self, q_step: int, k_step: int, down: int, across: int, coloured: bool) -> list[Panel]:
        """The shares and the states of cells of `q_step x k_step`, each drawn as `down x across` pixels."""
        shares = self.survey.cells(q_step, k_step).share
        states = self.survey.states(q_step, k_step)
        shares, states = (x.repeat_interleave(down, 0).repeat_interleave(across, 1) for x in (shares, states))
        if coloured:
            tile = self.survey.tiles.q_step
            # A pixel of several tiles is not told apart from its neighbour.
            sides = (
                tile * zoom / step if tile >= step else math.inf
                for step, zoom in ((q_step, down), (k_step, across))
            )
            pictures = _halves(_share_colours(shares)), _halves(_state_colours(states, *sides))
        else:
            pictures = _glyphs(shares, _shade), _glyphs(states, lambda state: _GLYPHS[int(state)])
        titles = "visible share", "states of tiles"
        return [_framed(x, title, states.shape[1]) for x, title in zip(pictures, titles, strict=True)]


def pixel(survey: Survey, width: int) -> tuple[int, int]:
    """Queries and keys per pixel, so that at most `width` pixels stand side by side.

    Tile edges fall on pixel edges: a step divides the tile, or the tile divides it. Pixels are square unless
    the matrix is so oblong that little would be left of its short side.
    """
    tile, most = survey.tiles.q_step, max(1, min(width, _MOST))
    q_step, k_step = (_step(length, most, tile) for length in (survey.size.q_length, survey.size.k_length))
    both = max(q_step, k_step)
    if min(survey.size.q_length, survey.size.k_length) >= 8 * both:
        return both, both
    return q_step, k_step


def _step(length: int, most: int, tile: int) -> int:
    """The least step that divides `tile` or is a multiple of it, and cuts `length` into at most `most`."""
    need = -(-length // most)
    if need > tile:
        return -(-need // tile) * tile
    return next(step for step in range(need, tile + 1) if tile % step == 0)


def _shade(share: float) -> str:
    """Only nothing is a dot, and only everything is a full block."""
    return _SHADES[0] if share <= 0.0 else _SHADES[4] if share >= 1.0 else _SHADES[1 + min(int(share * 3), 2)]


def _share_colours(shares: Tensor) -> list[list[Colour]]:
    return [[ramp(share) for share in row] for row in shares.tolist()]


def _state_colours(states: Tensor, q_pixels: float, k_pixels: float) -> list[list[Colour]]:
    """Tiles of `q_pixels x k_pixels` whose neighbours differ a little, so that each can be seen."""
    return [
        [
            blend(STATES[state], (0, 0, 0), 0.14 * ((x // q_pixels + y // k_pixels) % 2))
            for y, state in enumerate(row)
        ]
        for x, row in enumerate(states.tolist())
    ]


def _halves(pixels: list[list[Colour]]) -> Text:
    """Two rows of pixels a line: the upper one in the colour of the character, the lower one behind it."""
    lines = []
    for at in range(0, len(pixels), 2):
        lower = pixels[at + 1] if at + 1 < len(pixels) else [None] * len(pixels[at])
        line = Text(no_wrap=True)
        for above, below in zip(pixels[at], lower, strict=True):
            line.append(_SPLIT, Style(color=code(above), bgcolor=code(below) if below else None))
        lines.append(line)
    return Text("\n", no_wrap=True).join(lines)


def _glyphs(cells: Tensor, glyph: Callable[[float], str]) -> Text:
    return Text("\n".join("".join(map(glyph, row)) for row in cells.tolist()), no_wrap=True)


def _framed(picture: Text, title: str, width: int) -> Panel:
    return Panel(
        picture, title=title, title_align="left", width=max(width, _FRAME) + 2, padding=0, border_style="dim"
    )


def _legend(coloured: bool) -> Text:
    """What the colours, or the characters, of both pictures mean."""
    text = Text("share  0 ")
    if coloured:
        for tenth in range(11):
            text.append("█", code(ramp(tenth / 10)))
        text.append(" 1      tiles  ")
        for state in (FULL, PARTIAL, EMPTY):
            text.append("██", code(STATES[state]))
            text.append(f" {NAMES[state]}   ")
        return text
    tiles = "   ".join(f"{_GLYPHS[state]} {NAMES[state]}" for state in (FULL, PARTIAL, EMPTY))
    return text.append(f"{_SHADES} 1      tiles  {tiles}")


def _facts(survey: Survey) -> Table:
    """The numbers."""
    at, counts = survey.size, survey.counts
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    where = f"batch element {at.b} of {at.batch}, query head {at.h} of {at.heads}"
    memory = size(survey.form_bytes) if survey.form_bytes else "no tensor"
    visited = percent(counts["visited"] / counts["total"])
    tile = survey.tiles.q_step
    for name, value in (
        ("mask", survey.text),
        ("call", f"{at.q_length:,} queries x {at.k_length:,} keys; {where}"),
        ("form", f"{survey.form.kind}, {memory}"),
        ("visible", f"{percent(survey.share)} of the elements; {survey.empty_rows:,} rows see nothing"),
        ("tiles", f"{counts['total']:,} of {tile} x {tile}: {counts['visited']:,} visited ({visited})"),
        ("", f"{counts['full']:,} full, {counts['partial']:,} partial, {counts['empty']:,} empty"),
    ):
        table.add_row(name, Text(value))
    return table
