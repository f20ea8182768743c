"""Results as they are read: loading, numbers in words, and the table for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilefold.errors import ArgumentError

from .contestants import OURS
from .run import BOTH, FORWARD, Document, Row

PASSES = (FORWARD, BOTH)
_KEYS = ("case", "pass", "contestant", "status", "reasons")


def load(path: Path) -> Document:
    """A document that `bench` wrote.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"FILE: expected results of `tilefold bench`, got {path}: {error}") from error
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise ArgumentError(
            f"FILE: expected results of `tilefold bench` with rows of {', '.join(_KEYS)}, got {path}"
        )
    return document


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and all(key in row for key in _KEYS)
        and (row["status"] != "ok" or all(key in row for key in ("median", "low", "high", "extra_bytes")))
    )


# Numbers in words.


def seconds(value: float) -> str:
    """Three digits with a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= 0.9995 * size or unit == "µs":
            return f"{_digits(value / size)} {unit}"
    raise AssertionError("not reached")


def size(value: float) -> str:
    """Bytes with three digits and a unit."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= 0.9995 * step:
            return f"{_digits(value / step)} {unit}"
    return f"{value:.0f} B"


def rate(value: float) -> str:
    """FLOPs per second with three digits and a unit."""
    for unit, step in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if value >= 0.9995 * step:
            return f"{_digits(value / step)} {unit}"
    return f"{_digits(value / 1e6)} MFLOP/s"


def ratio(value: float) -> str:
    return f"{_digits(value)}×"


def _digits(value: float) -> str:
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{decimals}f}"


# Rows by case and pass.


def contestants(document: Document) -> list[str]:
    """Their names, in the order of the rows."""
    return list(dict.fromkeys(row["contestant"] for row in document["rows"]))


def groups(document: Document) -> Iterator[tuple[str, str, dict[str, Row]]]:
    """`(case, pass, rows by contestant)` in the order of the document."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in document["rows"]:
        found.setdefault((row["case"], row["pass"]), {})[row["contestant"]] = row
    for (case, what), rows in found.items():
        yield case, what, rows


def timed(row: Row | None) -> bool:
    return row is not None and row["status"] == "ok"


def beside_ours(row: Row, rows: dict[str, Row]) -> float | None:
    """How many times as long as tilefold this row took."""
    ours = rows.get(OURS)
    return row["median"] / ours["median"] if ours is not None and timed(ours) and timed(row) else None


def reasons(document: Document) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """`(contestant, status, reason, cases)` of everything that was not timed, each reason once."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in document["rows"]:
        if not timed(row):
            for reason in row["reasons"]:
                key = (row["contestant"], row["status"], reason)
                found.setdefault(key, {})[row["case"]] = None
    return [(*key, tuple(cases)) for key, cases in found.items()]


def subtitle(document: Document) -> str:
    """Machine, date and versions in one line; what is missing is left out."""
    machine = document.get("machine", "")
    numbers = ", ".join(f"{name} {value}" for name, value in document.get("versions", {}).items())
    return " · ".join(str(part) for part in (machine, document.get("date", ""), numbers) if part)


# The terminal.


LEGEND = (
    "tilefold: its median time. Others: their time over tilefold's. iqr: between its quartiles, over the "
    "median. memory: what it held beyond arguments and results. model: predicted over measured time."
)


def table(document: Document) -> RenderableType:
    """One line per case and pass, then who did not run and why. Fits a terminal of 80 columns."""
    names = contestants(document)
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    grid.add_column("case", no_wrap=True)
    grid.add_column("pass", no_wrap=True)
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True, style="bold green" if name == OURS else "")
    for name in ("iqr", "memory", "model"):
        grid.add_column(name, justify="right", no_wrap=True, style="dim" if name == "iqr" else "")
    for case, what, rows in groups(document):
        grid.add_row(case, _short(what), *(_cell(rows, name) for name in names), *_ours(rows.get(OURS)))
    title = Text(str(document.get("title", "tilefold bench")), style="bold")
    return Group(
        title, Text(subtitle(document), style="dim"), grid, Text(LEGEND, style="dim"), *_notes(document)
    )


def _short(what: str) -> str:
    return {FORWARD: "fwd", BOTH: "both"}.get(what, what)


def _cell(rows: dict[str, Row], name: str) -> Text:
    """Time of tilefold; of the others, how many times as long; or why there is none, in a word."""
    row = rows.get(name)
    if row is None:
        return Text("")
    if not timed(row):
        return Text(row["status"], style="red" if row["status"] in ("wrong", "failed") else "dim")
    beside = beside_ours(row, rows)
    return Text(seconds(row["median"]) if name == OURS or beside is None else ratio(beside))


def _ours(row: Row | None) -> Sequence[str]:
    """Spread, extra memory, and prediction over measurement of tilefold."""
    if row is None or not timed(row):
        return "", "", ""
    spread = f"{(row['high'] - row['low']) / row['median']:.0%}"
    predicted = row.get("predicted_over_measured")
    return spread, size(row["extra_bytes"]), "" if predicted is None else ratio(predicted)


def _notes(document: Document) -> list[Text]:
    lines = []
    if document.get("exact") is False:
        lines.append(Text("tilefold failed a check: nothing was timed.", style="bold red"))
    for name, status, reason, cases in reasons(document):
        where = ", ".join(cases) if len(cases) <= 4 else f"{len(cases)} cases"
        lines.append(Text(f"{name} {status} ({where}): {reason}", style="dim"))
    return lines
