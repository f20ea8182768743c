"""What the launchers of the Triton kernels make of unusual tensors, interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilefold import attention, masks, ops
from tilefold.masks.band import Band
from tilefold.problem import Problem
from tilefold.scores import Scores
from tilefold.testing.bounds import memory_checked

pytest.importorskip("triton", reason="Triton is not installed")

from tilefold.backends.triton import arguments, sizes
from tilefold.backends.triton import backend as triton_backend

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def accesses() -> Iterator[None]:
    """Every kernel of every test here stays inside its tensors."""
    with memory_checked():
        yield


def qkv(dtype: torch.dtype = torch.float32, length: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 16, generator=draw).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("layout", ["expanded", "stepped"])
def test_a_sink_may_have_any_stride(layout: str) -> None:
    q, k, v = qkv()
    values = torch.tensor([0.5, -1.0, 2.0, 0.1])
    sink = values[:1].expand(4) if layout == "expanded" else torch.stack([values, values + 9], 1)[:, 0]
    assert sink.stride(0) != 1
    results = []
    for backend in ("triton", "eager"):
        given = sink.detach().requires_grad_()
        out = attention(q, k, v, sink=given, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, given))))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_no_more_heads_share_a_section_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections of heads are counted in 32 bits, and keys may be few or none."""
    monkeypatch.setattr(arguments, "_l2_bytes", lambda device: 40 << 20)
    q = torch.randn(1, 2, 33, 16)
    nothing = q[:, :, :0]
    out, lse = attention(q, nothing, nothing, return_lse=True, backend="triton")
    assert not out.any() and bool((lse == -torch.inf).all())
    work = type("Work", (), {"problem": Problem(1, 2, 2, 33, 0, 16, 16, q.dtype), "q": q})
    assert arguments.span_of(work) == 2  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "kind, hip, capability, expected",
    [
        ("cpu", None, (9, 0), False), ("cuda", None, (8, 9), False), ("cuda", None, (9, 0), True),
        ("cuda", None, (12, 0), True), ("cuda", "6.4", (9, 4), False),
    ],
)  # fmt: skip
def test_who_chains_kernels(
    kind: str, hip: str | None, capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert arguments.chains.__wrapped__(torch.device(kind)) == expected


@pytest.mark.parametrize("change", [{"q_length": 1 << 29}, {"k_length": 1 << 29}])
def test_numbers_of_rows_and_keys_fit_32_bits_with_room_to_spare(change: dict[str, int]) -> None:
    problem = Problem(1, 1, 1, 64, 64, 16, 16, torch.float16)
    assert triton_backend.why_not(problem, Band(None, 0)) == []
    (reason,) = triton_backend.why_not(replace(problem, **change), Band(None, 0))  # pyright: ignore[reportArgumentType]
    assert reason == f"its kernels take fewer than 2^29 {'rows' if 'q_length' in change else 'keys'}"


def test_rectangles_take_out_and_lse_of_another_dtype() -> None:
    """The whole's `out` may be kept in float32 while q is narrower."""
    q, k, v = (x.detach() for x in qkv(torch.float16))
    problem = Problem(2, 4, 4, 40, 40, 16, 16, torch.float16, backend="triton")
    call = (problem, q, k, v, Band(None, 0), Scores(0.25))
    out, lse = ops.forward(*call)
    dout = torch.randn_like(out)
    narrow = ops.backward(*call, dout, out, lse)
    wide = ops.backward(*call, dout.float(), out.float(), lse.double())
    for mine, theirs in zip((narrow.q, narrow.k, narrow.v), (wide.q, wide.k, wide.v), strict=True):
        assert mine is not None and theirs is not None and torch.equal(mine, theirs)


def test_float32_precision_may_be_set_by_either_of_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in qkv())
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert arguments._tf32(Problem(1, 1, 1, 1, 1, 16, 16, torch.float32))
        assert not arguments._tf32(Problem(1, 1, 1, 1, 1, 16, 16, torch.float16))
        assert attention(q, k, v, mask=masks.causal(), backend="triton").isfinite().all()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(9, 3), masks.dilated(5, 2)])
def test_one_loop_over_all_tiles_computes_the_same(mask: masks.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit in what it sums in the same order: a program visits full tiles first either way."""
    from tilefold.backends.triton import backward, forward

    found = []
    for loops in (2, 1):
        for module in (forward, backward):
            monkeypatch.setattr(module, "needed", lambda *_, n=loops: sizes.Sizes(32, 32, 4, 1, n))
            module._kept.clear()
        q, k, v = qkv(length=100)
        bias = torch.randn(100, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = attention(q, k, v, mask=mask, bias=bias, softcap=20.0, backend="triton")
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))))
    for module in (forward, backward):
        module._kept.clear()
    for two, one in zip(*found, strict=True):
        torch.testing.assert_close(one, two)
