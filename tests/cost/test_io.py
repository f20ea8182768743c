"""Closed forms of IO: their laws, the bounds, and the bytes of the fold on small calls counted by hand."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tilefold import masks
from tilefold.cost import io
from tilefold.errors import ArgumentError
from tilefold.problem import Problem

EXAMPLE = Path(__file__).parents[2] / "examples" / "03_io_of_attention.py"
GRID = [(N, d) for N in (512, 4096, 65536) for d in (16, 64, 256) if 16 * d < N]
FLASH = (io.key_outer, io.query_outer)


def powers(low: float, high: float) -> list[int]:
    return [2**e for e in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]


def slope(count: Callable[[int, int, int], float], N: int, d: int, sizes: list[int]) -> float:
    """Of the straight line through log(moved) over log(M)."""
    x = torch.tensor([[math.log(M), 1.0] for M in sizes], dtype=torch.float64)
    y = torch.tensor([[math.log(count(N, d, M))] for M in sizes], dtype=torch.float64)
    return float(torch.linalg.lstsq(x, y).solution[0, 0])


@pytest.mark.parametrize("N, d", GRID)
@pytest.mark.parametrize("count", FLASH)
def test_slope_in_the_regime_of_the_theorem(count: Any, N: int, d: int) -> None:
    assert slope(count, N, d, powers(4 * d**2, N * d / 4)) == pytest.approx(-1.0, abs=0.1)


@pytest.mark.parametrize("N, d", [(N, d) for N, d in GRID if d >= 64])
def test_slope_of_the_small_cache(N: int, d: int) -> None:
    assert slope(io.small_cache, N, d, powers(64, d**2 / 4)) == pytest.approx(-0.5, abs=0.1)


@pytest.mark.parametrize("N, d", GRID)
def test_leading_constants(N: int, d: int) -> None:
    for M in powers(4 * d**2, N * d / 4):
        unit = N**2 * d**2 / M
        assert io.key_outer(N, d, M) == pytest.approx(12 * unit + 2 * N * d, rel=0.15)
        assert io.query_outer(N, d, M) == pytest.approx(8 * unit + 2 * N * d, rel=0.15)
        if M > N:
            assert io.standard(N, d, M) == pytest.approx(4 * N**2 + 2 * N * d + 4 * unit, rel=0.01)
        assert io.query_outer(N, d, M) < io.key_outer(N, d, M)
    for M in powers(256, d**2 / 4):
        assert io.small_cache(N, d, M) == pytest.approx(4 * 3**0.5 * N**2 * d / M**0.5 + 2 * N**2, rel=0.35)


@pytest.mark.parametrize("N, d", [(1024, 32), (4096, 64), (65536, 256)])
@pytest.mark.parametrize("count", FLASH)
def test_the_schedules_cross_near_d_squared(count: Any, N: int, d: int) -> None:
    assert io.small_cache(N, d, d**2 // 4) < count(N, d, d**2 // 4)
    assert io.small_cache(N, d, 4 * d**2) > count(N, d, 4 * d**2)


@pytest.mark.parametrize("N, d", GRID)
def test_every_schedule_is_within_16_of_the_bound_where_it_is_meant_to_run(N: int, d: int) -> None:
    for M in powers(64, 4 * N * d):
        meant = FLASH if d**2 <= M else (io.small_cache,)
        for count in meant:
            assert 1.0 <= io.distance(count(N, d, M), N, d, M) <= 16.0, (count, M)


def test_no_schedule_is_below_the_bound() -> None:
    for (N, d), M in itertools.product(GRID, powers(64, 2**22)):
        for count in (io.standard, *FLASH, io.small_cache):
            try:
                moved = count(N, d, M)
            except ArgumentError:
                continue
            assert io.distance(moved, N, d, M) >= 1.0


def test_bound() -> None:
    assert io.lower_bound(1024, 32, 2048) == 1024**2 * 32**2 / 2048
    assert io.lower_bound(1024, 32, 256) == 1024**2 * 32 / 16
    assert io.lower_bound(1024, 32, 1024) == 1024**2
    assert io.lower_bound(1024, 32, 2**20) == 4 * 1024 * 32
    assert io.lower_bound(100, 8, 10**6, Lk=60, dv=4) == 100 * 12 + 60 * 12
    assert io.lower_bound(1024, 32, 2048, pairs=6, share=0.5) == 3 * 1024**2 * 32**2 / 2048
    assert io.lower_bound(1024, 32, 2048, Lk=2048) == 2 * io.lower_bound(1024, 32, 2048)
    assert io.distance(2.0**20, 1024, 32, 1024) == 1.0


def test_standard_without_a_cache_size_counts_every_operand_once() -> None:
    assert io.standard(128, 16) == 4 * 128**2 + 4 * 128 * 16 + 128
    assert io.standard(128, 16, 10**6) == io.standard(128, 16)
    assert io.standard(128, 16, Lk=64, dv=8) == 4 * 128 * 64 + (128 + 64) * (16 + 8) + 128


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: io.key_outer(64, 8, 35), r"M: expected at least 36 elements .* got 35"),
        (lambda: io.query_outer(64, 8, 10), "M: expected at least 36"),
        (lambda: io.standard(64, 8, 16), "M: expected at least 17 elements for a score"),
        (lambda: io.small_cache(64, 8, 5), "M: expected at least 6"),
        (lambda: io.key_outer(64, 8, 100, 1.5), r"share: expected a number in \[0, 1\], got 1.5"),
        (lambda: io.lower_bound(0, 8, 100), "N: expected at least 1, got 0"),
        (lambda: io.lower_bound(8, 8, 100, dv=-1), "dv: expected at least 1, got -1"),
        (lambda: io.lower_bound(8, 8, 100, share=-0.1), "share: expected"),
        (lambda: traffic(masks.full(), rows=0), "rows: expected at least 1, got 0"),
    ],
)
def test_refusals(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call()


# The eager fold. B = 2, Hq = 4, Hk = 2, D = 8, Dv = 4; float32 unless said.


def traffic(
    mask: masks.Mask,
    *,
    Lq: int = 64,
    Lk: int = 64,
    rows: int = 16,
    keys: int = 16,
    backward: bool = False,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> dict[str, float]:
    problem = Problem(2, 4, 2, Lq, Lk, 8, 4, dtype)
    form = masks.lower(mask, (), 2, 4, Lq, Lk, "cpu")
    return io.fold_traffic(problem, form, rows, keys, backward, **more)


Q, K, V, OUT, ROW = 2 * 4 * 8 * 4, 2 * 2 * 8 * 4, 2 * 2 * 4 * 4, 2 * 4 * 4 * 4, 2 * 4 * 4
"""Bytes of one position of each tensor, and of one number per row."""


def test_full_forward() -> None:
    # Four stripes of four tiles; v is looked through once; out and lse start as zeros.
    assert traffic(masks.full()) == {
        "q": 64 * Q,
        "k": 4 * 64 * K,
        "v": (1 + 4) * 64 * V,
        "out": 2 * 64 * OUT,
        "lse": 2 * 64 * ROW,
    }


def test_causal_forward() -> None:
    # 1 + 2 + 3 + 4 tiles, and the first stripe's only tile is still there for the second stripe.
    found = traffic(masks.causal())
    assert found["k"] == 9 * 16 * K
    assert found["v"] == (64 + 9 * 16) * V


def test_one_tile_moves_everything_once() -> None:
    found = traffic(masks.full(), rows=64, keys=64)
    assert found == {"q": 64 * Q, "k": 64 * K, "v": 64 * V, "out": 64 * OUT, "lse": 64 * ROW}


def test_edge_tiles_have_their_true_sizes() -> None:
    found = traffic(masks.full(), Lq=40, Lk=50)
    assert found["q"] == 40 * Q
    assert found["k"] == 3 * 50 * K


def test_full_backward() -> None:
    found = traffic(masks.full(), backward=True)
    assert found == {
        "q": 2 * 64 * Q,
        "k": (1 + 4) * 64 * K,
        "v": 4 * 64 * V,
        "out": 64 * OUT,
        "dout": 64 * OUT,
        "lse": 64 * ROW,
        "dq": 3 * 64 * Q,
        "dk": (1 + 2 * 4) * 64 * K,
        "dv": (1 + 2 * 4) * 64 * V,
    }


def test_sums_are_wider_than_inputs() -> None:
    wide, narrow = (traffic(masks.full(), backward=True, dtype=x) for x in (torch.float32, torch.bfloat16))
    assert narrow["k"] == wide["k"] / 2 and narrow["lse"] == wide["lse"]
    # The sum is read once more, and written in half its size.
    assert narrow["dk"] == wide["dk"] + 1.5 * 64 * K


def test_bias_and_dlse() -> None:
    full = traffic(masks.full(), backward=True, bias_shape=(4, 64, 64), dlse=True)
    assert full["bias"] == 4 * 64 * 64 * 4
    assert full["dbias"] == 3 * full["bias"]
    assert full["dlse"] == full["lse"]
    keys_only = traffic(masks.full(), bias_shape=(2, 1, 1, 64), bias_dtype=torch.bfloat16)
    assert keys_only["bias"] == 4 * 2 * 64 * 2
    assert traffic(masks.full(), bias_shape=(64, 1))["bias"] == 64 * 4
    one = traffic(masks.full(), backward=True, bias_shape=(1, 4, 1, 1))
    assert one["bias"] == one["dbias"] == 4 * 4


def test_tables_are_read_for_mixed_tiles_only() -> None:
    offsets = torch.tensor([0, 24, 64], dtype=torch.int32)
    # Document 1: (0, 0) is full, (0, 1), (1, 0) and (1, 1) are mixed; document 2: beside (1, 1) also (1, 2),
    # (1, 3), (2, 1) and (3, 1) are mixed, four tiles full. A row's interval is two int32, for everybody.
    found = traffic(masks.documents(offsets))
    assert found["mask"] == 7 * 16 * 2 * 4
    assert found["k"] == (2 + 4 + 3 + 3) * 16 * K
    assert "mask" not in traffic(masks.causal())
    per_batch = traffic(masks.padding(torch.tensor([40, 64])))
    assert per_batch["mask"] == 2 * 4 * 2 * 16 * 2 * 4
    bits = traffic(masks.dense(torch.rand(128, 128) < 0.5), Lq=128, Lk=128, rows=64, keys=64)
    assert bits["mask"] == 4 * (1 + 4 + 64 * 8)


def test_a_tile_is_visited_if_anybody_sees_it() -> None:
    layout = torch.zeros(4, 4, 4, dtype=torch.bool)
    layout[1, 0, 2] = layout[3, 2, 1] = layout[3, 2, 2] = True
    found = traffic(masks.block_sparse(layout, 64), Lq=256, Lk=256, rows=64, keys=64)
    assert found["q"] == 2 * 64 * Q
    # (0, 2), (2, 1), (2, 2): no tile follows itself.
    assert found["k"] == 3 * 64 * K


def test_nothing_visible_moves_no_keys() -> None:
    forward, backward = (traffic(masks.empty(), backward=b) for b in (False, True))
    assert forward["q"] == forward["k"] == 0 and forward["out"] == 2 * 64 * OUT
    assert backward["dk"] == 64 * K and backward["v"] == 0


@pytest.mark.parametrize("Lq, Lk", [(0, 64), (64, 0), (0, 0)])
def test_sizes_of_zero(Lq: int, Lk: int) -> None:
    forward = traffic(masks.full(), Lq=Lq, Lk=Lk)
    assert forward["k"] == forward["v"] == forward["q"] == 0
    assert traffic(masks.full(), Lq=Lq, Lk=Lk, backward=True)["dv"] == Lk * V


# The example.


def test_example(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("io_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(["--length", "512", "--size", "8", "--png", str(tmp_path / "io.png")])
    slopes = dict(re.findall(r"(\S+): slope +(\S+),", capsys.readouterr().out))
    assert float(slopes["key-outer"]) == pytest.approx(-1.0, abs=0.1)
    assert float(slopes["query-outer"]) == pytest.approx(-1.0, abs=0.1)
    assert float(slopes["standard"]) > -0.5
    assert (tmp_path / "io.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        example.main(["--length", "64", "--size", "8"])
    assert "expected N >= 32 d" in capsys.readouterr().err


@pytest.mark.parametrize("function", [io.key_outer, io.query_outer, io.lower_bound])
@pytest.mark.parametrize("sizes", [(0, 8, 4096), (-5, 8, 4096), (64, 0, 4096), (64, 8, 0)])
def test_sizes_below_one_are_refused(function: Any, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ArgumentError, match="expected at least 1, got"):
        function(*sizes)


def test_under_a_mask_only_what_must_be_visible_is_read() -> None:
    # One visible key of 64, for everybody: all of q and out, a 64th of k and v.
    assert io.lower_bound(64, 8, 10**6, share=1 / 64) == 64 * 8 / 64 + 64 * 8 + 64 * 16 / 64
