"""Quantities as short text."""

from __future__ import annotations


def scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """`value` in the largest unit in which it is at least 1, with three digits."""
    index = 0
    while index + 1 < len(units) and abs(value) >= base * 0.9995:
        value /= base
        index += 1
    digits = (
        0 if abs(value) >= 99.95 or (index == 0 and value == int(value)) else 1 if abs(value) >= 9.995 else 2
    )
    return f"{value:.{digits}f} {units[index]}"


def size(count: float) -> str:
    """Bytes, in decimal units."""
    return scaled(count, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def flops(count: float) -> str:
    """Floating-point operations."""
    return scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def seconds(value: float) -> str:
    """A time, from nanoseconds up."""
    return scaled(value, 1, ("s",)) if value >= 0.9995 else scaled(value * 1e9, 1000, ("ns", "µs", "ms"))


def percent(share: float) -> str:
    """A share in [0, 1]; only what is exactly all is written as 100 %."""
    text = f"{100 * share:.3g} %"
    return "> 99.9 %" if text == "100 %" and share < 1.0 else text
