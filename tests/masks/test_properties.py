"""Laws of every mask: lowering is exact, tile states sound, directions agree, spellings rebuild."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilefold import masks
from tilefold.masks import Band, Bits, Cols, Mask, Rows, lower, parse
from tilefold.masks.context import key_lines, query_lines
from tilefold.masks.intervals import Spans, canonical

LENGTHS = st.sampled_from([0, 1, 2, 3, 5, 9, 17, 33, 63, 64, 65, 70])
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sizes:
    B: int
    H: int
    Lq: int
    Lk: int

    @property
    def call(self) -> tuple[int, int, int, int]:
        return self.B, self.H, self.Lq, self.Lk


SIZES = st.builds(Sizes, st.integers(1, 2), st.integers(1, 3), LENGTHS, LENGTHS)


def _offsets(draw: st.DrawFn, documents: int, length: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, length), min_size=documents, max_size=documents))
    return [0, *sorted(inner)]


@st.composite
def documents(draw: st.DrawFn, sizes: Sizes, depth: int) -> Mask:
    count = draw(st.integers(0, 3))
    batched = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    lengths = (sizes.Lq,) if sizes.Lq == sizes.Lk and draw(st.booleans()) else (sizes.Lq, sizes.Lk)
    tensors = []
    for length in lengths:
        rows = [_offsets(draw, count, length) for _ in range(sizes.B if batched else 1)]
        tensors.append(torch.tensor(rows if batched else rows[0], dtype=dtype))
    return masks.documents(*tensors, within=draw(st.none() | expressions(sizes, depth, nested=True)))


@st.composite
def shifted(draw: st.DrawFn, sizes: Sizes, depth: int, tensors: bool, functions: bool) -> Mask:
    dq, dk, more_q, more_k = (draw(st.integers(0, 4)) for _ in range(4))
    outer = Sizes(sizes.B, sizes.H, sizes.Lq + dq + more_q, sizes.Lk + dk + more_k)
    return masks.shift(draw(expressions(outer, depth, False, tensors, functions)), dq, dk, outer.Lq, outer.Lk)


@st.composite
def tables(draw: st.DrawFn, sizes: Sizes) -> Mask:
    """Masks with tensors that batch and heads may share."""
    B, H, Lq, Lk = sizes.call
    Bm, Hm = draw(st.sampled_from([1, B])), draw(st.sampled_from([1, H]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(
        st.sampled_from(
            ["dense", "dense", "runs", "columns", "columns", "block_sparse", "padding", "prefix", "global"]
        )
    )
    if kind == "dense":
        shape = (Bm, Hm, draw(st.sampled_from([1, Lq])), draw(st.sampled_from([1, Lk])))
        return masks.dense(
            torch.rand(shape, generator=random) > draw(st.sampled_from([-1.0, 0.02, 0.5, 0.98, 1.0]))
        )
    if kind == "runs":
        start = torch.randint(0, Lk + 1, (Bm, Hm, Lq, 1), generator=random)
        return masks.dense(
            (torch.arange(Lk) >= start) & (torch.arange(Lk) < start + draw(st.integers(0, Lk + 1)))
        )
    if kind == "columns":
        causal = draw(st.booleans())
        entries = draw(st.sampled_from([1, 2] if causal else [2, 4]))
        index = torch.randint(-1, Lq + 2, (Bm, Hm, Lk, entries), generator=random, dtype=torch.int32)
        return masks.columns(index, causal=causal)
    if kind == "block_sparse":
        block = draw(st.sampled_from([1, 3, 8, 64]))
        layout = torch.rand((Hm, -(-Lq // block), -(-Lk // block)), generator=random) > 0.5
        return masks.block_sparse(layout, block)
    if kind == "padding":
        lengths = torch.randint(0, Lk + 1, (Bm,), generator=random)
        return masks.padding(lengths, side=draw(st.sampled_from(["right", "left"])))
    if kind == "prefix":
        return masks.prefix(torch.randint(0, Lk + 2, (Bm,), generator=random))
    shape = (draw(st.integers(0, 3)),) if draw(st.booleans()) else (Bm, draw(st.integers(0, 3)))
    return masks.global_tokens(torch.randint(-1, max(Lk, 1), shape, generator=random).clamp(max=Lk - 1))


BOUND = st.none() | st.integers(-6, 20)
DIAGONAL = st.one_of(
    st.builds(masks.window, BOUND, BOUND),
    st.builds(masks.causal),
    st.builds(masks.full),
    st.builds(masks.empty),
    st.builds(masks.dilated, st.integers(0, 9), st.integers(1, 5)),
    st.builds(masks.strided, st.integers(1, 7)),
)
SEEDS = st.integers(-(2**40), 2**40)


def plain(sizes: Sizes) -> st.SearchStrategy[Mask]:
    """Masks without tensors."""
    tokens = st.lists(st.integers(0, max(0, sizes.Lk - 1)), max_size=4 if sizes.Lk else 0)
    return st.one_of(
        DIAGONAL,
        DIAGONAL,
        st.builds(masks.causal, st.just("top-left")),
        st.builds(masks.prefix, st.integers(0, 20)),
        st.builds(masks.global_tokens, st.integers(0, 5)),
        st.builds(masks.global_tokens, tokens),
        st.builds(masks.random_blocks, st.floats(0, 1), st.integers(1, 40), SEEDS),
        st.builds(
            masks.bigbird,
            st.integers(0, 5),
            st.integers(0, 2),
            st.integers(0, 3),
            st.sampled_from([1, 2, 7, 32]),
            SEEDS,
        ),
        st.builds(masks.butterfly, st.sampled_from([1, 2, 5, 32])),
        st.builds(masks.longformer, st.integers(0, 12), st.integers(0, 3), st.integers(1, 3)),
    )


def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A predicate that can be pickled."""
    return (q * 3 + k + h * 2 + b) % 5 < 2


def expressions(
    sizes: Sizes, depth: int = 3, nested: bool = False, tensors: bool = True, functions: bool = False
) -> st.SearchStrategy[Mask]:
    """Expressions of this depth. Inside documents (`nested`) tables cover the call, and so every document."""
    leaves = [plain(sizes)]
    if tensors:
        leaves.append(tables(sizes))
    if functions:
        leaves.append(st.just(masks.predicate(rule)))
    leaf = st.one_of(*leaves)
    if depth == 0:
        return leaf
    part = st.deferred(lambda: expressions(sizes, depth - 1, nested, tensors, functions))
    options = [
        leaf,
        st.builds(lambda a: ~a, part),
        st.builds(lambda a, b: a & b, part, part),
        st.builds(lambda a, b: a | b, part, part),
    ]
    if tensors:
        options.append(documents(sizes, depth - 1))
    if not nested:
        options.append(shifted(sizes, depth - 1, tensors, functions))
    return st.one_of(*options)


def with_sizes(depth: int = 3, **options: bool) -> st.SearchStrategy[tuple[Mask, Sizes]]:
    return SIZES.flatmap(lambda sizes: st.tuples(expressions(sizes, depth, **options), st.just(sizes)))


def whole(mask: Mask, sizes: Sizes) -> tuple[Tensor, Band | Rows | Cols | Bits]:
    return mask.materialize(*sizes.call), lower(mask, (), *sizes.call, CPU)


@given(with_sizes(functions=True), st.data())
@settings(max_examples=200)
def test_lowering_is_exact(drawn: tuple[Mask, Sizes], data: st.DataObject) -> None:
    mask, sizes = drawn
    dense, form = whole(mask, sizes)
    B, H, Lq, Lk = sizes.call
    tile = form.tile(0, Lq, 0, Lk, Lq, Lk, CPU)
    assert tile.shape[0] in (1, B)
    assert tile.shape[1] in (1, H)
    assert torch.equal(tile.expand(B, H, Lq, Lk), dense)
    for _ in range(3):
        q0, k0 = data.draw(st.integers(0, Lq)), data.draw(st.integers(0, Lk))
        q1, k1 = data.draw(st.integers(q0, Lq)), data.draw(st.integers(k0, Lk))
        part = form.tile(q0, q1, k0, k1, Lq, Lk, CPU)
        assert torch.equal(part.expand(B, H, q1 - q0, k1 - k0), dense[:, :, q0:q1, k0:k1])


def per_tile(dense: Tensor, bq: int, bk: int) -> tuple[Tensor, Tensor]:
    """(any, all) of each tile of bool `[B, H, Lq, Lk]`."""
    rows = [dense[:, :, q0 : q0 + bq] for q0 in range(0, dense.shape[2], bq)]
    tiles = [[row[..., k0 : k0 + bk].flatten(2) for k0 in range(0, dense.shape[3], bk)] for row in rows]
    shape = (*dense.shape[:2], -(-dense.shape[2] // bq), -(-dense.shape[3] // bk))
    some = (
        torch.stack([tile.any(-1) for row in tiles for tile in row], -1).view(shape)
        if all(shape)
        else torch.zeros(shape)
    )
    every = (
        torch.stack([tile.all(-1) for row in tiles for tile in row], -1).view(shape)
        if all(shape)
        else torch.zeros(shape)
    )
    return some.bool(), every.bool()


@given(with_sizes(), st.sampled_from([1, 7, 16, 64, 128]), st.sampled_from([1, 5, 32, 64, 192]))
@settings(max_examples=200)
def test_tile_states_are_never_wrong(drawn: tuple[Mask, Sizes], bq: int, bk: int) -> None:
    mask, sizes = drawn
    dense, form = whole(mask, sizes)
    some, every = per_tile(dense, bq, bk)
    states = form.tile_states(sizes.Lq, sizes.Lk, bq, bk, CPU)
    assert states.dtype == torch.int8
    states = states.expand(some.shape)
    assert not (some & (states == 0)).any()
    assert not (~every & (states == 2)).any()
    exact = some.to(torch.int8) + every.to(torch.int8)
    if isinstance(form, Band) or (isinstance(form, Bits) and bq % 64 == 0 and bk % 64 == 0):
        assert torch.equal(states, exact)
    if isinstance(form, (Rows, Cols)) and form.count == 1 and (bq if isinstance(form, Rows) else bk) == 1:
        assert torch.equal(states, exact)


@given(with_sizes(), st.sampled_from([1, 4, 33, 64]))
def test_classifying_boxes_is_never_wrong(drawn: tuple[Mask, Sizes], size: int) -> None:
    mask, sizes = drawn
    some, every = per_tile(mask.materialize(*sizes.call), size, size)
    states = mask.states(*sizes.call, size, CPU).expand(some.shape)
    assert not (some & (states == 0)).any()
    assert not (~every & (states == 2)).any()


@given(with_sizes())
def test_empty_rows(drawn: tuple[Mask, Sizes]) -> None:
    mask, sizes = drawn
    dense, form = whole(mask, sizes)
    empty = form.empty_rows(sizes.Lq, sizes.Lk, CPU).expand(dense.shape[:3])
    assert torch.equal(empty, ~dense.any(-1))


def painted(spans: Spans, lines: int, length: int, sizes: Sizes) -> Tensor:
    """bool `[B, H, lines, length]`."""
    spans = canonical(spans, length)
    at = torch.arange(length)
    shape = (sizes.B, sizes.H, lines, length)
    seen = torch.zeros(shape, dtype=torch.bool)
    for start, end in zip(spans.start, spans.end, strict=True):
        hit = (at >= start[..., None]) & (at < end[..., None])
        assert not (seen & hit).any(), "intervals overlap"
        seen = seen | hit
    return seen


@given(with_sizes())
@settings(max_examples=200)
def test_both_directions_agree(drawn: tuple[Mask, Sizes]) -> None:
    mask, sizes = drawn
    B, H, Lq, Lk = sizes.call
    dense = mask.materialize(*sizes.call)
    rows = mask.row_spans(query_lines(B, H, Lq, Lk, CPU))
    columns = mask.col_spans(key_lines(B, H, Lq, Lk, CPU))
    assert all(spans is None or spans.start.shape == spans.end.shape for spans in (rows, columns))
    if rows is not None:
        assert torch.equal(painted(rows, Lq, Lk, sizes), dense)
    if columns is not None:
        assert torch.equal(painted(columns, Lk, Lq, sizes).transpose(-1, -2), dense)


@given(with_sizes())
def test_tables_are_canonical(drawn: tuple[Mask, Sizes]) -> None:
    mask, sizes = drawn
    form = lower(mask, (), *sizes.call, CPU)
    if not isinstance(form, (Rows, Cols)):
        return
    length, lines = (sizes.Lk, sizes.Lq) if isinstance(form, Rows) else (sizes.Lq, sizes.Lk)
    bounds = form.bounds
    assert bounds.dtype == torch.int32
    assert bounds.shape[2] == lines
    assert bounds.shape[3] in (2, 4)
    start, end = bounds[..., 0::2], bounds[..., 1::2]
    assert bool(((start >= 0) & (end <= length) & (start <= end)).all())
    assert bool((bounds[..., 1::2][start == end] == 0).all())
    if form.count == 2:
        second = start[..., 1] < end[..., 1]
        assert bool((end[..., 0] < start[..., 1])[second].all())


@given(SIZES, st.lists(DIAGONAL, min_size=1, max_size=4))
def test_what_bands_share_is_a_band(sizes: Sizes, parts: list[Mask]) -> None:
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    form = lower(mask, (), *sizes.call, CPU)
    assert isinstance(form, Band)
    assert form.tensors() == ()
    assert mask.spec()[1] == ()


BANDS = st.builds(Band, BOUND, BOUND, st.integers(1, 6))


@given(BANDS, BANDS, st.integers(-9, 9))
@settings(max_examples=300)
def test_algebra_of_bands(a: Band, b: Band, by: int) -> None:
    offsets = torch.arange(-60, 61)
    shown_a, shown_b = a.shows(offsets), b.shows(offsets)
    assert (a == b) == torch.equal(shown_a, shown_b)
    assert torch.equal(a.intersection(b).shows(offsets), shown_a & shown_b)
    assert a.contains(b) == bool((shown_a | ~shown_b).all())
    both, without, moved = a.union(b), a.complement(), a.shifted(by)
    if both is not None:
        assert torch.equal(both.shows(offsets), shown_a | shown_b)
    if without is not None:
        assert torch.equal(without.shows(offsets), ~shown_a)
    if moved is not None:
        assert torch.equal(moved.shows(offsets), a.shows(offsets + by))


@given(SIZES.flatmap(lambda sizes: st.tuples(expressions(sizes, 2), expressions(sizes, 2), st.just(sizes))))
def test_de_morgan(drawn: tuple[Mask, Mask, Sizes]) -> None:
    a, b, sizes = drawn
    B, H, Lq, Lk = sizes.call
    for left, right in ((~(a | b), ~a & ~b), (~(a & b), ~a | ~b), (~~a, a), (a & (a | b), a)):
        assert torch.equal(left.materialize(*sizes.call), right.materialize(*sizes.call))
        first, second = (
            lower(mask, (), *sizes.call, CPU).tile(0, Lq, 0, Lk, Lq, Lk, CPU) for mask in (left, right)
        )
        assert torch.equal(first.expand(B, H, Lq, Lk), second.expand(B, H, Lq, Lk))


@given(with_sizes())
def test_spelling_and_parsing(drawn: tuple[Mask, Sizes]) -> None:
    mask, sizes = drawn
    spec, tensors = mask.spec()
    again = parse(spec, tensors)
    assert again.spec()[0] == spec
    assert all(a is b for a, b in zip(again.spec()[1], tensors, strict=True))
    assert torch.equal(again.materialize(*sizes.call), mask.materialize(*sizes.call))
    by_spec, by_mask = lower(spec, tensors, *sizes.call, CPU), lower(mask, (), *sizes.call, CPU)
    assert by_spec is by_mask


@given(with_sizes(tensors=False))
def test_repr_rebuilds(drawn: tuple[Mask, Sizes]) -> None:
    mask, sizes = drawn
    again = eval(repr(mask), {"masks": masks})
    assert again == mask
    assert hash(again) == hash(mask)
    assert torch.equal(again.materialize(*sizes.call), mask.materialize(*sizes.call))


@given(with_sizes(functions=True))
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda mask: pickle.loads(pickle.dumps(mask)), id="pickle"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(copy.copy, id="copy"),
        pytest.param(lambda mask: mask.to("cpu"), id="to"),
        pytest.param(lambda mask: mask.to("meta").to("meta"), id="to-meta"),
    ],
)
def test_copies_are_the_same_mask(change, drawn: tuple[Mask, Sizes]) -> None:
    mask, sizes = drawn
    again = change(mask)
    assert type(again) is type(mask)
    if not mask.needs_build:
        assert again.spec()[0] == mask.spec()[0]
    if all(tensor.device.type == "cpu" for tensor in again._tensors()):
        assert torch.equal(again.materialize(*sizes.call), mask.materialize(*sizes.call))


@given(with_sizes(functions=True))
def test_built_masks_are_the_same_mask(drawn: tuple[Mask, Sizes]) -> None:
    mask, sizes = drawn
    built = mask.build(*sizes.call)
    assert not built.needs_build
    spec, tensors = built.spec()
    dense = mask.materialize(*sizes.call)
    assert torch.equal(parse(spec, tensors).materialize(*sizes.call), dense)
    assert torch.equal((~built).materialize(*sizes.call), ~dense)
    B, H, Lq, Lk = sizes.call
    for other in (built, built & masks.full(), pickle.loads(pickle.dumps(built))):
        tile = lower(other, (), *sizes.call, CPU).tile(0, Lq, 0, Lk, Lq, Lk, CPU)
        assert torch.equal(tile.expand(B, H, Lq, Lk), dense)
