"""A machine with two levels of memory on which algorithms run and are counted (Hong & Kung 1981).

Slow memory is the tensors outside. Fast memory holds named blocks, at most `capacity` elements at any time.
An algorithm loads a block, computes on it, stores it and evicts it; every element that crosses is counted
under the block's name.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from tilefold.errors import ArgumentError, CapacityError


class Machine:
    """Fast memory of `capacity` elements, and counters.

    Attributes:
        capacity: the most elements that may be resident.
        resident: elements that are.
        peak: the most that ever were.
        loaded, stored: elements that crossed, by name of the block.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ArgumentError(f"capacity: expected at least 1 element, got {capacity}")
        self.capacity = capacity
        self.resident = self.peak = 0
        self.loaded: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()
        self._blocks: dict[str, Tensor] = {}

    @property
    def moved(self) -> int:
        """Elements that crossed, both ways."""
        return self.loaded.total() + self.stored.total()

    def load(self, name: str, slow: Tensor) -> Tensor:
        """Copy `slow`, a region of slow memory, into the new block `name`.

        Raises:
            CapacityError: it does not fit.
            ArgumentError: the block is resident already.
        """
        self._admit(name, slow.numel())
        self.loaded[name] += slow.numel()
        self._blocks[name] = slow.clone()
        return self._blocks[name]

    def allocate(self, name: str, *shape: int, like: Tensor, fill: float = 0.0) -> Tensor:
        """The new block `name` of `shape`, filled with `fill`, with the dtype of `like`; moves nothing.

        Raises:
            CapacityError: it does not fit.
            ArgumentError: the block is resident already.
        """
        self._admit(name, torch.Size(shape).numel())
        self._blocks[name] = like.new_full(shape, fill)
        return self._blocks[name]

    def store(self, name: str, slow: Tensor) -> None:
        """Copy the block `name` to `slow`, a region of slow memory of its shape; it stays resident.

        Raises:
            ArgumentError: the block is not resident, or has another shape.
        """
        block = self._block(name)
        if block.shape != slow.shape:
            raise ArgumentError(
                f"slow: expected the shape of the block {name!r}, {list(block.shape)}, got {list(slow.shape)}"
            )
        self.stored[name] += block.numel()
        slow.copy_(block)

    def evict(self, *names: str) -> None:
        """Forget blocks.

        Raises:
            ArgumentError: one of them is not resident.
        """
        for name in names:
            self.resident -= self._block(name).numel()
            del self._blocks[name]

    def _block(self, name: str) -> Tensor:
        if name not in self._blocks:
            raise ArgumentError(f"name: expected one of the resident blocks {self._names()}, got {name!r}")
        return self._blocks[name]

    def _admit(self, name: str, elements: int) -> None:
        if name in self._blocks:
            raise ArgumentError(f"name: expected a block that is not resident, got {name!r}; evict it first")
        if self.resident + elements > self.capacity:
            raise CapacityError(
                f"block {name!r}: expected at most {self.capacity - self.resident} elements, the rest of a"
                f" fast memory of {self.capacity}, got {elements}; resident: {self._names()}"
            )
        self.resident += elements
        self.peak = max(self.peak, self.resident)

    def _names(self) -> str:
        return ", ".join(f"{name} {list(block.shape)}" for name, block in self._blocks.items()) or "nothing"
