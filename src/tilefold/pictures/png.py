"""A mask as a picture in a file, drawn by matplotlib."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from tilefold.cost.units import percent, size
from tilefold.errors import ArgumentError, TilefoldError

from .grid import EMPTY, FULL, PARTIAL, Survey
from .palette import NAMES, NOTHING, RAMP, STATES, Colour

# Pixels along a side of the element picture at most, and tiles along a side with lines between them.
_MOST = 1024
_MOST_LINES = 64
# Beyond this ratio of the sides, pixels are not square: else nothing would be left of the short side.
_OBLONG = 4


def save(survey: Survey, path: Path) -> None:
    """Writes the elements of `survey`, its tiles and its numbers to the PNG file `path`.

    Raises:
        TilefoldError: matplotlib is not installed.
        ArgumentError: the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise TilefoldError(
            "png: expected matplotlib to be installed, got none (pip install 'tilefold[plots]')"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    Lq, Lk = survey.size.q_length, survey.size.k_length
    height = 5.0 * (Lq / Lk if Lq < Lk <= _OBLONG * Lq else 1.0)
    figure = Figure(figsize=(11, height + 1.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    (elements, tiles), below = figure.subplots(2, 2, height_ratios=(height, 0.4))
    for axes in below:
        axes.axis("off")
    _elements(figure, elements, below[0], survey)
    _tiles(tiles, below[1], survey)
    title = textwrap.fill(survey.text, 90, max_lines=3, placeholder=" ...")
    figure.suptitle(f"{title}\n{_numbers(survey)}", fontsize=10, parse_math=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ArgumentError(
            f"png: expected a file that can be written, got {path} ({error.strerror})"
        ) from error


def _numbers(survey: Survey) -> str:
    """One line about the whole."""
    counts = survey.counts
    memory = size(survey.form_bytes) if survey.form_bytes else "no tensor"
    return (
        f"{survey.form.kind}, {memory}; {percent(survey.share)} of the elements are visible; "
        f"{survey.empty_rows:,} rows see nothing; "
        f"{counts['visited']:,} of {counts['total']:,} tiles are visited"
    )


def _elements(figure: Any, axes: Any, below: Any, survey: Survey) -> None:
    """The visible share of each pixel, with lines between tiles."""
    from matplotlib.colors import LinearSegmentedColormap

    hidden = survey.size.q_length * survey.size.k_length - survey.visible
    longest = max(survey.size.q_length, survey.size.k_length)
    step = -(-longest // _MOST)
    seen = LinearSegmentedColormap.from_list("share", [_unit(colour) for colour in RAMP])
    colours = seen.with_extremes(under=_unit(NOTHING))
    # Only what is exactly 0 lies under the scale.
    image = _image(axes, survey, survey.cells(step, step).share, step, cmap=colours, vmin=1e-12, vmax=1.0)
    axes.set_title(
        "visible elements" if step == 1 else f"visible share of {step} x {step} elements", fontsize=10
    )
    tile = survey.tiles.q_step
    if longest <= tile * _MOST_LINES:
        for draw, length in ((axes.axhline, survey.size.q_length), (axes.axvline, survey.size.k_length)):
            for at in range(tile, length, tile):
                draw(at, color="white", linewidth=0.4, alpha=0.5)
    if step == 1:
        _legend(below, [(RAMP[-1], f"{survey.visible:,} visible"), (NOTHING, f"{hidden:,} hidden")])
    else:
        bar = below.inset_axes((0.2, 0.5, 0.6, 0.4))
        figure.colorbar(image, cax=bar, orientation="horizontal", label="visible share")


def _tiles(axes: Any, below: Any, survey: Survey) -> None:
    """The state of each tile."""
    from matplotlib.colors import ListedColormap

    tile, counts = survey.tiles.q_step, survey.counts
    step = tile * -(-max(survey.tiles.seen.shape) // _MOST)
    colours = ListedColormap([_unit(colour) for colour in STATES])
    _image(axes, survey, survey.states(step, step), step, cmap=colours, vmin=EMPTY, vmax=FULL)
    axes.set_title(f"tiles of {tile} x {tile}", fontsize=10)
    states = (FULL, PARTIAL, EMPTY)
    _legend(below, [(STATES[state], f"{counts[NAMES[state]]:,} {NAMES[state]}") for state in states])


def _legend(axes: Any, entries: list[tuple[Colour, str]]) -> None:
    """Colours and their names in one line."""
    from matplotlib.patches import Patch

    handles = [Patch(color=_unit(colour), label=label) for colour, label in entries]
    axes.legend(handles=handles, loc="center", ncols=3, frameon=False)


def _image(axes: Any, survey: Survey, cells: Tensor, step: int, **colours: Any) -> Any:
    """`cells` of `step x step` elements where they lie; the last ones may reach beyond the matrix."""
    Lq, Lk = survey.size.q_length, survey.size.k_length
    nq, nk = cells.shape
    aspect = "equal" if max(Lq, Lk) <= _OBLONG * min(Lq, Lk) else "auto"
    extent = (0, nk * step, nq * step, 0)
    image = axes.imshow(cells.numpy(), extent=extent, aspect=aspect, interpolation="nearest", **colours)
    axes.set(xlim=(0, Lk), ylim=(Lq, 0), xlabel="key", ylabel="query")
    return image


def _unit(colour: Colour) -> tuple[float, float, float]:
    """As matplotlib takes it."""
    red, green, blue = (part / 255 for part in colour)
    return red, green, blue
