"""Bits: one state per granule of 64 x 64, and the bits of the granules that are mixed.

Binary block masking (Sharma & Geiping 2024, "Efficiently Dispatching Flash Attention For Partially Filled
Attention Masks") with the elements of mixed blocks kept as bits, so that memory is O(granules + mixed
granules).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .context import capturing, states

GRANULE = 64
# Multiplied with eight bytes that are 0 or 1, this gathers byte k into bit k of the top byte.
_GATHER = 0x0102040810204080


@dataclass(frozen=True, eq=False)
class Bits:
    """Granule `(x, y)` covers rows `64 x .. 64 x + 63` and keys `64 y .. 64 y + 63`; positions outside the
    matrix are not visible.

    Attributes:
        states: int8 `[Bm, Hm, nq, nk]`: 0 empty, 1 mixed, 2 full. Only a granule that lies whole inside the
            matrix can be full.
        index: int32 `[Bm, Hm, nq, nk]`: the granule's place in `words`; -1 unless it is mixed.
        words: int64 `[M, 64]`: bit c of word r = row r of the granule sees its key c.
    """

    states: Tensor
    index: Tensor
    words: Tensor
    kind: ClassVar[str] = "bits"
    _cache: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.states, self.index, self.words

    def tile(
        self, q0: int, q1: int, k0: int, k1: int, Lq: int, Lk: int, device: torch.device | str
    ) -> Tensor:
        """Exact visibility, bool `[Bm, Hm, q1 - q0, k1 - k0]`."""
        x0, x1, y0, y1 = q0 // GRANULE, -(-q1 // GRANULE), k0 // GRANULE, -(-k1 // GRANULE)
        state = self.states[:, :, x0:x1, y0:y1]
        index = self.index[:, :, x0:x1, y0:y1]
        Bm, Hm, nx, ny = state.shape
        words = torch.where(state == 2, -1, 0).unsqueeze(-1)
        if self.words.shape[0]:
            mixed = self.words[index.clamp(min=0).long()]
            words = torch.where((index >= 0).unsqueeze(-1), mixed, words)
        words = words.expand(Bm, Hm, nx, ny, GRANULE)
        tile = unpacked(words).transpose(3, 4).reshape(Bm, Hm, nx * GRANULE, ny * GRANULE)
        q0, q1, k0, k1 = q0 - x0 * GRANULE, q1 - x0 * GRANULE, k0 - y0 * GRANULE, k1 - y0 * GRANULE
        return tile[:, :, q0:q1, k0:k1]

    def tile_states(self, Lq: int, Lk: int, bq: int, bk: int, device: torch.device | str) -> Tensor:
        """int8 `[Bm, Hm, ceil(Lq / bq), ceil(Lk / bk)]`: 0 empty, 1 partial, 2 full.

        0 and 2 are never wrong, and exact for tiles whose sides are multiples of 64. Smaller tiles inherit
        the states of their granules.
        """
        key = (Lq, Lk, bq, bk)
        found = self._cache.get(key)
        if found is None:
            found = self._tile_states(Lq, Lk, bq, bk)
            if not capturing(found.device):
                self._cache[key] = found
        return found

    def _tile_states(self, Lq: int, Lk: int, bq: int, bk: int) -> Tensor:
        whole = self._full_inside(Lq, Lk)
        x0, x1, y0, y1 = (*_granules(Lq, bq, whole.device), *_granules(Lk, bk, whole.device))
        some = _counts(self.states > 0, x0, x1, y0, y1)
        every = _counts(whole, x0, x1, y0, y1)
        size = (x1 - x0).unsqueeze(-1) * (y1 - y0)
        return states(some == 0, every == size)

    def _full_inside(self, Lq: int, Lk: int) -> Tensor:
        """bool like `states`: everything of the granule that lies inside the matrix is visible."""
        full = self.states == 2
        x, y = Lq // GRANULE, Lk // GRANULE
        if self.words.shape[0] and (Lq % GRANULE or Lk % GRANULE):
            for rows, keys, height, width in (
                (slice(x, None), slice(0, y), Lq % GRANULE, GRANULE),
                (slice(0, x), slice(y, None), GRANULE, Lk % GRANULE),
                (slice(x, None), slice(y, None), Lq % GRANULE, Lk % GRANULE),
            ):
                index = self.index[:, :, rows, keys]
                if index.numel():
                    words = self.words[index.clamp(min=0).long()]
                    complete = (words[..., :height] == _low(width)).all(-1)
                    full[:, :, rows, keys] = complete & (index >= 0)
        return full

    def visible_count(self, Lq: int, Lk: int) -> float:
        """Visible elements of one batch element and head, on average; counted once."""
        found = self._cache.get((Lq, Lk))
        if found is None:
            full = (self.states == 2).sum() * GRANULE**2
            found = self._cache[Lq, Lk] = full + _population(self.words).sum()
        return float(found) / (self.states.shape[0] * self.states.shape[1])

    def empty_rows(self, Lq: int, Lk: int, device: torch.device | str) -> Tensor:
        """bool `[Bm, Hm, Lq]`: rows that see no key."""
        Bm, Hm, nq, _ = self.states.shape
        seen = (self.states == 2).any(-1, keepdim=True).expand(Bm, Hm, nq, GRANULE)
        if self.words.shape[0]:
            at = (self.index >= 0).nonzero()
            lines = torch.zeros((Bm, Hm, nq, GRANULE), dtype=torch.int32, device=self.words.device)
            hit = (self.words[self.index[tuple(at.T)].long()] != 0).to(torch.int32)
            lines.view(-1, GRANULE).index_add_(0, (at[:, 0] * Hm + at[:, 1]) * nq + at[:, 2], hit)
            seen = seen | (lines > 0)
        return ~seen.reshape(Bm, Hm, nq * GRANULE)[:, :, :Lq]

    def look(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """bool: single elements, all index tensors broadcast together."""
        Bm, Hm, _, _ = self.states.shape
        at = (b if Bm > 1 else 0, h if Hm > 1 else 0, i // GRANULE, j // GRANULE)
        full = self.states[at] == 2
        if not self.words.shape[0]:
            return full
        index = self.index[at]
        word = self.words[index.clamp(min=0).long(), i % GRANULE]
        return full | ((index >= 0) & ((word >> (j % GRANULE)) & 1).bool())


def packed(granules: Tensor) -> Tensor:
    """int64 `[M, 64]` of bool `[M, 64, 64]`."""
    eights = granules.contiguous().view(torch.uint8).view(torch.int64)
    return (((eights * _GATHER) >> 56) & 255).to(torch.uint8).contiguous().view(torch.int64).squeeze(-1)


def unpacked(words: Tensor) -> Tensor:
    """bool `[..., 64, 64]` of int64 `[..., 64]`."""
    eights = words.contiguous().unsqueeze(-1).view(torch.uint8)
    bit = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=words.device)
    return (eights.unsqueeze(-1) & bit).ne(0).flatten(-2)


def _population(words: Tensor) -> Tensor:
    """int64: how many bits of each word are set, by sums of 2, 4 and 8 bits side by side."""
    pairs = words - ((words >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((eights * 0x0101010101010101) >> 56) & 255


def _low(width: int) -> int:
    """The word whose lowest `width` bits are set, as a signed 64-bit number."""
    return -1 if width == GRANULE else (1 << width) - 1


def _granules(length: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first granule that each tile touches along one side, and the one behind its last."""
    start = torch.arange(0, length, block, dtype=torch.int32, device=device)
    end = (start + block).clamp(max=length)
    return start // GRANULE, (end + GRANULE - 1) // GRANULE


def _counts(flags: Tensor, x0: Tensor, x1: Tensor, y0: Tensor, y1: Tensor) -> Tensor:
    """int32 `[Bm, Hm, tiles, tiles]`: how many flagged granules each tile touches, by a summed-area table."""
    summed = flags.cumsum(-1, dtype=torch.int32).cumsum(-2, dtype=torch.int32)
    summed = torch.nn.functional.pad(summed, (1, 0, 1, 0))
    across = summed[..., y1] - summed[..., y0]
    return across[..., x1, :] - across[..., x0, :]
