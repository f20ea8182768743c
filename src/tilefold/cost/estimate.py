"""A prediction for one pass of one call, as a value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one pass (forward, or backward) of a call is predicted to take.

    Attributes:
        seconds: wall time.
        flops: floating-point operations of the matrix products on the tiles that are visited, `2 m n k` each.
        bytes: bytes between slow and fast memory, reads and writes.
        extra_bytes: the most bytes held at once beyond the arguments and the results.
        result_bytes: bytes of the results.
        wall: what bounds the time: "matmul", "memory", "vector" or "overhead".
        shares: seconds of each of these walls, by name, as if it were alone.
        traffic: bytes moved, by what they belong to ("q", "k", "v", "out", "bias", ...).
    """

    seconds: float
    flops: float
    bytes: float
    extra_bytes: int
    result_bytes: int
    wall: str
    shares: dict[str, float]
    traffic: dict[str, float]

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self) | {"intensity": self.intensity}
