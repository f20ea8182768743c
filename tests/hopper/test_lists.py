"""What the Hopper kernel is told of lists of tiles, and what its warp groups make of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold import masks

pytest.importorskip("triton", reason="Triton is not installed")
from tilefold.backends.hopper import launch, lines
from tilefold.backends.hopper.variant import BITS, HIDDEN, LINES, MIXED, ROWS, Variant
from tilefold.backends.triton.lists import Lists, _listed, lists_of

from . import emulator
from .calls import agree, draw, resize, work_of

pytestmark = pytest.mark.usefixtures("emulated")

NEVER = torch.iinfo(torch.int32).min


def variant(groups: int, mask: int = ROWS) -> Variant:
    return Variant(
        D=64, DV=64, BN=64, STAGES=4, GROUPS=groups, REGISTERS=160, MASK=mask, MASKED=True, FIXED=True
    )


def joined(states: Tensor, groups: int) -> Tensor:
    """States of lines of tiles from those of 64 rows, int8 `[tables, lines, tiles]`."""
    tables, rows, tiles = states.shape
    count = -(-rows // groups)
    found = torch.empty(tables, count, tiles, dtype=torch.int8)
    for n in range(count):
        own = states[:, n * groups : (n + 1) * groups]
        found[:, n] = torch.where((own == 2).all(1), 2, torch.where((own == 0).all(1), 0, 1))
    return found


def listed(states: Tensor, groups: int, index: Tensor | None = None, mask: int = ROWS) -> lines.Listed:
    found = _listed(joined(states, groups))
    tiles = found.tiles.clone()
    # What lies behind a list's tiles is nobody's.
    tiles[torch.arange(tiles.shape[-1]) >= found.counts.sum(-1, keepdim=True)] = NEVER
    return lines.of_lists(Lists(tiles, found.counts, found.order), states, index, variant(groups, mask))


def drawn(seed: int, tables: int = 2, rows: int = 7, tiles: int = 23) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(tables, rows, 1, generator=generator)
    states = (torch.rand(tables, rows, tiles, generator=generator) < share).to(torch.int8)
    return states * (1 + (torch.rand(tables, rows, tiles, generator=generator) < 0.6).to(torch.int8))


def order_of(found: lines.Listed, table: int, line: int) -> list[int]:
    """The words for the tiles of a line."""
    count = int(found.lines.counts[table, line])
    entries = found.tiles[table, line, :count]
    return (entries[:, 0] if entries.dim() == 2 else entries).tolist()


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_every_warp_group_is_told_what_its_rows_see(seed: int, groups: int) -> None:
    states = drawn(seed)
    found = listed(states, groups)
    for table in range(2):
        for line in range(-(-7 // groups)):
            words = order_of(found, table, line)
            tiles = [word & ((1 << HIDDEN) - 1) for word in words]
            own = states[table, line * groups : (line + 1) * groups]
            assert sorted(tiles) == own.amax(0).nonzero().flatten().tolist()
            # Without a warp group whose rows lie behind the last one, a tile may be whole.
            full = [t for t in tiles if (own[:, t] == 2).all()]
            assert tiles[: len(full)] == full
            for w in range(groups):
                told = found.lines.words[table, line, w].tolist()
                seen = own[w, tiles] if w < len(own) else torch.zeros(len(tiles))
                assert [bool(word >> (HIDDEN + w) & 1) for word in words] == (seen == 0).tolist()
                assert [bool(word >> (MIXED + w) & 1) for word in words] == (seen < 2).tolist()
                last = int((torch.arange(1, len(tiles) + 1) * (seen > 0)).amax()) if tiles else 0
                assert told[3:] == [0, last, last, last, len(tiles) - last]


def test_tiles_of_single_warp_groups_alternate_behind_those_of_both() -> None:
    # Tile by tile: both all of it, one or the other, both some of it, nobody.
    first = [2, 0, 1, 2, 0, 1, 0, 2, 0, 2]
    second = [2, 2, 0, 1, 1, 1, 0, 0, 2, 0]
    found = listed(torch.tensor([[first, second]], dtype=torch.int8), 2)
    # The whole one; of those that both see first the one that somebody sees all of; then those of one or the
    # other in turn, first all whole ones.
    assert [word & 0xFFFFFF for word in order_of(found, 0, 0)] == [0, 3, 5, 1, 7, 8, 9, 2, 4]


def test_whole_tiles_of_one_alternate_with_mixed_ones_of_another() -> None:
    found = listed(torch.tensor([[[2] * 10 + [0] * 10, [0] * 10 + [1] * 10]], dtype=torch.int8), 2)
    assert [word & 0xFFFFFF for word in order_of(found, 0, 0)] == [n + w for n in range(10) for w in (0, 10)]


def test_pairs_of_three_warp_groups_alternate_before_single_ones() -> None:
    rows = [[2] * 8 + [0] * 2, [2] * 4 + [0] * 4 + [2] * 2, [0] * 4 + [1] * 4 + [0] * 2]
    found = listed(torch.tensor([rows], dtype=torch.int8), 3)
    assert [word & 0xFFFFFF for word in order_of(found, 0, 0)] == [0, 4, 1, 5, 2, 6, 3, 7, 8, 9]


def test_calls_of_one_mask_share_what_is_made_of_its_lists() -> None:
    x, mask = draw((300, 300)), masks.random_blocks(0.3, block=64)
    form = work_of(x, mask).form
    device = torch.device("cpu")
    made = []
    for groups in (2, 2, 3):
        C = variant(groups, BITS)
        made.append(launch._listed(form, work_of(x).problem, C, device)[1])
    assert made[0] is made[1] and made[0].tiles.shape[1] == 3 and made[2].tiles.shape[1] == 2


def test_all_that_a_mask_keeps_is_made_before_others_are_let_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wait for the last place at which something was made."""
    x, said = draw((300, 300)), []
    origin, states = launch.Origin, launch._states
    monkeypatch.setattr(launch, "Origin", lambda device: said.append("origin") or origin(device))
    monkeypatch.setattr(launch, "_states", lambda *rest: said.append("states") or states(*rest))
    problem = work_of(x).problem
    for mask in (masks.random_blocks(0.31, block=64), masks.documents(torch.tensor([0, 99, 300]).int())):
        form = work_of(x, mask).form
        launch._listed(form, problem, variant(2, BITS), torch.device("cpu"))
        assert said == ["states", "origin"] and len(launch._origins[form]) == 1
        said.clear()


def test_bits_come_with_their_codes() -> None:
    states = drawn(3)
    index = torch.where(states == 1, torch.arange(states.numel()).view(states.shape), -states.int()).int()
    found = listed(states, 2, index[:, None], BITS)
    assert found.tiles.shape == (2, 4, 23, 4) and found.tiles.is_contiguous()
    for line in range(4):
        for n, word in enumerate(order_of(found, 1, line)):
            for w in range(min(2, 7 - 2 * line)):
                code = index[1, 2 * line + w, word & 0xFFFFFF]
                assert int(found.tiles[1, line, n, 1 + w]) == int(code)


def test_lines_cost_what_their_busiest_warp_groups_take() -> None:
    def cost(*rows: list[int], mask: int = ROWS) -> int:
        return int(listed(torch.tensor([rows], dtype=torch.int8), 2, mask=mask).costs[0, 0])

    whole, none = [2] * 16, [0] * 16
    assert cost(whole, whole) == 16 * 64
    # Alone, a warp group is faster, but not twice as fast.
    assert 16 * 64 // 2 < cost(whole, none) < 16 * 64
    # Masks take time, and so does a softmax without a fixed reference.
    assert cost(whole, whole) < cost([2] * 8 + [1] * 8, whole) < cost([1] * 16, whole)
    # What bits pass over costs nothing, what tables hide does.
    gap = [2, 0, 0, 0] * 4
    assert cost(gap, gap[::-1], mask=BITS) < cost(gap, gap[::-1])


@pytest.mark.parametrize("groups", [2, 3])
def test_real_masks_agree_with_their_states(groups: int) -> None:
    cuts = torch.tensor([0, 90, 131, 300, 700, 1000], dtype=torch.int32)
    for mask in (
        masks.documents(cuts, within=masks.causal()),
        masks.columns((torch.arange(1000) + 60).int().view(1, 1, 1000, 1), causal=True),
        masks.causal() & masks.random_blocks(0.4, block=16),
    ):
        form: Any = masks.lower(mask, (), 1, 1, 1000, 1000, "cpu")
        states = launch._states(form, work_of(draw((1000, 1000))).problem, 64, torch.device("cpu"))
        # The last tile is over the edge, and needs a mask whatever it shows.
        assert int(states[..., -1].max()) == 1
        found = lines.of_lists(
            lists_of(form, 1000, 1000, LINES * groups, 64, by_key=False), states, None, variant(groups)
        )
        for line in range(found.lines.first.shape[1]):
            for word in order_of(found, 0, line):
                for w in range(min(groups, 16 - line * groups)):
                    state = int(states[0, line * groups + w, word & 0xFFFFFF])
                    assert (word >> (HIDDEN + w) & 1, word >> (MIXED + w) & 1) == (state == 0, state < 2)


# In the kernel.

SIZES: dict[str, dict[str, Any]] = {
    "three stages": {"STAGES": 3, "EARLY": False},
    "four stages": {"STAGES": 4},
    "many stages": {"STAGES": 8, "EARLY": True},
    "two barriers": {"STAGES": 5, "JOINED": False},
    "two stages": {"STAGES": 2, "JOINED": False, "EARLY": False},
    "three groups": {"GROUPS": 3, "STAGES": 4, "HELD": False},
}


def some_see_none() -> masks.Mask:
    """Of every three times 64 rows, the first two see some of 20 tiles, and the third some of 10 others."""
    shown = torch.zeros(1920, 1920, dtype=torch.bool)
    for start in range(0, 1920, 192):
        shown[start : start + 128, :1280] = shown[start + 128 : start + 192, 1280:] = True
    return masks.dense(shown & half(1920, 1920))


def half(*shape: int) -> Tensor:
    """What no intervals say."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5


SPARSE = {
    "some see none": some_see_none(),
    # A line with 30 tiles, of which the second warp group sees hardly any.
    "global rows": masks.bigbird(window=1, global_blocks=1, random=0, block=64),
    "bigbird": masks.bigbird(window=3, global_blocks=1, random=3, block=64),
    "random": masks.random_blocks(0.2, block=64),
    "small blocks": masks.random_blocks(0.1, block=16),
    # No tile that both warp groups see all of, and rows of one that see the first tile.
    "own halves": masks.documents(torch.tensor([0, 64, 192, 512, 1000, 1920], dtype=torch.int32)),
}


@pytest.mark.parametrize("mask", SPARSE)
@pytest.mark.parametrize("change", SIZES)
def test_warp_groups_pass_over_what_they_do_not_see(
    change: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resize(monkeypatch, SIZES[change])
    assert mask == "own halves" or work_of(draw((1920, 1920)), SPARSE[mask]).form.kind == "bits"
    agree(draw((1920, 1920), heads=(1, 1)), SPARSE[mask])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The warp group of each step of the kernel's loops from now on, and whether its softmax is online."""
    emulator.modules()
    kernel, found = emulator.part("attend"), []
    plain = kernel.step

    def noted(w: int, *rest: Any) -> Any:
        found.append((w, bool(rest[-1])))
        return plain(w, *rest)

    monkeypatch.setattr(kernel, "step", noted)
    return found


def test_rows_end_with_their_last_tile(steps: list[tuple[int, bool]]) -> None:
    """Of one line, the first warp group sees all tiles, the second one two of them."""
    shown = torch.ones(128, 1920, dtype=torch.bool)
    shown[64:, 128:] = False
    agree(draw((128, 1920), heads=(1, 1)), masks.dense(shown))
    # Each takes its first tile ahead of all steps.
    assert sorted(steps) == [(0, False)] * 29 + [(1, False)]


@pytest.mark.parametrize("stages, more", [(5, 0), (3, 9)])
def test_tiles_of_bits_that_others_see_cost_no_step(
    stages: int, more: int, steps: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warp groups see a tile together and ten others each, which come in turn. With three stages, none may be
    passed over.
    """
    resize(monkeypatch, {"STAGES": stages, "EARLY": False, "GROUPS": 2})
    shown = torch.zeros(128, 1344, dtype=torch.bool)
    shown[:64, 64:704] = shown[64:, 704:] = half(64, 640)
    shown[:, :64] = True
    x, mask = draw((128, 1344), heads=(1, 1)), masks.dense(shown)
    assert work_of(x, mask).form.kind == "bits"
    agree(x, mask)
    # The last tile is the second warp group's, and the first one's ends before it.
    assert sorted(steps) == [(0, False)] * (10 + more) + [(1, False)] * (10 + more + (more > 0))


def test_a_softmax_is_online_where_the_own_first_tile_is_mixed(steps: list[tuple[int, bool]]) -> None:
    # Two documents, whose border is in the second warp group's rows.
    cuts = torch.tensor([0, 100, 128], dtype=torch.int32)
    agree(draw((128, 128), heads=(1, 1)), masks.documents(cuts))
    assert sorted(steps) == [(0, False), (1, True)]
