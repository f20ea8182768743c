"""Training with AdamW, one context of packed files per step; the learning rate warms up and ends at 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from tilefold.nn import GPT

from .corpus import Corpus, Window

# The windows of the corpus that training never sees.
HELD_OUT = 4
LEARNING_RATE = 6e-3
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Progress:
    """The state after a step.

    Attributes:
        step: steps done.
        done: share of the training that is over, in [0, 1].
        loss: nats per byte of this step's context.
        smooth: the same, averaged over roughly the last 20 steps.
        bytes_per_second: since the beginning.
    """

    step: int
    done: float
    loss: float
    smooth: float
    bytes_per_second: float


@dataclass(frozen=True)
class Training:
    """What training did. Losses are nats per byte; `before` and `after` are on held-out contexts."""

    steps: int
    seconds: float
    before: float
    after: float
    curve: list[float]


def precision(dtype: torch.dtype, device: torch.device) -> AbstractContextManager:
    """Runs matrix products in `dtype`; parameters stay float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def faster_dtype(model: GPT, window: Window) -> torch.dtype:
    """bfloat16 or float32: whichever takes this machine less time for one forward and backward pass."""
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            with precision(dtype, window.tokens.device):
                loss = model.loss(window.tokens, window.targets, window.mask, window.positions)
            loss.backward()
            model.zero_grad()
            loss.item()
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return min(seconds, key=lambda dtype: seconds[dtype])


@torch.no_grad()
def held_out_loss(
    model: GPT, corpus: Corpus, context: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Mean loss over the contexts that training leaves out, in nats per byte."""
    count = corpus.windows(context)
    total = 0.0
    kept = range(max(count - HELD_OUT, 0), count)
    for index in kept:
        window = corpus.window(index, context, device)
        with precision(dtype, device):
            total += model.loss(window.tokens, window.targets, window.mask, window.positions).item()
    return total / len(kept)


def train(
    model: GPT,
    corpus: Corpus,
    *,
    context: int,
    steps: int,
    seconds: float,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[Progress], None],
) -> Training:
    """Trains for `steps` steps or `seconds` seconds, whichever ends first; calls `report` after each step."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    windows = max(corpus.windows(context) - HELD_OUT, 1)
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(0)).tolist()
    before = held_out_loss(model, corpus, context, dtype, device)
    model.train()
    start = time.perf_counter()
    curve: list[float] = []
    smooth = done = 0.0
    while done < 1.0:
        step = len(curve)
        rate = (
            LEARNING_RATE
            * min(1.0, (step + 1) / WARM_UP_STEPS)
            * math.sin(math.pi / 2 * min(1.0, 2 * (1 - done)))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        window = corpus.window(order[step % windows], context, device)
        with precision(dtype, device):
            loss = model.loss(window.tokens, window.targets, window.mask, window.positions)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
        weight = max(1 / (step + 1), 1 / 20)
        smooth += weight * (curve[-1] - smooth)
        elapsed = time.perf_counter() - start
        done = min(1.0, max((step + 1) / steps, elapsed / seconds))
        report(Progress(step + 1, done, curve[-1], smooth, (step + 1) * context / elapsed))
    model.eval()
    after = held_out_loss(model, corpus, context, dtype, device)
    return Training(len(curve), time.perf_counter() - start, before, after, curve)
