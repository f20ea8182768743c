"""`tilefold report`: results of `tilefold bench` as a table, a picture or a page."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .files import output, writing


def command(
    file: Annotated[list[Path], typer.Argument(help="Results that `tilefold bench --json` wrote.")],
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write one page of HTML here.")] = None,
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Write a picture here (.png).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON list.")] = False,
) -> None:
    """Print results, and write them as a page or a picture."""
    from tilefold.bench.page import page
    from tilefold.bench.picture import png as picture
    from tilefold.bench.report import load, table
    from tilefold.errors import ArgumentError

    html_file = output("html", html) if html is not None else None
    png_file = output("png", png, ".png") if png is not None else None
    documents = [load(path) for path in file]
    if png_file is not None and len(documents) > 1:
        raise ArgumentError(f"png: expected one FILE of results, got {len(documents)}")
    if html_file is not None:
        with writing("html", html_file):
            html_file.write_text(page(documents), encoding="utf-8")
    if png_file is not None:
        with writing("png", png_file):
            picture(documents[0], png_file)
    if json:
        typer.echo(jsons.dumps(documents, indent=1))
        return
    console = Console(highlight=False)
    for document in documents:
        console.print(table(document))
