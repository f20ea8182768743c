"""What the eager backend declares, against counts made by other means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tilefold import masks
from tilefold.backends.eager import backend, fold, fused, predict
from tilefold.backends.eager.predict import bill as bills
from tilefold.backends.eager.predict.calibrate import SIZES, at_size, class_of
from tilefold.cost.steps import Bias, Declaration
from tilefold.planning.backend import Work
from tilefold.planning.tuned import trying
from tilefold.problem import Problem
from tilefold.scores import Scores
from tilefold.testing.cases import MASKS

OPTIONS = ((), ("softcap",), ("alibi", "sink"), ("bias",), ("dropout",))


def declared(
    mask: masks.Mask | None, options: tuple[str, ...] = (), backward: bool = False, **changes: Any
) -> tuple[Problem, Declaration]:
    sizes = {
        "batch": 1, "q_heads": 4, "k_heads": 2, "q_length": 512, "k_length": 512, "head_dim": 32,
        "v_head_dim": 32, "dtype": torch.float32, "options": options,
    }  # fmt: skip
    p = Problem(**(sizes | changes))
    form = masks.lower(
        masks.full() if mask is None else mask, (), p.batch, p.q_heads, p.q_length, p.k_length, "cpu"
    )
    bias = Bias((1, p.q_heads, p.q_length, p.k_length), p.dtype) if "bias" in options else None
    return p, backend.declare(p, form, backward, bias)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_every_step_has_a_rate_that_is_measured(
    name: str, options: tuple[str, ...], backward: bool, rate_names: set[str]
) -> None:
    mask = MASKS[name](1, 4, 512, 512, torch.Generator().manual_seed(0))
    for changes in ({}, {"v_head_dim": 48}, {"dtype": torch.bfloat16, "k_heads": 4}):
        _, found = declared(mask, options, backward, **changes)
        assert {step.rate for step in found.steps} <= rate_names
        assert all(step.units > 0 for step in found.steps)
        assert found.extra_bytes >= 0
        assert all(moved >= 0 for moved in found.traffic.values())


def visible_share(mask: masks.Mask) -> float:
    return float(mask.materialize(1, 4, 512, 512).double().mean())


@pytest.mark.parametrize("name", ["full", "causal", "window", "prefix", "documents", "bigbird", "dense"])
def test_flops_are_at_least_those_of_visible_elements_and_at_most_those_of_all(name: str) -> None:
    mask = MASKS[name](1, 4, 512, 512, torch.Generator().manual_seed(0))
    assert mask is not None
    every = 4.0 * 4 * 512 * 512 * 32
    _, found = declared(mask)
    assert every * visible_share(mask) <= found.flops <= every
    _, folded = declared(mask, ("softcap",))
    assert every * visible_share(mask) <= folded.flops <= every


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.window(40, 0)], ids=repr)
def test_flops_of_the_fold_are_those_that_pytorch_counts(mask: masks.Mask, backward: bool) -> None:
    with trying("fold_tile_elements", 4 * 64 * 64):
        p, found = declared(mask, ("softcap",), backward)
        q = torch.randn(1, 4, 512, 32)
        k, v = torch.randn(2, 1, 2, 512, 32).unbind()
        work = Work(p, q, k, v, masks.lower(mask, (), 1, 4, 512, 512, "cpu"), Scores(1.0, softcap=9.0))
        out, lse = fold.forward(work)
        with FlopCounterMode(display=False) as counter:
            if backward:
                fold.backward(work, out, None, out, lse, (True, True, True, False, False, False))
            else:
                fold.forward(work)
    assert found.flops == counter.get_total_flops()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("pairs", [1, 2, 5, 16])
def test_the_busiest_thread_is_the_one_of_a_deal_in_runs(pairs: int, threads: int) -> None:
    costs = [1, 4, 9, 16, 25]
    tasks = costs * pairs
    run = -(-len(tasks) // threads)
    loads = [sum(tasks[at : at + run]) for at in range(0, len(tasks), run)]
    assert bills._busiest(pairs, costs, threads) == max(loads)


@pytest.mark.parametrize("rows", [1, 40, 300, 1000, 2048])
def test_causal_blocks_reach_whole_blocks_of_keys(rows: int) -> None:
    reach = bills._reach("causal", rows, rows)
    height = bills.rows_per_block(rows)
    assert len(reach) == -(-rows // height)
    for m, keys in enumerate(reach):
        last = min((m + 1) * height, rows)
        assert last <= keys <= min(rows, last + 511)
        assert keys == rows or keys % 512 == 0
    assert bills._reach("full", rows, 77) == [77] * len(reach)


@pytest.mark.parametrize("dim", [1, 16, 32, 40, 64, 96, 100, 128, 256, 512])
def test_head_sizes_between_the_measured_ones_lie_on_a_line(dim: int) -> None:
    weights = at_size(dim)
    assert set(weights) <= set(SIZES)
    assert all(weight > 0 for weight in weights.values())
    # A cost that is proportional to the head size is met exactly from the least size on.
    cost = sum(weight * size for size, weight in weights.items())
    assert cost == pytest.approx(max(dim, SIZES[0]))


@pytest.mark.parametrize("rows, label", [(1, 1), (2, 8), (23, 8), (24, 32), (191, 32), (192, 64), (768, 256)])
def test_classes_of_rows(rows: int, label: int) -> None:
    assert class_of(rows) == label


def test_more_threads_share_the_work_of_more_heads() -> None:
    for direction in ("forward", "backward"):
        found = []
        for threads in (1, 4):
            bill = bills.Bill(64, 4, threads)
            bill.kernel(direction, "full", 8, 1024, 1024)
            units = {step.rate: step.units for step in bill.steps()}
            found.append(units[f"kernel {direction}, 256 rows, D 64"])
        assert found[0] == 4 * found[1]


def test_what_the_road_is_called() -> None:
    assert declared(masks.causal(), q_length=2048, k_length=2048)[1].how == (
        "one call of PyTorch's fused CPU kernel (causal)"
    )
    assert "rectangles of views" in declared(masks.window(40, 0))[1].how
    assert "with gathered keys" in declared(masks.random_blocks(0.1), q_length=4096, k_length=4096)[1].how
    assert "no softcap" in declared(masks.causal(), ("softcap",))[1].how
    assert declared(masks.empty())[1].how == "nothing to compute: no query sees a key"
    assert fused.why_not(declared(None)[0], None) == []
    assert predict.__all__ == ["declare", "measure"]


def test_packed_operands_count_where_the_cpu_has_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    def extra(rows: int, dtype: torch.dtype, units: bool) -> int:
        monkeypatch.setattr(predict.fused, "matrix_units", lambda: units)
        return declared(None, dtype=dtype, q_length=rows, batch=3)[1].extra_bytes

    keys = 3 * 2 * 512 * 32 * 2
    without = extra(512, torch.bfloat16, False)
    # Both operands once per key head.
    assert extra(512, torch.bfloat16, True) == without + 2 * keys
    assert extra(512, torch.float16, True) == extra(512, torch.float16, False)
    # With few rows it is not worth it.
    assert extra(16, torch.bfloat16, True) == extra(16, torch.bfloat16, False)
