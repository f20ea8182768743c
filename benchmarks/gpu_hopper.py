"""Measures the promises about the Hopper kernels on one H200, in bfloat16, beside cuDNN and FlashAttention-3.

    python benchmarks/gpu_hopper.py --json benchmarks/results/gpu_hopper.json
    python benchmarks/gpu_hopper.py --only dense --limit 200

As `gpu_kernels.py`: contestants take turns within one run, and count with their medians between CUDA events;
results are checked before they are timed. FlashAttention-3 is the wheel `fa3-fwd` (`fa3_fwd_interface`);
without it, its rows are left out and the run has failed. Exit code 1: something missed its bound or failed;
2: nothing can be measured here.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_contest import (
    Case,
    Named,
    Results,
    Row,
    host,
    inputs,
    masked,
    medians,
    refusal,
    row,
    run,
    sdpa,
    verdict,
    worst_row,
)
from torch import Tensor
from torch.nn.attention import SDPBackend

from tilefold import attention, masks
from tilefold.bench.machine import machine, versions
from tilefold.problem import Problem

#: Largest error of a row: rounding to bfloat16 makes some hundredths, a tile left out or added much more.
ERROR = 0.1
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ours = partial(attention, backend="hopper")
THEIRS = "speed / FlashAttention-3"
DENSE = [Case(label, D, L) for D, L, label in itertools.product((64, 128, 256), LENGTHS, ("full", "causal"))]
SPARSE = [Case(label, 128, 16384) for label in ("window(1023, 0)", "causal documents")]
SPARSE += [Case("bigbird", 128, 32768)]


def flash() -> Callable[..., Tensor] | None:
    """FlashAttention-3's forward on `[B, L, H, D]`, if it is installed."""
    try:
        found = importlib.import_module("fa3_fwd_interface")
    except ModuleNotFoundError:
        return None

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = found.flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return call


def missing() -> list[Row]:
    raise ModuleNotFoundError("fa3_fwd_interface is not installed: pip install fa3-fwd==0.0.3")


def plain(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    x, _ = inputs(*shape)
    q, k, v = (t.detach() for t in x)
    return q, k, v


def checked(what: str, got: Tensor, wanted: Tensor) -> list[Row]:
    return [row("error beside cuDNN, worst row", what, worst_row([got], [wanted]), "", ceiling=ERROR)]


def dense() -> Named:
    """Full and causal."""
    peer = flash()
    for case in DENSE:
        yield str(case), partial(dense_case, case, peer)
    if peer is None:
        yield "FlashAttention-3", missing


def dense_case(case: Case, peer: Callable[..., Tensor] | None) -> list[Row]:
    x = plain(*case.shape)
    mask = masked(case.label, case.L)[0]
    mine = partial(ours, *x, mask=mask)
    cudnn = partial(sdpa, SDPBackend.CUDNN_ATTENTION, *x, is_causal=mask is not None)
    rows = checked(str(case), mine(), cudnn())
    if not all(map(verdict, rows)):
        return rows
    calls: dict[str, Callable[[], Any]] = {"hopper": mine, "cuDNN": cudnn}
    calls["triton"] = partial(attention, *x, mask=mask, backend="triton")
    if peer is not None:
        calls["FlashAttention-3"] = partial(peer, *(t.transpose(1, 2) for t in x), causal=mask is not None)
    spent = dict(zip(calls, medians(list(calls.values())), strict=True))
    flops = (0.5 if mask is not None else 1.0) * 4 * 2048 * max(16384, case.L) * case.L
    about = {"tflops": {name: flops / seconds / 1e12 for name, seconds in spent.items()}}
    floor = {"floor": 1.0} if case.L == 512 else {}
    short = ", L 512" if case.L == 512 else ""
    rows.append(row(f"speed / cuDNN{short}", str(case), spent["cuDNN"] / spent["hopper"], **floor, **about))
    rows.append(row("speed / the Triton kernels", str(case), spent["triton"] / spent["hopper"]))
    if peer is not None:
        floor = {"floor": 0.98} if case.L >= 1024 else {}
        speed = spent["FlashAttention-3"] / spent["hopper"]
        rows.append(row(THEIRS + short, str(case), speed, **floor))
    return rows


def means(results: Results) -> Named:
    """Geometric means over what the part before has measured."""

    def measure() -> list[Row]:
        cells = [x["measured"] for x in results.rows if x["group"] == THEIRS]
        if not cells:
            return []
        mean = math.exp(sum(map(math.log, cells)) / len(cells))
        return [row(f"{THEIRS}, geometric mean", f"L 1024 to 16384, {len(cells)} cells", mean, floor=1.05)]

    yield "geometric means", measure


def sparse() -> Named:
    """Masks beside their share of the full call."""
    for case in SPARSE:
        yield str(case), partial(sparse_case, case)


def sparse_case(case: Case) -> list[Row]:
    from tilefold.backends.hopper.sizes import kind_of, sizes_of, width_of
    from tilefold.backends.hopper.variant import LINES

    x = plain(*case.shape)
    mask = masked(case.label, case.L)[0]
    assert mask is not None
    B, H, L, D = case.shape
    form = masks.lower(mask, (), B, H, L, L, "cuda")
    sizes = sizes_of(width_of(D, D), kind_of(form, D, L, False))
    states = form.tile_states(L, L, LINES * sizes["GROUPS"], sizes["BN"], "cuda")
    share = float((states > 0).float().mean())
    mine, triton = partial(ours, *x, mask=mask), partial(attention, *x, mask=mask, backend="triton")
    rows = checked(str(case), mine(), triton())
    if not all(map(verdict, rows)):
        return rows
    t = medians([mine, partial(ours, *x), triton])
    milliseconds = {name: 1e3 * s for name, s in zip(("hopper", "hopper, full", "triton"), t, strict=True)}
    group = "time / (visited share x time of full), masks"
    rows.append(
        row(group, str(case), t[0] / t[1] / share, ceiling=1.15, visited=share, milliseconds=milliseconds)
    )
    rows.append(row("speed / the Triton kernels, masks", str(case), t[2] / t[0]))
    return rows


def others() -> Named:
    """The worst input of a fixed reference; grouped heads; the host."""
    for D in (64, 128, 256):
        yield f"worst input, D {D}", partial(worst_case, D)
    for D in (64, 128):
        yield f"grouped heads, D {D}", partial(grouped_case, D)
    yield "host", host_case


def worst_case(D: int) -> list[Row]:
    """Every row outgrows the reference that it takes from its first tiles, which are the last keys."""
    L, what = 8192, f"full, D {D}, L 8192"
    q, k, v = plain(2, 2048 // D, L, D)
    usual = partial(ours, q, k, v)
    steps = torch.linspace(40.0, 0.2, L, device="cuda").bfloat16()[:, None]
    rising = (q.abs() + 1, (k.abs() + 1) * steps, v)
    worst = partial(ours, *rising)
    rows = checked(f"worst input, {what}", worst(), attention(*rising, backend="triton"))
    t = medians([worst, usual])
    return [*rows, row("time / usual time, worst input of a fixed reference", what, t[0] / t[1], ceiling=2.1)]


def grouped_case(D: int) -> list[Row]:
    L, H = 16384, 2048 // D
    q, k, v = plain(1, H, L, D)
    few = (t[:, : H // 4].contiguous() for t in (k, v))
    t = medians([partial(ours, q, *few), partial(ours, q, k, v)])
    return [
        row(
            "speed / as many key heads, four query heads per key head",
            f"full, D {D}, L {L}",
            t[1] / t[0],
            floor=1.0,
        )
    ]


def host_case() -> list[Row]:
    x, what = plain(2, 8, 128, 64), "full, B 2 H 8 L 128 D 64"
    spent = host([partial(ours, *x), partial(F.scaled_dot_product_attention, *x)])
    return [
        row("host time, no grad", what, spent[0], "us", ceiling=40.0, sdpa=spent[1]),
        row("host time above SDPA's, no grad", what, spent[0] - spent[1], "us", ceiling=25.0),
    ]


PARTS = ("dense", "means", "masks", "others")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="begin no case after so many seconds"
    )
    parser.add_argument("--json", type=Path, help="write the results here; rows of other parts stay")
    return parser.parse_args(words)


def main() -> int:
    begun, options = time.monotonic(), arguments()
    reason = refusal()
    if reason is None:
        size = Problem(1, 1, 1, 128, 128, 64, 64, torch.bfloat16, "cuda", backend="hopper")
        from tilefold.backends.hopper import backend

        reason = "; ".join(backend.why_not(size, masks.Band(None, None))) or None
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    about = {
        "title": "Hopper kernels",
        "machine": machine("cuda"),
        "date": datetime.date.today().isoformat(),
        "versions": versions() | {"triton": version("triton"), "cudnn": str(torch.backends.cudnn.version())},
    }
    try:
        results = Results(options.json, about, list(PARTS))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    every = {"dense": dense, "means": partial(means, results), "masks": sparse, "others": others}
    parts = {name: cases for name, cases in every.items() if name in options.only}
    return 0 if run(parts, begun + options.limit, results) else 1


if __name__ == "__main__":
    sys.exit(main())
