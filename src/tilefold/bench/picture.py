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
    figure.legend(handles, labels, loc="outside lower left", ncols=len(names) + 1, frameon=False, fontsize=9)
    figure.suptitle(
        f"{document.get('title', 'tilefold bench')}\n{subtitle(document)}", x=0.01, ha="left", fontsize=10
    )
    figure.savefig(path, dpi=110)


def _panels(document: Document) -> list[tuple[str, str, list[tuple[str, dict[str, Row]]]]]:
    """`(title, key of the rows, [(case, rows by contestant)])`."""
    by_pass = {
        what: [
            (case, rows)
            for case, found, rows in groups(document)
            if found == what and any(timed(row) for row in rows.values())
        ]
        for what in PASSES
    }
    panels = [(f"{what}, seconds", "median", rows) for what, rows in by_pass.items() if rows]
    return (
        panels
        + [
            (f"{what}, extra memory in MiB", "extra_bytes", rows)
            for what, rows in list(by_pass.items())[::-1]
            if rows
        ][:1]
    )


def _bars(
    axis: Any, title: str, key: str, rows: Sequence[tuple[str, dict[str, Row]]], names: Sequence[str]
) -> None:
    """Horizontal bars, the first case on top; a ring marks the prediction."""
    scale = 1.0 if key == "median" else 2.0**-20
    predicted = "predicted_seconds" if key == "median" else "predicted_extra_bytes"
    step = 0.8 / len(names)
    for n, name in enumerate(names):
        found = [(y, rows[y][1][name]) for y in range(len(rows)) if timed(rows[y][1].get(name))]
        at = [y + (n + 0.5) * step - 0.4 for y, _ in found]
        axis.barh(at, [row[key] * scale for _, row in found], step * 0.9, color=_colour(n), label=name)
        if name == OURS:
            known = [
                (y, row[predicted] * scale) for y, (_, row) in zip(at, found, strict=True) if predicted in row
            ]
            if known:
                ys, xs = zip(*known, strict=True)
                axis.plot(xs, ys, "o", mfc="white", mec="black", ms=4, label="predicted")
    axis.set_xscale("symlog", linthresh=0.01) if key != "median" else axis.set_xscale("log")
    axis.set_yticks(range(len(rows)), [case for case, _ in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_title(title, fontsize=10, loc="left")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _colour(n: int) -> str:
    return COLOURS[n % len(COLOURS)]
