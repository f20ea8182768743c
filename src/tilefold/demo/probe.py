"""How long a call takes and how much memory it holds at its worst moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilefold.bench.timing import peak_memory


@dataclass(frozen=True)
class Cost:
    """Seconds of one call, and the most bytes that it held beyond what was there before."""

    seconds: float
    bytes: int


def measure(call: Callable[[], Any], device: torch.device, patience: float = 0.5) -> Cost:
    """The best time of a few calls within about `patience` seconds, and the peak memory of one more."""
    peak = peak_memory(call, device)[1]
    best, spent = float("inf"), 0.0
    while spent < patience:
        _synchronise(device)
        start = time.perf_counter()
        call()
        _synchronise(device)
        elapsed = time.perf_counter() - start
        best, spent = min(best, elapsed), spent + max(elapsed, patience / 8)
    return Cost(best, peak)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
