"""Time from declared work, against sums done by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tilefold.cost.hardware import MACHINES, Hardware
from tilefold.cost.roofline import estimate, walls
from tilefold.cost.steps import Bias, Declaration, Step

MACHINE = Hardware(
    "toy", "cuda", "sm00", bandwidth=100.0, matmul={"float32": 1000.0, "bfloat16": 4000.0}, exps=10.0,
    passes=200.0, launch=0.5, fast_bytes=1, cores=1, memory_bytes=1, sources={},
)  # fmt: skip


def declared(*steps: Step, traffic: float = 0.0, products: str = "float32") -> Declaration:
    sizes = {"argument_bytes": 30, "result_bytes": 20, "extra_bytes": 7}
    return Declaration("toy", steps, 1, 1, {"q": traffic}, products, **sizes)


@pytest.mark.parametrize(
    "step, traffic, seconds, wall",
    [
        (Step("a", 1, flops=8000), 0, 8.0, "matmul"),
        (Step("a", 1, flops=1000, passes=800), 0, 4.0, "vector"),
        (Step("a", 1, flops=1000, exps=50), 0, 5.0, "vector"),
        (Step("a", 1, flops=1000), 900, 9.0, "memory"),
        (Step("a", 1, flops=1000, ops=6), 100, 3.0, "overhead"),
    ],
)
def test_the_slowest_part_decides(step: Step, traffic: float, seconds: float, wall: str) -> None:
    found = estimate(declared(step, traffic=traffic), MACHINE)
    assert (found.seconds, found.wall) == (seconds, wall)
    assert found.seconds == pytest.approx(max(found.shares.values()))
    assert (found.extra_bytes, found.result_bytes) == (7, 20)


def test_steps_follow_one_another_each_with_its_own_wall() -> None:
    steps = (Step("a", 1, flops=3000), Step("b", 1, flops=1000, passes=400))
    assert estimate(declared(*steps), MACHINE).seconds == 3.0 + 2.0


def test_parts_that_are_operations_of_their_own_add_up() -> None:
    step = Step("a", 1, flops=3000, passes=400, exps=50, serial=True)
    assert estimate(declared(step), MACHINE).seconds == 3.0 + 5.0


def test_the_dtype_decides_the_speed_of_products() -> None:
    step = Step("a", 1, flops=8000)
    assert walls(declared(step, products="bfloat16"), MACHINE)["matmul"] == 2.0
    # A dtype without a figure counts as float32.
    assert walls(declared(step, products="float16"), MACHINE)["matmul"] == 8.0


def test_measured_rates_go_before_rooflines() -> None:
    measured = dataclasses.replace(MACHINE, rates={"a": 2.0, "b": 0.25})
    steps = (Step("a", 3, flops=1e9), Step("b", 4))
    # 3 * 2 + 4 * 0.25, and 50 bytes of arguments and results from slow memory.
    assert estimate(declared(*steps), measured).seconds == pytest.approx(6.0 + 1.0 + 0.5)


def test_one_unknown_rate_leaves_all_to_the_rooflines() -> None:
    measured = dataclasses.replace(MACHINE, rates={"a": 2.0})
    steps = (Step("a", 3, flops=4000), Step("b", 4, flops=1000))
    assert estimate(declared(*steps), measured).seconds == 5.0


def test_intensity_is_flops_per_byte() -> None:
    found = estimate(declared(Step("a", 1, flops=600), traffic=40), MACHINES["H200"])
    assert found.intensity == 15.0
    assert found.to_dict()["intensity"] == 15.0
    assert estimate(declared(Step("a", 1)), MACHINES["H200"]).intensity == 0.0


def test_a_bias_knows_its_full_shape() -> None:
    import torch

    assert Bias((3, 4), torch.float32).full == (1, 1, 3, 4)
    assert Bias((2, 1, 3, 4), torch.float32).elements == 24
