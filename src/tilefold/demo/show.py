"""What the demonstration looks like: everything that draws, and nothing that computes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .probe import Cost
from .scaling import Row
from .train import Progress as Step
from .train import Training
from .verify import Comparison

BARS = "▁▂▃▄▅▆▇█"


class Show:
    """Draws on `console`, one method per thing that there is to see."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def title(self, machine: str) -> None:
        self.console.print(
            Panel(
                Text.assemble(
                    ("tilefold", "bold cyan"), "  exact, IO-aware attention for PyTorch\n", (machine, "dim")
                ),
                border_style="cyan",
                expand=False,
            )
        )

    def station(self, number: int, title: str, sentence: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{number}  {title}", align="left", style="cyan")
        self.console.print(sentence, style="dim")
        self.console.print()

    def end(self, seconds: float, proven: bool) -> None:
        self.console.print()
        if not proven:
            self.console.print("A comparison of station 2 does not hold.", style="bold red")
        self.console.print(f"{seconds:.0f} s in all", style="dim")

    @contextmanager
    def training(self) -> Iterator[TrainingBar]:
        """A progress bar for as long as the block runs."""
        columns = (
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("[dim]step[/] {task.fields[step]:>4}"),
            TextColumn("[dim]loss[/] [bold green]{task.fields[loss]}[/]"),
            TextColumn("[dim]{task.fields[rate]}[/]"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            yield TrainingBar(progress)

    def trained(self, training: Training) -> None:
        before, after = training.before, training.after
        curve = Text.assemble(
            ("loss of every step  ", "dim"),
            (sparkline(training.curve, 48), "green"),
            f"  {training.steps} steps",
        )
        held_out = Text.assemble(
            ("held-out files      ", "dim"),
            f"{before:.2f} → ",
            (f"{after:.2f}", "bold green"),
            f" nats per byte ({before / math.log(2):.2f} → {after / math.log(2):.2f} bits)",
        )
        self.console.print(curve, held_out, sep="\n")

    def comparisons(self, comparisons: Sequence[Comparison], parameters: int) -> None:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("relative difference")
        for name in ("loss", "gradients", "allowed"):
            table.add_column(name, justify="right")
        table.add_column("")
        for line in comparisons:
            verdict = "" if line.allowed is None else "[green]✓[/]" if line.holds else "[bold red]✗[/]"
            allowed = "" if line.allowed is None else f"{line.allowed:.1e}"
            table.add_row(line.what, f"{line.loss:.1e}", f"{line.gradients:.1e}", allowed, verdict)
        self.console.print(table)
        self.console.print(
            f"gradients: the largest difference of any element of the {parameters} parameters' gradients, "
            "over the largest element of the same gradient",
            style="dim",
        )

    def scaling(self, rows: Iterator[Row], budget: int) -> list[Row]:
        """Draws `rows` as a table that grows, and returns them all."""
        seen: list[Row] = []
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            for row in rows:
                seen.append(row)
                live.update(self._scaling_table(seen, budget), refresh=True)
        self.console.print(self._scaling_table(seen, budget))
        if any(not outcome.made for row in seen for outcome in row.outcomes):
            self.console.print("* predicted from the row above, not run", style="dim")
        return seen

    def _scaling_table(self, rows: Sequence[Row], budget: int) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("context", justify="right")
        for outcome in rows[0].outcomes:
            table.add_column(outcome.name, justify="right", min_width=9)
            table.add_column("peak", justify="right", min_width=9)
        for row in rows:
            cells = [f"{row.length:,}"]
            for outcome in row.outcomes:
                if outcome.made:
                    style = "bold green" if outcome.name == "tilefold" else ""
                    cells += [
                        _style(seconds(outcome.cost.seconds), style),
                        _style(size(outcome.cost.bytes), style),
                    ]
                elif outcome.cost.bytes > budget:
                    cells += ["[red]does not fit[/]", f"[red]{size(outcome.cost.bytes)} *[/]"]
                else:
                    cells += ["[yellow]too slow[/]", f"[yellow]{seconds(outcome.cost.seconds)} *[/]"]
            table.add_row(*cells)
        return table

    def plain_causal(self, length: int, costs: dict[str, Cost]) -> None:
        parts = ", ".join(
            f"{name} {seconds(cost.seconds)} and {size(cost.bytes)}" for name, cost in costs.items()
        )
        self.console.print(
            f"Without documents SDPA knows the mask by name. Plain causal at {length:,}: {parts}.",
            style="dim",
        )

    def text(self, characters: Iterator[str]) -> str:
        """Prints characters as they come, and returns them all."""
        written = ""
        for character in characters:
            written += character
            self.console.print(Text(character, style="green"), end="")
        self.console.print()
        return written


class TrainingBar:
    """Feeds a progress bar from training."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=1.0, step=0, loss="", rate="")

    def __call__(self, step: Step) -> None:
        self._progress.update(
            self._task,
            completed=step.done,
            step=step.step,
            loss=f"{step.smooth:.3f}",
            rate=f"{step.bytes_per_second / 1000:.1f} kB/s",
        )


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a row of at most `width` bars, each the mean of its share."""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def seconds(value: float) -> str:
    if value >= 0.9995:
        return f"{value:.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.00995 else f"{value * 1e3:.1f} ms"


def size(count: float) -> str:
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**20:.1f} MiB"


def _style(text: str, style: str) -> str:
    return f"[{style}]{text}[/]" if style else text
