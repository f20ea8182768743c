"""Measures the promises about the CPU: speed beside SDPA, cost beside the visible share of a mask, memory,
host time.

    python benchmarks/cpu_core.py                 # everything, minutes
    python benchmarks/cpu_core.py --quick         # short sequences, about a minute
    python benchmarks/cpu_core.py --only share --json benchmarks/results/cpu_core.json

Every figure is a ratio (or a difference) of contestants that take turns within one run; each contestant
counts with its fastest turn, so other work on the machine hurts less. Results are checked against the dense
reference before anything is timed.

SDPA gets what a user would give it: `is_causal`, or the boolean mask as a dense tensor. Every contestant has
run once before it is timed, so that masks are lowered and calls are planned; what a first call costs stands
in rows of its own, without a bound.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilefold import attention, masks
from tilefold.bench.machine import machine, versions
from tilefold.bench.timing import extra_memory

MB = 1 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS = {"forward": False, "forward + backward": True}
REPEATS = 200
Row = dict[str, Any]
CLOCK: Callable[[], float] = time.perf_counter
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# Measuring.


def fastest(contestants: list[Callable[[], Any]], seconds: float, least: int = 3) -> list[float]:
    """The fastest turn of each contestant, in seconds; they take turns for about `seconds`, `least` rounds at
    least.
    """
    best = [float("inf")] * len(contestants)
    for run in contestants:
        run()
    end, rounds = CLOCK() + seconds, 0
    while rounds < least or CLOCK() < end:
        for n, run in enumerate(contestants):
            start = CLOCK()
            run()
            best[n] = min(best[n], CLOCK() - start)
        rounds += 1
    return best


def visited_share(mask: masks.Mask, B: int, H: int, L: int, tile: int = 128) -> float:
    """The share of `tile x tile` tiles in which some query sees some key, from the definition of the mask."""
    seen = total = 0
    for start in range(0, L, tile):
        rows = min(tile, L - start)
        stripe = masks.shift(mask, start, 0, L, L).materialize(B, H, rows, L).any(dim=2)
        tiles = F.pad(stripe, (0, -L % tile)).unflatten(-1, (-1, tile)).any(dim=-1)
        seen, total = seen + int(tiles.sum()), total + tiles.numel()
    return seen / total


def inputs(B: int, H: int, L: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that want gradients, and an upstream gradient."""
    q, k, v = (torch.randn(B, H, L, D, dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v, torch.randn(B, H, L, D, dtype=dtype)


def step(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward."""
    out = call(q, k, v)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))


def contest(
    calls: list[Callable[..., Any]], args: tuple[Tensor, ...], seconds: float, grad: bool, least: int = 3
) -> list[float]:
    """The fastest turn of each call, forward or (with `grad`) forward and backward."""
    with torch.set_grad_enabled(grad):
        return fastest(
            [partial(step, c, *args) if grad else partial(c, *args[:3]) for c in calls], seconds, least
        )


def offsets(length: int, about: int) -> Tensor:
    """Offsets of documents of 0.7 to 1.3 times `about` tokens."""
    generator, cuts = torch.Generator().manual_seed(1), [0]
    while cuts[-1] < length:
        size = int(torch.randint(about * 7 // 10, about * 13 // 10, (1,), generator=generator))
        cuts.append(min(length, cuts[-1] + size))
    return torch.tensor(cuts, dtype=torch.int32)


def key_columns(length: int, about: int) -> Tensor:
    """`columns(causal=True)` of documents: each key is hidden from the rows after its document."""
    cuts = offsets(length, about).long()
    document = torch.searchsorted(cuts, torch.arange(length), right=True)
    return cuts[document].to(torch.int32).view(1, 1, length, 1)


def check(mask: masks.Mask | None, B: int = 1, L: int = 320) -> None:
    """Stops the run if a mask's results differ from plain attention under its dense tensor."""
    q, k, v, dout = inputs(B, 2, L, 32, torch.float32)
    dense = torch.ones(1, 1, L, L, dtype=torch.bool) if mask is None else mask.materialize(B, 2, L, L)
    got = step(lambda q, k, v: attention(q, k, v, mask=mask), q, k, v, dout)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~dense, -1e30)
        return (scores.softmax(-1) * dense) @ v

    for ours, theirs in zip(got, step(plain, q, k, v, dout), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# The cases.


def plain(quick: bool, seconds: float) -> Iterator[Row]:
    """Full and causal beside SDPA."""
    check(None)
    check(masks.causal())
    for (name, dtype), D, L, causal in itertools.product(
        DTYPES.items(), (64, 128), (1024, 2048) if quick else (1024, 2048, 4096, 8192), (False, True)
    ):
        args = inputs(1, 8, L, D, dtype)
        ours = partial(attention, mask=masks.causal() if causal else None)
        theirs = partial(F.scaled_dot_product_attention, is_causal=causal)
        for part, grad in PARTS.items():
            t = contest([theirs, ours], args, seconds, grad)
            what = f"{'causal' if causal else 'full'} {name} L {L} D {D}, {part}"
            yield {
                "case": f"speed / SDPA, {what}",
                "group": f"speed / SDPA, {'causal' if causal else 'full'}, all lengths and head sizes",
                "measured": t[0] / t[1],
                "floor": 0.97,
                "unit": "x",
            }


def sparse(quick: bool, seconds: float) -> Iterator[Row]:
    """A window and causal documents beside SDPA with a dense mask: speed and memory."""
    L, H = 16384, 1 if quick else 2
    for label, mask in (
        ("window(1023, 0)", masks.window(1023, 0)),
        ("causal documents of about 1k", masks.documents(offsets(L, 1000), within=masks.causal())),
    ):
        dense = mask.materialize(1, 1, L, L)
        for name, dtype in DTYPES.items():
            args = inputs(1, H, L, 64, dtype)
            calls = [partial(F.scaled_dot_product_attention, attn_mask=dense), partial(attention, mask=mask)]
            t = contest(calls, args, seconds, grad=True, least=2)
            m = [extra_memory(partial(step, call, *args)) for call in calls]
            short = f"SDPA with a dense mask, {label}, L {L}"
            what = f"SDPA with a dense mask, {label}, {name}, L {L}, H {H}, forward + backward"
            yield {
                "case": f"speed / {what}",
                "group": f"speed / {short}",
                "measured": t[0] / t[1],
                "floor": 5.0,
                "unit": "x",
            }
            yield {
                "case": f"extra memory / {what}",
                "group": f"extra memory / {short}",
                "measured": m[1] / m[0],
                "ceiling": 0.05,
                "unit": "x",
                "megabytes": [x / MB for x in m],
            }


def cold(quick: bool, seconds: float) -> Iterator[Row]:
    """A first call beside a later one: what lowering and planning cost. Information, without a bound."""
    L = 16384
    for label, make in (
        ("window(1023, 0)", lambda n: masks.window(1023, 0)),
        ("causal documents of about 1k", lambda n: masks.documents(offsets(n, 1000), within=masks.causal())),
    ):
        q, k, v, _ = inputs(1, 1, L, 64, torch.float32)
        times, mask = [], make(L)
        with torch.no_grad():
            # What every first call of a process costs is no part of it.
            attention(*(x[:, :, :2048] for x in (q, k, v)), mask=make(2048))
            for _ in range(4):
                start = CLOCK()
                attention(q, k, v, mask=mask)
                times.append(CLOCK() - start)
        yield {
            "case": f"first call above a later one, {label}, fp32, L {L}, H 1, forward",
            "measured": (times[0] - min(times[1:])) * 1e3,
            "unit": "ms",
        }


def share_cases(L: int, B: int) -> list[tuple[str, Any, float]]:
    """Masks and the factor by which their time may exceed their visible share."""
    lengths = torch.tensor([L, L // 3][:B], dtype=torch.int32)
    return [
        ("window(1023, 0)", masks.window(1023, 0), 1.3),
        ("documents", masks.documents(offsets(L, 1000)), 1.3),
        ("causal documents", masks.documents(offsets(L, 1000), within=masks.causal()), 1.3),
        ("prefix LM", masks.prefix(L // 4) | masks.causal(), 1.3),
        ("columns", masks.columns(key_columns(L, 1000), causal=True), 1.3),
        ("padding", masks.padding(lengths), 1.3),
        ("bigbird", masks.bigbird(), 2.5),
        ("random blocks", masks.random_blocks(0.1), 2.5),
        ("dilated", masks.dilated(64, 8), 2.5),
    ]


def share(quick: bool, seconds: float) -> Iterator[Row]:
    """Time of a mask beside the time of no mask, and the share of 128 x 128 tiles that it visits."""
    L, H = (4096, 4) if quick else (8192, 8)
    for label, mask, _ in share_cases(512, 2):
        check(mask, B=2 if label == "padding" else 1, L=512)
    for label, mask, factor in share_cases(L, 2):
        B = 2 if label == "padding" else 1
        visited = visited_share(mask, B, H // B, L)
        for (name, dtype), (part, grad) in itertools.product(DTYPES.items(), PARTS.items()):
            args = inputs(B, H // B, L, 64, dtype)
            t = contest([attention, partial(attention, mask=mask)], args, seconds, grad)
            yield {
                "case": f"time / time of full, {label}, {name}, L {L}, {part}",
                "group": f"time / time of full, {label}, L {L}",
                "measured": t[1] / t[0],
                "ceiling": factor * visited + 0.03,
                "unit": "x",
                "visited": visited,
            }


def long(quick: bool, seconds: float) -> Iterator[Row]:
    """Extra memory of a long causal sequence."""
    for L in (8192, 16384) if quick else (32768, 65536):
        run = partial(step, partial(attention, mask=masks.causal()), *inputs(1, 1, L, 64, torch.float32))
        yield {
            "case": f"extra memory, causal fp32, L {L}, H 1, forward + backward",
            "measured": extra_memory(run) / MB,
            "ceiling": 150.0,
            "unit": "MB",
        }


def host(quick: bool, seconds: float) -> Iterator[Row]:
    """Host time of a small repeated call above the kernel's own."""
    args = inputs(1, 8, 16, 64, torch.float32)
    for causal, (part, most) in itertools.product((False, True), (("no grad", 30.0), ("with grad", 100.0))):
        grad = part == "with grad"
        ours = partial(attention, mask=masks.causal() if causal else None)
        run = partial(step, ours, *args) if grad else partial(ours, *args[:3])
        with torch.set_grad_enabled(grad):
            t = fastest([repeated(partial(kernels, *args, causal, grad)), repeated(run)], seconds)
        yield {
            "case": f"host time above the kernels, {'causal' if causal else 'full'}, B 1 H 8 L 16, {part}",
            "measured": (t[1] - t[0]) / REPEATS * 1e6,
            "ceiling": most,
            "unit": "us",
        }


def kernels(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, grad: bool) -> None:
    """ATen's kernels called directly."""
    with torch.no_grad():
        out, lse = _forward(q, k, v, 0.0, causal)
        if grad:
            _backward(dout, q, k, v, out, lse, 0.0, causal)


def repeated(run: Callable[[], Any]) -> Callable[[], None]:
    """`REPEATS` calls as one turn."""

    def turn() -> None:
        for _ in range(REPEATS):
            run()

    return turn


CASES = {"plain": plain, "sparse": sparse, "cold": cold, "share": share, "long": long, "host": host}


# The run.


def verdict(row: Row) -> bool:
    return row["measured"] >= row.get("floor", -float("inf")) and row["measured"] <= row.get(
        "ceiling", float("inf")
    )


def line(row: Row) -> str:
    """A row as it is printed; one without a bound is information."""
    bounds = [f"{sign} {row[key]:.3g}" for key, sign in (("floor", ">="), ("ceiling", "<=")) if key in row]
    mark = ("ok" if verdict(row) else "MISS") if bounds else "info"
    required = f"(required {bounds[0]:>9})" if bounds else ""
    return f"{mark:4} {row['measured']:9.3f} {row['unit']:2} {required:20}  {row['case']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short sequences")
    parser.add_argument("--only", choices=sorted(CASES), action="append", help="only these cases")
    parser.add_argument("--seconds", type=float, default=None, help="time for each comparison")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread, its CPU time: for a machine that is busy"
    )
    options = parser.parse_args()
    if options.cpu_time:
        global CLOCK
        CLOCK = time.process_time
        torch.set_num_threads(1)
    seconds = options.seconds or (0.5 if options.quick else 3.0)
    torch.manual_seed(0)
    rows = []
    for name in options.only or CASES:
        for row in CASES[name](options.quick, seconds):
            print(line(row), flush=True)
            rows.append(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        results = {
            "title": "The core on a CPU",
            "machine": machine(),
            "date": datetime.date.today().isoformat(),
            "versions": versions(),
            "clock": "CPU time of one thread" if options.cpu_time else "wall time",
            "quick": options.quick,
            "rows": rows,
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(map(verdict, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
