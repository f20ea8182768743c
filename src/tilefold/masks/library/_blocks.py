"""What masks on blocks of tokens share, and a stateless hash of block indices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.masks.base import Mask
from tilefold.masks.context import Boxes, Length, Points, position, states

_LOW = 0xFFFFFFFF
# Boxes that span more blocks per side than this are left to element masks.
_MOST_SAMPLES = 6


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(Mask):
    """A mask that is constant on blocks of queries x keys.

    Blocks of queries are counted by position, `(i + Lk - Lq) // block`, unless a mask says otherwise.
    """

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        raise NotImplementedError

    def block_visible(self, b: Tensor, h: Tensor, x: Tensor, y: Tensor, k_length: Length) -> Tensor:
        """bool: do queries of block `x` see keys of block `y`? `x` may be negative where queries come before
        the first key.
        """
        raise NotImplementedError

    def query_position(self, i: Tensor, q_length: Length, k_length: Length) -> Tensor:
        """The position that is divided into blocks."""
        return position(i, q_length, k_length)

    def visible(self, p: Points) -> Tensor:
        x = self.query_position(p.i, p.q_length, p.k_length) // self.block_size
        return self.block_visible(p.b, p.h, x, p.j // self.block_size, p.k_length)

    def tiles(self, boxes: Boxes) -> Tensor:
        block = self.block_size
        samples = -(-(boxes.size - 1) // block) + 1
        if samples > _MOST_SAMPLES:
            return super().tiles(boxes)
        q0, q1 = (self.query_position(q, boxes.q_length, boxes.k_length) for q in (boxes.q0, boxes.q1))
        some = every = None
        # One element of every block that the box touches; a box that touches fewer looks at its last block
        # again.
        for row in range(samples):
            x = torch.minimum(q0 + row * block, q1 - 1) // block
            for column in range(samples):
                y = torch.minimum(boxes.k0 + column * block, boxes.k1 - 1) // block
                seen = self.block_visible(boxes.b, boxes.h, x, y, boxes.k_length)
                some = seen if some is None else some | seen
                every = seen if every is None else every & seen
        assert some is not None
        assert every is not None
        return states(~some, every)


def hashed(*values: Tensor | int) -> Tensor:
    """int64 in [0, 2^32): the values mixed one after the other by MurmurHash3's finalizer; broadcasts, keeps
    no state.
    """
    state: Tensor | int = 0x9E3779B9
    for value in values:
        state = _mixed((state ^ (value & _LOW)) & _LOW)
    assert isinstance(state, Tensor)
    return state


def _mixed(x: Tensor | int) -> Tensor | int:
    # Products wrap in int64, which leaves their low 32 bits right.
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)
