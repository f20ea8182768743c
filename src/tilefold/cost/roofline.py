"""Time from declared work: measured rates where the machine has them, rooflines where it has not.

The roofline (Williams, Waterman & Patterson 2009) of each step is the slowest of its parts (matrix products,
exponentials, elementwise passes), or their sum where they are operations of their own. The whole cannot be
faster than the arguments move through slow memory, nor than the host issues operations.
"""

from __future__ import annotations

from .estimate import Estimate
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
    products = step.flops / rate
    elementwise = max(step.passes / machine.passes, step.exps / machine.exps)
    return products + elementwise if step.serial else max(products, elementwise)


def walls(declared: Declaration, machine: Hardware) -> dict[str, float]:
    """Seconds that each wall alone would take."""
    steps = declared.steps
    return {
        "matmul": declared.flops / machine.matmul_rate(declared.products),
        "memory": sum(declared.traffic.values()) / machine.bandwidth,
        "vector": sum(max(step.passes / machine.passes, step.exps / machine.exps) for step in steps),
        "overhead": sum(step.ops for step in steps) * machine.launch,
    }
