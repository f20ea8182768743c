"""The two-level machine, and the schedules of the literature on it: values, capacity, counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilefold import masks, reference
from tilefold.cost import io, schedules
from tilefold.cost.machine import Machine
from tilefold.errors import ArgumentError, CapacityError, ShapeError

SCHEDULES = ("standard", "key_outer", "query_outer", "small_cache")
SIZES = [(1, 1, 1, 1), (7, 5, 3, 3), (64, 64, 8, 8), (100, 61, 16, 5), (33, 130, 4, 24)]


def draw(N: int, Lk: int, d: int, dv: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in ((N, d), (Lk, d), (Lk, dv))]


def expected(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    mask = None if visible is None else masks.dense(visible)
    out, lse = reference.attention(q[None, None], k[None, None], v[None, None], mask=mask)
    return out[0, 0], lse[0, 0]


def capacities(N: int, Lk: int, d: int, dv: int) -> list[int]:
    """From just enough for every schedule to enough for everything at once."""
    least = max(2 * (d + dv) + 4, 2 * max(d, dv) + 1, 6)
    return [least, least + 1, 2 * least + 3, 8 * least, 4 * (N + Lk) * (d + dv) + N * Lk]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_values_capacity_and_counts(name: str, sizes: tuple[int, int, int, int]) -> None:
    N, Lk, d, dv = sizes
    q, k, v = draw(*sizes)
    out, lse = expected(q, k, v)
    for capacity in capacities(*sizes):
        machine = Machine(capacity)
        found, found_lse = getattr(schedules, name)(machine, q, k, v)
        torch.testing.assert_close(found, out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_lse, lse, rtol=1e-12, atol=1e-12)
        assert machine.resident == 0 and 0 < machine.peak <= capacity
        assert machine.moved == getattr(io, name)(N, d, capacity, Lk=Lk, dv=dv)


@pytest.mark.parametrize("name", SCHEDULES)
def test_float32(name: str) -> None:
    q, k, v = draw(50, 40, 8, 8, torch.float32)
    out, lse = getattr(schedules, name)(Machine(400), q, k, v)
    wanted, wanted_lse = expected(q.double(), k.double(), v.double())
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_element_less_than_planned_overflows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles fill the memory, so the machine's own check, and not only the plan's, stands between."""
    N, d, M = 64, 8, 512
    q, k, v = draw(N, N, d, d)
    machine = Machine(M)
    getattr(schedules, name)(machine, q, k, v)
    short = Machine(machine.peak - 1)
    for function in ("standard_tiles", "key_outer_tiles", "query_outer_tiles"):
        tiles = getattr(io, function)(N, d, M)
        monkeypatch.setattr(io, function, lambda *_, tiles=tiles, **__: tiles)
    side = io.small_cache_side(M)
    monkeypatch.setattr(io, "small_cache_side", lambda _: side)
    with pytest.raises(CapacityError, match=rf"fast memory of {machine.peak - 1}, got"):
        getattr(schedules, name)(short, q, k, v)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_memory_without_room_for_a_tile_is_refused(name: str) -> None:
    q, k, v = draw(16, 16, 8, 8)
    with pytest.raises(ArgumentError, match=r"M: expected at least \d+ elements"):
        getattr(schedules, name)(Machine(5), q, k, v)


@pytest.mark.parametrize("M", [4 * 16**2, 8 * 16**2, 2048])
def test_key_outer_moves_what_the_paper_says(M: int) -> None:
    N, d = 512, 16
    machine = Machine(M)
    schedules.key_outer(machine, *draw(N, N, d, d, torch.float32))
    assert machine.moved == pytest.approx(12 * N**2 * d**2 / M + 2 * N * d, rel=0.15)


def test_every_tensor_is_counted_by_name() -> None:
    N, Lk, d, dv = 64, 48, 8, 4
    machine = Machine(200)
    schedules.query_outer(machine, *draw(N, Lk, d, dv))
    stripes = -(-N // io.query_outer_tiles(N, d, 200, Lk=Lk, dv=dv)[0])
    assert dict(machine.loaded) == {"q": N * d, "k": stripes * Lk * d, "v": stripes * Lk * dv}
    assert dict(machine.stored) == {"out": N * dv, "l": N}


# Block-sparse.


@pytest.mark.parametrize("name", ["key_outer", "query_outer"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_block_sparse_values(name: str, share: float) -> None:
    N, Lk, d, dv, M = 90, 70, 8, 6, 400
    q, k, v = draw(N, Lk, d, dv)
    rows, keys = getattr(io, f"{name}_tiles")(N, d, M, Lk=Lk, dv=dv)
    layout = torch.rand(-(-N // rows), -(-Lk // keys)) < share
    dense = layout.repeat_interleave(rows, 0)[:N].repeat_interleave(keys, 1)[:, :Lk]
    found = getattr(schedules, name)(Machine(M), q, k, v, layout)
    for got, want in zip(found, expected(q, k, v, dense), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def cross(shape: tuple[int, int], share: float) -> Tensor:
    """A random layout in which every line of tiles sees something."""
    layout = torch.rand(shape) < share
    layout[0], layout[:, 0] = True, True
    return layout


@pytest.mark.parametrize("name, outer, inner", [("key_outer", "k", "q"), ("query_outer", "q", "k")])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_block_sparse_loads_are_proportional_to_the_visible_tiles(
    name: str, outer: str, inner: str, share: float
) -> None:
    d, M = 8, 516
    rows, keys = getattr(io, f"{name}_tiles")(10**6, d, M)
    N = 2 * rows * keys
    layout = cross((N // rows, N // keys), share)
    machine = Machine(M)
    getattr(schedules, name)(machine, *draw(N, N, d, d, torch.float32), layout)
    side = rows if inner == "q" else keys
    assert machine.loaded[inner] == int(layout.sum()) * side * d
    assert machine.loaded[outer] == N * d
    assert machine.moved == pytest.approx(
        getattr(io, name)(N, d, M, float(layout.double().mean())), rel=1e-12
    )


def test_a_wrong_layout_is_refused() -> None:
    q, k, v = draw(64, 64, 8, 8)
    for wrong in (torch.ones(3, 2, dtype=torch.bool), torch.ones(8, 8)):
        with pytest.raises(ShapeError, match="visible: expected bool"):
            schedules.key_outer(Machine(300), q, k, v, wrong)


@pytest.mark.parametrize("shapes", [((4, 2), (4, 3), (4, 3)), ((4, 2), (5, 2), (4, 2)), ((1, 4, 2),) * 3])
def test_wrong_shapes_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ShapeError, match="q, k, v: expected shapes"):
        schedules.standard(Machine(100), *(torch.zeros(shape) for shape in shapes))


def test_empty_sizes_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least 1"):
        schedules.standard(Machine(100), torch.zeros(0, 2), torch.zeros(3, 2), torch.zeros(3, 2))


# The machine by itself.


def test_load_compute_store_evict() -> None:
    slow, result = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
    machine = Machine(10)
    block = machine.load("x", slow)
    total = machine.allocate("total", 3, like=slow, fill=1.0)
    total.add_(block.sum(0))
    machine.store("total", result[1])
    assert machine.resident == machine.peak == 9
    assert result.tolist() == [[0, 0, 0], [4, 6, 8]]
    machine.evict("x", "total")
    assert machine.resident == 0 and machine.peak == 9
    assert machine.loaded == {"x": 6} and machine.stored == {"total": 3} and machine.moved == 9


def test_fast_memory_is_a_copy() -> None:
    slow = torch.ones(3)
    machine = Machine(3)
    machine.load("x", slow).zero_()
    assert slow.tolist() == [1, 1, 1]
    machine.store("x", slow)
    assert slow.tolist() == [0, 0, 0]


def test_overflow_names_what_is_resident() -> None:
    machine = Machine(10)
    machine.load("x", torch.zeros(2, 4))
    with pytest.raises(
        CapacityError, match=r"block 'y': expected at most 2 elements.*of 10, got 3; resident: x \[2, 4\]"
    ):
        machine.load("y", torch.zeros(3))
    with pytest.raises(CapacityError):
        machine.allocate("y", 3, 1, like=torch.zeros(1))
    assert machine.resident == 8 and machine.moved == 8
    assert issubclass(CapacityError, ValueError)


def test_misuse_of_blocks_is_refused() -> None:
    machine = Machine(10)
    machine.load("x", torch.zeros(4))
    with pytest.raises(ArgumentError, match="evict it first"):
        machine.load("x", torch.zeros(4))
    with pytest.raises(ArgumentError, match=r"resident blocks x \[4\], got 'y'"):
        machine.evict("y")
    with pytest.raises(ArgumentError, match="expected one of the resident blocks"):
        machine.store("y", torch.zeros(4))
    with pytest.raises(ArgumentError, match="expected the shape of the block 'x'"):
        machine.store("x", torch.zeros(2, 2))
    with pytest.raises(ArgumentError, match="capacity: expected at least 1"):
        Machine(0)
