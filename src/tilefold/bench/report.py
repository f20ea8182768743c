"""Results as they are read: loading, numbers in words, and the table for a terminal."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilefold.errors import ArgumentError

from .contestants import OURS
from .run import BOTH, FORWARD, Document, Row

PASSES = (FORWARD, BOTH)
Rule = tuple[str, Callable[[Any], bool]]
Fields = Mapping[str, Rule]


def load(path: Path) -> Document:
    """A document that `bench` wrote.

    Raises:
        ArgumentError: the file cannot be read, or holds something else; says where, and what was expected.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        _check(document)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"FILE: expected results of `tilefold bench`, got {path}: {error}") from error
    except RecursionError as error:
        raise ArgumentError(
            f"FILE: expected results of `tilefold bench`, got {path}: it is nested too deeply"
        ) from error
    return document


# What a document holds. A rule is a description and a predicate.


def _is_text(value: Any) -> bool:
    """Half of a surrogate pair, which JSON can hold, can neither be printed nor written."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_number(value: Any) -> bool:
    """No infinity, no NaN, and nothing that overflows when it is scaled."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MOST


def _one_of(*values: str) -> Rule:
    return f"one of {', '.join(map(repr, values))}", lambda x: isinstance(x, str) and x in values


def _or_null(rule: Rule) -> Rule:
    words, holds = rule
    return f"{words}, or null", lambda x: x is None or holds(x)


_MOST = 1e30
_TEXT: Rule = ("text", _is_text)
_TEXTS: Rule = ("a list of texts", lambda x: isinstance(x, list) and all(map(_is_text, x)))
_NAMED_TEXTS: Rule = (
    "an object of texts",
    lambda x: isinstance(x, dict) and all(map(_is_text, (*x, *x.values()))),
)
_FINITE: Rule = (f"a finite number of at most {_MOST:g}", _is_number)
_POSITIVE: Rule = (
    f"a finite positive number in [{1 / _MOST:g}, {_MOST:g}]",
    lambda x: _is_number(x) and x >= 1 / _MOST,
)
_NOT_NEGATIVE: Rule = (
    f"0 or a finite positive number in [{1 / _MOST:g}, {_MOST:g}]",
    lambda x: _is_number(x) and (x == 0 or x >= 1 / _MOST),
)

_DOCUMENT: Fields = {"rows": ("a list of rows, not empty", lambda x: isinstance(x, list) and len(x) > 0)}
_DOCUMENT_OPTIONAL: Fields = {
    "title": _TEXT,
    "machine": _TEXT,
    "device": _TEXT,
    "date": _TEXT,
    "note": _TEXT,
    "versions": _NAMED_TEXTS,
    "seconds": _NOT_NEGATIVE,
    "exact": ("true or false", lambda x: isinstance(x, bool)),
    "contestants": _NAMED_TEXTS,
}
_ROW: Fields = {
    "case": _TEXT,
    "pass": _one_of(*PASSES),
    "contestant": _TEXT,
    "status": _one_of("ok", "refused", "failed", "wrong", "not timed"),
    "reasons": _TEXTS,
}
_ROW_OPTIONAL: Fields = {"about": _TEXT, "shape": _TEXT}
# Rows of who was timed. Others have at most an error, which may be infinite.
_TIMED: Fields = {"median": _POSITIVE, "low": _POSITIVE, "high": _POSITIVE}
_TIMED_OPTIONAL: Fields = {
    "best": _or_null(_POSITIVE),
    "turns": _or_null(_POSITIVE),
    "error_over_budget": _or_null(_NOT_NEGATIVE),
    # The profiler may lose an event, so that the memory of a run is less than that of its results.
    "extra_bytes": _or_null(_FINITE),
    "flops": _or_null(_NOT_NEGATIVE),
    "flops_per_second": _or_null(_NOT_NEGATIVE),
    "predicted_seconds": _or_null(_POSITIVE),
    "predicted_bytes": _or_null(_NOT_NEGATIVE),
    "predicted_extra_bytes": _or_null(_NOT_NEGATIVE),
    "predicted_over_measured": _or_null(_POSITIVE),
    "predicted_over_measured_extra": _or_null(_NOT_NEGATIVE),
}


def _check(document: Any) -> None:
    """Raises ValueError that says which field of which row does not follow its rule."""
    _check_fields("the document", document, _DOCUMENT, _DOCUMENT_OPTIONAL)
    for n, row in enumerate(document["rows"], 1):
        where = f"row {n}"
        _check_fields(where, row, _ROW, _ROW_OPTIONAL)
        if timed(row):
            _check_fields(where, row, _TIMED, _TIMED_OPTIONAL)


def _check_fields(where: str, found: Any, required: Fields, optional: Fields) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object, got {reprlib.repr(found)}")
    for name, (words, holds) in {**required, **optional}.items():
        if name not in found:
            if name in required:
                raise ValueError(f"{where}, {name}: expected {words}, got nothing")
        elif not holds(found[name]):
            raise ValueError(f"{where}, {name}: expected {words}, got {reprlib.repr(found[name])}")


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
    extra, predicted = row.get("extra_bytes"), row.get("predicted_over_measured")
    return spread, "" if extra is None else size(extra), "" if predicted is None else ratio(predicted)


def _notes(document: Document) -> list[Text]:
    lines = []
    if document.get("exact") is False:
        lines.append(Text("tilefold failed a check: nothing was timed.", style="bold red"))
    for name, status, reason, cases in reasons(document):
        where = ", ".join(cases) if len(cases) <= 4 else f"{len(cases)} cases"
        lines.append(Text(f"{name} {status} ({where}): {reason}", style="dim"))
    return lines
