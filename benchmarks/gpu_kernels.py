"""Measures the promises about the Triton kernels on one CUDA GPU, in bfloat16.

    python benchmarks/gpu_kernels.py                              # everything but FlexAttention, minutes
    python benchmarks/gpu_kernels.py --flex --json benchmarks/results/gpu_kernels.json
    python benchmarks/gpu_kernels.py --only masks bias --limit 200 --json benchmarks/results/gpu_kernels.json

Every figure is a ratio (or a difference) of contestants that take turns within one run; a contestant counts
with the median of its turns, between CUDA events. Before a case is timed, its results and gradients are held
against SDPA's on the same inputs: the worst row of each tensor, beside that row's length or the median row's,
whichever is more. Where that error is above its ceiling, no speed is measured.

FlexAttention is compiled, with its default blocks. What the cases of a mask need is compiled beforehand,
in processes that fill the caches on disk. A file of results keeps the rows of parts that do not run.
Exit code 1: something missed its bound or failed; 2: nothing can be measured here.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_contest import (
    Case,
    Named,
    Results,
    Row,
    contest,
    dense_mask,
    flexed,
    host,
    in_milliseconds,
    inputs,
    masked,
    medians,
    offsets,
    ours,
    over,
    per_pass,
    refusal,
    row,
    run,
    sdpa,
    step,
    verdict,
    visited_share,
    worst_row,
)
from torch import Tensor
from torch.nn.attention import SDPBackend

from tilefold import attention_varlen, explain, masks
from tilefold.bench.machine import machine, versions
from tilefold.bench.timing import peak_memory

#: Largest error of a row: rounding to bfloat16 makes some hundredths, a tile left out or added much more.
ERROR = 0.1
LENGTHS, MB = (2048, 8192, 16384), 1e6


DENSE = [Case(label, D, L) for D, L, label in itertools.product((64, 128, 256), LENGTHS, ("full", "causal"))]
SPARSE = [Case(label, 128, 16384) for label in ("window(1023, 0)", "causal documents", "columns")]
SPARSE += [Case("bigbird", 128, 32768)]


# The cases.


def checked(what: str, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Row]:
    """The row of an error."""
    return [row("error beside SDPA, worst row", what, worst_row(got, wanted), "", ceiling=ERROR)]


def dense(flex: bool) -> Named:
    """Full and causal beside FlashAttention-2, FlexAttention and the prediction."""
    for case in DENSE:
        yield str(case), partial(dense_case, case, flex and case.D <= 128)


def dense_case(case: Case, flex: bool) -> list[Row]:
    x, dout = inputs(*case.shape)
    mask, mod = masked(case.label, case.L)
    mine = partial(ours, *x, mask=mask)
    flash = partial(sdpa, SDPBackend.FLASH_ATTENTION, *x, is_causal=mask is not None)
    rows = checked(str(case), step(mine, x, dout), step(flash, x, dout))
    if not all(map(verdict, rows)):
        return rows
    t = contest([(call, x) for call in (mine, flash, *([flexed(*x, mod)] if flex else []))], dout)
    forward, backward = over(t[1], t[0])
    heads, floor = ("D 64 and 128", 1.15) if case.D <= 128 else ("D 256", 1.0)
    rows.append(row(f"speed / FlashAttention-2, forward, {heads}", str(case), forward, floor=floor))
    rows.append(row("speed / FlashAttention-2, backward", str(case), backward, floor=1.0))
    if flex:
        rows += per_pass("speed / FlexAttention, full and causal", str(case), over(t[2], t[0]), floor=1.0)
    plan = explain(*x, mask=mask, backend="triton")
    predicted = over((plan.forward.seconds, plan.backward.seconds), t[0])
    group = "predicted / measured time, full and causal"
    rows += per_pass(group, str(case), predicted, floor=0.8, ceiling=1.25)
    flops = (0.5 if mask is not None else 1.0) * 4 * 2048 * max(16384, case.L) * case.L
    rows[-1]["tflops"] = [flops / t[0][0] / 1e12, 2.5 * flops / t[0][1] / 1e12]
    rows[-1]["milliseconds"] = in_milliseconds(("tilefold", "FlashAttention-2", "FlexAttention"), t)
    return rows


def sparse(flex: bool) -> Named:
    """Masks beside their share of the full call, and FlexAttention; packed documents beside
    FlashAttention-2.
    """
    for case in SPARSE:
        yield str(case), partial(sparse_case, case, flex)
    yield "attention_varlen", varlen_case


def sparse_case(case: Case, flex: bool) -> list[Row]:
    x, dout = inputs(*case.shape)
    mask, mod = masked(case.label, case.L)
    assert mask is not None
    mine = partial(ours, *x, mask=mask)
    theirs = partial(sdpa, SDPBackend.EFFICIENT_ATTENTION, *x, attn_mask=dense_mask(mask, case.L))
    rows = checked(str(case), step(mine, x, dout), step(theirs, x, dout))
    del theirs
    if not all(map(verdict, rows)):
        return rows
    visited = visited_share(mask, case)
    calls = (mine, partial(ours, *x), *([flexed(*x, mod)] if flex else []))
    t = contest([(call, x) for call in calls], dout)
    costs = [ratio / visited for ratio in over(t[0], t[1])]
    rows += per_pass(
        "time / (visited share x time of full), masks", str(case), costs, ceiling=1.15, visited=visited
    )
    if flex:
        rows += per_pass("speed / FlexAttention, masks", str(case), over(t[2], t[0]), floor=1.0)
    rows[-1]["milliseconds"] = in_milliseconds(("tilefold", "tilefold, full", "FlexAttention"), t)
    return rows


def varlen_case() -> list[Row]:
    L, what = 16384, "causal documents, D 128, 16k tokens"
    args = tuple(torch.randn(L, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    x, dout = tuple(t.clone().requires_grad_() for t in args), torch.randn_like(args[0])
    cuts = offsets(L).cuda()
    longest = int(cuts.diff().max())
    mine = partial(attention_varlen, *x, cuts, cuts, mask=masks.causal(), backend="triton")
    lengths = (cuts, cuts, longest, longest, 0.0, True)
    flash = partial(torch.ops.aten._flash_attention_forward, *args, *lengths, False)
    out, lse, state, unused, _ = flash()
    back = partial(torch.ops.aten._flash_attention_backward, dout, *args, out, lse, *lengths, state, unused)
    rows = checked(f"attention_varlen, {what}", step(mine, x, dout), (out, *back()[:3]))
    if not all(map(verdict, rows)):
        return rows
    with torch.no_grad():
        forward = medians([mine, flash])
    backward = medians([partial(torch.autograd.grad, mine(), x, dout, retain_graph=True), back])
    ratios = [forward[1] / forward[0], backward[1] / backward[0]]
    return rows + per_pass("speed / FlashAttention-2, attention_varlen", what, ratios, floor=1.0)


def biased(flex: bool) -> Named:
    """A bias that wants its gradient."""
    for D, batch in itertools.product((64, 128), (1, 4)):
        yield f"bias [{batch}, 16, 4k, 4k], D {D}", partial(bias_case, D, batch)


def bias_case(D: int, batch: int) -> list[Row]:
    B, H, L, what = 4, 16, 4096, f"bias [{batch}, 16, 4k, 4k], B 4, D {D}"
    x, dout = inputs(B, H, L, D)
    bias = torch.randn(batch, H, L, L, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = (*x, bias)
    mine = partial(ours, *x, bias=bias)
    theirs = partial(sdpa, SDPBackend.EFFICIENT_ATTENTION, *x, attn_mask=bias)
    rows = checked(what, step(mine, y, dout), step(theirs, y, dout))
    if not all(map(verdict, rows)):
        return rows
    _, peak = peak_memory(partial(step, mine, y, dout), "cuda")
    # The gradients; out; lse and the rows' sums of out times its gradient.
    least = sum(t.nbytes for t in (*y, dout)) + 2 * 4 * B * H * L
    group = "peak memory beyond arguments / (gradients, out, lse, delta), with a bias"
    rows.append(row(group, what, peak / least, ceiling=1.1, megabytes=[peak / MB, least / MB]))
    t = contest([(partial(ours, *x), x), (mine, y)], dout)
    group = "forward + backward with a bias and its gradient / without"
    rows.append(row(group, what, sum(t[1]) / sum(t[0]), ceiling=1.6))
    rows[-1]["milliseconds"] = in_milliseconds(("without", "with"), t)
    return rows


def hosts(flex: bool) -> Named:
    """What a small call costs the host."""
    for label in ("full", "causal"):
        yield f"host time, {label}", partial(host_case, label)


def host_case(label: str) -> list[Row]:
    x, dout = inputs(2, 8, 128, 64)
    mask, what = masked(label, 128)[0], f"{label}, B 2 H 8 L 128 D 64"
    calls = (
        partial(ours, *x, mask=mask),
        partial(F.scaled_dot_product_attention, *x, is_causal=mask is not None),
    )
    rows = checked(what, *(step(call, x, dout) for call in calls))
    if not all(map(verdict, rows)):
        return rows
    with torch.no_grad():
        plain = host(calls)
    recorded = host(calls)
    both = host([partial(step, call, x, dout) for call in calls])
    return [
        *rows,
        row("host time, no grad", what, plain[0], "us", ceiling=40.0, sdpa=plain[1]),
        row("host time above SDPA's, no grad", what, plain[0] - plain[1], "us", ceiling=25.0),
        row("host time, with grad", what, recorded[0], "us", ceiling=100.0, sdpa=recorded[1]),
        row("host time of forward + backward", what, both[0], "us", sdpa=both[1]),
    ]


def compiling(flex: bool) -> Named:
    """What a first call and its backward pass spend in the compiler, while Triton's cache is empty."""
    for label, D in (("full", 128), ("causal", 64), ("causal", 128), ("causal", 256)):
        yield f"first call, {label}, D {D}", partial(compile_case, label, D)


def compile_case(label: str, D: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as cache:
        words = [sys.executable, __file__, "--first-call", label, str(D)]
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        child = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    seconds = json.loads(child.stdout.splitlines()[-1])
    group, what = "first forward + backward, seconds in the compiler", f"{label}, D {D}"
    times = [spent for _, spent in seconds]
    return [
        row(f"{group}, all kernels", what, sum(times), "s", kernels=seconds),
        row(f"{group}, slowest kernel", what, max(times), "s"),
    ]


def first_call(label: str, D: int) -> None:
    """In a process of its own: prints what each kernel spent in the compiler, as JSON."""
    from tilefold.backends.triton.kernel import first_call_seconds

    x, dout = inputs(1, 2, 2048, D)
    step(partial(ours, *x, mask=masked(label, 2048)[0]), x, dout)
    print(json.dumps([(name, seconds) for (name, _, _), seconds in first_call_seconds.items()]))


PARTS = {"dense": dense, "masks": sparse, "bias": biased, "host": hosts, "compile": compiling}


# Compiling beforehand.


def to_warm(parts: Iterable[str], flex: bool) -> list[Case]:
    """Cases whose kernels differ: FlexAttention is compiled for each length."""
    cases = [case for part, own in (("dense", DENSE), ("masks", SPARSE)) if part in parts for case in own]
    if flex:
        return cases
    return list({case[:2]: case for case in cases}.values())


def warm(case: Case, flex: bool) -> None:
    """In a process of its own: runs a case once, which leaves its kernels in the caches on disk."""
    x, dout = inputs(*case.shape)
    mask, mod = masked(case.label, case.L)
    calls = [partial(ours, *x, mask=mask), *([flexed(*x, mod)] if flex and case.D <= 128 else [])]
    for call in calls:
        with torch.no_grad():
            call()
        step(call, x, dout)
    torch.cuda.synchronize()


def warm_all(cases: Sequence[Case], flex: bool, deadline: float) -> None:
    """Runs `warm` for each case, as many at once as there are processors, until the deadline."""
    waiting, running = list(cases), []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < (os.cpu_count() or 1):
                words = [sys.executable, __file__, "--warm", *map(str, waiting.pop(0)), *["--flex"] * flex]
                # Each compiles in its own process: there are as many of them as processors.
                threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
                running.append(subprocess.Popen(words, env=os.environ | threads))
            running = [child for child in running if child.poll() is None]
            time.sleep(0.1)
    finally:
        for child in running:
            child.kill()
            child.wait()


# The run.


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts")
    parser.add_argument("--flex", action="store_true", help="also beside compiled FlexAttention")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="begin no case after so many seconds"
    )
    parser.add_argument("--json", type=Path, help="write the results here; rows of other parts stay")
    parser.add_argument("--warm", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--first-call", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> int:
    begun, options = time.monotonic(), arguments()
    if (reason := refusal()) is not None:
        print(reason, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    if options.warm:
        label, D, L = options.warm
        warm(Case(label, int(D), int(L)), options.flex)
        return 0
    if options.first_call:
        label, D = options.first_call
        first_call(label, int(D))
        return 0
    about = {
        "title": "Triton kernels on a GPU",
        "machine": machine("cuda"),
        "date": datetime.date.today().isoformat(),
        "versions": versions() | {"triton": version("triton")},
    }
    try:
        results = Results(options.json, about, list(PARTS))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    deadline = begun + options.limit
    warm_all(to_warm(options.only, options.flex), options.flex, deadline)
    parts = {name: partial(PARTS[name], options.flex) for name in options.only}
    return 0 if run(parts, deadline, results) else 1


if __name__ == "__main__":
    sys.exit(main())
