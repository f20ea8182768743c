"""The table of machines."""

from __future__ import annotations

import dataclasses

import pytest

from tilefold.cost.hardware import MACHINES, find, recognised
from tilefold.errors import ArgumentError, ArgumentTypeError

NO_FIGURES = {"name", "device", "architecture", "sources", "rates", "doubt"}
ASKED = ("H200", "H100", "A100", "L40S", "RTX 4090", "MI300X", "B200")


@pytest.mark.parametrize("name", ASKED)
def test_every_figure_has_a_source(name: str) -> None:
    machine = MACHINES[name]
    figures = {f.name for f in dataclasses.fields(machine)} - NO_FIGURES
    assert set(machine.sources) == figures
    assert all(len(source) > 20 for source in machine.sources.values())


@pytest.mark.parametrize("name", ASKED)
def test_figures_are_in_the_right_units(name: str) -> None:
    machine = MACHINES[name]
    assert 0.5e12 < machine.bandwidth < 1e13
    assert 1e14 < machine.matmul_rate("bfloat16") < 5e15
    assert machine.matmul_rate("float16") == machine.matmul_rate("bfloat16") > machine.matmul_rate("float32")
    assert machine.matmul_rate("float32") >= machine.matmul_rate("float64") > 1e12
    assert 1e12 < machine.exps < 2e13
    assert 2e10 < machine.memory_bytes < 3e11
    assert 60_000 < machine.fast_bytes < 240_000
    assert 1e-6 < machine.launch < 2e-5
    assert machine.passes <= machine.bandwidth


def test_exponentials_of_an_h100_are_those_of_the_flash_attention_3_paper() -> None:
    # Shah et al. 2024, section 1: 3.9 TFLOP/s of special functions on an H100 SXM5.
    assert MACHINES["H100"].exps == pytest.approx(3.9e12, rel=0.02)


@pytest.mark.parametrize("name", ["rtx4090", "RTX-4090", "rtx 4090", "Rtx_4090"])
def test_names_are_found_however_they_are_written(name: str) -> None:
    assert find(name) is MACHINES["RTX 4090"]


def test_unknown_machines_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"machine: expected one of 'H200', .*'B200' or None, got 'V100'"):
        find("V100")
    with pytest.raises(ArgumentTypeError, match="machine: expected a name or None, got int"):
        find(5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "called, name",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_drivers_names_are_recognised(called: str, name: str | None) -> None:
    found = recognised(called)
    assert (found.name if found else None) == name
