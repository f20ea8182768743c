"""`tilefold tune`: the tile sizes of this machine, measured and kept."""

from __future__ import annotations

import json as jsons
import math
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .files import output, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tilefold.bench.hopper_entries import AnyEntry
    from tilefold.bench.tune import Tuning
    from tilefold.bench.tune_kernels import Found, KernelTuning

Value = TypeVar("Value")


def command(
    device: Annotated[str, typer.Option(help="Which device: cpu, cuda or cuda:N.")] = "cpu",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Time for each case of the fold, all candidates.")
    ] = 4.0,
    kernels: Annotated[
        str | None,
        typer.Option(
            help="Which kernels of a GPU, with commas between: forward, queries, dk, dv, keys, bias, hopper."
        ),
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Which head sizes of their table: 64,128.")] = None,
    bits: Annotated[str | None, typer.Option(help="Which widths of dtypes: 16 (the default), 32.")] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            help="Kinds of entries: any, full, short, rows, cols, bits, bias; of hopper full, short full, "
            "band, short band, window, rows, cols, bits, bias. Those of the table by default."
        ),
    ] = None,
    limit: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds for the kernels of a GPU; without end by default.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and keep nothing.")] = False,
    write: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a whole table as the library ships it, for maintainers."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, the progress to stderr.")
    ] = False,
) -> None:
    """Try tile sizes on this machine and keep the fastest, for every later process of this user.

    First the tiles of the eager backend, then, on a GPU, those of its kernels: hours for all of them. Every
    candidate is checked before it is timed. Figures that explain uses for this CPU are measured anew at its
    next question.
    """
    from tilefold.bench.tune import tune, whole_table
    from tilefold.bench.tune_kernels import tune_kernels
    from tilefold.errors import ArgumentError

    from .bench import check_device

    for name, number in (("seconds", seconds), ("limit", limit)):
        if number is not None and not math.isfinite(number):
            raise ArgumentError(f"{name}: expected a finite number, got {number}")
    check_device(device)
    options = {"kernels": kernels, "heads": heads, "bits": bits, "kinds": kinds, "limit": limit}
    entries: Sequence[AnyEntry] = []
    if device.startswith("cuda"):
        entries = _entries(device, kernels, heads, bits, kinds)
    elif given := [name for name, value in options.items() if value is not None]:
        raise ArgumentError(f"{given[0]}: expected only where there are kernels, on cuda, got {device}")
    target = output("write", write) if write is not None else None
    columns = (
        TextColumn("trying"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.description}"),
    )
    tuning = None
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def reporter() -> Callable[[str, int, int], None]:
            task = bar.add_task("", total=None)
            return lambda what, done, total: bar.update(task, completed=done, total=total, description=what)

        report = reporter()
        found = tune(device, seconds, report, write=not dry_run)
        report("", len(found.seconds), len(found.seconds))
        if entries:
            report = reporter()
            tuning = tune_kernels(
                device, entries, math.inf if limit is None else limit, report, write=not dry_run
            )
            report("", len(tuning.entries), len(entries))
    if target is not None:
        with writing("write", target):
            target.write_text(whole_table(device, found, tuning), encoding="utf-8")
    if json:
        both = found.to_dict() | ({} if tuning is None else {"kernels": tuning.to_dict()})
        typer.echo(jsons.dumps(both, indent=1))
        return
    _print(found, dry_run)
    if tuning is not None:
        _print_kernels(tuning, dry_run)


def _entries(
    device: str, kernels: str | None, heads: str | None, bits: str | None, kinds: str | None
) -> Sequence[AnyEntry]:
    """The entries that the options choose."""
    from tilefold.bench.hopper_entries import choose
    from tilefold.planning import tuned

    return choose(
        tuned.architecture(device),
        kernels=_parts("kernels", kernels, str),
        heads=_parts("heads", heads, int),
        bits=_parts("bits", bits, int) or [16],
        kinds=_parts("kinds", kinds, str),
    )


def _parts(name: str, text: str | None, convert: Callable[[str], Value]) -> list[Value]:
    """What stands between commas; nothing without the option."""
    from tilefold.errors import ArgumentError

    if text is None:
        return []
    try:
        return [convert(part.strip()) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{name}: expected whole numbers with commas between, got {text!r}") from None


def _kept(path: str, dry_run: bool) -> str:
    return "kept nothing" if dry_run else f"kept in {path}" if path else "could not be kept"


def _print(found: Tuning, dry_run: bool) -> None:
    console = Console(highlight=False)
    grid = Table(box=None, pad_edge=False, header_style="dim")
    grid.add_column("tile elements", justify="right")
    for case in found.seconds:
        grid.add_column(case, justify="right")
    grid.add_column("of the best", justify="right")
    for candidate in next(iter(found.seconds.values())):
        cells = [f"{times[candidate] * 1e3:.1f} ms" for times in found.seconds.values()]
        style = "bold green" if candidate == found.best else ""
        grid.add_row(f"{candidate:,}", *cells, f"{found.relative(candidate):.2f} x", style=style)
    console.print(grid)
    line = f"{found.architecture}: {found.best:,} elements, was {found.before:,}; "
    console.print(line + _kept(found.path, dry_run), style="dim")


def _print_kernels(found: KernelTuning, dry_run: bool) -> None:
    """A row per entry, then every candidate that was wrong or failed."""
    console = Console(highlight=False)
    grid = Table(box=None, pad_edge=False, header_style="dim")
    grid.add_column("entry", no_wrap=True)
    for name in ("old sizes", "new sizes"):
        grid.add_column(name)
        grid.add_column("time", justify="right")
    for name in ("compiled in", "timed", "wrong", "did not fit", "untried"):
        grid.add_column(name, justify="right")
    for one in found.entries:
        grid.add_row(
            one.entry.name.removeprefix("triton/"),
            one.entry.in_short(one.old),
            _time(one.old_seconds),
            one.entry.in_short(one.best) if one.best != one.old else "the same",
            _time(one.seconds),
            "" if one.compile_seconds is None else f"{one.compile_seconds:.1f} s",
            str(one.count("timed")),
            str(one.count("wrong")),
            str(one.count("failed") + one.count("large")),
            str(one.count("left")),
            style="bold green" if one.best != one.old else "",
        )
    console.print(grid)
    for one in found.entries:
        _print_reasons(console, one)
    if found.left:
        console.print(f"no time was left for {', '.join(found.left)}", style="yellow", markup=False)
    count = len(found.values)
    line = f"{found.architecture}: {count} entr{'y' if count == 1 else 'ies'} measured; "
    console.print(line + _kept(found.path, dry_run), style="dim")


def _print_reasons(console: Console, one: Found) -> None:
    for trial in one.trials:
        if trial.reasons:
            style = "red" if trial.status == "wrong" else "dim"
            line = f"{trial.status}: {one.entry.name}, {one.entry.in_short(trial.sizes)}: {trial.reasons[0]}"
            console.print(line, style=style, markup=False)
    if one.seconds is None:
        console.print(f"{one.entry.name}: no candidate was right", style="red", markup=False)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f} ms"
