"""What happens to a score between the dot product and the softmax.

The options as one value, and their tensors tile by tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import philox
from .problem import Positions, Problem, key_positions, query_positions

#: Names of the score options, in the order of `Scores.flags`.
OPTIONS = ("softcap", "dropout", "bias", "sink", "alibi")


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The score options of one call, in the order in which they apply.

    A score is `scale * q.k`, then `softcap * tanh(s / softcap)`, then `- slope * |i + Lk - Lq - j|` (ALiBi,
    Press et al. 2022), then `+ bias[i, j]`; the mask selects; the sink joins the denominator. Dropout acts on
    the probabilities.

    Attributes:
        scale: factor of the dot product.
        softcap: cap of the scores, or None.
        dropout_p: probability in [0, 1) with which a probability is dropped.
        bias: additive, broadcastable to `[B, Hq, Lq, Lk]`, or None.
        sink: one logit per query head `[Hq]` that joins the denominator only, or None.
        alibi_slopes: `[Hq]` or `[B, Hq]` (packed: `[documents, Hq]`), or None.
        seed: int64, no dimensions; key of the dropout generator. Present iff `dropout_p > 0`.
    """

    scale: float
    softcap: float | None = None
    dropout_p: float = 0.0
    bias: Tensor | None = None
    sink: Tensor | None = None
    alibi_slopes: Tensor | None = None
    seed: Tensor | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The names of the options in use, for `Problem.options`."""
        present = (
            self.softcap is not None,
            self.dropout_p > 0.0,
            self.bias is not None,
            self.sink is not None,
            self.alibi_slopes is not None,
        )
        return tuple(name for name, used in zip(OPTIONS, present, strict=True) if used)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Positions of a call's rows and keys in tensors.

    Attributes:
        q: `[Lq]`, position of each row; `on_keys [Lq]`: the key position on its diagonal.
        k: `[Lk]`, position of each key.
        batch: `[B, 1, 1]` or, for packed rows, `[Lq]`: index of the batch element.
        heads: `[Hq, 1]`, index of the query head.
        packed: whether `batch` is per row.
    """

    q: Tensor
    on_keys: Tensor
    k: Tensor
    batch: Tensor
    heads: Tensor
    packed: bool

    @staticmethod
    def of(problem: Problem, tables: tuple[Tensor, ...] | list[Tensor], device: torch.device) -> Places:
        """The places of `problem`, from its origins and steps or from its two tables."""
        at: Positions = problem.positions
        heads = torch.arange(problem.q_heads, device=device)[:, None] + at.head_origin
        if at.tables:
            rows, keys = (t.to(torch.int64) for t in tables)
            return Places(rows[0], rows[1], keys, rows[2] + at.batch_origin, heads, packed=True)
        q = query_positions(at, problem.q_length, device)
        diagonal = problem.k_length - problem.q_length if at.diagonal is None else at.diagonal
        batch = torch.arange(problem.batch, device=device)[:, None, None] + at.batch_origin
        return Places(
            q, q + diagonal, key_positions(at, problem.k_length, device), batch, heads, packed=False
        )

    def distance(self, rows: slice, keys: slice) -> Tensor:
        """ALiBi's `|i + Lk - Lq - j|`, int64 `[rows, keys]`."""
        return (self.on_keys[rows, None] - self.k[keys]).abs()

    def slopes(self, slopes: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """`slopes` as they stand beside a tile of scores: `[1 or B, Hq, 1 or rows, 1]`."""
        slopes = slopes.to(dtype)
        if slopes.dim() == 1:
            return slopes[None, :, None, None]
        if self.packed:
            return slopes[self.batch[rows]].transpose(0, 1)[None, :, :, None]
        return slopes[:, :, None, None]

    def collect_slopes(self, per_row: Tensor, rows: slice, like: Tensor) -> Tensor:
        """Sum a gradient `[B, Hq, rows]` into the shape of the slopes."""
        if like.dim() == 1:
            return per_row.sum((0, 2))
        if self.packed:
            documents = torch.arange(like.shape[0], device=per_row.device)[:, None]
            # A product and not index_add: that one adds in no fixed order on a GPU.
            return (self.batch[rows] == documents).to(per_row.dtype) @ per_row[0].transpose(0, 1)
        return per_row.sum(2)

    def kept(self, scores: Scores, rows: slice, keys: slice) -> Tensor:
        """Which probabilities of a tile survive dropout, bool `[1 or B, Hq, rows, keys]`."""
        assert scores.seed is not None
        batch = self.batch[rows] if self.packed else self.batch
        drawn = philox.keep(scores.seed, scores.dropout_p, batch, self.heads, self.q[rows], self.k[keys])
        return drawn[None] if drawn.dim() == 3 else drawn


def bias_tile(bias: Tensor, rows: slice, keys: slice) -> Tensor:
    """The part of a broadcastable bias that stands beside a tile: a view of four dimensions, the last two
    `[1 or rows, 1 or keys]`.
    """
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    bias = bias if bias.shape[2] == 1 else bias[:, :, rows]
    return bias if bias.shape[3] == 1 else bias[:, :, :, keys]
