"""`global_tokens`: tokens that see everything and are seen by everyone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.errors import MaskError
from tilefold.masks.band import Band, bounded
from tilefold.masks.base import Arguments, Mask
from tilefold.masks.context import Boxes, Length, Lines, Points, position, states
from tilefold.masks.intervals import MAX_WIDTH, Spans, spans

from ._checks import INTEGERS, a_tensor, an_int, check_shared
from ._tables import entry, search


@dataclass(frozen=True, eq=False, repr=False)
class FirstTokens(Mask):
    """The first `n` positions are global."""

    n: int

    def _name(self) -> str:
        return "global_tokens"

    def _arguments(self) -> Arguments:
        return (("", self.n),)

    @property
    def _count(self) -> int:
        return bounded(self.n)

    def _row(self, at: Tensor, q_length: Length, k_length: Length) -> Tensor:
        where = position(at, q_length, k_length)
        return (where >= 0) & (where < self._count)

    def visible(self, p: Points) -> Tensor:
        return (p.j < self._count) | self._row(p.i, p.q_length, p.k_length)

    def band(self, Lq: int, Lk: int) -> Band | None:
        if 0 < self.n < Lk:
            return None
        return Band(0, -1) if self.n == 0 else Band(None, None)

    def row_spans(self, lines: Lines) -> Spans | None:
        everything = self._row(lines.at, lines.q_length, lines.k_length) * lines.k_length
        return spans((0, everything.clamp(min=self._count)), like=lines.at)

    def col_spans(self, lines: Lines) -> Spans | None:
        # Queries stand at positions i + Lk - Lq; those at 0 .. n - 1 see every key.
        first = lines.at * 0 - position(lines.at * 0, lines.q_length, lines.k_length)
        seen = lines.at < self._count
        return spans(
            (torch.where(seen, 0, first), torch.where(seen, lines.q_length, first + self._count)),
            like=lines.at,
        )

    def tiles(self, boxes: Boxes) -> Tensor:
        q0 = position(boxes.q0, boxes.q_length, boxes.k_length)
        q1 = position(boxes.q1, boxes.q_length, boxes.k_length)
        n = self._count
        empty = (boxes.k0 >= n) & ((q0 >= n) | (q1 <= 0))
        return states(empty, (boxes.k1 <= n) | ((q0 >= 0) & (q1 <= n)))


@dataclass(frozen=True, eq=False, repr=False)
class ListedTokens(Mask):
    """The listed positions are global."""

    index: Any

    def _name(self) -> str:
        return "global_tokens"

    def _arguments(self) -> Arguments:
        return (("", self.index),)

    def _sorted(self, device: torch.device) -> Tensor:
        """int64 `[n]` or `[B, n]`, ascending."""
        if isinstance(self.index, Tensor):
            return self.index.long().sort(dim=-1).values
        return torch.tensor(self.index, dtype=torch.int64, device=device)

    @property
    def _count(self) -> int:
        return self.index.shape[-1] if isinstance(self.index, Tensor) else len(self.index)

    def _holds(self, table: Tensor, b: Tensor, at: Tensor) -> Tensor:
        """bool: is position `at` listed?"""
        if self._count == 0:
            return torch.zeros_like(at, dtype=torch.bool)
        return (entry(table, b, search(table, b, at, right=False)) == at) & (at >= 0)

    def visible(self, p: Points) -> Tensor:
        table = self._sorted(p.i.device)
        return self._holds(table, p.b, p.j) | self._holds(table, p.b, position(p.i, p.q_length, p.k_length))

    def band(self, Lq: int, Lk: int) -> Band | None:
        return Band(0, -1) if self._count == 0 else None

    def row_spans(self, lines: Lines) -> Spans | None:
        at = position(lines.at, lines.q_length, lines.k_length)
        return self._spans(lines, at, 0, lines.k_length)

    def col_spans(self, lines: Lines) -> Spans | None:
        return self._spans(lines, lines.at, lines.k_length - lines.q_length, lines.q_length)

    def _spans(self, lines: Lines, at: Tensor, away: Length, across: Length) -> Spans | None:
        """Lines that are listed reach across; the others see one position per entry, moved back by `away`."""
        if self._count > MAX_WIDTH:
            return None
        if self._count == 0:
            return spans(like=lines.at)
        table = self._sorted(lines.at.device)
        listed = self._holds(table, lines.b, at)
        pairs = []
        for n in range(self._count):
            token = entry(table, lines.b, torch.full_like(lines.b, n))
            # Padding entries are negative and stand for no token.
            start = torch.where(token < 0, -1, token) - away
            end = torch.where(token < 0, -1, token + 1) - away
            pairs.append((torch.where(listed, 0, start), torch.where(listed, across, end)))
        return spans(*pairs, like=lines.at)

    def tiles(self, boxes: Boxes) -> Tensor:
        q0 = position(boxes.q0, boxes.q_length, boxes.k_length)
        q1 = position(boxes.q1, boxes.q_length, boxes.k_length)
        table = self._sorted(boxes.q0.device)
        if self._count == 0:
            return torch.zeros((1, 1, 1, 1), dtype=torch.int8, device=boxes.q0.device)
        keys = self._between(table, boxes.b, boxes.k0, boxes.k1)
        queries = self._between(table, boxes.b, q0.clamp(min=0), q1.clamp(min=0))
        empty = (keys == 0) & (queries == 0)
        full = ((keys == 1) & (boxes.k1 - boxes.k0 == 1)) | ((queries == 1) & (q1 - q0 == 1))
        return states(empty, full)

    @staticmethod
    def _between(table: Tensor, b: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """How many entries lie in `[start, end)`."""
        return search(table, b, end, right=False) - search(table, b, start, right=False)

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        super().check(B, Hq, Lq, Lk, device)
        if isinstance(self.index, Tensor) and self.index.dim() == 2:
            check_shared("index of global_tokens", "the batch", self.index.shape[0], B)
        if not isinstance(self.index, Tensor) and Lk is not None and self.index and self.index[-1] >= Lk:
            expected = f"positions below {Lk}, the length of the keys"
            raise MaskError(f"index of global_tokens: expected {expected}, got {self.index[-1]}")

    def check_values(self, Lq: int | None, Lk: int | None) -> None:
        if isinstance(self.index, Tensor) and self.index.numel():
            least, most = int(self.index.amin()), int(self.index.amax())
            if least < -1 or (Lk is not None and most >= Lk):
                bound = "of at least -1" if Lk is None else f"in [-1, {Lk})"
                raise MaskError(
                    f"index of global_tokens: expected positions {bound}, got {least if least < -1 else most}"
                )


def global_tokens(index: int | Sequence[int] | Tensor) -> Mask:
    """Global tokens are seen by all queries and see all keys (Longformer: Beltagy et al. 2020; ITC of
    BigBird: Zaheer et al. 2020).

    A query is global if its position `i + Lk - Lq` is, so that the last query of a longer sequence is what it
    was in the whole one.

    Args:
        index: the first `index` positions; or a list of positions; or int32 / int64 `[n]` or `[B, n]`, where
            -1 stands for no token.

    Raises:
        ArgumentTypeError, MaskError: none of these.
    """
    if isinstance(index, Tensor):
        expected = "an int, a list of ints, or int32 or int64 of shape [n] or [B, n]"
        return ListedTokens(a_tensor("index", index, expected, INTEGERS, (1, 2)))
    if isinstance(index, (list, tuple)):
        return ListedTokens(tuple(sorted({int(an_int("index", token, 0)) for token in index})))
    return FirstTokens(an_int("index", index, 0))
