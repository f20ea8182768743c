"""Results of a run, as `bench` writes them."""

from __future__ import annotations

from typing import Any

import pytest

NASTY = "<script>alert('x')</script> & \"quotes\""


def row(case: str, what: str, contestant: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    found = {
        "case": case,
        "about": f"about {case}",
        "shape": "B 1 H 8 L 1024 D 64 fp32",
        "pass": what,
        "contestant": contestant,
        "status": "ok" if seconds is not None else "refused",
        "reasons": [] if seconds is not None else ["it has no soft cap"],
        "error_over_budget": 0.5,
    }
    if seconds is not None:
        found |= {
            "median": seconds, "low": seconds * 0.9, "high": seconds * 1.2, "best": seconds * 0.8, "turns": 5,
            "extra_bytes": int(seconds * 2**30), "flops": 1e9, "flops_per_second": 1e9 / seconds,
        }  # fmt: skip
    if seconds is not None and contestant == "tilefold":
        found |= {
            "predicted_seconds": seconds * 1.5, "predicted_bytes": 1e8, "predicted_extra_bytes": 3 << 20,
            "predicted_over_measured": 1.5, "predicted_over_measured_extra": 0.4,
        }  # fmt: skip
    return found | more


@pytest.fixture
def document() -> dict[str, Any]:
    """Twelve cases, both passes, three contestants; sdpa refuses one case and is wrong in another."""
    rows = []
    for n in range(12):
        for what, factor in (("forward", 1.0), ("forward + backward", 3.5)):
            case, base = f"case-{n}-of-many", 10.0 ** (n / 4 - 3) * factor
            rows.append(row(case, what, "tilefold", base))
            rows.append(row(case, what, "sdpa", None if n == 3 else base * 2))
            rows.append(row(case, what, "standard", base * 4))
    rows[-2] |= {"status": "wrong", "reasons": [f"OVER out: {NASTY}"]}
    return {
        "title": "tilefold bench",
        "machine": f"Processor {NASTY}, 2 threads, AVX2",
        "device": "cpu",
        "date": "2026-01-02",
        "versions": {"tilefold": "0.1.0", "torch": "2.11.0", "python": "3.11.1"},
        "seconds": 1.0,
        "exact": True,
        "contestants": {"tilefold": "ours", "sdpa": "PyTorch's", "standard": "plain"},
        "rows": rows,
    }
