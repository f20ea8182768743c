"""Results as one PNG: time and extra memory of each case by contestant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .contestants import OURS
from .report import PASSES, contestants, groups, subtitle, timed
from .run import Document, Row

COLOURS = ("#2563eb", "#d97706", "#64748b", "#059669", "#db2777", "#7c3aed")


def png(document: Document, path: Path) -> None:
    """Writes the picture: a column per pass, and one for the memory of the last pass, bars on a log scale.

    Raises:
        ArgumentError: nothing in the document was timed.
    """
    from matplotlib.figure import Figure

    from tilefold.errors import ArgumentError

    panels = _panels(document)
    if not panels:
        raise ArgumentError("FILE: expected results with times for a PNG, got none that was timed")
    names = contestants(document)
    height = 1.6 + 0.17 * max(len(rows) for _, _, rows in panels) * (len(names) + 1)
    figure = Figure(figsize=(5.2 * len(panels), height), layout="constrained")
    axes: Any = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, key, rows) in zip(axes, panels, strict=True):
        _bars(axis, title, key, rows, names)
    handles, labels = axes[0].get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, loc="outside lower left", ncols=len(names) + 1, frameon=False, fontsize=9
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    title = f"{document.get('title', 'tilefold bench')}\n{subtitle(document)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)
    figure.savefig(path, dpi=110, format="png")


def _panels(document: Document) -> list[tuple[str, str, list[tuple[str, dict[str, Row]]]]]:
    """`(title, key of the rows, [(case, rows by contestant)])`."""

    def known(what: str, key: str) -> list[tuple[str, dict[str, Row]]]:
        """The cases in which somebody has this figure."""
        return [
            (case, rows)
            for case, found, rows in groups(document)
            if found == what and any(timed(row) and row.get(key) is not None for row in rows.values())
        ]

    times = [(f"{what}, seconds", "median", known(what, "median")) for what in PASSES]
    memory = [
        (f"{what}, extra memory in MiB", "extra_bytes", known(what, "extra_bytes")) for what in PASSES[::-1]
    ]
    return [panel for panel in times if panel[2]] + [panel for panel in memory if panel[2]][:1]


def _bars(
    axis: Any, title: str, key: str, rows: Sequence[tuple[str, dict[str, Row]]], names: Sequence[str]
) -> None:
    """Horizontal bars, the first case on top; a ring marks the prediction."""
    scale = 1.0 if key == "median" else 2.0**-20
    predicted = "predicted_seconds" if key == "median" else "predicted_extra_bytes"
    step = 0.8 / len(names)
    for n, name in enumerate(names):
        mine = [(y, by_name[name]) for y, (_, by_name) in enumerate(rows) if timed(by_name.get(name))]
        found = [(y, row) for y, row in mine if row.get(key) is not None]
        at = [y + (n + 0.5) * step - 0.4 for y, _ in found]
        axis.barh(at, [row[key] * scale for _, row in found], step * 0.9, color=_colour(n), label=name)
        if name == OURS:
            known = [
                (y, row[predicted] * scale)
                for y, (_, row) in zip(at, found, strict=True)
                if row.get(predicted) is not None
            ]
            if known:
                ys, xs = zip(*known, strict=True)
                axis.plot(xs, ys, "o", mfc="white", mec="black", ms=4, label="predicted")
    axis.set_xscale("symlog", linthresh=0.01) if key != "median" else axis.set_xscale("log")
    axis.set_yticks(range(len(rows)), [case for case, _ in rows], fontsize=8, parse_math=False)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_title(title, fontsize=10, loc="left")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _colour(n: int) -> str:
    return COLOURS[n % len(COLOURS)]
