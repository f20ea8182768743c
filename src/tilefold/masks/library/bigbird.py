"""`bigbird`: window, global and random blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Length

from ._blocks import Blocks, hashed
from ._checks import an_int


@dataclass(frozen=True, eq=False, repr=False)
class BigBird(Blocks):
    window: int
    global_blocks: int
    random: int
    block: int
    seed: int

    def _arguments(self) -> Arguments:
        block = () if self.block == 64 else (("block", self.block),)
        seed = () if self.seed == 0 else (("seed", self.seed),)
        return ("", self.window), ("", self.global_blocks), ("", self.random), *block, *seed

    @property
    def block_size(self) -> int:
        return self.block

    def block_visible(self, b: Tensor, h: Tensor, x: Tensor, y: Tensor, k_length: Length) -> Tensor:
        side = self.window // 2
        near = (y - x).abs() <= side if self.window > 0 else torch.zeros_like(y - x, dtype=torch.bool)
        everything = (x >= 0) & (x < self.global_blocks)
        seen = near | (y < self.global_blocks) | everything
        for pick in self._picks(x, (k_length + self.block - 1) // self.block):
            seen = seen | (y == pick)
        return seen

    def _picks(self, x: Tensor, blocks: int | Tensor) -> list[Tensor]:
        """The random key blocks of query block `x`, like `x`; -1 where there are fewer left than asked for.

        Candidates are the `n` blocks that are neither global nor in the window. Floyd's algorithm draws
        distinct ones without a table: in round `t` a number in `[0, top]`, or `top` itself if that number was
        drawn before, with `top = n - rounds + t`.
        """
        zero = x * 0
        blocks = blocks + zero
        # The window's blocks that are not global: [first, last).
        first = (x - self.window // 2).clamp(min=self.global_blocks)
        last = torch.minimum(x + self.window // 2 + 1, blocks)
        hole = (last - first).clamp(min=0) if self.window > 0 else zero
        n = (blocks - self.global_blocks - hole).clamp(min=0)
        rounds = n.clamp(max=self.random)
        drawn: list[Tensor] = []
        for t in range(self.random):
            top = n - rounds + t
            number = hashed(self.seed, self.seed >> 32, x, zero + t) % (top + 1)
            again = torch.zeros_like(number, dtype=torch.bool)
            for earlier in drawn:
                again = again | (number == earlier)
            number = torch.where(again, top, number)
            drawn.append(torch.where(t < rounds, number, -1))
        picks = []
        for number in drawn:
            pick = number + self.global_blocks
            pick = torch.where((hole > 0) & (pick >= first), pick + hole, pick)
            picks.append(torch.where(number < 0, -1, pick))
        return picks


def bigbird(window: int = 3, global_blocks: int = 2, random: int = 3, block: int = 64, seed: int = 0) -> Mask:
    """BigBird on blocks of tokens (Zaheer et al. 2020, section 2 and appendix D, internal global tokens).

    Query block `x` (by position, `(i + Lk - Lq) // block`) sees key block `y` if

    - window: `|x - y| <= window // 2`; or
    - global: `y < global_blocks`, or `0 <= x < global_blocks`; or
    - random: `y` is one of `random` distinct blocks, drawn for each `x` among those that are neither in its
      window nor global (all of them where fewer are left). The draw is a function of `(seed, x)` and the
      number of key blocks; batch and heads share it.

    Args:
        window: blocks around the diagonal, odd; 0 for none.
        global_blocks: the first blocks are global, at least 0.
        random: random blocks per row of blocks, at least 0.
        block: tokens per block, at least 1.
        seed: an int.

    Raises:
        ArgumentTypeError, MaskError: not ints, or too small.
    """
    return BigBird(
        an_int("window", window, 0),
        an_int("global_blocks", global_blocks, 0),
        an_int("random", random, 0),
        an_int("block", block, 1),
        an_int("seed", seed),
    )
