"""`block_sparse`: tiles of a boolean layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.errors import MaskError
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Length

from ._blocks import Blocks
from ._checks import a_tensor, an_int, check_shared
from ._tables import shared


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(Blocks):
    layout: Tensor
    block: int

    def _name(self) -> str:
        return "block_sparse"

    def _arguments(self) -> Arguments:
        return ("", self.layout), ("", self.block)

    @property
    def block_size(self) -> int:
        return self.block

    def query_position(self, i: Tensor, q_length: Length, k_length: Length) -> Tensor:
        return i

    def block_visible(self, b: Tensor, h: Tensor, x: Tensor, y: Tensor, k_length: Length) -> Tensor:
        H, nq, nk = self.layout.shape
        if self.layout.numel() == 0:
            return torch.zeros_like(x + y, dtype=torch.bool)
        inside = (x >= 0) & (x < nq) & (y >= 0) & (y < nk)
        return inside & self.layout[shared(h, H), x.clamp(0, nq - 1), y.clamp(0, nk - 1)]

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        super().check(B, Hq, Lq, Lk, device)
        check_shared("layout of block_sparse", "the query heads", self.layout.shape[0], Hq)
        for name, length, blocks in (("Lq", Lq, self.layout.shape[1]), ("Lk", Lk, self.layout.shape[2])):
            if length is not None and blocks != -(-length // self.block):
                expected = f"{-(-length // self.block)} blocks of {self.block} for {name} = {length}"
                raise MaskError(f"layout of block_sparse: expected {expected}, got {list(self.layout.shape)}")


def block_sparse(layout: Tensor, block: int) -> Mask:
    """Query `i` sees key `j` if `layout[h, i // block, j // block]` (FlashAttention: Dao et al. 2022, section
    3.3).

    Args:
        layout: bool `[nq, nk]` or `[Hq or 1, nq, nk]`, with `nq = ceil(Lq / block)` and `nk = ceil(Lk /
            block)`.
        block: tokens per block, at least 1.

    Raises:
        ArgumentTypeError, MaskError: not such a tensor, or not an int.
    """
    expected = "bool of shape [nq, nk] or [Hq or 1, nq, nk]"
    a_tensor("layout", layout, expected, (torch.bool,), (2, 3))
    return BlockSparse(layout.unsqueeze(0) if layout.dim() == 2 else layout, an_int("block", block, 1))
