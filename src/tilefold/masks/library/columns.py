"""`columns`: hidden query intervals per key, the mask of FlashMask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.errors import ArgumentTypeError, MaskError
from tilefold.masks import intervals
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.cols import Cols
from tilefold.masks.context import Length, Lines, Points, key_lines, position
from tilefold.masks.intervals import Spans, spans

from ._checks import a_tensor, check_shared
from ._tables import shared


@dataclass(frozen=True, eq=False, repr=False)
class Columns(Mask):
    index: Tensor
    causal: bool

    def _arguments(self) -> Arguments:
        return ("", self.index), ("causal", self.causal)

    def _hidden(
        self, b: Tensor, h: Tensor, j: Tensor, q_length: Length
    ) -> tuple[list[tuple[Length, Length]], Tensor]:
        """(start, end) pairs of the query intervals that key `j` is hidden from; and whether `j` lies in the
        table.
        """
        B, H, N, n = self.index.shape
        at = j.clamp(0, max(N - 1, 0))
        found = self.index[shared(b, B), shared(h, H), at].long().unbind(-1)
        pairs: list[tuple[Length, Length]]
        if n == 4:
            pairs = [(found[0], found[1]), (found[2], found[3])]
        elif self.causal:
            pairs = [(found[0], q_length if n == 1 else found[1])]
        else:
            pairs = [(found[0], q_length), (0, found[1])]
        return pairs, (j >= 0) & (j < N)

    def visible(self, p: Points) -> Tensor:
        if self.index.shape[2] == 0:
            return (p.j < 0) & (p.j >= 0)
        pairs, seen = self._hidden(p.b, p.h, p.j, p.q_length)
        for start, end in pairs:
            seen = seen & ~((p.i >= start) & (p.i < end))
        return seen & (p.j <= position(p.i, p.q_length, p.k_length)) if self.causal else seen

    def col_spans(self, lines: Lines) -> Spans | None:
        return intervals.complement(self.hidden_spans(lines), lines.q_length)

    def hidden_spans(self, lines: Lines) -> Spans | None:
        if self.index.shape[2] == 0:
            return spans((0, lines.q_length), like=lines.at)
        pairs, inside = self._hidden(lines.b, lines.h, lines.at, lines.q_length)
        if self.causal:
            pairs.append((0, lines.at - (lines.k_length - lines.q_length)))
        if isinstance(lines.k_length, Tensor) or lines.k_length != self.index.shape[2]:
            # A key outside the table (in a document longer than the table) is hidden from all.
            pairs.append((0, (~inside) * lines.q_length))
        return intervals.canonical(spans(*pairs, like=lines.at), lines.q_length)

    def states(self, B: int, H: int, Lq: int, Lk: int, size: int, device: torch.device) -> Tensor:
        hidden = self.hidden_spans(key_lines(B, H, Lq, Lk, device))
        if hidden is None or Lq == 0 or Lk == 0:
            return super().states(B, H, Lq, Lk, size, device)
        return Cols(intervals.table(hidden, hidden.count, Lk)).tile_states(Lq, Lk, size, size, device)

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        super().check(B, Hq, Lq, Lk, device)
        check_shared("index of columns", "the batch", self.index.shape[0], B)
        check_shared("index of columns", "the query heads", self.index.shape[1], Hq)
        if Lk is not None and self.index.shape[2] != Lk:
            raise MaskError(f"index of columns: expected one row per key, {Lk}, got {self.index.shape[2]}")


def columns(index: Tensor, causal: bool) -> Mask:
    """Each key is hidden from one or two intervals of queries (FlashMask: Wang et al. 2024, arXiv:2410.01359,
    section 4.1).

    The last dimension holds, per key, half-open intervals of query rows (lower-triangle start LTS and end
    LTE, upper-triangle start UTS and end UTE); a start at or after its end hides nothing, and bounds are
    clipped to `[0, Lq]`:

    | causal | entries | hidden rows |
    |---|---|---|
    | True | LTS | `[LTS, Lq)`, and rows above the (bottom-right) diagonal |
    | True | LTS, LTE | `[LTS, LTE)`, and rows above the diagonal |
    | False | LTS, UTE | `[LTS, Lq)` and `[0, UTE)` |
    | False | LTS, LTE, UTS, UTE | `[LTS, LTE)` and `[UTS, UTE)` |

    Args:
        index: int32 `[B or 1, Hq or 1, Lk, 1, 2 or 4]`.
        causal: which table of the above.

    Raises:
        ArgumentTypeError, MaskError: not such a tensor.
    """
    if not isinstance(causal, bool):
        raise ArgumentTypeError(f"causal: expected a bool, got {type(causal).__name__}")
    entries = (1, 2) if causal else (2, 4)
    expected = f"int32 of shape [B or 1, Hq or 1, Lk, {entries[0]} or {entries[1]}] with causal={causal}"
    a_tensor("index", index, expected, (torch.int32,), (4,))
    if index.shape[-1] not in entries:
        raise MaskError(f"index: expected {expected}, got shape {list(index.shape)}")
    return Columns(index, causal)
