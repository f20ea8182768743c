"""What the eager fold moves, counted while it runs, is what the closed form says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tilefold import masks, reference
from tilefold.backends.eager import counted, fold
from tilefold.cost import io
from tilefold.errors import ArgumentError
from tilefold.planning.backend import Work
from tilefold.problem import Problem
from tilefold.scores import Scores

B, HQ, D = 2, 4, 16
ALL = (True,) * 6
OFFSETS = (0, 70, 90, 91, 192)


def documents(Lq: int, Lk: int) -> masks.Mask:
    q, k = (torch.tensor([min(at, n) for at in (*OFFSETS[:-1], n)], dtype=torch.int32) for n in (Lq, Lk))
    return masks.documents(q, k, within=masks.causal())


MASKS = {
    "full": lambda Lq, Lk: masks.full(),
    "empty": lambda Lq, Lk: masks.empty(),
    "causal": lambda Lq, Lk: masks.causal(),
    "window": lambda Lq, Lk: masks.window(40, 0),
    "dilated": lambda Lq, Lk: masks.dilated(40, 4),
    "documents": documents,
    "prefix": lambda Lq, Lk: masks.prefix(50) | masks.causal(),
    "padding": lambda Lq, Lk: masks.padding(torch.tensor([Lk // 3, Lk])),
    "columns": lambda Lq, Lk: masks.columns(
        torch.tensor([[[[Lq // 2]] * Lk]], dtype=torch.int32), causal=True
    ),
    "bigbird": lambda Lq, Lk: masks.bigbird(window=1, global_blocks=1, random=1, block=32),
    "block_sparse": lambda Lq, Lk: masks.block_sparse(
        torch.eye(6, 8).bool()[: -(-Lq // 32), : -(-Lk // 32)], 32
    ),
    "dense": lambda Lq, Lk: masks.dense(torch.rand(B, HQ, Lq, Lk) < 0.5),
}
LENGTHS = [(192, 192), (131, 192), (192, 77), (45, 45), (1, 130)]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"bias": (B, HQ, 131, 192)},
    "bias of heads": {"bias": (HQ, 131, 192)},
    "bias of keys": {"bias": (B, 1, 1, 192)},
    "bias of rows": {"bias": (131, 1)},
    "bias of one": {"bias": (1, HQ, 1, 1)},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout_p": 0.3},
    "alibi": {"alibi_slopes": (HQ,)},
    "sink": {"sink": (HQ,)},
    "everything": {
        "bias": (131, 192), "softcap": 5.0, "dropout_p": 0.3, "alibi_slopes": (B, HQ), "sink": (HQ,)
    },
}  # fmt: skip


@pytest.fixture(params=[32, 64], autouse=True)
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Small tiles, so that short sequences have many."""
    monkeypatch.setattr(fold, "block_of", lambda problem: request.param)
    return request.param


def make(
    mask: masks.Mask,
    Lq: int,
    Lk: int,
    *,
    heads: int = HQ,
    dv: int = D,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Work:
    q, k, v = (
        torch.randn(shape).to(dtype) for shape in ((B, HQ, Lq, D), (B, heads, Lk, D), (B, heads, Lk, dv))
    )
    given: dict[str, Any] = {
        name: torch.randn(x).to(dtype) if isinstance(x, tuple) else x for name, x in options.items()
    }
    if "dropout_p" in given:
        given["seed"] = torch.tensor(7)
    scores = Scores(D**-0.5, **given)
    problem = Problem(B, HQ, heads, Lq, Lk, D, dv, dtype, options=scores.flags)
    return Work(problem, q, k, v, masks.lower(mask, (), B, HQ, Lq, Lk, "cpu"), scores)


def check(work: Work, side: int, *, dlse: bool = False) -> None:
    """Per tensor, per pass and in total."""
    bias = work.scores.bias
    shapes: dict[str, Any] = {"bias_shape": None if bias is None else bias.shape}
    (out, lse), forward = counted.forward(work)
    plain = fold.forward(work)
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    agree(work, forward, io.fold_traffic(work.problem, work.form, side, side, False, **shapes))

    args = (torch.randn_like(out), torch.randn_like(lse) if dlse else None, out, lse, ALL)
    gradients, backward = counted.backward(work, *args)
    for got, want in zip(gradients, fold.backward(work, *args), strict=True):
        assert (got is None) == (want is None)
        assert got is None or want is None or torch.equal(got, want)
    agree(work, backward, io.fold_traffic(work.problem, work.form, side, side, True, dlse=dlse, **shapes))


def agree(work: Work, found: counted.Traffic, predicted: dict[str, float]) -> None:
    """Equal byte for byte, but for tiles smaller than the granules of a bit mask, whose states stay in fast
    memory from one tile of a granule to the next.
    """
    moved = found.moved
    assert moved.keys() == predicted.keys()
    for name, size in predicted.items():
        exact = name != "mask" or work.form.kind != "bits"
        assert moved[name] == size if exact else moved[name] == pytest.approx(size, rel=0.02), name
    assert found.total == pytest.approx(sum(predicted.values()), rel=0.02)


def test_every_form_of_mask_is_there() -> None:
    kinds = {masks.lower(mask(192, 192), (), B, HQ, 192, 192, "cpu").kind for mask in MASKS.values()}
    assert kinds == {"band", "rows", "cols", "bits"}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_lengths(name: str, lengths: tuple[int, int], side: int) -> None:
    check(make(MASKS[name](*lengths), *lengths), side)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "documents", "dense"])
def test_dtypes_grouped_heads_and_value_sizes(name: str, dtype: torch.dtype, side: int) -> None:
    check(make(MASKS[name](131, 192), 131, 192, heads=2, dv=24, dtype=dtype), side, dlse=True)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("mask", ["causal", "padding"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, mask: str, dtype: torch.dtype, side: int) -> None:
    check(make(MASKS[mask](131, 192), 131, 192, heads=1, dtype=dtype, **OPTIONS[option]), side)


def test_the_memory_order_of_inputs_does_not_matter(side: int) -> None:
    work = make(masks.causal(), 131, 192, heads=2)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (work.q, work.k, work.v))
    check(replace(work, q=q, k=k, v=v), side)


def test_the_count_includes_what_the_passes_compute(side: int) -> None:
    """The twin returns attention: its numbers are those of the definition."""
    mask = masks.causal()
    work = make(mask, 100, 150, heads=2, dtype=torch.float64)
    (out, lse), _ = counted.forward(work)
    expected = reference.attention(work.q, work.k, work.v, mask=mask)
    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-12)


def test_a_broadcast_bias_counts_its_own_elements(side: int) -> None:
    work = make(masks.full(), 64, 64, bias=(1, 1, 64, 64))
    scores = replace(work.scores, bias=work.scores.bias.expand(B, HQ, 64, 64))
    found = counted.forward(replace(work, scores=scores))[1]
    assert found.loaded["bias"] == 64 * 64 * 4


def test_a_fold_that_reads_more_is_found_out(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make(masks.full(), 192, 192)
    before = counted.forward(work)[1].loaded["k"]
    raw = fold._Fold.raw
    monkeypatch.setattr(fold._Fold, "raw", lambda self, tile: raw(self, tile) + 0 * self.work.k.sum())
    visits = (192 // side) ** 2
    # Every tile loads all of k as well, and then its part again.
    assert counted.forward(work)[1].loaded["k"] == before + visits * work.k.nbytes


def test_loads_and_stores_are_told_apart(side: int) -> None:
    work = make(masks.full(), 192, 192)
    (out, lse), forward = counted.forward(work)
    assert forward.stored["out"] == 2 * out.nbytes and forward.loaded["out"] == 0
    assert forward.stored["k"] == 0 and forward.loaded["k"] == 192 // side * work.k.nbytes
    _, backward = counted.backward(work, torch.ones_like(out), None, out, lse, ALL)
    assert backward.loaded["dk"] == 192 // side * work.k.nbytes
    assert backward.stored["dk"] == (1 + 192 // side) * work.k.nbytes
    assert backward.total == sum(backward.loaded.values()) + sum(backward.stored.values())


def test_only_the_gradients_asked_for_are_counted(side: int) -> None:
    work = make(masks.full(), 96, 96)
    (out, lse), _ = counted.forward(work)
    gradients, found = counted.backward(
        work, torch.ones_like(out), None, out, lse, (False, False, True, *ALL[3:])
    )
    assert gradients.q is None and gradients.v is not None
    assert "dv" in found.moved and not {"dq", "dk", "dlse", "dbias"} & found.moved.keys()
    # The products with v are not needed.
    assert found.moved["v"] == 0


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_values_that_are_not_finite_are_refused(name: str) -> None:
    work = make(masks.causal(), 40, 40)
    getattr(work, name)[0, 0, 3, 0] = torch.nan
    with pytest.raises(ArgumentError, match=f"{name}: expected finite values"):
        counted.forward(work)


def test_tensors_that_share_memory_are_refused() -> None:
    work = make(masks.causal(), 40, 40)
    with pytest.raises(ArgumentError, match="v: expected memory of its own, got that of k"):
        counted.forward(replace(work, v=work.k[..., :4]))


def test_gradients_of_inputs_are_not_recorded() -> None:
    work = make(masks.causal(), 40, 40)
    work.q.requires_grad_()
    assert not counted.forward(work)[0][0].requires_grad
