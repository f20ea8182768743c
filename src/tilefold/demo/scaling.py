"""Time and memory of one attention layer, forward and backward, as the context grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import tilefold
from tilefold import masks

from .probe import Cost, measure
from .standard import sdpa, standard

HEADS = 2
HEAD_DIM = 64
DOCUMENT = 1024
FIRST = 1024
# A call for which more than this is predicted is not made.
PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class Outcome:
    """What one implementation did at one length.

    Attributes:
        name: `standard`, `SDPA` or `tilefold`.
        cost: measured, or predicted where the call was not made.
        made: whether the call was made.
    """

    name: str
    cost: Cost
    made: bool


@dataclass(frozen=True)
class Row:
    length: int
    outcomes: list[Outcome]


def scaling(longest: int, budget: int, device: torch.device) -> Iterator[Row]:
    """Yields a row for 1,024, 2,048, ... up to `longest` tokens.

    The mask is of the kind used in training: documents of 1,024 tokens, causal within each. Standard
    attention and SDPA are given it as a dense matrix that is made beforehand: making it is not counted in
    their time, holding it is counted in their memory. What is predicted to need more than `budget` bytes is
    left out; needs grow fourfold per row for the quadratic two and twofold for tilefold.
    """
    predictions: dict[str, Cost] = {}
    length = FIRST
    while length <= longest:
        outcomes = []
        for name, attend, is_dense in (
            ("standard", standard, True),
            ("SDPA", sdpa, True),
            ("tilefold", tilefold.attention, False),
        ):
            predicted = predictions.get(name)
            if predicted and (predicted.bytes > budget or predicted.seconds > PATIENCE_SECONDS):
                outcome = Outcome(name, predicted, made=False)
            else:
                outcome = Outcome(name, _cost(attend, length, is_dense, device), made=True)
            outcomes.append(outcome)
            growth = 4 if is_dense else 2
            predictions[name] = replace(
                outcome.cost, seconds=growth * outcome.cost.seconds, bytes=growth * outcome.cost.bytes
            )
        yield Row(length, outcomes)
        length *= 2


def plain_causal(length: int, device: torch.device) -> dict[str, Cost]:
    """The one mask that SDPA knows by name: without documents it needs no dense matrix either."""

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilefold.attention(q, k, v, mask=masks.causal())

    return {
        name: measure(_step(attend, length, device), device)
        for name, attend in (("SDPA", fused), ("tilefold", ours))
    }


def _cost(attend: Callable[..., Tensor], length: int, is_dense: bool, device: torch.device) -> Cost:
    """What `attend` costs with the mask over documents."""
    offsets = torch.arange(0, length + 1, DOCUMENT, dtype=torch.int32, device=device)
    mask = _dense_documents(length, device) if is_dense else masks.documents(offsets, within=masks.causal())
    cost = measure(_step(lambda q, k, v: attend(q, k, v, mask=mask), length, device), device)
    return replace(cost, bytes=cost.bytes + mask.nbytes) if isinstance(mask, Tensor) else cost


def _step(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], length: int, device: torch.device
) -> Callable[[], object]:
    """Runs `attend` forward and backward on fixed inputs; in bfloat16 on a GPU, in float32 elsewhere."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(1, HEADS, length, HEAD_DIM, generator=draw).to(device, dtype).requires_grad_(index < 3)
        for index in range(4)
    )
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), upstream)


def _dense_documents(length: int, device: torch.device) -> Tensor:
    """bool `[1, 1, L, L]`, block by block so that nothing larger is ever held."""
    visible = torch.zeros(length, length, dtype=torch.bool, device=device)
    for start in range(0, length, DOCUMENT):
        stop = start + DOCUMENT
        visible[start:stop, start:stop] = torch.ones(
            DOCUMENT, DOCUMENT, dtype=torch.bool, device=device
        ).tril()
    return visible[None, None]
