"""`tilefold check`: the laws of attention, held against the backends of this machine."""

from __future__ import annotations

import json as jsons
import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tilefold.testing.cases import Case
    from tilefold.testing.law import Law

# Failures that are printed per law; the rest is counted.
_SHOWN = 5
# Letters of a message that are printed; --json has all of them.
_LETTERS = 240
# Cases of a law at most, so that all laws together take about a minute.
_QUICK = 200


def command(
    backend: Annotated[
        str | None, typer.Option(help="The backend to check; by default every one here.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where its tensors lie: cpu or cuda.")] = "cpu",
    law: Annotated[
        list[str] | None, typer.Option(help="A law to check, and no other; may be repeated.")
    ] = None,
    cases: Annotated[
        int | None,
        typer.Option(min=1, help="Cases of each law at most; by default as many as take a minute."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All cases, which takes long.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, the progress to stderr.")
    ] = False,
) -> None:
    """Run the conformance laws on this machine. Exit code 1 if one is broken."""
    from tilefold.errors import ArgumentError

    if full and cases is not None:
        raise ArgumentError(f"cases: expected none beside --full, got {cases}")
    names, laws = _backends(backend), _laws(law or [])
    _check_device(device)
    chosen = [(each, _chosen(each, cases, full)) for each in laws]
    console = Console(stderr=json, highlight=False)
    with _bar(console) as bar:
        tallies = [tally for name in names for tally in _run(name, device, chosen, bar)]
    broken = any(tally.failures for tally in tallies)
    if json:
        typer.echo(
            jsons.dumps(
                {"device": device, "ok": not broken, "laws": [x.to_dict() for x in tallies]}, indent=2
            )
        )
    else:
        _print(console, tallies)
    raise typer.Exit(int(broken))


@dataclass
class Tally:
    """What came of the cases of one law on one backend. `failures` are pairs of case and message."""

    backend: str
    law: str
    passed: int = 0
    declined: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "backend": self.backend,
            "law": self.law,
            "passed": self.passed,
            "declined": self.declined,
            "failed": len(self.failures),
            "failures": [{"case": case, "message": message} for case, message in self.failures],
        }


def _backends(name: str | None) -> list[str]:
    """The backend that was asked for, or all that are installed."""
    from tilefold import ops
    from tilefold.errors import ArgumentError, BackendError
    from tilefold.planning.backend import KNOWN_BACKENDS

    if name is None:
        return [known for known in KNOWN_BACKENDS if not isinstance(ops.load(known), str)]
    if name not in KNOWN_BACKENDS:
        raise ArgumentError(f"backend: expected one of {', '.join(KNOWN_BACKENDS)}, got {name!r}")
    found = ops.load(name)
    if isinstance(found, str):
        raise BackendError(f"backend: expected one that is installed, got {name!r}: {found}", (found,))
    return [name]


def _laws(names: list[str]) -> list[Law]:
    """The laws that were asked for, or all."""
    from tilefold.errors import ArgumentError
    from tilefold.testing import conformance

    found = {law.name: law for law in conformance.laws()}
    for name in names:
        if name not in found:
            raise ArgumentError(f"law: expected one of {', '.join(found)}, got {name!r}")
    return [found[name] for name in dict.fromkeys(names)] or list(found.values())


def _check_device(device: str) -> None:
    import torch

    from tilefold.errors import DeviceError

    if device not in ("cpu", "cuda"):
        raise DeviceError(f"device: expected cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device: expected one that is here, got cuda, of which this PyTorch sees none")


def _chosen(law: Law, most: int | None, full: bool) -> list[Case]:
    """All cases of a law, or a seeded choice of `most` of the grid's; by default as many as take seconds."""
    from tilefold.testing import conformance

    if full:
        return conformance.cases(law, full=True)
    most = min(law.limit or _QUICK, _QUICK) if most is None else most
    found = [case for case in conformance.cases() if law.applies(case)]
    return found if most >= len(found) else random.Random(law.name).sample(found, most)


def _run(backend: str, device: str, chosen: list[tuple[Law, list[Case]]], bar: Progress) -> Iterator[Tally]:
    """Each law on `backend`, one tally after the other."""
    task = bar.add_task(backend, total=sum(len(cases) for _, cases in chosen), law="")
    for law, cases in chosen:
        tally = Tally(backend, law.name)
        for case in cases:
            bar.update(task, law=law.name)
            _judge(tally, law, case, device)
            bar.advance(task)
        yield tally


def _judge(tally: Tally, law: Law, case: Case, device: str) -> None:
    """Hold one law against one case. Whatever a backend raises is a finding, and the run goes on."""
    from tilefold.testing import conformance

    try:
        declined = bool(conformance.why_not(case, tally.backend, device))
        conformance.run(law, case, tally.backend, device)
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        # The budget's message begins with what the line has said already.
        message = str(error).removeprefix(f"{law.name}, {case.name}: ")
        tally.failures.append((case.name, kind + " ".join(message.split())))
    else:
        tally.declined += declined
        tally.passed += not declined


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[law]}"),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print(console: Console, tallies: list[Tally]) -> None:
    """A table of the counts, and the failures."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("backend", style="dim")
    table.add_column("law")
    for name in ("passed", "declined", "failed"):
        table.add_column(name, justify="right")
    for tally in tallies:
        failed = Text(str(len(tally.failures)), style="bold red" if tally.failures else "")
        table.add_row(tally.backend, tally.law, str(tally.passed), str(tally.declined), failed)
    console.print(table)
    for tally in tallies:
        for case, message in tally.failures[:_SHOWN]:
            console.print(
                Text.assemble(
                    ("✗ ", "bold red"), f"{tally.law}, {case}: {textwrap.shorten(message, _LETTERS)}"
                )
            )
        if len(tally.failures) > _SHOWN:
            console.print(f"  and {len(tally.failures) - _SHOWN} more of {tally.law}", style="dim")
    passed, declined = (
        sum(counts) for counts in zip(*((x.passed, x.declined) for x in tallies), strict=True)
    )
    failed = sum(len(tally.failures) for tally in tallies)
    if failed:
        console.print(f"{failed} of {passed + declined + failed} checks failed", style="bold red")
    else:
        rest = f", {declined} declined in the words of the backend" if declined else ""
        console.print(f"{passed} checks passed{rest}", style="bold green")
