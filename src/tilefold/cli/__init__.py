"""The command line `tilefold`: one file per subcommand, which reads options and hands them on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

MISSING = "The command line needs typer and rich, which are not both installed: pip install 'tilefold[cli]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; `arguments` are those of the process unless they are given.

    Returns 0 if it did what it was asked for, 1 if a check failed, 2 if the input was wrong or a package is
    missing.
    """
    if find_spec("typer") is None or find_spec("rich") is None:
        print(MISSING, file=sys.stderr)
        return 2
    from .app import app

    try:
        app(sys.argv[1:] if arguments is None else list(arguments), prog_name="tilefold")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0
