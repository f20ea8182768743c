"""What `explain` says of the Hopper kernel, without a GPU: its tiles, and times near the measured ones."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from tilefold import Problem, explain, masks

pytest.importorskip("triton", reason="Triton is not installed")
from tilefold.backends.hopper.sizes import WIDTHS, sizes_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_hopper.json"
MASKS = {"full": masks.full(), "causal": masks.causal(), "window(1023, 0)": masks.window(1023, 0)}


def call(B: int, H: int, L: int, D: int, **changes: Any) -> Problem:
    given = {"options": ()} | changes
    return Problem(B, H, H, L, L, D, D, torch.bfloat16, "cuda", backend="hopper", **given)


def measured() -> list[Any]:
    """Dense calls of the file of results: label, head size, length, seconds."""
    found = []
    for row in json.loads(RESULTS.read_text())["rows"]:
        if "tflops" in row:
            label, head, length = row["case"].rsplit(": ", 1)[1].split(", ")
            D, L = int(head.split()[1]), int(length.split()[1])
            flops = (0.5 if label == "causal" else 1.0) * 4 * 2048 * max(16384, L) * L
            found.append((label, D, L, flops / row["tflops"]["hopper"] / 1e12))
    return found


def test_dense_calls_were_measured() -> None:
    assert len(measured()) >= 28


@pytest.mark.parametrize("label, D, L, seconds", measured(), ids=lambda value: str(value)[:6])
def test_dense_times_are_predicted_within_a_fifth(label: str, D: int, L: int, seconds: float) -> None:
    problem = call(max(16384 // L, 1), 2048 // D, L, D)
    found = explain(problem, mask=MASKS[label], machine="H200").forward.seconds
    assert 0.8 <= found / seconds <= 1.25


@pytest.mark.parametrize(
    "mask, options, kind",
    [
        ("full", (), "full"),
        ("causal", (), "band"),
        ("window(1023, 0)", (), "window"),
        ("full", ("bias",), "bias"),
    ],
)
def test_its_tiles_are_those_of_its_table(mask: str, options: tuple[str, ...], kind: str) -> None:
    found = explain(call(2, 8, 4096, 128, options=options), mask=MASKS[mask], machine="H200")
    sizes = sizes_of(128, kind)
    assert (found.tiles.rows, found.tiles.keys) == (64 * sizes["GROUPS"], sizes["BN"])
    assert found.how.startswith(f"fused Hopper kernel, forward in tiles of {64 * sizes['GROUPS']} x ")
    assert found.backend == "hopper" and 0 < found.forward.seconds < found.backward.seconds


def test_rates_are_those_of_the_sizes_that_are_shipped() -> None:
    file = resources.files("tilefold") / "planning" / "tables" / "rates" / "h200.json"
    rates = {name: rate for name, rate in json.loads(file.read_text()).items() if name.startswith("hopper/")}
    assert {f"hopper/{width}{kind}" for width in WIDTHS for kind in ("", "/full", "/band")} <= set(rates)
    for name, rate in rates.items():
        _, width, *kind = name.split("/")
        sizes = sizes_of(int(width), *(kind or ["band"]))
        tile = [64 * sizes["GROUPS"], sizes["BN"], 8, sizes["STAGES"]]
        assert rate["sizes"] == tile, f"{name}: measure it again"
        assert 0.2 < rate["share"] < 1.0 and 0.0 <= rate["fixed"] <= 10.0


def test_masks_cost_what_they_show() -> None:
    full, causal, window = (
        explain(call(1, 16, 16384, 128), mask=mask, machine="H200").forward for mask in MASKS.values()
    )
    assert 0.45 < causal.seconds / full.seconds < 0.6
    assert 0.06 < window.seconds / full.seconds < 0.12
    assert full.extra_bytes == window.extra_bytes == 0


def test_what_it_declines_is_said() -> None:
    problem = Problem(1, 8, 8, 512, 512, 64, 64, torch.float32, "cuda")
    assert "take bfloat16 and float16" in str(explain(problem, machine="H200"))


@pytest.mark.parametrize(
    "mask, words",
    [(masks.documents(torch.tensor([0, 100, 1024], dtype=torch.int32)), 1), (masks.random_blocks(0.3), 4)],
    ids=["documents", "blocks"],
)
def test_lists_are_kept_twice(mask: masks.Mask, words: int) -> None:
    """As the Triton backend makes them, and as the kernel takes them: lines of 128 rows, tiles of 64 keys."""
    found = explain(call(1, 2, 1024, 128), mask=mask, machine="H200").forward
    assert found.extra_bytes == 4 * 8 * (16 + 3) + 4 * words * 8 * 16
