"""Measures how far `explain` is off: its times and memory beside what the named cases take on this CPU.

    python benchmarks/prediction.py                       # every CPU case of bench/cases.py, minutes
    python benchmarks/prediction.py causal gqa --json benchmarks/results/prediction.json

Every case is checked for exactness before it is timed. A figure is `|predicted / measured - 1|`; measured
times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilefold import explain, masks
from tilefold.bench.cases import CASES, MEMORY, build, select
from tilefold.bench.contestants import CONTESTANTS, OURS
from tilefold.bench.run import BOTH, FORWARD, Options, Row, bench, predictions, runs_of
from tilefold.bench.timing import extra_memory

MB = 1e6
#: From how many predicted bytes on memory is held to its bound.
LARGE = 64 * MB


def off(row: Row, key: str) -> float | None:
    """How far a ratio is from 1."""
    ratio = row.get(key)
    return None if ratio is None else abs(ratio - 1)


def lines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One result per figure: the medians first, then every case as information."""
    times = [x for row in rows if (x := off(row, "predicted_over_measured")) is not None]
    found: list[dict[str, Any]] = [
        {
            "case": f"predicted time beside measured, median of {len(times)} passes of the named CPU cases",
            "measured": 100 * statistics.median(times),
            "ceiling": 15.0,
            "unit": "%",
        }
    ]
    return [
        *found,
        *(
            {
                "case": f"{row['case']}, {row['pass']}",
                "group": "predicted / measured time, single passes",
                "measured": row["predicted_over_measured"],
                "unit": "x",
                "milliseconds": [1e3 * row["predicted_seconds"], 1e3 * row["median"]],
                "megabytes": [row["predicted_extra_bytes"] / MB, row["extra_bytes"] / MB],
            }
            for row in rows
        ),
    ]


def memory() -> dict[str, Any]:
    """Percent by which predicted peak memory is off: the worst of the calls that hold much."""
    ours, worst, count = CONTESTANTS[OURS], 0.0, 0
    for case in MEMORY.values():
        call = build(case)
        predicted, attend = predictions(call, case), ours.prepare(case, call)
        for what, backward in ((FORWARD, False), (BOTH, True)):
            (run,) = runs_of(attend, [call], case, backward)
            run()
            if predicted[what].extra_bytes >= LARGE:
                measured = max(extra_memory(run) for _ in range(2))
                worst, count = max(worst, abs(predicted[what].extra_bytes / measured - 1)), count + 1
    return {
        "case": f"predicted peak memory beside measured, worst of {count} passes that hold 64 MB or more",
        "measured": 100 * worst,
        "ceiling": 10.0,
        "unit": "%",
    }


def speed_of_explain() -> dict[str, Any]:
    """Milliseconds of an explanation, once the machine is known: the slowest of the named cases."""
    slowest = 0.0
    for case in select([], "cpu"):
        call = build(case)
        turns = []
        for _ in range(5):
            start = time.perf_counter()
            explain(call.q, call.k, call.v, **call.options)
            turns.append(time.perf_counter() - start)
        slowest = max(slowest, statistics.median(turns))
    return {
        "case": "time of explain itself, slowest of the named CPU cases",
        "measured": 1e3 * slowest,
        "ceiling": 5.0,
        "unit": "ms",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="names, globs or beginnings of cases")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each pass")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    cases = select(options.cases, "cpu")
    ours = [c for c in CONTESTANTS.values() if c.name == OURS]
    # The machine is measured before anything else warms it up.
    warm = build(CASES["causal-1k-fp32-d64"])
    explain(warm.q, warm.k, warm.v, mask=masks.causal())
    document = bench(cases, ours, Options(seconds=options.seconds, title="Predictions beside measurements"))
    rows = [row for row in document["rows"] if row.get("predicted_over_measured") is not None]
    if not rows:
        print("nothing to compare: this machine was busy while its figures were measured", file=sys.stderr)
        return 1
    results = {key: document[key] for key in ("title", "machine", "date", "versions")}
    results["rows"] = [speed_of_explain(), memory(), *lines(rows)]
    for row in results["rows"]:
        bound = f"(required <= {row['ceiling']:g})" if "ceiling" in row else ""
        extra = "".join(
            f"  {key} {pair[0]:9.2f} {pair[1]:9.2f}"
            for key in ("milliseconds", "megabytes")
            if (pair := row.get(key))
        )
        print(f"{row['measured']:8.3f} {row['unit']:2} {bound:18} {row['case']:70}{extra}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    missed = [row for row in results["rows"] if row["measured"] > row.get("ceiling", float("inf"))]
    return 1 if missed or not document["exact"] else 0


if __name__ == "__main__":
    sys.exit(main())
