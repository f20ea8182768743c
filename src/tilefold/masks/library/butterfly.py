"""`butterfly`: the fixed pattern of block-sparse FlashAttention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Length

from ._blocks import Blocks
from ._checks import an_int


@dataclass(frozen=True, eq=False, repr=False)
class Butterfly(Blocks):
    block: int

    def _arguments(self) -> Arguments:
        return () if self.block == 64 else (("block", self.block),)

    @property
    def block_size(self) -> int:
        return self.block

    def block_visible(self, b: Tensor, h: Tensor, x: Tensor, y: Tensor, k_length: Length) -> Tensor:
        flipped = x ^ y
        # Zero and powers of two; queries before the first key have negative blocks, and see none.
        return (flipped >= 0) & ((flipped & (flipped - 1)) == 0)


def butterfly(block: int = 64) -> Mask:
    """Query block `x` sees key block `y` if `x == y` or `x XOR y` is a power of two: log2 of the number of
    blocks, plus one, per row.

    The flat butterfly of Pixelated Butterfly (Chen et al. 2022), which FlashAttention (Dao et al. 2022,
    section 3.3) takes for its block-sparse runs; add `| global_tokens(n)` for the low-rank part. Blocks of
    queries are counted by position, `(i + Lk - Lq) // block`.

    Args:
        block: tokens per block, at least 1.

    Raises:
        ArgumentTypeError, MaskError: not an int, or too small.
    """
    return Butterfly(an_int("block", block, 1))
