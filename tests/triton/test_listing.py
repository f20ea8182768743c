"""The lists that kernels make from tables are those that PyTorch makes from states of tiles; and the kernels
compile for GPUs that are not here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilefold.masks import lower
from tilefold.masks.cols import Cols
from tilefold.masks.rows import Rows
from tilefold.testing import inputs
from tilefold.testing.bounds import Accesses, memory_checked
from tilefold.testing.cases import MASKS

triton = pytest.importorskip("triton", reason="Triton is not installed")

from tilefold.backends.triton import listing  # noqa: E402
from tilefold.backends.triton.ahead import compiled  # noqa: E402
from tilefold.backends.triton.lists import PARTIAL, Lists, _listed  # noqa: E402

KINDS: dict[str, type[Rows] | type[Cols]] = {"rows": Rows, "cols": Cols}
SIZES = (16, 32, 48, 64)
few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def accesses(request: pytest.FixtureRequest) -> Iterator[Accesses | None]:
    """Every kernel that is interpreted here stays inside its tensors."""
    if request.node.get_closest_marker("interpreter") is None:
        yield None
    else:
        with memory_checked() as seen:
            yield seen


def by_sorting(form: Rows | Cols, Lq: int, Lk: int, rows: int, keys: int, by_key: bool) -> Lists:
    states = form.tile_states(Lq, Lk, rows, keys, "cpu").flatten(0, 1)
    states = (states.transpose(1, 2) if by_key else states).contiguous()
    length, side = (Lq, rows) if by_key else (Lk, keys)
    if length % side:
        states[..., -1:].clamp_(max=PARTIAL)
    return _listed(states)


def check(form: Rows | Cols, Lq: int, Lk: int, rows: int, keys: int) -> None:
    """Lists either way are those of `by_sorting`, as far as they are read."""
    for by_key in (False, True):
        expected = by_sorting(form, Lq, Lk, rows, keys, by_key)
        tiles, counts, order = listing.listed(form, Lq, Lk, rows, keys, by_key)
        assert {x.dtype for x in (tiles, counts, order)} == {torch.int32}
        assert tiles.shape == expected.tiles.shape
        assert torch.equal(counts, expected.counts)
        assert torch.equal(order, expected.order)
        read = torch.arange(expected.capacity) < counts.sum(-1, keepdim=True)
        assert torch.equal(tiles[read], expected.tiles[read])


def table(shape: tuple[int, int, int], count: int, length: int, way: str, seed: int) -> Tensor:
    """Bounds of a table, int32 `[*shape, 2 * count]`.

    Args:
        way: "any" draws each line by itself; "slow" has bounds that grow along the table, as documents have;
            "blocks" has runs of equal lines at multiples of 16, so that many tiles are full or empty.
    """
    draw = inputs.generator(seed)
    ends = torch.randint(0, length + 1, (*shape, 2 * count), generator=draw)
    if way == "slow":
        ends = ends.sort(dim=2).values
    if way == "blocks":
        ends = (ends // 16 * 16)[:, :, torch.arange(shape[2]) // 40 * 40]
    ends = ends.sort(dim=-1).values
    # Unused intervals are (0, 0), in either place.
    unused = torch.rand((*shape, count), generator=draw) < 0.15
    unused |= ends[..., 0::2] == ends[..., 1::2]
    return torch.where(unused.repeat_interleave(2, -1), 0, ends).to(torch.int32)


# -- interpreted ---------------------------------------------------------------------------------------------


@pytest.mark.interpreter
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@few
@given(
    lengths=st.tuples(st.integers(1, 160), st.integers(1, 160)),
    sides=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    tables=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    way=st.sampled_from(["any", "slow", "blocks"]),
    seed=st.integers(0, 99),
)
def test_lists_are_those_of_the_states(
    kind: str,
    count: int,
    lengths: tuple[int, int],
    sides: tuple[int, int],
    tables: tuple[int, int],
    way: str,
    seed: int,
) -> None:
    lines, length = lengths if kind == "rows" else lengths[::-1]
    check(KINDS[kind](table((*tables, lines), count, length, way, seed)), *lengths, *sides)


_REAL = ("documents_causal", "documents_window", "padding_left", "sinks_and_window", "global_tokens")
_REAL_COLS = ("columns1", "columns2", "columns4", "columns_upper")


@pytest.mark.interpreter
@pytest.mark.parametrize("Lq, Lk", [(200, 150), (128, 256), (1, 130), (130, 1)])
@pytest.mark.parametrize("name", [*_REAL, *_REAL_COLS])
def test_lists_of_masks(name: str, Lq: int, Lk: int) -> None:
    B, H = 2, 2
    mask = MASKS[name](B, H, Lq, Lk, inputs.generator(5))
    assert mask is not None
    form = lower(*mask.spec(), B, H, Lq, Lk, torch.device("cpu"))
    if isinstance(form, (Rows, Cols)):
        check(form, Lq, Lk, 32, 64)
    else:
        # Where there is one row or key only, some have another form.
        assert min(Lq, Lk) == 1


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("Lq, Lk, rows, keys", [(300, 6, 1, 3), (5, 290, 4, 1), (520, 40, 260, 33)])
def test_more_than_one_step_takes(kind: str, Lq: int, Lk: int, rows: int, keys: int) -> None:
    """More tiles, lines and lines of a tile than a program looks at in one step."""
    assert max(Lq // rows, Lk // keys, rows) > listing.CHUNK.value
    lines, length = (Lq, Lk) if kind == "rows" else (Lk, Lq)
    check(KINDS[kind](table((1, 1, lines), 2, length, "slow", 3)), Lq, Lk, rows, keys)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("Lq, Lk", [(64, 96), (50, 70)])
def test_nothing_and_everything(kind: str, Lq: int, Lk: int) -> None:
    """Lines of all empty and of all full tiles, whose order is that in which they stand."""
    lines, length = (Lq, Lk) if kind == "rows" else (Lk, Lq)
    bounds = torch.zeros((2, 1, lines, 2), dtype=torch.int32)
    bounds[1, ..., 1] = length
    form = KINDS[kind](bounds)
    check(form, Lq, Lk, 16, 32)
    order = listing.listed(form, Lq, Lk, 16, 32, False)[2]
    assert order.tolist() == [list(range(-(-Lq // 16)))] * 2


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("Lq, Lk", [(0, 40), (40, 0), (0, 0)])
def test_no_rows_or_no_keys(kind: str, Lq: int, Lk: int) -> None:
    lines = Lq if kind == "rows" else Lk
    check(KINDS[kind](torch.zeros((2, 1, lines, 4), dtype=torch.int32)), Lq, Lk, 16, 16)


@pytest.mark.interpreter
def test_a_table_may_be_expanded() -> None:
    bounds = table((1, 1, 70), 2, 90, "slow", 1).expand(2, 3, -1, -1)
    check(Rows(bounds), 70, 90, 32, 16)


# -- compiled ahead of time ----------------------------------------------------------------------------------


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter stands in for it")
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "gfx942"])
def test_the_kernels_compile(arch: str) -> None:
    made = [launch for kind in KINDS for count in (1, 2) for launch in listing._launches(kind, count)]
    for launch in (*made, listing._order):
        binary = compiled(launch.kernel, launch.variant, "i32", launch.warps, arch)
        assert binary.asm["hsaco" if arch.startswith("gfx") else "cubin"]
