"""Which form a mask takes, when tables are shared, what is kept, and what `build` returns."""

from __future__ import annotations

import gc

import pytest
import torch

from tilefold import masks
from tilefold.errors import MaskError
from tilefold.masks import Band, Bits, Cols, Mask, Rows, lower

B, H, L = 2, 4, 200
CU = torch.tensor([0, 50, 50, 130, 200])


def form_of(mask: Mask, Lq: int = L, Lk: int = L) -> Band | Rows | Cols | Bits:
    return lower(mask, (), B, H, Lq, Lk, "cpu")


@pytest.mark.parametrize(
    "mask, band",
    [
        (masks.full(), Band(None, None)),
        (masks.empty(), Band(0, -1)),
        (masks.causal(), Band(None, 0)),
        (masks.causal("top-left"), Band(None, 0)),
        (masks.window(7, 3), Band(-7, 3)),
        (masks.window(7, 0) & masks.causal(), Band(-7, 0)),
        (masks.window(7, 3) | masks.window(3, 9), Band(-7, 9)),
        (masks.window(5, -3) | masks.window(2, 0), Band(-5, 0)),
        (masks.causal() | masks.window(0, 5), Band(None, 5)),
        (~masks.causal(), Band(1, None)),
        (~~masks.window(None, -3), Band(None, -3)),
        (~masks.full(), Band(0, -1)),
        (masks.window(7, 3) & masks.window(-5, 9) & masks.window(9, 4), Band(0, -1)),
        (masks.dilated(6, 4), Band(-12, 12, 4)),
        (masks.dilated(7, 4) & masks.causal(), Band(-12, 0, 4)),
        (masks.strided(4) & masks.strided(6), Band(None, None, 12)),
        (masks.strided(4) | masks.strided(8), Band(None, None, 4)),
        (masks.window(10**12, 10**12), Band(None, None)),
        (masks.window(None, -(10**12)), Band(0, -1)),
        (masks.shift(masks.causal(), 0, 100, L, 400), Band(None, 100)),
        (masks.shift(masks.causal(), 200, 0, 400, 400), Band(None, None)),
        (masks.shift(masks.causal(), 0, 200, 400, 400), Band(0, -1)),
        (masks.prefix(0), Band(0, -1)),
        (masks.prefix(L), Band(None, None)),
        (masks.prefix(3) & masks.empty(), Band(0, -1)),
        (masks.dense(torch.ones(L, L, dtype=torch.bool)) | masks.full(), Band(None, None)),
    ],
    ids=repr,
)
def test_band(mask: Mask, band: Band) -> None:
    assert form_of(mask) == band.clipped(L, L)


def test_band_of_one_query_is_full_when_it_sees_everything() -> None:
    assert form_of(masks.causal(), 1, 12) == Band(None, None)
    assert form_of(masks.window(3, 0), 1, 12) == Band(-3, None)


@pytest.mark.parametrize(
    "mask, count, shared",
    [
        (masks.documents(CU), 1, (1, 1)),
        (masks.documents(CU, within=masks.causal()), 1, (1, 1)),
        (masks.documents(CU, within=masks.window(9, 0) | masks.prefix(2)), 2, (1, 1)),
        (masks.documents(CU) & masks.causal(), 1, (1, 1)),
        (masks.padding(torch.tensor([60, 200])), 1, (2, 1)),
        (masks.padding(torch.tensor([60])), 1, (1, 1)),
        (masks.padding(torch.tensor([60, 200])) & masks.causal(), 1, (2, 1)),
        (masks.prefix(30), 1, (1, 1)),
        (masks.prefix(30) | masks.causal(), 1, (1, 1)),
        (masks.prefix(torch.tensor([5, 9])) | masks.causal(), 1, (2, 1)),
        (masks.window(9, 0) | masks.prefix(4), 2, (1, 1)),
        (masks.shift(masks.prefix(4), 0, 0, L, L) | masks.window(9, 0), 2, (1, 1)),
        (masks.longformer(8, 3), 2, (1, 1)),
        (~masks.window(9, 9), 2, (1, 1)),
        (masks.global_tokens(4) & masks.causal(), 1, (1, 1)),
        (masks.dense(torch.ones(L, L, dtype=torch.bool).tril()), 1, (1, 1)),
        (masks.dense((torch.arange(L) < torch.tensor([[60], [150]]))[:, None, None]), 1, (2, 1)),
    ],
    ids=repr,
)
def test_rows(mask: Mask, count: int, shared: tuple[int, int]) -> None:
    form = form_of(mask)
    assert isinstance(form, Rows)
    assert form.kind == "rows"
    assert form.bounds.shape == (*shared, L, 2 * count)


@pytest.mark.parametrize(
    "mask, count, shared",
    [
        (masks.columns(torch.full((1, H, L, 1), 120, dtype=torch.int32), causal=True), 2, (1, 4)),
        (masks.columns(torch.full((2, 1, L, 2), 120, dtype=torch.int32), causal=True), 1, (2, 1)),
        (
            masks.columns(torch.tensor([120, 40], dtype=torch.int32).expand(1, 1, L, 2), causal=False),
            2,
            (1, 1),
        ),
        (masks.dense((torch.arange(L) % 3 > 0)[None]), 1, (1, 1)),
        (masks.dense((torch.arange(L) % 3 > 0)[None]) & masks.causal(), 1, (1, 1)),
    ],
    ids=repr,
)
def test_cols(mask: Mask, count: int, shared: tuple[int, int]) -> None:
    form = form_of(mask)
    assert isinstance(form, Cols)
    assert form.kind == "cols"
    assert form.bounds.shape == (*shared, L, 2 * count)


def test_bits_share_what_does_not_differ() -> None:
    def shape(mask: Mask) -> tuple[int, ...]:
        form = form_of(mask)
        assert isinstance(form, Bits)
        assert form.kind == "bits"
        return tuple(form.states.shape)

    assert shape(masks.random_blocks(0.5)) == (1, 1, 4, 4)
    assert shape(masks.dense(torch.rand(2, 1, L, L) > 0.5)) == (2, 1, 4, 4)
    assert shape(masks.dense(torch.rand(H, L, L) > 0.5)) == (1, 4, 4, 4)
    assert shape(masks.predicate(lambda b, h, q, k: (q + h) % 3 == k % 2)) == (1, 4, 4, 4)
    assert shape(masks.predicate(lambda b, h, q, k: q % 3 == k % 2)) == (1, 1, 4, 4)


def test_bits_keep_mixed_granules_only() -> None:
    form = form_of(masks.bigbird(1, 1, 1), 64 * 20, 64 * 20)
    assert isinstance(form, Bits)
    assert form.words.shape == (0, 64)
    assert set(form.states.unique().tolist()) == {0, 2}
    form = form_of(masks.bigbird(1, 1, 1) & masks.causal(), 64 * 20, 64 * 20)
    assert isinstance(form, Bits)
    assert form.words.shape == (20, 64)
    assert bool(((form.index >= 0) == (form.states == 1)).all())


def test_bits_are_empty_outside_the_matrix() -> None:
    form = form_of(
        masks.predicate(lambda b, h, q, k: (q >= 0) | (k >= 0)) & masks.random_blocks(1.0), 65, 130
    )
    assert isinstance(form, Bits)
    assert form.states[0, 0].tolist() == [[2, 2, 1], [1, 1, 1]]
    assert form.words[form.index[0, 0, 1, 2]].tolist() == [3] + [0] * 63
    assert bool((form.tile_states(65, 130, 64, 64, "cpu") == 2).all())


def test_tile_bounds() -> None:
    form = form_of(masks.documents(CU, within=masks.causal()))
    assert isinstance(form, Rows)
    bounds = form.tile_bounds(64)
    assert bounds.dtype == torch.int32
    # Least and greatest start, least and greatest end; rows 192..199 end the last tile.
    assert bounds[0, 0].tolist() == [
        [0, 50, 1, 64],
        [50, 50, 65, 128],
        [50, 130, 129, 192],
        [130, 130, 193, 200],
    ]
    assert form.tile_bounds(64) is bounds


def test_kept_until_a_tensor_changes() -> None:
    cu = torch.tensor([0, 80, 200])
    spec, tensors = masks.documents(cu).spec()
    first = lower(spec, tensors, B, H, L, L, "cpu")
    assert lower(spec, tensors, B, H, L, L, "cpu") is first
    assert lower(masks.documents(cu), (), B, H, L, L, "cpu") is first
    assert lower(spec, (cu.clone(),), B, H, L, L, "cpu") is not first
    cu[1] = 100
    changed = lower(spec, tensors, B, H, L, L, "cpu")
    assert isinstance(changed, Rows)
    assert int(changed.bounds[0, 0, 90, 1]) == 100


def test_kept_forms_do_not_keep_tensors() -> None:
    from tilefold.masks.lower import cache

    cache.clear()
    cu = torch.tensor([0, 80, 200])
    form_of(masks.documents(cu))
    assert len(cache) == 1
    del cu
    gc.collect()
    assert len(cache) == 0


def test_inference_tensors_lower() -> None:
    with torch.inference_mode():
        cu = torch.tensor([0, 80, 200])
        assert isinstance(form_of(masks.documents(cu)), Rows)


def test_predicates_are_evaluated_once() -> None:
    calls = []

    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (q + k) % 3 == 0

    first = form_of(masks.predicate(rule) & masks.causal())
    count = len(calls)
    assert form_of(masks.predicate(rule) & masks.causal()) is first
    assert len(calls) == count


def test_build_holds_the_tables() -> None:
    mask = masks.predicate(lambda b, h, q, k: (q + k) % 3 == 0)
    assert mask.needs_build
    with pytest.raises(MaskError, match="expected a mask that was built before"):
        mask.spec()
    built = mask.build(B, H, L, L)
    spec, tensors = built.spec()
    assert spec == "built('bits', 200, 200, t0, t1, t2)"
    assert lower(spec, tensors, B, H, L, L, "cpu").tensors() == tensors
    with pytest.raises(
        MaskError, match=r"expected the lengths for which it was built, \(200, 200\), got Lq = 64"
    ):
        built.check(B, H, 64, L, "cpu")
    assert masks.causal().build(B, H, L, L) == masks.causal()
    assert masks.documents(CU).build(B, H, L, L).spec()[0] == "built('rows', 200, 200, t0)"
    assert built.build(B, H, L, L) is built
    assert (masks.predicate(lambda b, h, q, k: q >= k) | masks.full()).build(B, H, L, L).spec() == (
        "window(None, None)",
        (),
    )


@pytest.mark.parametrize("Lq, Lk", [(0, 0), (0, 5), (5, 0)])
def test_zero_lengths(Lq: int, Lk: int) -> None:
    cu = torch.tensor([0, 0])
    for mask in (
        masks.causal(),
        masks.documents(cu),
        masks.random_blocks(0.5),
        masks.dense(torch.zeros(Lq, Lk, dtype=torch.bool)),
    ):
        form = form_of(mask, Lq, Lk)
        assert form.tile(0, Lq, 0, Lk, Lq, Lk, "cpu").shape[2:] == (Lq, Lk)
        assert form.tile_states(Lq, Lk, 64, 64, "cpu").shape[2:] == (min(Lq, 1), min(Lk, 1))
        assert form.empty_rows(Lq, Lk, "cpu").shape[2:] == (Lq,)
        assert bool(form.empty_rows(Lq, Lk, "cpu").all())
        assert lower(mask, (), 0, H, Lq, Lk, "cpu").kind == "band"


def test_tiles_of_documents_as_columns_are_those_of_documents() -> None:
    """A causal key whose first hidden interval is empty keeps the other one where its neighbours have theirs:
    else its whole column of tiles would count as partial.
    """
    cuts = torch.tensor([0, 100, 230, 300, 512], dtype=torch.int32)
    L = int(cuts[-1])
    ends = cuts[1:].repeat_interleave(cuts.diff())
    cols = masks.lower(masks.columns(ends.view(1, 1, L, 1), causal=True), (), 1, 1, L, L, "cpu")
    rows = masks.lower(masks.documents(cuts, within=masks.causal()), (), 1, 1, L, L, "cpu")
    assert (cols.kind, rows.kind) == ("cols", "rows")
    for size in (16, 64):
        states = [form.tile_states(L, L, size, size, "cpu") for form in (cols, rows)]
        assert torch.equal(*states)
    # Key 0 hides nothing before it.
    assert cols.tensors()[0][0, 0, 0].tolist() == [0, 0, 100, 512]
    assert cols.tensors()[0][0, 0, 1].tolist() == [0, 1, 100, 512]
    assert cols.tensors()[0][0, 0, 511].tolist() == [0, 511, 0, 0]
