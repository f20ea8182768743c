"""Time from declared work: measured rates where the machine has them, rooflines where it has not.

The roofline (Williams, Waterman & Patterson 2009) of each step is the slowest of its parts (matrix products,
exponentials, elementwise passes), or their sum where they are operations of their own. The whole cannot be
faster than the arguments move through slow memory, nor than the host issues operations.

GPU kernels follow one another, each after its launch. One takes as long as its programs do on the cores, with
their products at the share of the peak that it declares; or as its bytes do.
"""

from __future__ import annotations

from .estimate import Estimate
from .grid import Grid
from .hardware import Hardware
from .steps import Declaration, Step


def estimate(declared: Declaration, machine: Hardware) -> Estimate:
    """The prediction for `declared` on `machine`."""
    shares, rate = walls(declared, machine), machine.matmul_rate(declared.products)
    wall = max(shares, key=lambda name: shares[name])
    measured = [machine.rates.get(step.rate) for step in declared.steps]
    if declared.steps and all(rate is not None for rate in measured):
        # Rates are measured on data that is in a cache already.
        seconds = (declared.argument_bytes + declared.result_bytes) / machine.bandwidth + sum(
            rate * step.units for rate, step in zip(measured, declared.steps, strict=True) if rate is not None
        )
    else:
        device = sum(_device_seconds(step, machine, rate) for step in declared.steps)
        if any(step.grid is not None for step in declared.steps):
            device += shares["overhead"]
        seconds = max(device, shares["memory"], shares["overhead"])
    return Estimate(
        seconds=seconds,
        flops=declared.flops,
        bytes=sum(declared.traffic.values()),
        extra_bytes=declared.extra_bytes,
        result_bytes=declared.result_bytes,
        wall=wall,
        shares=shares,
        traffic=dict(declared.traffic),
    )


def _device_seconds(step: Step, machine: Hardware, rate: float) -> float:
    """Seconds of one step alone, products at `rate` FLOP/s."""
    moved = step.moved / machine.passes
    if step.grid is not None:
        return max(_grid_seconds(step.grid, machine, rate), moved)
    products = step.flops / rate
    elementwise = max(step.passes / machine.passes, step.exps / machine.exps)
    return products + elementwise if step.serial else max(products, elementwise, moved)


def _grid_seconds(grid: Grid, machine: Hardware, rate: float) -> float:
    """Seconds from the start of the first program to the end of the last."""
    # A program has its part of the core to itself.
    places = machine.cores * grid.per_core
    unit = places * (grid.flops / (rate * grid.share) + grid.instructions / machine.instructions)
    return grid.makespan(machine.cores, machine.cache_bytes) * unit


def walls(declared: Declaration, machine: Hardware) -> dict[str, float]:
    """Seconds that each wall alone would take."""
    steps = declared.steps
    moved = sum(step.moved for step in steps) or sum(declared.traffic.values())
    return {
        "matmul": sum(step.flops + step.repeated for step in steps) / machine.matmul_rate(declared.products),
        "memory": moved / machine.bandwidth,
        "vector": sum(_vector_seconds(step, machine) for step in steps),
        "overhead": sum(step.ops for step in steps) * machine.launch,
    }


def _vector_seconds(step: Step, machine: Hardware) -> float:
    """Seconds of the elementwise work of one step."""
    seconds = max(step.passes / machine.passes, step.exps / machine.exps)
    if step.grid is None:
        return seconds
    return max(seconds, step.units * step.grid.instructions / machine.instructions)
