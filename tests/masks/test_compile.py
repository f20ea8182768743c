"""Masks inside compiled functions: Dynamo traces constructors, algebra, checks and spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tilefold import masks
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
