"""Results as one HTML page that needs nothing else: charts as inline SVG, a table that sorts itself."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from string import Template

from .contestants import OURS
from .report import PASSES, beside_ours, contestants, groups, rate, ratio, reasons, seconds, size, timed
from .run import Document, Row

_COLUMNS = (
    ("case", "text"), ("pass", "text"), ("contestant", "text"), ("time", "number"), ("quartiles", "number"),
    ("beside tilefold", "number"), ("extra memory", "number"), ("predicted", "number"),
    ("predicted / measured", "number"), ("work per time", "number"), ("error / budget", "number"),
)  # fmt: skip


def page(documents: Sequence[Document]) -> str:
    """The whole page."""
    titles = [str(document.get("title", "tilefold bench")) for document in documents]
    template = Template(files("tilefold.bench").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=_text(" and ".join(dict.fromkeys(titles))),
        body="\n".join(_section(document) for document in documents),
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _section(document: Document) -> str:
    """One document: header, charts, table, refusals, method."""
    names = contestants(document)
    parts = [_header(document), _banner(document), _tiles(document), _legend(document, names)]
    for what in PASSES:
        found = [(case, rows) for case, which, rows in groups(document) if which == what]
        parts.append(_chart(f"Time, {what}", "median", "predicted_seconds", found, names))
        parts.append(_chart(f"Extra memory, {what}", "extra_bytes", "predicted_extra_bytes", found, names))
    parts += [_table(document), _refusals(document), _method(document)]
    return f"<section>{''.join(parts)}</section>"


def _header(document: Document) -> str:
    versions = document.get("versions", {})
    facts = {"machine": document.get("machine"), "date": document.get("date"), **versions}
    items = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items() if value
    )
    title = _text(document.get("title", "tilefold bench"))
    return f'<header><h1>{title}</h1><dl class="facts">{items}</dl></header>'


def _banner(document: Document) -> str:
    if document.get("exact") is not False:
        return ""
    return '<p class="banner" role="alert">tilefold failed a check. Nothing was timed.</p>'


def _tiles(document: Document) -> str:
    """A few numbers that say how it went."""
    beside: dict[str, list[float]] = {}
    predicted: list[float] = []
    for _, _, rows in groups(document):
        for name, row in rows.items():
            value = beside_ours(row, rows)
            if name != OURS and value is not None:
                beside.setdefault(name, []).append(value)
            known = row.get("predicted_over_measured")
            if name == OURS and timed(row) and known is not None:
                predicted.append(known)
    tiles = [(str(len({row["case"] for row in document["rows"]})), "cases")]
    tiles += [
        (
            ratio(statistics.median(found)),
            f"median of {name}'s time over tilefold's, {len(found)} comparisons",
        )
        for name, found in beside.items()
    ]
    if predicted:
        tiles.append((ratio(statistics.median(predicted)), "median of predicted over measured time"))
    cells = "".join(f"<div><b>{_text(a)}</b><span>{_text(b)}</span></div>" for a, b in tiles)
    return f'<div class="tiles">{cells}</div>'


def _legend(document: Document, names: Sequence[str]) -> str:
    about = document.get("contestants", {})
    items = "".join(
        f'<li><i class="c{n}"></i><b>{_text(name)}</b> <span>{_text(about.get(name, ""))}</span></li>'
        for n, name in enumerate(names)
    )
    ring = '<li><i class="ring"></i><b>predicted</b> <span>before the run, from the cost model</span></li>'
    return f'<ul class="legend">{items}{ring}</ul>'


# Charts. Horizontal positions are percentages, so that text keeps its size on a narrow screen.


class _Scale:
    """Values to percentages, on a log scale between powers of ten."""

    def __init__(self, values: Iterable[float]) -> None:
        known = [value for value in values if value > 0]
        self.low = math.floor(math.log10(min(known)))
        self.high = max(math.ceil(math.log10(max(known))), self.low + 1)

    def __call__(self, value: float) -> float:
        if value <= 0:
            return 0.0
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return 100 * min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        step = max(1, math.ceil((self.high - self.low) / 5))
        return [10.0**n for n in range(self.low, self.high + 1, step)]


def _chart(
    title: str, key: str, predicted: str, found: Sequence[tuple[str, dict[str, Row]]], names: Sequence[str]
) -> str:
    """One block of bars per case; nothing if nothing was timed."""
    rows = [row for _, by_name in found for row in by_name.values() if timed(row)]
    keys = (key, predicted, "low", "high") if key == "median" else (key, predicted)
    values = [row[k] for row in rows for k in keys if row.get(k) is not None]
    if not any(value > 0 for value in values):
        return ""
    scale, words = _Scale(values), _power_of_ten if key == "median" else _decimal_size
    labels = "".join(
        f'<text x="{scale(tick):.2f}%" y="11" text-anchor="{_anchor(scale(tick))}">{words(tick)}</text>'
        for tick in scale.ticks()
    )
    axis = (
        f'<div class="bar axis"><span></span><svg height="14" aria-hidden="true">{labels}</svg>'
        "<span></span></div>"
    )
    blocks = "".join(_block(case, by_name, names, scale, key, predicted) for case, by_name in found)
    opened = " open" if key == "median" else ""
    return f'<details class="chart"{opened}><summary>{_text(title)}</summary>{axis}{blocks}</details>'


def _anchor(percent: float) -> str:
    return "start" if percent < 2 else "end" if percent > 98 else "middle"


def _power_of_ten(value: float) -> str:
    """Powers of ten in seconds."""
    for unit, step in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= 0.9995 * step:
            return f"{value / step:,.0f} {unit}"
    return f"{value / 1e-9:.0f} ns"


def _decimal_size(value: float) -> str:
    """Powers of ten in bytes."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= step:
            return f"{value / step:,.0f} {unit}"
    return f"{value:.0f} B"


def _block(
    case: str, rows: dict[str, Row], names: Sequence[str], scale: _Scale, key: str, predicted: str
) -> str:
    row = next(iter(rows.values()))
    about = f"{row.get('about', '')} · {row.get('shape', '')}".strip(" ·")
    bars = "".join(
        _bar(n, name, rows[name], scale, key, predicted)
        for n, name in enumerate(names)
        if timed(rows.get(name)) and rows[name].get(key) is not None
    )
    return (
        f'<div class="case" data-case="{_text(case)}"><h3>{_text(case)} <small>{_text(about)}</small></h3>'
        f"{bars}</div>"
    )


def _bar(n: int, name: str, row: Row, scale: _Scale, key: str, predicted: str) -> str:
    """Name, bar with quartiles and prediction, value."""
    words = seconds if key == "median" else size
    lines = "".join(
        f'<line class="grid" x1="{scale(t):.2f}%" x2="{scale(t):.2f}%" y1="0" y2="18"/>'
        for t in scale.ticks()
    )
    bar = f'<rect class="c{n}" y="3" height="12" rx="2" width="{max(scale(row[key]), 0.4):.2f}%"/>'
    label = f"{name}: {words(row[key])}"
    if key == "median":
        low, high = scale(row["low"]), scale(row["high"])
        bar += f'<line class="quartiles" x1="{low:.2f}%" x2="{high:.2f}%" y1="9" y2="9"/>'
        label += f", quartiles {words(row['low'])} to {words(row['high'])}"
    if row.get(predicted) is not None:
        bar += f'<circle class="ring" cx="{scale(row[predicted]):.2f}%" cy="9" r="4.5"/>'
        label += f", predicted {words(row[predicted])}"
    return (
        f'<div class="bar"><span>{_text(name)}</span><svg height="18" role="img" aria-label="{_text(label)}">'
        f"<title>{_text(label)}</title>{lines}{bar}</svg><span>{words(row[key])}</span></div>"
    )


# The table and the text below it.


def _table(document: Document) -> str:
    head = "".join(
        f'<th scope="col" class="{kind}"><button type="button">{name}</button></th>'
        for name, kind in _COLUMNS
    )
    body = "".join(_line(row, rows) for _, _, rows in groups(document) for row in rows.values() if timed(row))
    if not body:
        return ""
    return (
        '<h2>All figures</h2><p class="tools"><label>Filter <input type="search" placeholder="case"></label> '
        '<output></output></p><div class="scroll" tabindex="0"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _line(row: Row, rows: dict[str, Row]) -> str:
    """A line of the table; `data-v` holds what it is sorted by."""
    beside = beside_ours(row, rows)
    known = row.get("predicted_seconds")
    cells: list[tuple[object, str]] = [
        (row["case"], row["case"]),
        (row["pass"], row["pass"]),
        (row["contestant"], row["contestant"]),
        (row["median"], seconds(row["median"])),
        (row["low"], f"{seconds(row['low'])} to {seconds(row['high'])}"),
        _cell(beside, ratio),
        _cell(row.get("extra_bytes"), size),
        _cell(known, seconds),
        _cell(row.get("predicted_over_measured"), ratio),
        _cell(row.get("flops_per_second"), rate),
        _cell(row.get("error_over_budget"), lambda x: f"{x:.2f}"),
    ]
    kinds = [kind for _, kind in _COLUMNS]
    inner = "".join(
        f'<td class="{kind}" data-v="{_text(value)}">{_text(shown)}</td>'
        for (value, shown), kind in zip(cells, kinds, strict=True)
    )
    mark = ' class="ours"' if row["contestant"] == OURS else ""
    return f'<tr{mark} data-case="{_text(row["case"])}">{inner}</tr>'


def _cell(value: float | None, words: Callable[[float], str]) -> tuple[object, str]:
    return ("", "") if value is None else (value, words(value))


def _refusals(document: Document) -> str:
    """Who did not run what, and why."""
    items = "".join(
        f"<li><b>{_text(name)}</b> <em>{_text(status)}</em> {_text(reason)}"
        f"<small>{_text(', '.join(cases))}</small></li>"
        for name, status, reason, cases in reasons(document)
    )
    return f'<h2>What was not timed, and why</h2><ul class="reasons">{items}</ul>' if items else ""


def _method(document: Document) -> str:
    cuda = document.get("device") == "cuda"
    clock = (
        "Time is taken between two events on the device, after its L2 cache was filled with something else."
        if cuda
        else "Time is wall time."
    )
    sentences = (
        "Every case was checked before anything was timed: a short version of it, results and gradients, "
        "against float64; and at full size all rows against float64 where that is feasible, else eight "
        "groups of them, and all of the output against tilefold's. Where the two differ, float64 decides.",
        "The error budget is twice the error of plain PyTorch in the same dtype plus one rounding unit; "
        "tilefold must stay within it, a rival within four of it.",
        "Contestants take turns on several sets of inputs in rotation, after a round that does not count. "
        "Bars show the median, the fine line the quartiles.",
        clock,
        "Masks, dense tensors and compiled code are made before the clock starts.",
        "Extra memory is the most that PyTorch's allocator held beyond arguments and results.",
        "Work per time counts the products on tiles that somebody sees, for everybody.",
    )
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return f'<h2>How it was measured</h2><ul class="method">{items}</ul>'
