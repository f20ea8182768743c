"""`tilefold bench`: named cases, checked and then timed beside others."""

from __future__ import annotations

import json as jsons
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .files import output, writing


def command(
    case: Annotated[
        list[str] | None,
        typer.Argument(help="Names of cases, beginnings of names or globs; all of the device by default."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the cases of the device and stop.")] = False,
    device: Annotated[str, typer.Option(help="Where the tensors lie: cpu, cuda or cuda:N.")] = "cpu",
    contestants: Annotated[
        str | None, typer.Option(help="Names with commas between: tilefold, sdpa, standard, flex.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Time for the turns of one case and pass, all contestants.")
    ] = 3.0,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Leave out the backward pass.")
    ] = False,
    title: Annotated[str, typer.Option(help="Heading of the results.")] = "tilefold bench",
    json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write the results, or the list, here; - for stdout, without a table."
        ),
    ] = None,
) -> None:
    """Check cases and time them beside SDPA, plain PyTorch and FlexAttention.

    Exit code 1, and no times, if tilefold fails a check.
    """
    from tilefold.bench.cases import select
    from tilefold.bench.contestants import pick
    from tilefold.bench.report import table
    from tilefold.bench.run import Options, bench
    from tilefold.errors import ArgumentError

    if not math.isfinite(seconds):
        raise ArgumentError(f"seconds: expected a finite number, got {seconds}")
    check_device(device)
    cases = select(case or [], device)
    chosen = pick([name.strip() for name in contestants.split(",")] if contestants is not None else [])
    target = output("json", json) if json is not None and json != "-" else None
    if list_:
        listed = [{"case": case.name, "shape": case.shape, "about": case.about} for case in cases]
        _write(listed, target, json == "-")
        if json != "-":
            _print_list(listed)
        return
    options = Options(device=device, seconds=seconds, backward=not forward_only, title=title)
    with _progress() as progress:
        document = bench(cases, chosen, options, progress)
    _write(document, target, json == "-")
    if json != "-":
        Console(highlight=False).print(table(document))
    raise typer.Exit(0 if document["exact"] else 1)


def check_device(device: str) -> None:
    """Refuses a device that is not there, in one sentence."""
    import torch

    from tilefold.errors import DeviceError

    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdecimal())):
        raise DeviceError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"device: expected one that is here, got {device}; this PyTorch sees {torch.cuda.device_count()}"
        )


def _write(found: Any, target: Path | None, to_stdout: bool) -> None:
    """`found` as JSON into a file, to stdout, or nowhere."""
    text = jsons.dumps(found, indent=1) + "\n"
    if to_stdout:
        sys.stdout.write(text)
    if target is not None:
        with writing("json", target):
            target.write_text(text, encoding="utf-8")


def _print_list(listed: Iterable[dict[str, str]]) -> None:
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("case", "shape", "about"):
        grid.add_column(name, no_wrap=name != "about")
    for entry in listed:
        grid.add_row(*(Text(text) for text in entry.values()))
    Console(highlight=False).print(grid)


@contextmanager
def _progress() -> Iterator[Callable[[str, str, int, int], None]]:
    """A bar on stderr with one task per phase."""
    columns = (
        TextColumn("{task.description:<6}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[case]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks = {}

        def report(phase: str, case: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total, case=case)
            bar.update(tasks[phase], completed=done, case=case)

        yield report
        for task in tasks.values():
            bar.update(task, completed=bar.tasks[task].total, case="")
