"""Rectangles of one call, run through the functions below the public one, make up the whole.

What decoding and distributed runs build on: results over disjoint keys merge, gradients of each rectangle
under the global `out` and `lse` add up, and ALiBi and dropout read positions in the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tilefold import Partial, attention, masks, merge, ops
from tilefold.masks import Mask
from tilefold.problem import Positions, Problem
from tilefold.scores import Scores

B, HQ, HK, LQ, LK, D, DV = 2, 4, 2, 37, 53, 8, 6
CPU = torch.device("cpu")
MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.window(9, 3),
    "random": masks.random_blocks(0.5, 8) | masks.window(2, 0),
    "padding": masks.padding(torch.tensor([20, 53])),
}
NEEDS = (True, True, True, False, False, True)


@dataclass(frozen=True, eq=False)
class Whole:
    """A call with ALiBi and dropout, in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    mask: Mask
    dropout_p: float = 0.3
    seed: int = 7

    @staticmethod
    def of(mask: Mask, slopes_per_batch: bool = False) -> Whole:
        shapes = (B, HQ, LQ, D), (B, HK, LK, D), (B, HK, LK, DV)
        q, k, v = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
        slopes = torch.rand(*((B, HQ) if slopes_per_batch else (HQ,)), dtype=torch.float64)
        return Whole(q, k, v, slopes, mask)

    def run(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`(out, lse)`, an incoming gradient of each, and the gradients of q, k, v and the slopes."""
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v, self.slopes)]
        out, lse = attention(
            *leaves[:3],
            mask=self.mask,
            alibi_slopes=leaves[3],
            dropout_p=self.dropout_p,
            seed=self.seed,
            return_lse=True,
        )
        dout, dlse = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)
        gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        return (out.detach(), lse.detach()), (dout, dlse), gradients

    def rectangle(self, rows: slice, keys: slice) -> tuple[Problem, tuple[Tensor, ...], object, Scores]:
        """The first four arguments of `ops.forward` for some of the rows and keys."""
        q, k, v = self.q[:, :, rows], self.k[:, :, keys], self.v[:, :, keys]
        positions = Positions(q_origin=rows.start, k_origin=keys.start, diagonal=LK - LQ)
        scores = Scores(
            D**-0.5, dropout_p=self.dropout_p, alibi_slopes=self.slopes, seed=torch.tensor(self.seed)
        )
        lengths = q.shape[2], k.shape[2]
        part = masks.shift(self.mask, rows.start, keys.start, LQ, LK)
        problem = Problem(B, HQ, HK, *lengths, D, DV, q.dtype, positions=positions, options=scores.flags)
        return problem, (q, k, v), masks.lower(part, (), B, HQ, *lengths, CPU), scores


def cut(length: int, *cuts: int) -> list[slice]:
    return [slice(start, end) for start, end in pairwise((0, *cuts, length))]


@pytest.mark.parametrize("slopes_per_batch", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(
    "row_cuts, key_cuts", [((), (26,)), ((), (1, 30, 52)), ((11,), (17,))], ids=["halves", "ragged", "grid"]
)
def test_rectangles_make_up_the_whole(
    row_cuts: tuple[int, ...], key_cuts: tuple[int, ...], mask: Mask, slopes_per_batch: bool
) -> None:
    whole = Whole.of(mask, slopes_per_batch)
    (out, lse), (dout, dlse), expected = whole.run()
    found = [torch.zeros_like(x) for x in expected]
    for rows in cut(LQ, *row_cuts):
        parts = []
        for keys in cut(LK, *key_cuts):
            problem, qkv, form, scores = whole.rectangle(rows, keys)
            parts.append(ops.forward(problem, *qkv, form, scores))
            gradients = ops.backward(
                problem, *qkv, form, scores, dout[:, :, rows], out[:, :, rows], lse[:, :, rows],
                dlse[:, :, rows], NEEDS,
            )  # fmt: skip
            places = (..., rows, slice(None)), (..., keys, slice(None)), (..., keys, slice(None)), ...
            asked = gradients.q, gradients.k, gradients.v, gradients.alibi_slopes
            for total, place, gradient in zip(found, places, asked, strict=True):
                assert gradient is not None
                total[place] += gradient
            assert gradients.bias is None and gradients.sink is None
        merged = merge(parts)
        torch.testing.assert_close(merged.out, out[:, :, rows], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(merged.lse, lse[:, :, rows], rtol=1e-11, atol=1e-12)
    for name, total, gradient in zip(("q", "k", "v", "slopes"), found, expected, strict=True):
        torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_a_sink_enters_once_at_the_last_merge() -> None:
    whole = Whole.of(MASKS["window"])
    sink = torch.randn(HQ, dtype=torch.float64)
    out, lse = attention(
        whole.q, whole.k, whole.v, mask=whole.mask, alibi_slopes=whole.slopes, sink=sink,
        dropout_p=whole.dropout_p, seed=whole.seed, return_lse=True,
    )  # fmt: skip
    parts = []
    for keys in cut(LK, 26):
        problem, qkv, form, scores = whole.rectangle(slice(0, LQ), keys)
        parts.append(ops.forward(problem, *qkv, form, scores))
    last = Partial(torch.zeros_like(out), sink[:, None].expand_as(lse))
    merged = merge([*parts, last])
    torch.testing.assert_close(merged.out, out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(merged.lse, lse, rtol=1e-11, atol=1e-12)


def test_batch_elements_and_heads_are_drawn_where_they_lie_in_the_whole() -> None:
    """One batch element and one key head at a time, as on several devices."""
    whole = Whole.of(masks.causal())
    (out, lse), _, _ = whole.run()
    group = HQ // HK
    for b in range(B):
        for h in range(HK):
            problem, (q, k, v), form, scores = whole.rectangle(slice(0, LQ), slice(0, LK))
            heads = slice(h * group, (h + 1) * group)
            positions = replace(problem.positions, batch_origin=b, head_origin=h * group)
            problem = replace(problem, batch=1, q_heads=group, k_heads=1, positions=positions)
            scores = replace(scores, alibi_slopes=whole.slopes[heads])
            part = ops.forward(
                problem, q[b : b + 1, heads], k[b : b + 1, h : h + 1], v[b : b + 1, h : h + 1], form, scores
            )
            torch.testing.assert_close(part.out, out[b : b + 1, heads], rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(part.lse, lse[b : b + 1, heads], rtol=1e-11, atol=1e-12)
