"""`tilefold demo`: the demonstration, which reads its own options."""

from __future__ import annotations

from typing import Annotated

import typer

SETTINGS = {"ignore_unknown_options": True, "help_option_names": []}


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTIONS]", help="Options of the demonstration; --help lists them."),
    ] = None,
) -> None:
    """Train, verify, measure and sample a small model on this machine; `tilefold demo --help` says more."""
    from tilefold.demo.__main__ import main

    raise typer.Exit(main(arguments or []))
