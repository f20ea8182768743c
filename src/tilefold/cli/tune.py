"""`tilefold tune`: the tile sizes of this machine, measured and kept."""

from __future__ import annotations

import json as jsons
import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from tilefold.bench.tune import Tuning


def command(
    device: Annotated[str, typer.Option(help="Which device: cpu, cuda or cuda:N.")] = "cpu",
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for each case, all candidates.")] = 4.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and keep nothing.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, the progress to stderr.")
    ] = False,
) -> None:
    """Try tile sizes on this machine and keep the fastest, for every later process of this user.

    Figures that explain uses for this CPU are measured anew at its next question.
    """
    from tilefold.bench.tune import tune
    from tilefold.errors import ArgumentError

    from .bench import check_device

    if not math.isfinite(seconds):
        raise ArgumentError(f"seconds: expected a finite number, got {seconds}")
    check_device(device)
    columns = (
        TextColumn("trying"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def report(case: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=case)

        found = tune(device, seconds, report, write=not dry_run)
        bar.update(task, completed=len(found.seconds), description="")
    if json:
        typer.echo(jsons.dumps(found.to_dict(), indent=1))
    else:
        _print(found, dry_run)


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
    kept = "kept nothing" if dry_run else f"kept in {found.path}" if found.path else "could not be kept"
    console.print(f"{found.architecture}: {found.best:,} elements, was {found.before:,}; {kept}", style="dim")
