"""`random_blocks`: each block of queries x keys is visible with probability p."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilefold.errors import ArgumentTypeError, MaskError
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Length

from ._blocks import Blocks, hashed
from ._checks import an_int


@dataclass(frozen=True, eq=False, repr=False)
class RandomBlocks(Blocks):
    p: float
    block: int
    seed: int

    def _name(self) -> str:
        return "random_blocks"

    def _arguments(self) -> Arguments:
        block = () if self.block == 64 else (("block", self.block),)
        seed = () if self.seed == 0 else (("seed", self.seed),)
        return (("", self.p), *block, *seed)

    @property
    def block_size(self) -> int:
        return self.block

    def block_visible(self, b: Tensor, h: Tensor, x: Tensor, y: Tensor, k_length: Length) -> Tensor:
        return hashed(self.seed, self.seed >> 32, x, y) < int(self.p * 2**32)


def random_blocks(p: float, block: int = 64, seed: int = 0) -> Mask:
    """Each block of `block x block` positions is visible with probability `p`, independently; batch and heads
    share the pattern.

    Whether block `(x, y)` is visible is a function of `(seed, x, y)` alone (`x` counts queries by position `i
    + Lk - Lq`), so that a block never changes with the lengths or the order of evaluation. Rows may see
    nothing: add `| causal()` or `| window(...)` where they must not.

    Args:
        p: in [0, 1].
        block: tokens per block, at least 1.
        seed: an int.

    Raises:
        ArgumentTypeError, MaskError: not numbers, or out of range.
    """
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise ArgumentTypeError(f"p: expected a number in [0, 1], got {type(p).__name__}")
    if not 0.0 <= p <= 1.0:
        raise MaskError(f"p: expected a number in [0, 1], got {p}")
    return RandomBlocks(float(p), an_int("block", block, 1), an_int("seed", seed))
