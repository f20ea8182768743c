"""Masks inside compiled functions: Dynamo traces constructors, algebra, checks and spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tilefold import attention, masks
from tilefold.masks import Mask


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def spelled(q: Tensor, mask: Mask) -> Tensor:
    """A number that depends on the spelling and on every tensor of the mask."""
    length = q.shape[0]
    mask.check(1, 1, length, length, q.device)
    spec, tensors = mask.spec()
    total = q.sum() * len(spec)
    for tensor in tensors:
        total = total + tensor.sum()
    return total


INSIDE: dict[str, Callable[[Tensor, Tensor], Mask]] = {
    "causal": lambda q, cu: masks.causal(),
    "top-left": lambda q, cu: masks.causal(align="top-left"),
    "window": lambda q, cu: masks.causal() & masks.window(3, 0),
    "complement": lambda q, cu: masks.causal() | masks.window(3, 0).complement(),
    "documents": lambda q, cu: masks.documents(cu, within=masks.window(3, None) & masks.causal()),
    "cross": lambda q, cu: masks.documents(cu, cu + 1) | masks.prefix(cu[:1]) | masks.prefix(2),
    "patterns": lambda q, cu: (
        masks.bigbird() & masks.longformer(8, [1, 2]) | masks.butterfly() & masks.random_blocks(0.25, seed=3)
    ),
    "steps": lambda q, cu: masks.dilated(4, 2) | masks.strided(5),
    "tables": lambda q, cu: (
        masks.padding(cu[1:2], side="left") & masks.dense(q > 0) & masks.global_tokens(cu)
    ),
    "columns": lambda q, cu: masks.columns(
        cu.int()[None, None, :1, None].expand(1, 1, q.shape[0], 1), causal=True
    ),
    "blocks": lambda q, cu: masks.block_sparse(torch.ones(1, 1, dtype=torch.bool), 64),
    "shift": lambda q, cu: masks.shift(masks.causal(), 0, 3, 64, 64),
}


@pytest.mark.parametrize("make", INSIDE.values(), ids=INSIDE.keys())
@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_made_inside(make: Callable[[Tensor, Tensor], Mask], dynamic: bool) -> None:
    def function(q: Tensor, cu: Tensor) -> Tensor:
        return spelled(q, make(q, cu))

    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=dynamic)
    cu = torch.tensor([0, 3, 10])
    for length in (10, 12, 17):
        q = torch.randn(length)
        torch.testing.assert_close(compiled(q, cu), function(q, cu))


@pytest.mark.parametrize("make", INSIDE.values(), ids=INSIDE.keys())
def test_masks_made_outside(make: Callable[[Tensor, Tensor], Mask]) -> None:
    q, cu = torch.randn(10), torch.tensor([0, 3, 10])
    mask = make(q, cu)
    compiled = torch.compile(spelled, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, mask), spelled(q, mask))
    mask.spec()  # a kept spelling changes nothing
    torch.testing.assert_close(compiled(q, mask), spelled(q, mask))


def test_one_graph_for_many_lengths() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def function(q: Tensor, cu: Tensor) -> Tensor:
        return spelled(q, masks.causal() & masks.documents(cu))

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for length in (10, 12, 17, 30):
        compiled(torch.randn(length), torch.tensor([0, 3, 10]))
    assert len(graphs) == 1


def test_built_masks_inside() -> None:
    mask = masks.predicate(lambda b, h, q, k: (q + k) % 3 == 0).build(1, 1, 10, 10)
    compiled = torch.compile(spelled, fullgraph=True, backend="eager")
    q = torch.randn(10)
    torch.testing.assert_close(compiled(q, mask), spelled(q, mask))


@pytest.mark.parametrize(
    "make",
    [
        lambda q, n: masks.prefix(n) | masks.causal(),
        lambda q, n: masks.global_tokens(n) | masks.global_tokens([n, n + 1]),
        lambda q, n: masks.window(q.shape[0] // 2, n).complement(),
        lambda q, n: masks.shift(masks.causal(), 0, n, q.shape[0], q.shape[0] + n),
    ],
    ids=["prefix", "tokens", "window", "shift"],
)
def test_ints_and_sizes_become_part_of_the_spelling(make: Callable[[Tensor, int], Mask]) -> None:
    """Symbolic ints are spelled as their numbers, never as symbols, so that a new number is a new graph."""

    def function(q: Tensor, n: int) -> Tensor:
        return spelled(q, make(q, n))

    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
    for length, n in ((10, 2), (12, 3), (17, 11)):
        q = torch.randn(length)
        torch.testing.assert_close(compiled(q, n), function(q, n))


class Windowed(torch.nn.Module):
    """A mask of the length, which a program of many lengths cannot hold."""

    def forward(self, q: Tensor) -> Tensor:
        return attention(q, q, q, mask=masks.window(q.shape[2] // 2, 0))


@pytest.mark.parametrize("strict", [False, True])
def test_export_specialises_sizes_in_masks(strict: bool) -> None:
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(Exception, match=r"Constraints violated|specialized"):
        torch.export.export(
            Windowed(), (q,), dynamic_shapes=({2: torch.export.Dim("L", min=2, max=64)},), strict=strict
        )
    program = torch.export.export(Windowed(), (q,), strict=strict)
    torch.testing.assert_close(program.module()(q), Windowed()(q))
