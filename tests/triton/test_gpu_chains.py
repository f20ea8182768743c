"""Kernels of a backward pass that begin before the one ahead of them is done (`variant.Variant.CHAIN`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold import attention, masks

pytest.importorskip("triton", reason="Triton is not installed")

from tilefold.backends.triton import arguments, backward, delta
from tilefold.backends.triton.arguments import chains

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Fresh memory is left as it comes: whatever filled it would run between two kernels."""


@pytest.fixture(autouse=True)
def chained() -> None:
    if not chains(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs programmatic dependent launch, compute capability 9.0")


def _documents(Lq: int, Lk: int) -> masks.Mask:
    ends = [torch.tensor([0, L // 5, L // 4, L], device="cuda") for L in (Lq, Lk)]
    return masks.documents(*ends, within=masks.causal())


MASKS: dict[str, Callable[[int, int], masks.Mask]] = {
    "full": lambda Lq, Lk: masks.full(),
    "causal": lambda Lq, Lk: masks.causal(),
    "documents": _documents,
    "bigbird": lambda Lq, Lk: masks.bigbird(window=3, global_blocks=1, random=3, block=64),
}
#: Batch, query heads, key heads, rows, keys, head size.
ODD, LARGE, WIDE = (1, 2, 2, 200, 200, 64), (2, 8, 2, 2048, 2048, 128), (1, 4, 4, 1500, 1500, 256)
#: With few rows, most cores see nothing of dQ's kernel; with few keys, nothing of that of dK and dV.
FEW_ROWS, FEW_KEYS = (2, 2, 1, 64, 8192, 64), (1, 2, 2, 4096, 128, 64)
CALLS = [
    ("full", "", LARGE), ("full", "", FEW_ROWS), ("full", "bias", ODD), ("causal", "", LARGE),
    ("causal", "", WIDE), ("causal", "slopes", ODD), ("causal", "bias", FEW_ROWS), ("documents", "", LARGE),
    ("documents", "sink", FEW_KEYS), ("bigbird", "", LARGE),
]  # fmt: skip


def _call(shape: tuple[int, ...], option: str) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Leaves, the incoming gradient, and the option that is in use."""
    B, Hq, Hk, Lq, Lk, D = shape
    q, dout = (torch.randn(B, Hq, Lq, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(B, Hk, Lk, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    more = {
        "bias": lambda: {"bias": torch.randn(1, Hq, Lq, Lk, device="cuda", dtype=torch.bfloat16)},
        "slopes": lambda: {"alibi_slopes": torch.rand(Hq, device="cuda")},
        "sink": lambda: {"sink": torch.randn(Hq, device="cuda")},
    }
    options = more[option]() if option else {}
    return [x.requires_grad_() for x in (q, k, v, *options.values())], dout, options


def _run(call: Any, mask: masks.Mask) -> list[Tensor]:
    leaves, dout, options = call
    out = attention(*leaves[:3], mask=mask, backend="triton", **options)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    # Results are overwritten as soon as they were read, and their memory is taken again by the next pass.
    kept = [x.detach().clone() for x in found]
    for x in found:
        x.detach().fill_(float("nan"))
    return kept


@pytest.mark.parametrize("kind, option, shape", CALLS, ids=str)
def test_kernels_of_a_chain_see_what_earlier_ones_wrote(
    kind: str, option: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute, bit for bit, what they compute one after the other; the first time too, when lists of
    tiles are written between them.
    """
    mask = MASKS[kind](*shape[3:5])
    calls = [_call(shape, option) for _ in range(6)]
    together = [_run(call, mask) for call in calls]
    for module in (arguments, backward, delta):
        monkeypatch.setattr(module, "chains", lambda device: False)
    for call, found in zip(calls, together, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, _run(call, mask), strict=True))


@pytest.mark.parametrize("option", ["", "bias"])
@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_graphs_replay_chains(kind: str, option: str) -> None:
    """Lists of tiles are made while the graph is captured."""
    shape = (2, 4, 2, 700, 700, 64)
    call = leaves, dout, options = _call(shape, option)
    expected = _run(call, MASKS[kind](700, 700))
    mask = MASKS[kind](700, 700)

    def run() -> tuple[Tensor, ...]:
        out = attention(*leaves[:3], mask=mask, backend="triton", **options)
        return (out, *torch.autograd.grad(out, leaves, dout))

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for x in captured:
            x.detach().fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))
