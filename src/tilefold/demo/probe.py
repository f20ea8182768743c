"""How long a call takes and how much memory it holds at its worst moment."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Cost:
    """Seconds of one call, and the most bytes that it held beyond what was there before."""

    seconds: float
    bytes: int


def measure(call: Callable[[], Any], device: torch.device, patience: float = 0.5) -> Cost:
    """The best time of a few calls within about `patience` seconds, and the peak memory of one more."""
    peak = peak_bytes(call, device)
    best, spent = float("inf"), 0.0
    while spent < patience:
        _synchronise(device)
        start = time.perf_counter()
        call()
        _synchronise(device)
        elapsed = time.perf_counter() - start
        best, spent = min(best, elapsed), spent + max(elapsed, patience / 8)
    return Cost(best, peak)


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that `call` held at once, beyond those held before.

    On CUDA the caching allocator counts them. On CPU the profiler reports every allocation and release of
    PyTorch's allocator, also those inside kernels, and their running sum is taken.
    """
    if device.type == "cuda":
        _synchronise(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        _synchronise(device)
        return torch.cuda.max_memory_allocated(device) - before
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with _silent_stderr():
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
                call()
            profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Sends file descriptor 2 nowhere: some builds of the profiler write to it at every start and stop."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
