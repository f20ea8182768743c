"""`tilefold explain`: who would run a call, and what that would cost. Nothing is computed."""

from __future__ import annotations

import json as jsons
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    import torch

    from tilefold import Problem


def command(
    shapes: Annotated[
        list[str],
        typer.Argument(
            metavar="SHAPE...", help="BxHxLxD of q, and of k and v where they differ, such as 1x8x4096x64."
        ),
    ],
    mask: Annotated[str | None, typer.Option(help="A mask, such as 'causal() & window(255, 0)'.")] = None,
    dtype: Annotated[str, typer.Option(help="fp64, fp32, fp16 or bf16.")] = "bf16",
    device: Annotated[
        str | None,
        typer.Option(
            help="Where the tensors would lie: cpu or cuda; by default what --machine is, else cpu."
        ),
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="Whose figures to use, such as H100; by default this machine's.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="The backend to demand.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Cap of the scores.")] = None,
    dropout: Annotated[float, typer.Option(help="Rate of dropout, in [0, 1).")] = 0.0,
    alibi: Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes, one per query head.")] = False,
    bias: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="With a bias of this shape, such as 1x1x4096x4096.")
    ] = None,
    bias_gradient: Annotated[
        bool, typer.Option("--bias-gradient", help="The bias wants a gradient.")
    ] = False,
    sink: Annotated[bool, typer.Option("--sink", help="With a sink, one logit per query head.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
) -> None:
    """Explain a call: the plan, everybody's reasons, FLOPs, bytes, predicted time and memory."""
    import tilefold
    from tilefold.errors import ArgumentError

    from . import expression

    if bias_gradient and bias is None:
        raise ArgumentError("bias_gradient: expected --bias SHAPE beside it, got none")
    question = Question(expression.shapes(shapes), expression.dtype(dtype), _device(device, machine), backend)
    # The first question about a CPU measures it, which takes a while.
    with Console(stderr=True).status("Looking up the figures of this machine"):
        found = tilefold.explain(
            question.problem(softcap is not None, dropout > 0.0, bias is not None, sink, alibi),
            mask=None if mask is None else expression.mask(mask),
            softcap=softcap,
            dropout_p=dropout,
            backend=backend,
            machine=machine,
            **question.tensors(bias, bias_gradient, sink, alibi),
        )
    if mask is not None:
        # As it was typed: tensors do not write their values.
        found = replace(found, mask=mask.strip())
    if json:
        typer.echo(jsons.dumps(found.to_dict(), indent=2))
        return
    from tilefold.pictures.explanation import picture

    Console(highlight=False).print(picture(found))


def _device(name: str | None, machine: str | None) -> str:
    """The kind of device that was asked for, or that of the machine.

    Raises:
        ArgumentError: neither cpu nor cuda, not the machine's, or an unknown machine.
    """
    from tilefold.cost import hardware
    from tilefold.errors import ArgumentError

    if name not in (None, "cpu", "cuda"):
        raise ArgumentError(f"device: expected cpu or cuda, got {name!r}")
    if machine is None:
        return name or "cpu"
    found = hardware.find(machine).device
    if name not in (None, found):
        raise ArgumentError(f"device: expected {found} beside the machine {machine!r}, got {name!r}")
    return found


@dataclass(frozen=True)
class Question:
    """A call that nobody makes.

    Attributes:
        shapes: of q, k and v.
        dtype: of all tensors.
        device: kind of the device on which they would lie.
        backend: the backend asked for, or None.
    """

    shapes: tuple[tuple[int, int, int, int], ...]
    dtype: torch.dtype
    device: str
    backend: str | None

    def problem(self, *used: bool) -> Problem:
        """The call in metadata; `used` says which score options are, in the order of `Problem.options`."""
        from tilefold import Problem

        (B, Hq, Lq, D), (_, Hk, Lk, _), (_, _, _, Dv) = self.shapes
        names = ("softcap", "dropout", "bias", "sink", "alibi")
        options = tuple(name for name, is_used in zip(names, used, strict=True) if is_used)
        return Problem(
            B, Hq, Hk, Lq, Lk, D, Dv, self.dtype, self.device, options=options, backend=self.backend
        )

    def tensors(self, bias: str | None, bias_gradient: bool, sink: bool, alibi: bool) -> dict[str, Any]:
        """The tensors of the score options in use, without memory.

        Raises:
            ShapeError: `bias` is no shape.
        """
        import torch

        from tilefold.errors import ShapeError

        from . import expression

        found: dict[str, Any] = {}
        heads = self.shapes[0][1]
        if bias is not None:
            shape = expression.sizes(bias)
            if shape is None:
                raise ShapeError(f"bias: expected positive sizes such as 1x1x4096x4096, got {bias!r}")
            found["bias"] = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=bias_gradient)
        for name, wanted in (("sink", sink), ("alibi_slopes", alibi)):
            if wanted:
                found[name] = torch.empty(heads, dtype=self.dtype, device="meta")
        return found
