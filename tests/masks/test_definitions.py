"""Every constructor against a slow rule for one pair (b, h, i, j), written down from its source."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tilefold import masks
from tilefold.masks import Mask, lower

B, H = 2, 3
SHAPES = [(11, 11), (7, 13), (13, 7), (1, 12), (70, 66)]
Pair = Callable[[int, int, int, int, int, int], bool]


@dataclass(frozen=True)
class Definition:
    """`make(Lq, Lk)` builds the mask and its rule `(b, h, i, j, Lq, Lk) -> bool`."""

    name: str
    make: Callable[[int, int], tuple[Mask, Pair]]


def at(i: int, Lq: int, Lk: int) -> int:
    """The position of query i under the bottom-right diagonal."""
    return i + Lk - Lq


def simple(name: str, mask: Mask, rule: Pair) -> Definition:
    return Definition(name, lambda Lq, Lk: (mask, rule))


def draws(*shape: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(5), dtype=dtype)


def flips(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(6)) < 0.5


def padded(side: str) -> Callable[[int, int], tuple[Mask, Pair]]:
    def make(Lq: int, Lk: int) -> tuple[Mask, Pair]:
        lengths = torch.tensor([Lk // 2, Lk])
        first = [0, 0] if side == "right" else [Lk - int(n) for n in lengths]
        return (
            masks.padding(lengths, side=side),  # pyright: ignore[reportArgumentType]
            lambda b, h, i, j, Lq, Lk: first[b] <= j < first[b] + int(lengths[b]),
        )

    return make


def packed(within: Mask, rule: Pair) -> Callable[[int, int], tuple[Mask, Pair]]:
    """Three documents, one of them empty, and tokens behind the last."""

    def make(Lq: int, Lk: int) -> tuple[Mask, Pair]:
        q = [0, Lq // 3, Lq // 3, max(Lq // 3, Lq - 1)]
        k = [0, Lk // 2, Lk // 2, max(Lk // 2, Lk - 2)]

        def pair(b: int, h: int, i: int, j: int, Lq: int, Lk: int) -> bool:
            for q0, q1, k0, k1 in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True):
                if q0 <= i < q1 and k0 <= j < k1:
                    return rule(b, h, i - q0, j - k0, q1 - q0, k1 - k0)
            return False

        return masks.documents(torch.tensor(q), torch.tensor(k), within=within), pair

    return make


def hidden(causal: bool, entries: int) -> Callable[[int, int], tuple[Mask, Pair]]:
    def make(Lq: int, Lk: int) -> tuple[Mask, Pair]:
        index = draws(B, H, Lk, entries, low=-1, high=Lq + 2, dtype=torch.int32)

        def pair(b: int, h: int, i: int, j: int, Lq: int, Lk: int) -> bool:
            bound = index[b, h, j].tolist()
            if entries == 4:
                return not (bound[0] <= i < bound[1] or bound[2] <= i < bound[3])
            if not causal:
                return not (i >= bound[0] or i < bound[1])
            end = bound[1] if entries == 2 else Lq
            return j <= at(i, Lq, Lk) and not bound[0] <= i < end

        return masks.columns(index, causal=causal), pair

    return make


def layout(Lq: int, Lk: int) -> tuple[Mask, Pair]:
    tiles = flips(H, -(-Lq // 4), -(-Lk // 4))
    return masks.block_sparse(tiles, 4), lambda b, h, i, j, Lq, Lk: bool(tiles[h, i // 4, j // 4])


def table(Lq: int, Lk: int) -> tuple[Mask, Pair]:
    seen = flips(B, 1, Lq, Lk)
    return masks.dense(seen), lambda b, h, i, j, Lq, Lk: bool(seen[b, 0, i, j])


def key_table(Lq: int, Lk: int) -> tuple[Mask, Pair]:
    seen = flips(Lk)
    return masks.dense(seen), lambda b, h, i, j, Lq, Lk: bool(seen[j])


def part_of_causal(Lq: int, Lk: int) -> tuple[Mask, Pair]:
    whole = Lq + 5, Lk + 3
    return masks.shift(masks.causal(), 2, 1, *whole), lambda b, h, i, j, Lq, Lk: j + 1 <= at(i + 2, *whole)


def is_butterfly(x: int, y: int) -> bool:
    return x >= 0 and (x == y or (x ^ y) in [2**n for n in range(20)])


def listed(b: int, h: int, i: int, j: int, Lq: int, Lk: int) -> bool:
    return j in (0, 4) or at(i, Lq, Lk) in (0, 4)


DEFINITIONS = [
    simple("full", masks.full(), lambda b, h, i, j, Lq, Lk: True),
    simple("empty", masks.empty(), lambda b, h, i, j, Lq, Lk: False),
    simple("causal", masks.causal(), lambda b, h, i, j, Lq, Lk: j <= i + Lk - Lq),
    simple("causal top-left", masks.causal(align="top-left"), lambda b, h, i, j, Lq, Lk: j <= i),
    simple("window", masks.window(3, 1), lambda b, h, i, j, Lq, Lk: -3 <= j - at(i, Lq, Lk) <= 1),
    simple("window ahead", masks.window(-2, 5), lambda b, h, i, j, Lq, Lk: 2 <= j - at(i, Lq, Lk) <= 5),
    simple("window open", masks.window(None, -1), lambda b, h, i, j, Lq, Lk: j - at(i, Lq, Lk) <= -1),
    simple(
        "dilated",
        masks.dilated(5, 3),
        lambda b, h, i, j, Lq, Lk: abs(j - at(i, Lq, Lk)) <= 6 and (j - at(i, Lq, Lk)) % 3 == 0,
    ),
    simple("strided", masks.strided(4), lambda b, h, i, j, Lq, Lk: (j - at(i, Lq, Lk)) % 4 == 0),
    simple("prefix", masks.prefix(3), lambda b, h, i, j, Lq, Lk: j < 3),
    simple("prefix per batch", masks.prefix(torch.tensor([2, 5])), lambda b, h, i, j, Lq, Lk: j < (2, 5)[b]),
    Definition("padding right", padded("right")),
    Definition("padding left", padded("left")),
    Definition("documents", packed(masks.full(), lambda *_: True)),
    Definition("documents causal", packed(masks.causal(), lambda b, h, i, j, Lq, Lk: j <= i + Lk - Lq)),
    Definition(
        "documents of documents",
        packed(
            masks.documents(torch.tensor([0, 2, 4])),
            lambda b, h, i, j, Lq, Lk: i // 2 == j // 2 and i < 4 and j < 4,
        ),
    ),
    Definition("documents listed", packed(masks.global_tokens([0, 4]), listed)),
    simple(
        "global first", masks.global_tokens(2), lambda b, h, i, j, Lq, Lk: j < 2 or 0 <= at(i, Lq, Lk) < 2
    ),
    simple("global list", masks.global_tokens([4, 0, 4]), listed),
    simple(
        "global per batch",
        masks.global_tokens(torch.tensor([[3, -1], [1, 2]])),
        lambda b, h, i, j, Lq, Lk: j in ((3,), (1, 2))[b] or at(i, Lq, Lk) in ((3,), (1, 2))[b],
    ),
    simple(
        "butterfly", masks.butterfly(2), lambda b, h, i, j, Lq, Lk: is_butterfly(at(i, Lq, Lk) // 2, j // 2)
    ),
    simple(
        "longformer",
        masks.longformer(4, 1),
        lambda b, h, i, j, Lq, Lk: abs(j - at(i, Lq, Lk)) <= 2 or j == 0 or at(i, Lq, Lk) == 0,
    ),
    simple(
        "longformer dilated",
        masks.longformer(4, [1], dilation=2),
        lambda b, h, i, j, Lq, Lk: j - at(i, Lq, Lk) in (-4, -2, 0, 2, 4) or j == 1 or at(i, Lq, Lk) == 1,
    ),
    Definition("block sparse", layout),
    Definition("columns causal 1", hidden(True, 1)),
    Definition("columns causal 2", hidden(True, 2)),
    Definition("columns 2", hidden(False, 2)),
    Definition("columns 4", hidden(False, 4)),
    Definition("dense", table),
    Definition("dense keys", key_table),
    Definition("shift", part_of_causal),
    simple(
        "predicate",
        masks.predicate(lambda b, h, q, k: (q + h) % 2 == k % 2),
        lambda b, h, i, j, *_: (i + h) % 2 == j % 2,
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_definition(definition: Definition, shape: tuple[int, int]) -> None:
    Lq, Lk = shape
    mask, rule = definition.make(Lq, Lk)
    heads, batches = (H, B) if Lq < 20 else (1, 2)
    if Lq >= 20 and definition.name in (
        "block sparse",
        "columns causal 1",
        "columns causal 2",
        "columns 2",
        "columns 4",
    ):
        heads = H
    pairs = itertools.product(range(batches), range(heads), range(Lq), range(Lk))
    expected = torch.tensor([rule(b, h, i, j, Lq, Lk) for b, h, i, j in pairs]).view(batches, heads, Lq, Lk)
    assert torch.equal(mask.materialize(batches, heads, Lq, Lk), expected)
    tile = lower(mask, (), batches, heads, Lq, Lk, "cpu").tile(0, Lq, 0, Lk, Lq, Lk, "cpu")
    assert torch.equal(tile.expand(batches, heads, Lq, Lk), expected)


def block_rows(mask: Mask, blocks: int, block: int, Lq: int | None = None) -> Tensor:
    """The block layout of a mask that is constant on blocks, bool `[x, y]`."""
    Lk = blocks * block
    dense = mask.materialize(1, 1, Lk if Lq is None else Lq, Lk)[0, 0]
    tiles = dense.unflatten(0, (-1, block)).unflatten(2, (-1, block))
    assert bool((tiles.all(3).all(1) == tiles.any(3).any(1)).all()), "not constant on blocks"
    return tiles.any(3).any(1)


@pytest.mark.parametrize("random", [0, 1, 3])
@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_bigbird_has_window_global_and_distinct_random_blocks(window: int, first: int, random: int) -> None:
    blocks = 24
    layout = block_rows(masks.bigbird(window, first, random, block=4, seed=11), blocks, 4)
    x, y = torch.arange(blocks).view(-1, 1), torch.arange(blocks)
    near = (x - y).abs() <= window // 2 if window else torch.zeros_like(layout)
    fixed = near | (y < first) | (x < first)
    assert bool(layout[fixed].all())
    drawn = (layout & ~fixed).sum(1)
    left = (~fixed).sum(1)
    assert torch.equal(drawn[first:], left[first:].clamp(max=random))


def test_bigbird_takes_all_blocks_where_few_are_left() -> None:
    assert bool(block_rows(masks.bigbird(3, 2, 9, block=4), 8, 4).all())


def test_bigbird_draws_evenly() -> None:
    counts = torch.zeros(30)
    for seed in range(200):
        counts += block_rows(masks.bigbird(1, 0, 2, block=1, seed=seed), 30, 1)[15]
    counts[15] = 200 * 2 / 29
    assert counts.sum() == pytest.approx(200 * 2 * 30 / 29)
    assert float((counts - 200 * 2 / 29).abs().max()) < 5 * (200 * 2 / 29) ** 0.5


def test_random_blocks_are_a_function_of_seed_and_place() -> None:
    mask = masks.random_blocks(0.3, block=4, seed=7)
    whole = block_rows(mask, 100, 4)
    assert abs(float(whole.float().mean()) - 0.3) < 0.02
    assert torch.equal(block_rows(mask, 40, 4), whole[:40, :40])
    # The last queries alone see what they see in the whole call.
    assert torch.equal(block_rows(mask, 100, 4, Lq=80), whole[80:])
    assert not torch.equal(block_rows(masks.random_blocks(0.3, block=4, seed=8), 100, 4), whole)
    assert not torch.equal(block_rows(masks.random_blocks(0.3, block=4, seed=7 + 2**32), 100, 4), whole)
    assert torch.equal(whole, block_rows(masks.random_blocks(0.3, block=4, seed=7), 100, 4))


def test_random_blocks_at_the_ends_of_p() -> None:
    assert bool(masks.random_blocks(1.0, block=3).materialize(1, 1, 50, 50).all())
    assert not bool(masks.random_blocks(0.0, block=3).materialize(1, 1, 50, 50).any())


KNOWN = [
    "xx..xxxx",
    ".xx.x...",
    ".x..xxx.",
    "xxxx...x",
    ".xx.x.xx",
    "xx....xx",
    "xx.xxxx.",
    "xxxx.x..",
]


def test_random_blocks_known_answer() -> None:
    """Fixed forever: a checkpoint trained under a pattern must meet the same pattern again."""
    layout = block_rows(masks.random_blocks(0.5, block=1, seed=1), 8, 1)
    assert ["".join(".x"[cell] for cell in row) for row in layout.int().tolist()] == KNOWN
