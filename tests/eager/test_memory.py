"""Extra memory of the fused routes stays small beside their tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilefold.backends.eager import fused, views
from tilefold.masks.band import Band
from tilefold.masks.rows import Rows

MB = 1 << 20


def extra(run: Callable[[], tuple[Tensor, ...]]) -> float:
    """Megabytes that torch's allocator held at most during `run`, without its results."""
    # The kernel's own buffers grow with the number of threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            results = run()
    finally:
        torch.set_num_threads(threads)
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, held)
    return (peak - sum(t.untyped_storage().nbytes() for t in results)) / MB


def documents(L: int, size: int) -> Rows:
    i = torch.arange(L, dtype=torch.int32)
    return Rows(torch.stack([i // size * size, i + 1], -1)[None, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [Band(-1023, 0), documents(8192, 1000)], ids=["window", "documents"])
def test_windows_and_documents(form: object, dtype: torch.dtype) -> None:
    L, H, D = 8192, 2, 32
    q, k, v, dout = (torch.randn(1, H, L, D, dtype=dtype) for _ in range(4))
    pieces = fused.plan(form, 1, H, H, L, L)

    def forward() -> tuple[Tensor, ...]:
        result = fused.forward(pieces, q, k, v, 0.2)
        assert result is not None
        return result

    out, lse = forward()

    def backward() -> tuple[Tensor, ...]:
        result = fused.backward(pieces, dout, q, k, v, out, lse, 0.2)
        assert result is not None
        return result

    # A dense mask alone would take 256 MB, or 128 in a 16-bit type. On CPUs with matrix units the kernel
    # packs keys and values of 16-bit types once more, window by window.
    assert extra(forward) < (5 if dtype == torch.float32 else 10) and extra(backward) < 12


def test_kept_masks_are_bounded() -> None:
    for lo in range(40):
        views.band_mask((256, 1280, -lo, 1023, torch.float32))
    assert sum(m.numel() * m.element_size() for m in views._kept.values()) <= views.KEPT_BYTES
