"""The Hopper backend on a Hopper GPU: the whole conformance suite, and what no small case shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilefold import attention, masks
from tilefold.masks.base import Mask
from tilefold.testing import conformance
from tilefold.testing.cases import Case
from tilefold.testing.law import LAWS, Law

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
MATCHES = LAWS["matches_the_reference"]


@pytest.fixture(autouse=True, scope="module")
def context() -> None:
    """Autograd's thread has CUDA's context before it needs cuBLAS, which would warn that it makes one."""
    torch.ones(1, device="cuda", requires_grad=True).mul(2.0).sum().backward()


def test_the_memory_checker_finds_nothing(check_memory: Callable[..., None]) -> None:
    """First of all: nothing takes longer."""
    check_memory(Path(__file__).parent / "every_kind.py")


@pytest.mark.parametrize("law, case", conformance.parameters(), ids=conformance.identify)
def test_hopper_obeys(law: Law, case: Case) -> None:
    conformance.run(law, case, "hopper", "cuda")


@pytest.mark.parametrize(
    "mask", ["none", "causal", "window", "documents_causal", "columns4", "random_blocks"]
)
@pytest.mark.parametrize("lengths", [(256, 384), (300, 333), (64, 1000), (777, 700)], ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 24)], ids=str)
def test_it_matches_the_reference(
    dims: tuple[int, int], dtype: str, lengths: tuple[int, int], mask: str
) -> None:
    case = Case(dims=dims, dtype=dtype, mask=mask, lengths=lengths, heads=(4, 2), sink=lengths[0] == 300)
    conformance.run(MATCHES, case, "hopper", "cuda")


def _rising(length: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that rise from tile to tile, past any fixed reference, in either direction."""
    q, k, v = (torch.randn(1, 4, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    steps = torch.linspace(0.2, 40.0, length, device="cuda").bfloat16()[:, None]
    k = (k.abs() + 1) * torch.stack([steps, steps.flip(0), steps, steps.flip(0)])
    return q.abs() + 1, k, v


@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.window(700, 30)], ids=repr)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_that_outgrow_their_reference_are_computed_again(head_dim: int, mask: Mask) -> None:
    x = _rising(2048, head_dim)
    found = attention(*x, mask=mask, return_lse=True, backend="hopper")
    right = attention(*x, mask=mask, return_lse=True, backend="triton")
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(100, 0)], ids=repr)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_is_hidden_may_be_nan(head_dim: int, mask: Mask) -> None:
    q, k, v = (torch.randn(2, 2, 700, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    clean = attention(q, k, v, mask=mask, backend="hopper")
    # The last keys are seen by the last rows only.
    k[:, :, -40:], v[:, :, -40:] = float("nan"), float("nan")
    found = attention(q, k, v, mask=mask, backend="hopper")
    torch.testing.assert_close(found[:, :, :640], clean[:, :, :640], atol=1e-2, rtol=1e-2)
    assert found[:, :, -1].isnan().all()


@pytest.mark.parametrize("case", ["full", "causal", "rising"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_two_hundred_runs_beside_other_work_give_the_same_bits(head_dim: int, case: str) -> None:
    x = tuple(torch.randn(2, 4, 1536, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if case == "rising":
        x = _rising(1536, head_dim)
    mask = masks.causal() if case == "causal" else masks.full()
    first = attention(*x, mask=mask, return_lse=True, backend="hopper")
    torch.cuda.synchronize()
    aside, other = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        with torch.cuda.stream(aside):
            other = (other @ other).clamp(-1, 1)
        again = attention(*x, mask=mask, return_lse=True, backend="hopper")
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_another_stream_waits_for_what_the_first_call_has_made(kind: str) -> None:
    """Lists and tables of a mask are kept from the first call of its kind, whose stream is busy here."""
    for length in (1000, 1100, 1200, 1300):
        x = tuple(torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        cuts = torch.tensor([0, 100, length], device="cuda")
        mask = masks.documents(cuts, within=masks.causal()) if kind == "documents" else masks.causal()
        torch.cuda.synchronize()
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            torch.cuda._sleep(50_000_000)
            one = attention(*x, mask=mask, backend="hopper")
        with torch.cuda.stream(second):
            other = attention(*x, mask=mask, backend="hopper")
        torch.cuda.synchronize()
        assert torch.equal(one, other)


@pytest.mark.parametrize("mask", ["documents_causal", "columns4", "random_blocks"])
def test_lists_are_shared_out_by_deterministic_operations_alone(mask: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        conformance.run(
            MATCHES, Case(dims=(64, 64), dtype="bf16", mask=mask, lengths=(520, 520)), "hopper", "cuda"
        )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("before", ["the same call", "a shorter call"])
@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_it_runs_in_a_graph(kind: str, before: str) -> None:
    """Its tables were made before the capture, or are made by every replay; the kernel is compiled."""
    x = _rising(1024, 128)
    cuts = torch.tensor([0, 100, 1024], device="cuda")
    mask = masks.documents(cuts, within=masks.causal()) if kind == "documents" else masks.causal()
    if before == "the same call":
        attention(*x, mask=mask, backend="hopper")
    else:
        few = masks.documents(cuts[:2] * 10, within=masks.causal()) if kind == "documents" else masks.causal()
        attention(*(t[:, :, :1000] for t in x), mask=few, backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*x, mask=mask, backend="hopper")
    for scale in (1.0, -1.0):
        x[0].mul_(scale)
        graph.replay()
        torch.testing.assert_close(out, attention(*x, mask=mask, backend="hopper"), atol=0, rtol=0)
