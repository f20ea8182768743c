"""What is asked of one call, as a hashable value made from metadata only.

Also where its rows and keys lie in the whole.
The checks of user input live in `checks.py`; nothing here reads a tensor's values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Positions:
    """Where the rows and keys of a call lie in the whole sequence. ALiBi and dropout read these, never tile
    indices.

    Row `i` of the call has position `q_origin + q_step * i`, key `j` has `k_origin + k_step * j`, and ALiBi
    measures `|position(i) + diagonal - position(j)|`.

    Attributes:
        q_origin, q_step, k_origin, k_step: tokens.
        diagonal: `Lk - Lq` of the whole problem; None means that of the call itself.
        batch_origin, head_origin: index of the call's first batch element and query head in the whole.
        tables: True if two int32 tensors travel with the call instead: `[3, Lq]` (position,
            position + diagonal, batch index of each row) and `[Lk]` (position of each key). Packed sequences
            use this.
    """

    q_origin: int = 0
    q_step: int = 1
    k_origin: int = 0
    k_step: int = 1
    diagonal: int | None = None
    batch_origin: int = 0
    head_origin: int = 0
    tables: bool = False


def query_positions(at: Positions, length: int, device: torch.device | str) -> Tensor:
    """Positions of `length` query rows, int64 `[length]`."""
    return torch.arange(length, device=device) * at.q_step + at.q_origin


def key_positions(at: Positions, length: int, device: torch.device | str) -> Tensor:
    """Positions of `length` keys, int64 `[length]`."""
    return torch.arange(length, device=device) * at.k_step + at.k_origin


@dataclass(frozen=True, slots=True)
class Problem:
    """One call in metadata.

    Attributes:
        batch, q_heads, k_heads, q_length, k_length, head_dim, v_head_dim: the sizes `B, Hq, Hk, Lq, Lk,
            D, Dv`.
        dtype: dtype of q, k and v.
        device: device kind, such as "cpu" or "cuda".
        positions: where the call lies in the whole.
        options: names of the score options in use (`Scores.flags`).
        deterministic: whether bit-stable gradients are demanded.
        backend: name of the backend asked for, or None.
        aligned: whether q, k and v have dense rows that begin at multiples of 16 bytes, see `is_aligned`; of
            a call without tensors None.
    """

    batch: int
    q_heads: int
    k_heads: int
    q_length: int
    k_length: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: str = "cpu"
    positions: Positions = Positions()
    options: tuple[str, ...] = ()
    deterministic: bool = False
    backend: str | None = None
    aligned: bool | None = None

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.q_heads // self.k_heads if self.k_heads else 0

    @property
    def accumulator(self) -> torch.dtype:
        """Dtype in which scores, sums and `lse` are kept: float32, or float64 for float64 inputs."""
        return accumulator(self.dtype)

    @property
    def lies_aligned(self) -> bool:
        """`aligned`, or whether dense tensors of these sizes are."""
        if self.aligned is not None:
            return self.aligned
        return all(size * self.dtype.itemsize % 16 == 0 for size in (self.head_dim, self.v_head_dim))

    @property
    def is_empty(self) -> bool:
        """Whether there is no row at all, or no key for any row."""
        return 0 in (self.batch, self.q_heads, self.q_length, self.k_length)


def is_aligned(x: Tensor) -> bool:
    """Whether the columns of `x [B, H, L, D]` lie next to each other, rows, heads and batch elements are a
    multiple of 16 bytes apart, and so is the first one from the beginning of its memory: what the copy
    engines of GPUs take as it is.
    """
    batch, head, row, last = x.stride()
    unit = max(16 // x.element_size(), 1)
    return last == 1 and batch % unit == head % unit == row % unit == x.storage_offset() % unit == 0


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores, sums and `lse` of inputs of `dtype` are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32
