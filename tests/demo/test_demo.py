"""The demonstration as a whole with tiny settings, and what it measures with."""

from __future__ import annotations

import json
import sys
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from tilefold import masks
from tilefold.bench.timing import peak_memory
from tilefold.demo import scaling as scaling_module
from tilefold.demo.__main__ import MISSING, main, parse
from tilefold.demo.corpus import Corpus
from tilefold.demo.probe import Cost, measure
from tilefold.demo.sample import PROMPT
from tilefold.demo.scaling import Outcome, Row, scaling
from tilefold.demo.show import Show, seconds, size, sparkline
from tilefold.demo.standard import sdpa, standard
from tilefold.demo.verify import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, compare, run, verify
from tilefold.nn import GPT, GPTConfig

CPU = torch.device("cpu")
MiB = 2**20
TINY = [
    "--seconds",
    "60",
    "--steps",
    "12",
    "--context",
    "256",
    "--dim",
    "32",
    "--layers",
    "1",
    "--max-context",
    "1024",
    "--sample",
    "12",
    "--json",
]


@pytest.fixture(scope="module")
def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(dim=16, layers=2, heads=2, kv_heads=1))


def test_runs_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    captured = capsys.readouterr()
    results: dict[str, Any] = json.loads(captured.out)
    assert results["train"]["steps"] == len(results["train"]["curve"]) == 12
    assert results["train"]["after"] < results["train"]["before"]
    assert [line["holds"] for line in results["verify"]] == [True] * 4
    (row,) = results["scale"]["rows"]
    assert [outcome["name"] for outcome in row["outcomes"]] == ["standard", "SDPA", "tilefold"]
    assert results["sample"].startswith(PROMPT.decode())
    for title in ("Train", "Verify", "Scale", "Sample"):
        assert title in captured.err


def test_says_how_to_get_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilefold.demo.__main__.find_spec", lambda name: None)
    assert main([]) == 2
    assert capsys.readouterr().err.strip() == MISSING


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "--steps: expected a positive number, got 0"),
        (["--budget-mb", "-1"], "--budget-mb: expected a positive number, got -1"),
        pytest.param(
            ["--device", "cuda"],
            "this build of PyTorch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


def test_comparisons_hold_and_would_notice(tiny: GPT) -> None:
    window = Corpus.load().window(3, 200, CPU)
    doubles, theirs, fused, ours = verify(tiny, window)
    assert doubles.holds and theirs.holds and ours.holds
    assert doubles.allowed == FLOAT64_TOLERANCE and ours.allowed == FLOAT32_TOLERANCE
    assert theirs.allowed is None and fused.allowed is None

    def slightly_wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return standard(q * (1 + 1e-8), k, v, **options)

    truth = run(tiny, window, standard, torch.float64)
    assert not compare("", run(tiny, window, slightly_wrong, torch.float64), truth, FLOAT64_TOLERANCE).holds


def test_verifying_leaves_the_model_alone(tiny: GPT) -> None:
    before = {name: parameter.clone() for name, parameter in tiny.named_parameters()}
    attends = [layer.attend for layer in tiny.attention_layers()]
    verify(tiny, Corpus.load().window(0, 64, CPU))
    assert [layer.attend for layer in tiny.attention_layers()] == attends
    for name, parameter in tiny.named_parameters():
        assert (
            torch.equal(parameter, before[name])
            and parameter.grad is None
            and parameter.dtype == torch.float32
        )


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(4, 2)])
def test_both_baselines_agree(mask: masks.Mask | None) -> None:
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(standard(q, k, v, mask=mask), sdpa(q, k, v, mask=mask))


def test_peak_is_the_most_held_at_once() -> None:
    def call() -> None:
        first = torch.zeros(MiB)
        second = torch.zeros(2 * MiB)
        del first, second
        torch.zeros(MiB)

    assert peak_memory(call, CPU)[1] == 12 * MiB


def test_peak_counts_what_kernels_allocate_inside() -> None:
    x = torch.randn(1, 2, 256, 16)
    visible = torch.ones(256, 256, dtype=torch.bool)
    # The boolean mask becomes a float32 one inside.
    assert peak_memory(lambda: sdpa(x, x, x, mask=visible[None, None]), CPU)[1] >= 256 * 256 * 4


def test_measuring_repeats_short_calls_and_not_long_ones() -> None:
    calls = []
    cost = measure(lambda: calls.append(torch.zeros(MiB)) or calls.clear(), CPU, patience=0.02)
    assert 0 < cost.seconds < 0.02
    assert cost.bytes == 4 * MiB


def test_what_would_not_fit_is_predicted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def cost(attend: Any, length: int, is_dense: bool, device: torch.device) -> Cost:
        made.append((length, is_dense))
        return Cost(0.1, length * length if is_dense else length)

    monkeypatch.setattr(scaling_module, "_cost", cost)
    rows = list(scaling(8192, 5 * MiB, CPU))
    assert [row.length for row in rows] == [1024, 2048, 4096, 8192]
    assert [[outcome.made for outcome in row.outcomes] for row in rows] == [
        [True, True, True],
        [True, True, True],
        [False, False, True],
        [False, False, True],
    ]
    assert rows[3].outcomes[0].cost.bytes == 8192 * 8192
    assert (4096, True) not in made and (8192, False) in made


def test_the_table_says_what_did_not_fit() -> None:
    rows = [
        Row(
            1024,
            [Outcome("standard", Cost(2.0, 3 * 2**30), False), Outcome("tilefold", Cost(0.25, MiB), True)],
        )
    ]
    written = StringIO()
    returned = Show(Console(file=written, width=100)).scaling(iter(rows), budget=MiB)
    assert returned == rows
    text = " ".join(written.getvalue().split())
    assert "does not fit 3.0 GiB * 250 ms 1.0 MiB" in text
    assert "predicted from the row above, not run" in text


def test_units() -> None:
    assert [seconds(x) for x in (0.00123, 0.0456, 0.9999, 12.345)] == ["1.2 ms", "46 ms", "1.00 s", "12.35 s"]
    assert [size(x) for x in (MiB // 2, 35.4 * MiB, 2.25 * 1024 * MiB)] == ["0.5 MiB", "35 MiB", "2.2 GiB"]
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)], 48)) == 48


def test_the_demonstration_needs_no_display_to_be_imported() -> None:
    assert "rich" not in sys.modules["tilefold.demo.__main__"].__dict__
