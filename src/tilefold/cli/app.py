"""The application: which commands there are, and how an error leaves it.

A command is a module with a function `command`, whose signature typer reads, and optionally a dict `SETTINGS`
for its context. Modules import at the top only what reading the options takes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import tilefold
from tilefold.errors import TilefoldError

#: Name of each command and the module of this folder that holds it, in the order of the help text.
COMMANDS = (
    ("info", "info"),
    ("explain", "explain"),
    ("mask", "mask"),
    ("check", "check"),
    ("demo", "demo"),
    ("bench", "bench"),
    ("report", "report"),
    ("tune", "tune"),
)


def refusing(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command`, with errors of this library as one line on stderr and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except TilefoldError as error:
            line = " ".join(str(error).split())
            Console(stderr=True).print(Text(f"error: {line}", style="red"), soft_wrap=True)
            raise typer.Exit(2) from None

    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilefold {tilefold.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="tilefold",
    help="Exact, IO-aware attention for PyTorch: what a call costs, what a mask hides, what runs here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the application itself."""


for _name, _module in COMMANDS:
    _found = importlib.import_module(f"tilefold.cli.{_module}")
    app.command(_name, context_settings=getattr(_found, "SETTINGS", None))(refusing(_found.command))
