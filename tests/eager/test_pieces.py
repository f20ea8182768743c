"""The rectangles of a mask share no visible element and miss none, forward and backward."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilefold.backends.eager import pieces, programs
from tilefold.backends.eager.programs import plan
from tilefold.masks.band import Band
from tilefold.masks.cols import Cols
from tilefold.masks.rows import Rows

from .forms import KINDS, counted, draw, visible


@pytest.fixture(autouse=True)
def forget() -> None:
    """Plans depend on the sizes, which tests change."""
    programs._plan_band.cache_clear()


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    Lq=st.sampled_from([1, 5, 63, 64, 130, 300]),
    Lk=st.sampled_from([None, 1, 7, 64, 200]),
    sizes_of=st.sampled_from([(1, 1, 1), (2, 4, 2), (3, 6, 2)]),
)
def test_partition(kind: str, seed: int, Lq: int, Lk: int | None, sizes_of: tuple[int, int, int]) -> None:
    programs._plan_band.cache_clear()
    B, Hq, Hk = sizes_of
    Lk = Lq if Lk is None else Lk
    form = draw(random.Random(seed), kind, B, Hq, Lq, Lk)
    found = plan(form, B, Hq, Hk, Lq, Lk)
    shown = visible(form, B, Hq, Lq, Lk).to(torch.int32)
    for direction in ("forward", "backward"):
        assert torch.equal(counted(found, direction, B, Hq, Lq, Lk), shown), direction


@given(
    r0=st.integers(-3, 6),
    rows=st.integers(0, 9),
    k0=st.integers(-3, 6),
    keys=st.integers(0, 9),
    lo=st.none() | st.integers(-12, 12),
    hi=st.none() | st.integers(-12, 12),
)
def test_region(r0: int, rows: int, k0: int, keys: int, lo: int | None, hi: int | None) -> None:
    expected = {
        (i, j)
        for i in range(r0, r0 + rows)
        for j in range(k0, k0 + keys)
        if (lo is None or j - i >= lo) and (hi is None or j - i <= hi)
    }
    found = [
        (i, j)
        for t in pieces.region(r0, r0 + rows, k0, k0 + keys, lo, hi)
        for i in range(t.r0, t.r1)
        for j in range(t.start + t.ds * (i - t.r0), t.end + t.de * (i - t.r0))
    ]
    assert len(found) == len(set(found)) and set(found) == expected
    assert len(pieces.region(r0, r0 + rows, k0, k0 + keys, lo, hi)) <= 3


def kinds(form: object, L: int, Lk: int | None = None, direction: str = "forward") -> list[tuple[str, int]]:
    found = plan(form, 1, 8, 8, L, Lk or L)
    return [(r.kind, r.n) for g in found.groups for r in getattr(g.program, direction)]


@pytest.mark.parametrize("L", [16, 17, 1024, 65536])
def test_full_and_causal_are_one_call(L: int) -> None:
    assert plan(Band(None, None), 2, 8, 2, L, L).single == "full"
    assert plan(Band(None, 0), 2, 8, 2, L, L).single == "causal"
    assert plan(Band(None, None), 2, 8, 2, L, 3 * L).single == "full"
    assert plan(Band(None, 0), 2, 8, 2, 1, L).single == "full"


def test_nothing_visible_is_no_call() -> None:
    found = plan(Band(0, -1), 2, 8, 2, 100, 100)
    assert found.groups == () and found.may_be_empty and not found.whole


def test_a_window_is_a_causal_head_and_equal_stripes() -> None:
    assert kinds(Band(-1023, 0), 16384) == [("causal", 1), ("band", 60)]
    backward = kinds(Band(-1023, 0), 16384, direction="backward")
    assert backward[0] == ("band", 60) and sum(n for _, n in backward) == 64
    program = plan(Band(-1023, 0), 1, 8, 8, 16384, 16384).groups[0].program
    assert program.grad_keys == (True, True) and program.rows_once and program.rows_whole


def test_a_window_wider_than_any_mask() -> None:
    found = plan(Band(-20000, 0), 1, 1, 1, 65536, 65536).groups[0].program
    assert max(r.rows * r.keys for r in found.forward if r.kind == "band") <= 1 << 21


def test_causal_continuation_is_a_rectangle_and_a_square() -> None:
    assert kinds(Band(None, 0), 2048, 8192) == [("full", 1), ("causal", 1)]
    assert kinds(Band(None, 0), 16, 8192) == [("band", 1)]


def test_equal_documents_are_one_batch() -> None:
    i = torch.arange(4096, dtype=torch.int32)
    form = Rows(torch.stack([i // 512 * 512, i + 1], -1)[None, None])
    assert kinds(form, 4096) == [("causal", 8)]


def test_tiny_documents_share_rectangles() -> None:
    i = torch.arange(4096, dtype=torch.int32)
    form = Rows(torch.stack([i // 8 * 8, i + 1], -1)[None, None])
    found = kinds(form, 4096)
    assert len(found) <= 128 and {kind for kind, _ in found} == {"table"}


def test_padding_is_one_rectangle_for_each_length() -> None:
    lengths = torch.tensor([100, 100, 70, 100])
    bounds = torch.zeros(4, 1, 128, 2, dtype=torch.int32)
    bounds[..., 1] = lengths[:, None, None]
    found = plan(Rows(bounds), 4, 8, 2, 128, 128)
    assert [(g.b0, g.b1) for g in found.groups] == [(0, 2), (2, 3), (3, 4)]
    assert all(r.kind == "full" for g in found.groups for r in g.program.forward) and not found.masked


def test_tables_of_single_heads_keep_key_heads_apart() -> None:
    bounds = torch.zeros(1, 6, 64, 2, dtype=torch.int32)
    bounds[..., 1] = torch.tensor([10, 20, 20, 20, 20, 30])[None, :, None]
    found = plan(Rows(bounds), 1, 6, 2, 64, 64)
    assert [(g.h0, g.h1, g.k0, g.k1) for g in found.groups] == [
        (0, 1, 0, 1),
        (1, 3, 0, 1),
        (3, 5, 1, 2),
        (5, 6, 1, 2),
    ]
    assert found.shared_keys


def test_columns_with_many_runs_become_stripes() -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(1, 513, (512,), generator=generator, dtype=torch.int32)
    bounds = torch.stack([ends, torch.full_like(ends, 512)], -1)
    bounds[ends == 512] = 0
    found = plan(Cols(bounds[None, None]), 1, 2, 2, 512, 512)
    assert {r.kind for g in found.groups for r in g.program.forward} <= {"table", "full"}
    assert len(found.groups[0].program.forward) <= 8


def test_plans_are_remembered() -> None:
    i = torch.arange(64, dtype=torch.int32)
    form = Rows(torch.stack([i, i + 1], -1)[None, None])
    assert plan(form, 1, 2, 2, 64, 64) is plan(form, 1, 2, 2, 64, 64)
    assert plan(Band(-3, 0), 1, 2, 2, 64, 64) is plan(Band(-3, 0), 1, 2, 2, 64, 64)
