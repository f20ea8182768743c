"""`tilefold mask`: what a mask shows and hides, drawn and counted."""

from __future__ import annotations

import json as jsons
from typing import Annotated

import typer
from rich.console import Console


def command(
    mask: Annotated[
        str,
        typer.Argument(
            metavar="EXPR", help="The mask, such as 'causal() & window(255, 0)'. Lists are tensors."
        ),
    ],
    lengths: Annotated[str, typer.Option(help="Queries and keys: 512, or 512x1024.")] = "512",
    batch: Annotated[int, typer.Option(min=1, help="Batch elements of the call.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads of the call.")] = 1,
    b: Annotated[int, typer.Option("--b", min=0, help="The batch element that is shown.")] = 0,
    h: Annotated[int, typer.Option("--h", min=0, help="The query head that is shown.")] = 0,
    tile: Annotated[int, typer.Option(min=1, help="Queries and keys along the side of a tile.")] = 64,
    png: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also draw into this file, .png (needs matplotlib)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON and draw nothing.")] = False,
) -> None:
    """Draw a mask and its tiles, and count what they hold."""
    from tilefold.pictures import grid
    from tilefold.pictures import png as image
    from tilefold.pictures.mask import MaskPicture

    from . import expression
    from .files import output, writing

    target = output("png", png, ".png") if png is not None else None
    size = grid.Size(*expression.lengths(lengths), batch, heads, b, h)
    survey = grid.survey(expression.mask(mask), size, tile, mask.strip())
    if target is not None:
        with writing("png", target):
            image.save(survey, target)
    if json:
        typer.echo(jsons.dumps(survey.to_dict(), indent=2))
    else:
        Console(highlight=False).print(MaskPicture(survey))
