"""Pictures of masks and explanations: the numbers are those of the dense mask, and nothing is cut off."""

from __future__ import annotations

import io
import re
from collections import Counter
from pathlib import Path

import matplotlib.image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.segment import Segment

from tilefold import masks
from tilefold.bench.timing import peak_memory
from tilefold.cost.estimate import Estimate
from tilefold.cost.units import flops, percent, seconds, size
from tilefold.errors import ArgumentError, MaskError, TilefoldError
from tilefold.pictures import grid, png
from tilefold.pictures.explanation import picture
from tilefold.pictures.grid import EMPTY, FULL, PARTIAL, Size, survey
from tilefold.pictures.mask import MaskPicture, pixel
from tilefold.pictures.palette import NOTHING, RAMP, STATES, code, ramp
from tilefold.planning.explanation import Explanation, TileCount
from tilefold.planning.plan import Plan
from tilefold.testing import inputs
from tilefold.testing.cases import MASKS

CAUSAL = survey(masks.causal(), Size(512, 512), 64, "causal()")


def segments(drawn: RenderableType, width: int) -> list[Segment]:
    """What a console with all colours prints."""
    console = Console(width=width, color_system="truecolor", force_terminal=True, file=io.StringIO())
    return list(console.render(drawn))


def lines(drawn: RenderableType, width: int, colours: bool = False) -> list[str]:
    """What a console prints, without its control codes."""
    if colours:
        return "".join(segment.text for segment in segments(drawn, width)).splitlines()
    file = io.StringIO()
    Console(width=width, color_system=None, file=file, highlight=False).print(drawn)
    return file.getvalue().splitlines()


def framed(text: list[str]) -> list[str]:
    """The lines of the left picture."""
    return [line.split("│")[1] for line in text if line.startswith("│")]


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_counts_are_those_of_the_dense_mask(name: str) -> None:
    B, H, Lq, Lk, b, h, tile = 2, 4, 130, 61, 1, 2, 16
    mask = MASKS[name](B, H, Lq, Lk, inputs.generator(5))
    assert mask is not None
    dense = mask.materialize(B, H, Lq, Lk)[b, h]
    found = survey(mask, Size(Lq, Lk, B, H, b, h), tile)
    assert found.visible == int(dense.sum())
    assert found.empty_rows == int((~dense.any(1)).sum())
    for q_step, k_step in ((tile, tile), (7, 61), (200, 1)):
        cells = found.cells(q_step, k_step)
        blocks = [list(row.split(k_step, 1)) for row in dense.split(q_step, 0)]
        assert cells.seen.tolist() == [[int(part.sum()) for part in row] for row in blocks]
        assert cells.size.tolist() == [[part.numel() for part in row] for row in blocks]
    states = [[int(x.any()) + int(x.all()) for x in row.split(tile, 1)] for row in dense.split(tile, 0)]
    assert found.tiles.states.tolist() == states
    counts = Counter(state for row in states for state in row)
    assert found.counts == {
        "total": 9 * 4,
        "visited": counts[PARTIAL] + counts[FULL],
        "full": counts[FULL],
        "partial": counts[PARTIAL],
        "empty": counts[EMPTY],
    }


def test_the_part_that_is_shown_is_the_one_asked_for() -> None:
    mask = masks.padding(torch.tensor([5, 9])) & masks.causal()
    assert [survey(mask, Size(10, 10, 2, 1, b), 4).visible for b in (0, 1)] == [15 + 5 * 5, 45 + 9]
    for wrong, name in ((Size(10, 10, 2, 1, 2), "b"), (Size(10, 10, 2, 3, 0, 3), "h")):
        with pytest.raises(ArgumentError, match=f"{name}: expected an index in"):
            survey(mask, wrong, 4)
    with pytest.raises(MaskError, match="padding"):
        survey(mask, Size(10, 10), 4)


def test_long_masks_are_counted_in_stripes() -> None:
    N = 2**16
    found: list[grid.Survey] = []
    _, held = peak_memory(lambda: found.append(survey(masks.causal(), Size(N, N), 1024)))
    assert found[0].visible == N * (N + 1) // 2
    assert held < N * N // 64


def test_too_many_tiles_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match="tile: expected one that makes at most 4,194,304 tiles, got 16,7"
    ):
        survey(masks.causal(), Size(4096, 4096), 1)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 200), st.sampled_from((1, 7, 37, 64, 100)))
def test_pixels_fit_and_tile_edges_fall_on_pixel_edges(Lq: int, Lk: int, tile: int, width: int) -> None:
    blank = torch.zeros(1, 1, dtype=torch.int64)
    cells = grid.Cells(tile, tile, blank, blank)
    found = grid.Survey("", Size(Lq, Lk), masks.Band(None, None), 0, cells, 0)
    for step, length in zip(pixel(found, width), (Lq, Lk), strict=True):
        assert -(-length // step) <= min(width, 64)
        assert step % tile == 0 or tile % step == 0


@pytest.mark.parametrize("width", [80, 120, 60, 40])
@pytest.mark.parametrize("colours", [False, True])
def test_a_mask_fits_its_console(width: int, colours: bool) -> None:
    shown = [
        CAUSAL,
        survey(masks.padding(torch.tensor([3])), Size(4, 5), 2),
        survey(masks.strided(3) & masks.causal(), Size(1, 4096), 100),
        survey(masks.bigbird(block=16), Size(3000, 700), 16, "bigbird(block=16)" + " & full()" * 30),
    ]
    for found in shown:
        text = lines(MaskPicture(found), width, colours)
        assert max(map(len, text)) <= width
        assert any(line.startswith("╭─ visible share ") for line in text)
        assert any("states of tiles" in line for line in text)


def test_without_colours_a_mask_is_drawn_in_characters() -> None:
    text = lines(MaskPicture(survey(masks.causal(), Size(64, 64), 8)), 80)
    # A character is 4 x 2 elements: shares are 0, 1, and by thirds what the diagonal leaves between them.
    rows = framed(text)
    assert len(rows) == 16
    assert rows[1].rstrip() == "██▓▒" + "·" * 28
    right = [line.split("│")[3].rstrip() for line in text if line.startswith("│")]
    assert right[0] == "▒▒▒▒" + "·" * 28
    assert right[-1] == "█" * 28 + "▒▒▒▒"
    assert text[-1] == "Queries run down and keys to the right; 4 x 2 elements are one character."


def test_small_masks_are_enlarged() -> None:
    rows = framed(lines(MaskPicture(survey(masks.causal(), Size(2, 2), 1)), 80))
    # A character is twice as high as wide.
    assert [row.rstrip() for row in rows] == ["████····"] * 2 + ["████████"] * 2


def test_with_colours_a_character_is_two_pixels() -> None:
    drawn = segments(MaskPicture(CAUSAL), 80)
    pixels: Counter[str] = Counter()
    for segment in drawn:
        if segment.text.startswith("▀") and segment.style is not None:
            for colour in (segment.style.color, segment.style.bgcolor):
                assert colour is not None
                pixels[colour.name] += len(segment.text)
    # 32 x 32 pixels of 16 x 16 elements; 8 x 8 tiles of 4 x 4 pixels, every other one a little darker.
    assert pixels[code(RAMP[-1])] == 31 * 32 // 2
    assert pixels[code(ramp(0.5 + 1 / 32))] == 32
    assert pixels[code(STATES[PARTIAL])] == 8 * 16
    assert pixels[code(STATES[FULL])] == 12 * 16
    assert pixels[code(NOTHING)] == 31 * 32 // 2 + 12 * 16
    assert pixels.total() == 2 * 32 * 32


def test_any_share_above_nothing_differs_from_nothing() -> None:
    assert ramp(0.0) == NOTHING
    assert ramp(1e-9) == RAMP[0] != NOTHING
    assert ramp(1.0) == RAMP[-1]
    assert len({ramp(at / 10) for at in range(11)}) == 11


def near(image: torch.Tensor, colour: tuple[int, int, int]) -> torch.Tensor:
    """Which pixels of `[height, width, 4]` in [0, 1] have this colour."""
    return ((image[..., :3] * 255 - torch.tensor(colour)).abs() < 2).all(-1)


def test_the_file_shows_elements_and_tiles(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    png.save(CAUSAL, path)
    image = torch.from_numpy(matplotlib.image.imread(path).copy())
    assert image.shape[0] > 600
    left, right = image.chunk(2, dim=1)
    full, partial = (near(right, STATES[state]) for state in (FULL, PARTIAL))
    assert int(full.sum()) / int(partial.sum()) == pytest.approx(28 / 8, rel=0.1)
    # In the lines of the picture, not of the legend, full tiles lie below the diagonal.
    full = full & (full.sum(1, keepdim=True) > 60)
    rows, columns = full.nonzero().unbind(1)
    assert bool(full[rows.max() - 5, columns.min() + 5])
    assert not bool(full[rows.min() + 5, columns.max() - 5])
    seen, hidden = (int(near(left, colour).sum()) for colour in (RAMP[-1], NOTHING))
    assert seen / hidden == pytest.approx(513 / 511, rel=0.1)


@pytest.mark.parametrize("size, tile", [(Size(1, 3000), 64), (Size(3000, 40), 1), (Size(2500, 1500), 100)])
def test_long_and_oblong_masks_have_a_file_too(tmp_path: Path, size: Size, tile: int) -> None:
    path = tmp_path / "mask.png"
    found = survey(masks.causal() & masks.window(9, 0), size, tile, "causal() & $window$(9, 0)")
    png.save(found, path)
    image = torch.from_numpy(matplotlib.image.imread(path).copy())
    assert bool(near(image[:, image.shape[1] // 2 :], STATES[PARTIAL]).any())


def test_a_file_needs_matplotlib_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"png: expected a file that can be written, got .*gone/mask.png"):
        png.save(CAUSAL, tmp_path / "gone" / "mask.png")
    monkeypatch.setattr(png, "find_spec", lambda name: None)
    with pytest.raises(TilefoldError, match=r"pip install 'tilefold\[plots\]'"):
        png.save(CAUSAL, tmp_path / "mask.png")
    assert list(tmp_path.iterdir()) == []


def explanation(**changes: object) -> Explanation:
    forward = Estimate(
        1.5e-3, 4.5e12, 3 * 2**30, 2**20, 2**26, "matmul", {"matmul": 1.1e-3, "memory": 2e-4},
        {"q": 2.0**21, "k": 2.0**22, "out": 2.0**20, "bias": 0.0},
    )  # fmt: skip
    backward = Estimate(
        2.5, 9e15, 2**33, 0, 5, "vector", {"matmul": 1.0, "vector": 2.5}, {"q": 2.0**30, "dq": 2.0**31}
    )
    fields = {
        "call": "q [1, 8, 4096, 64], k [1, 8, 4096, 64], v [1, 8, 4096, 64], bfloat16 on cuda, softcap, bias",
        "mask": "causal() & [bold]window(255, 0)",
        "form": "band",
        "machine": "H100",
        "plan": Plan("eager"),
        "how": "in tiles of 512 x 1024, one rectangle at a time, since nothing else runs the call as it is",
        "refusals": (("hopper", ("not part of this version", "no CUDA device")), ("triton", ("not there",))),
        "tiles": TileCount(64, 64, 4096, 300, 236, 64, 0.0712),
        "forward": forward,
        "backward": backward,
        "lse_bytes": 12,
        "bound_bytes": 1.5e9,
        "advice": ("The bias is read once per query head: " + "say it as a mask " * 6, "And more."),
    }
    return Explanation(**(fields | changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("width", [80, 60, 140])
def test_an_explanation_fits_its_console_and_says_everything(width: int) -> None:
    found = explanation()
    text = lines(picture(found), width)
    assert max(map(len, text)) <= width
    words = " ".join(" ".join(text).replace("│", " ").split())
    for part in (found.call, f"{found.mask} (lowered to band)", found.how, *found.advice):
        assert " ".join(part.split()) in words
    rows = [" ".join(line.split()) for line in text]
    for row in (
        "time 1.50 ms 2.50 s",
        "bound by matmul vector",
        "memory alone 200 µs",
        "vector alone 2.50 s",
        "FLOPs 4.50 TFLOP 9.00 PFLOP",
        "bytes moved 3.22 GB 8.59 GB",
        "of dq 2.15 GB",
        "of q 2.10 MB 1.07 GB",
        "bytes at least 1.50 GB",
        "extra memory 1.05 MB 0 B",
        "results 67.1 MB 5 B",
        "█ 236 full ▒ 64 partial ░ 3,796 skipped",
        "hopper not part of this version",
        "no CUDA device",
        "triton not there",
        "- And more.",
    ):
        assert row in rows
    assert not any("bias 0 B" in row for row in rows)


def test_the_bar_shows_every_state_that_there_is() -> None:
    for counts, wanted in (
        ((4096, 3, 1, 2), "█░"),
        ((4096, 4096, 4096, 0), "█"),
        ((1, 1, 0, 1), "▒"),
        ((4096, 0, 0, 0), "░"),
    ):
        total, visited, full, partial = counts
        tiles = TileCount(64, 64, total, visited, full, partial, 0.5)
        text = lines(picture(explanation(tiles=tiles, refusals=(), advice=())), 80)
        (bar,) = (line.strip() for line in text if re.fullmatch("[█▒░]{48}", line.strip()))
        assert set(wanted) <= set(bar)
        assert ("▒" in bar, "█" in bar) == (partial > 0, full > 0)
        assert "Other backends" not in "".join(text)
        assert "Advice" not in "".join(text)


def test_quantities_have_three_digits_and_a_unit() -> None:
    assert [size(x) for x in (0, 999, 1000, 10_000, 999.4e6, 1e12)] == [
        "0 B", "999 B", "1.00 kB", "10.0 kB", "999 MB", "1.00 TB",
    ]  # fmt: skip
    assert [flops(x) for x in (7, 999.9e3, 1e18)] == ["7 FLOP", "1.00 MFLOP", "1.00 EFLOP"]
    assert [seconds(x) for x in (0.0, 1.5e-9, 0.25, 0.9999, 75.3)] == [
        "0 ns", "1.50 ns", "250 ms", "1.00 s", "75.3 s",
    ]  # fmt: skip
    assert [percent(x) for x in (0.0, 1e-5, 0.5012, 0.99999, 1.0)] == [
        "0 %", "0.001 %", "50.1 %", "> 99.9 %", "100 %",
    ]  # fmt: skip
