"""`documents`: packed sequences. Every mask `within` lives in the coordinates of its document."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilefold.errors import MaskError
from tilefold.masks import intervals
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Boxes, Lines, Points
from tilefold.masks.intervals import Spans

from ._checks import INTEGERS, a_mask, a_tensor, check_shared
from ._tables import entry, search
from .constant import Full, full


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    within: Mask

    def _arguments(self) -> Arguments:
        keys = () if self.cu_seqlens_k is None else (("", self.cu_seqlens_k),)
        within = () if isinstance(self.within, Full) else (("within", self.within),)
        return (("", self.cu_seqlens_q), *keys, *within)

    def _parts(self) -> tuple[Mask, ...]:
        return (self.within,)

    @property
    def _offsets_k(self) -> Tensor:
        return self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k

    def _document(self, offsets: Tensor, b: Tensor, at: Tensor) -> Tensor:
        """int64: the document of position `at`; -1 or the number of documents for positions outside all of
        them.
        """
        return search(offsets, b, at, right=True) - 1

    def _lives(self, document: Tensor) -> Tensor:
        return (document >= 0) & (document < self.cu_seqlens_q.shape[-1] - 1)

    def _bounds(self, offsets: Tensor, b: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
        """Start and length of a document; of none, a document without tokens."""
        start = entry(offsets, b, document)
        return start, (entry(offsets, b, document + 1) - start).clamp(min=0)

    def visible(self, p: Points) -> Tensor:
        mine, other = self._document(self.cu_seqlens_q, p.b, p.i), self._document(self._offsets_k, p.b, p.j)
        same = (mine == other) & self._lives(mine)
        if isinstance(self.within, Full):
            return same
        q_start, q_size = self._bounds(self.cu_seqlens_q, p.b, mine)
        k_start, k_size = self._bounds(self._offsets_k, p.b, other)
        # Only pairs of one document count; positions outside all documents are clamped so that they index
        # nothing beyond a table.
        row = torch.minimum(p.i - q_start, q_size - 1).clamp(min=0)
        key = torch.minimum(p.j - k_start, k_size - 1).clamp(min=0)
        _, k_size = self._bounds(self._offsets_k, p.b, mine)
        return same & self.within.visible(Points(p.b, p.h, row, key, q_size, k_size))

    def row_spans(self, lines: Lines) -> Spans | None:
        return self._spans(lines, self.cu_seqlens_q, self._offsets_k, rows=True)

    def col_spans(self, lines: Lines) -> Spans | None:
        return self._spans(lines, self._offsets_k, self.cu_seqlens_q, rows=False)

    def _spans(self, lines: Lines, own: Tensor, other: Tensor, rows: bool) -> Spans | None:
        """Intervals on the other side, for lines that are packed by `own`."""
        document = self._document(own, lines.b, lines.at)
        start, size = self._bounds(own, lines.b, document)
        far_start, far_size = self._bounds(other, lines.b, document)
        q_size, k_size = (size, far_size) if rows else (far_size, size)
        local = replace(lines, at=lines.at - start, q_length=q_size, k_length=k_size)
        inner = self.within.row_spans(local) if rows else self.within.col_spans(local)
        if inner is None:
            return None
        # A line outside all documents has a far side of length 0.
        inner = intervals.canonical(inner, torch.where(self._lives(document), far_size, 0))
        return Spans(inner.start + far_start, inner.end + far_start)

    def tiles(self, boxes: Boxes) -> Tensor:
        b = boxes.b
        q_first, q_last = (self._document(self.cu_seqlens_q, b, at) for at in (boxes.q0, boxes.q1 - 1))
        k_first, k_last = (self._document(self._offsets_k, b, at) for at in (boxes.k0, boxes.k1 - 1))
        last = self.cu_seqlens_q.shape[-1] - 2
        apart = (
            (q_last < k_first)
            | (k_last < q_first)
            | (q_first > last)
            | (k_first > last)
            | (q_last < 0)
            | (k_last < 0)
        )
        one = (q_first == q_last) & (k_first == k_last) & (q_first == k_first) & self._lives(q_first)
        q_start, q_size = self._bounds(self.cu_seqlens_q, b, q_first)
        k_start, k_size = self._bounds(self._offsets_k, b, k_first)
        inner = self.within.tiles(
            Boxes(
                b,
                boxes.h,
                boxes.q0 - q_start,
                boxes.q1 - q_start,
                boxes.k0 - k_start,
                boxes.k1 - k_start,
                q_size,
                k_size,
                boxes.size,
            )
        )
        return torch.where(one, inner, torch.where(apart, 0, 1).to(torch.int8))

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        for tensor in self._own_tensors():
            if tensor.dim() == 2:
                check_shared("cu_seqlens of documents", "the batch", tensor.shape[0], B)
        super().check(B, Hq, None, None, device)

    def check_values(self, Lq: int | None, Lk: int | None) -> None:
        for name, offsets, length in (
            ("cu_seqlens_q", self.cu_seqlens_q, Lq),
            ("cu_seqlens_k", self._offsets_k, Lk),
        ):
            check_offsets(f"{name} of documents", offsets, length)
        # Documents differ in length, and bounds inside them are clipped to it.
        self.within.check_values(None, None)


def check_offsets(argument: str, offsets: Tensor, length: int | None) -> None:
    """Raise `MaskError` unless offsets `[n + 1]` or `[B, n + 1]` start at 0, never decrease and stay within
    `length`. Reads them.
    """
    if not offsets.numel():
        return
    starts, last = offsets[..., 0].flatten(), int(offsets[..., -1].amax())
    if bool(starts.any()):
        raise MaskError(f"{argument}: expected offsets that start at 0, got {int(starts[starts != 0][0])}")
    if offsets.shape[-1] > 1 and int(offsets.diff(dim=-1).amin()) < 0:
        drop = (offsets.diff(dim=-1) < 0).nonzero()[0]
        before, after = (int(offsets[(*drop[:-1], drop[-1] + at)]) for at in (0, 1))
        raise MaskError(f"{argument}: expected offsets that never decrease, got {after} after {before}")
    if length is not None and last > length:
        raise MaskError(
            f"{argument}: expected offsets of at most {length}, the length of the tensor, got {last}"
        )


def documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, within: Mask | None = None) -> Mask:
    """A query sees its own document, and of that what `within` shows.

    `within` is evaluated in the document's own coordinates: lengths, positions and the bottom-right diagonal
    are the document's. Rows and keys past the last offset belong to no document: such rows see nothing. An
    empty document is two equal offsets.

    Args:
        cu_seqlens_q: int32 or int64 `[documents + 1]` (or `[B, documents + 1]`), offsets of the documents
            among the queries, from 0.
        cu_seqlens_k: the same for keys; None takes `cu_seqlens_q`.
        within: the mask inside each document; None is `full()`.

    Raises:
        ArgumentTypeError, MaskError: not such tensors, or different numbers of documents.
    """
    expected = "int32 or int64 of shape [documents + 1] or [B, documents + 1]"
    given = {"cu_seqlens_q": cu_seqlens_q} | ({} if cu_seqlens_k is None else {"cu_seqlens_k": cu_seqlens_k})
    for name, offsets in given.items():
        a_tensor(name, offsets, expected, INTEGERS, (1, 2))
        if offsets.shape[-1] == 0:
            raise MaskError(f"{name}: expected {expected}, got shape {list(offsets.shape)}")
    if cu_seqlens_k is not None and cu_seqlens_k.shape[-1] != cu_seqlens_q.shape[-1]:
        expected = f"as many offsets as cu_seqlens_q has, {cu_seqlens_q.shape[-1]}"
        raise MaskError(f"cu_seqlens_k: expected {expected}, got {cu_seqlens_k.shape[-1]}")
    return Documents(cu_seqlens_q, cu_seqlens_k, full() if within is None else a_mask("within", within))
