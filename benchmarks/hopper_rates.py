"""Fits the rates of the Hopper kernel, with which `explain` predicts its time, to what `gpu_hopper.py` has
measured.

    python benchmarks/hopper_rates.py benchmarks/results/gpu_hopper.json

Prints the entries of `planning/tables/rates/h200.json`: for each width of heads and kind of call the share of
the matrix units' peak that its products reach, and what a program costs beside its visits, in visits; and how
far the predictions are from the measurements with them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_contest import Case, masked

from tilefold import Problem, explain, masks
from tilefold.backends.hopper.sizes import kind_of, sizes_of
from tilefold.backends.triton import rates

#: What a program may cost beside its visits.
FIXED = [n / 4 for n in range(41)]


def measurements(path: Path) -> dict[str, list[tuple[Case, float]]]:
    """Seconds of dense calls, by the name of their entry."""
    found: dict[str, list[tuple[Case, float]]] = {}
    for row in json.loads(path.read_text())["rows"]:
        if "tflops" in row:
            label, head, length = row["case"].rsplit(": ", 1)[1].split(", ")
            case = Case(label, int(head.split()[1]), int(length.split()[1]))
            share = 0.5 if label == "causal" else 1.0
            flops = share * 4 * 2048 * max(16384, case.L) * case.L
            mask = masked(label, case.L, "cpu")[0]
            spec = (masks.full() if mask is None else mask).spec()
            form = masks.lower(*spec, 1, 1, case.L, case.L, "cpu")
            name = f"hopper/{case.D}/{kind_of(form, case.D, case.L, False)}"
            found.setdefault(name, []).append((case, flops / row["tflops"]["hopper"] / 1e12))
    return found


def predicted(case: Case) -> float:
    """Seconds, with the rates in force."""
    B, H, L, D = case.shape
    call = Problem(B, H, H, L, L, D, D, torch.bfloat16, "cuda", backend="hopper")
    return explain(call, mask=masked(case.label, L, "cpu")[0], machine="H200").forward.seconds


def fit(name: str, rows: list[tuple[Case, float]]) -> tuple[dict[str, Any], list[float]]:
    """The entry, and predicted time over measured time of each row with it."""
    _, width, kind = name.split("/")
    sizes = sizes_of(int(width), kind)
    entry: dict[str, Any] = {"programs": 1, "sizes": [64 * sizes["GROUPS"], sizes["BN"], 8, sizes["STAGES"]]}
    best: tuple[float, dict[str, Any], list[float]] | None = None
    for fixed in FIXED:
        tried = entry | {"share": 0.7, "fixed": fixed}
        for _ in range(4):
            rates._table()[name] = tried
            ratios = [predicted(case) / seconds for case, seconds in rows]
            tried = tried | {"share": tried["share"] * math.exp(statistics.fmean(map(math.log, ratios)))}
        worst = max(abs(math.log(ratio)) for ratio in ratios)
        if best is None or worst < best[0]:
            best = worst, tried | {"share": round(tried["share"], 4)}, ratios
    assert best is not None
    rates._table()[name] = best[1]
    return best[1], best[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    for name, rows in sorted(measurements(parser.parse_args().results).items()):
        entry, ratios = fit(name, rows)
        near = ", ".join(f"{case.L}: {ratio:.2f}" for (case, _), ratio in zip(rows, ratios, strict=True))
        print(f' "{name}": {json.dumps(entry)},', flush=True)
        print(f"   predicted / measured {near}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
