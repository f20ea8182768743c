"""What a backend declares about one pass of a call: a list of steps, priced later for some machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .grid import Grid


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of work.

    Attributes:
        rate: name of the measured rate that knows it, for machines that were measured.
        units: how many units of that rate, already divided among the threads of the machine that runs it.
        flops: floating-point operations in matrix products.
        passes: elements that elementwise operations read or write, in bytes, through fast memory.
        exps: exponentials and other special functions.
        ops: operations that the host issues one by one.
        serial: its parts follow one another, as operations that are not fused do, instead of overlapping.
        grid: the programs of a GPU kernel, from which its time follows; its units are theirs.
        moved: bytes that a GPU kernel moves through slow memory. What its programs read again, or read from
            each other, lies in a cache of all cores and counts once.
        repeated: floating-point operations in products that another step of the pass has counted already.
    """

    rate: str
    units: float
    flops: float = 0.0
    passes: float = 0.0
    exps: float = 0.0
    ops: float = 0.0
    serial: bool = False
    grid: Grid | None = None
    moved: float = 0.0
    repeated: float = 0.0


@dataclass(frozen=True, slots=True)
class Bias:
    """The additive bias of a call, in metadata.

    Attributes:
        shape: its own shape, broadcast dimensions of size 1.
        dtype: its dtype.
        gradient: whether its gradient is wanted.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = False

    @property
    def full(self) -> tuple[int, int, int, int]:
        """The shape with its leading dimensions of size 1."""
        a, b, c, d = (1,) * (4 - len(self.shape)) + tuple(self.shape)
        return a, b, c, d

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a backend will do for one pass.

    Attributes:
        how: one sentence.
        steps: the work.
        rows, keys: the sides of the tiles it works in.
        traffic: bytes between slow and fast memory, by what they belong to.
        products: dtype in which matrix products are computed, such as "float32".
        argument_bytes, result_bytes: bytes of what goes in and comes out.
        extra_bytes: the most bytes held at once beyond these.
    """

    how: str
    steps: Sequence[Step]
    rows: int
    keys: int
    traffic: dict[str, float]
    products: str
    argument_bytes: int
    result_bytes: int
    extra_bytes: int

    @property
    def flops(self) -> float:
        """Floating-point operations of all matrix products."""
        return sum(step.flops for step in self.steps)
