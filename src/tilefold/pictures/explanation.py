"""What is known about a call before it runs, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tilefold.cost.estimate import Estimate
from tilefold.cost.units import flops, percent, seconds, size
from tilefold.planning.explanation import Explanation, TileCount

from .grid import EMPTY, FULL, PARTIAL
from .palette import STATES, code

_BAR = 48
# Tensors in the list of traffic: those that move the most.
_TENSORS = 6
_GLYPHS = {FULL: "█", PARTIAL: "▒", EMPTY: "░"}
_SKIPPED = "grey50"


def picture(found: Explanation) -> RenderableType:
    """All of an explanation, as something that rich prints."""
    parts: list[RenderableType] = [_call(found), _tiles(found.tiles), _costs(found)]
    if found.refusals:
        reasons = [(name, reason) for name, all_of in found.refusals for reason in all_of]
        parts.append(_listed("Other backends", reasons))
    if found.advice:
        parts.append(_listed("Advice", [("-", sentence) for sentence in found.advice]))
    return Group(*parts)


def _call(found: Explanation) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in (
        ("call", Text(found.call)),
        ("mask", Text(f"{found.mask} (lowered to {found.form})")),
        ("machine", Text.assemble(found.machine, (f" ({found.doubt})" if found.doubt else "", "yellow"))),
        ("backend", Text.assemble((found.backend, "bold green"), f": {found.how}")),
    ):
        table.add_row(name, value)
    return Panel(table, title="explain", title_align="left", border_style="cyan")


def _tiles(tiles: TileCount) -> RenderableType:
    """A bar of the tiles by state, and their numbers."""
    skipped = tiles.total - tiles.visited
    parts = ((FULL, "full", tiles.full), (PARTIAL, "partial", tiles.partial), (EMPTY, "skipped", skipped))
    bar, legend = Text(), Text()
    for (state, name, count), width in zip(parts, _widths([n for _, _, n in parts], _BAR), strict=True):
        style = _SKIPPED if state == EMPTY else code(STATES[state])
        bar.append(_GLYPHS[state] * width, style)
        legend.append(_GLYPHS[state] + " ", style)
        legend.append(f"{count:,} {name}   ")
    head = Text.assemble(
        ("Tiles", "bold"),
        f"  {tiles.total:,} of {tiles.rows} x {tiles.keys}; "
        f"visited ones hold {percent(tiles.share)} of the elements",
    )
    return Padding(Group(head, bar, legend), (1, 0, 0, 1))


def _widths(counts: list[int], width: int) -> list[int]:
    """`width` characters in the ratio of `counts`; what is there gets at least one."""
    total = sum(counts)
    found = [max(1, round(width * n / total)) if n else 0 for n in counts]
    largest = max(range(len(found)), key=lambda at: found[at])
    found[largest] += width - sum(found) if total else 0
    return found


def _costs(found: Explanation) -> RenderableType:
    """Both passes side by side."""
    passes = (found.forward, found.backward)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("Predicted", "forward", "backward"):
        table.add_column(name, justify="left" if name == "Predicted" else "right", no_wrap=True)

    def row(name: str, values: Iterable[str], style: str | None = None) -> None:
        table.add_row(name, *values, style=style)

    row("time", (seconds(x.seconds) for x in passes), "bold green")
    row("bound by", (x.wall for x in passes))
    for wall in dict.fromkeys([*found.forward.shares, *found.backward.shares]):
        times = (seconds(x.shares[wall]) if wall in x.shares else "" for x in passes)
        row(f"  {wall} alone", times, "dim")
    row("FLOPs", (flops(x.flops) for x in passes))
    row("bytes moved", (size(x.bytes) for x in passes))
    for name in _busiest(passes):
        moved = (size(x.traffic[name]) if name in x.traffic else "" for x in passes)
        row(f"  of {name}", moved, "dim")
    row("bytes at least", (size(found.bound_bytes), ""))
    row("intensity", (f"{x.intensity:,.1f} FLOP/byte" for x in passes))
    row("extra memory", (size(x.extra_bytes) for x in passes))
    row("results", (size(x.result_bytes) for x in passes))
    return Padding(table, (1, 0, 0, 1))


def _busiest(passes: tuple[Estimate, Estimate]) -> list[str]:
    """The tensors that move the most bytes, in both passes together."""
    names = dict.fromkeys(name for x in passes for name in x.traffic)
    total = {name: sum(x.traffic.get(name, 0.0) for x in passes) for name in names}
    return sorted((name for name in names if total[name] > 0), key=lambda name: -total[name])[:_TENSORS]


def _listed(title: str, entries: list[tuple[str, str]]) -> RenderableType:
    """Sentences below a title, each with what it belongs to in front of it."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    before = ""
    for name, sentence in entries:
        table.add_row("" if name == before and name != "-" else name, Text(sentence))
        before = name
    return Padding(Group(Text(title, style="bold"), table), (1, 0, 0, 1))
