"""The Hopper kernel compiled without a GPU: it fits, multiplies with whole warp groups, spills nothing where
it matters, and carries nothing of options that a call does not have.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
import triton

from tilefold.backends.hopper.ahead import compiled
from tilefold.backends.hopper.sizes import sizes_of
from tilefold.backends.hopper.variant import BITS, COLS, KINDS, ROWS, Variant
from tilefold.backends.triton.ahead import resources

SHARED = 227 << 10


def variant(width: int, kind: str, **changes: Any) -> Variant:
    masked = kind not in ("full", "short full")
    given = {
        "D": width, "DV": width, "MASK": KINDS.get(kind, 0), "MASKED": masked, "CAREFUL": masked,
        "FIXED": True, "BELOW": kind == "window",
    }  # fmt: skip
    return Variant(**(given | sizes_of(width, kind) | changes))


@cache
def of(C: Variant, dtype: torch.dtype = torch.bfloat16) -> Any:
    return compiled(C, dtype)


def code(made: Any) -> list[tuple[int, str]]:
    """The machine's instructions with their addresses. (Triton's own text of them ends after 4,096.)"""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+ )?([A-Z][^;]*);", said)
    return [(int(at, 16), text) for at, text in found]


def instructions(made: Any) -> list[str]:
    """Names of the machine's instructions, in their order."""
    return [text.split()[0] for _, text in code(made)]


def steps(made: Any, C: Variant) -> list[list[str]]:
    """Names of the instructions of each loop over tiles: it has both products, once, and little else."""
    every = code(made)
    back = [(int(text.split("0x")[-1], 16), at) for at, text in every if re.match(r"BRA 0x", text)]
    bodies = [[text.split()[0] for at, text in every if start <= at <= end] for start, end in back]
    products = C.D // 16 + C.BN // 16
    return [body for body in bodies if sum("HGMMA" in name for name in body) == products and len(body) < 900]


#: What calls without a list of tiles take, and one with: the rest is for `-m slow`.
POINTS = [
    (64, "full"), (64, "band"), (128, "full"), (128, "short full"), (128, "band"), (128, "window"),
    (128, "rows"), (256, "full"), (256, "band"),
]  # fmt: skip
OTHERS = [
    (64, "short full"), (64, "short band"), (64, "window"), (64, "rows"), (64, "cols"), (64, "bits"),
    (128, "short band"), (128, "cols"), (128, "bits"), (256, "window"), (256, "rows"), (256, "cols"),
    (256, "bits"),
]  # fmt: skip
EVERY = [*POINTS, *(pytest.param(*point, marks=pytest.mark.slow) for point in OTHERS)]


@pytest.mark.parametrize("width, kind", EVERY)
def test_it_fits_and_uses_warp_groups(width: int, kind: str) -> None:
    C = variant(width, kind)
    made = of(C)
    taken = resources(made)
    assert taken.shared <= SHARED
    assert "wgmma.mma_async" in made.asm["ptx"]
    # Two roles' registers: the kernel starts with as many as 16 or 12 warps may have, and deals them out.
    assert taken.registers in (128, 168)
    # All passes share their code: what is far from the beginning comes late. (Apart it was 8,000 to 14,200.)
    most = 10_000 if C.MASKED else 7_500 if C.EARLY else 6_500
    assert len(instructions(made)) < (11_000 if (width, kind) == (256, "cols") else most)


@pytest.mark.parametrize("width, kind", EVERY)
def test_products_are_not_serialised(width: int, kind: str) -> None:
    """The compiler of the machine's code does so, without a word, when registers are short."""
    names = [name.split(".")[0] for name in instructions(of(variant(width, kind)))]
    runs = "".join(
        "x" if name == "HGMMA" else " " for name in names if name in ("HGMMA", "WARPGROUP")
    ).split()
    assert min(map(len, runs)) >= 4


@pytest.mark.skipif(triton.__version__ != "3.6.0", reason="spills depend on the compiler")
@pytest.mark.parametrize("width, kind", EVERY)
def test_nothing_is_spilled_in_a_loop_over_tiles(width: int, kind: str) -> None:
    """Some bytes of what a loop does not touch may wait in memory. At D 256 a masked loop reads one word, one
    over the edges of a window two, and one with intervals of rows some.
    """
    C = variant(width, kind)
    made = of(C)
    found = [
        (body.count("FMNMX") > 0, sum(name in ("STL", "LDL") for name in body)) for body in steps(made, C)
    ]
    # A loop with the fixed reference and an online one of each consumer at least.
    assert sum(not online for online, _ in found) >= C.GROUPS
    assert sum(online for online, _ in found) >= C.GROUPS
    #: Stores and loads in a loop with a fixed reference, and in an online one.
    most = {(256, "rows"): (6, 9), (256, "window"): (2, 1)}.get(
        (width, kind), (1, 1) if width == 256 else (0, 0)
    )
    assert all(spills <= most[online] for online, spills in found), found
    if width == 256:
        assert min(spills for online, spills in found if not online) == 0
    if not C.MASKED:
        assert resources(made).stack <= 96


@pytest.mark.parametrize("width", [64, 128])
def test_a_plain_call_carries_no_option(width: int) -> None:
    """Its instructions are fewer than those with each option; a full call compares no positions."""
    plain = len(instructions(of(variant(width, "full"))))
    assert len(instructions(of(variant(width, "full", SINK=True)))) > plain
    assert len(instructions(of(variant(width, "full", MASKED=True, CAREFUL=True)))) > 1.2 * plain
    ptx = of(variant(width, "full")).asm["ptx"]
    assert "0fFF800000" in of(variant(width, "band")).asm["ptx"]
    assert ptx.count("selp.f32") < of(variant(width, "band")).asm["ptx"].count("selp.f32")


def test_float16_has_no_second_pass() -> None:
    """Its softmax is the usual one."""
    fixed, online = of(variant(128, "full")), of(variant(128, "full", FIXED=False), torch.float16)
    assert "f16" in online.asm["ptx"]
    assert len(instructions(online)) < 0.7 * len(instructions(fixed))


@pytest.mark.parametrize("period, kind", [(1, "full"), (8, "band")])
def test_heads_that_share_tiles_compile(period: int, kind: str) -> None:
    assert resources(of(variant(128, kind, PERIOD=period))).shared <= SHARED


@pytest.mark.parametrize("option", [pytest.param("SOFTCAP", marks=pytest.mark.slow), "ALIBI", "BIAS"])
def test_options_of_the_score_compile(option: str) -> None:
    made = of(variant(128, "band", PLAIN=False, **{option: True}))
    assert resources(made).shared <= SHARED
    assert ("abs" in made.asm["ptx"]) or option != "ALIBI"


@pytest.mark.slow
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("intervals", [1, 2])
@pytest.mark.parametrize("mask", [ROWS, COLS, BITS])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_every_variant_compiles(width: int, mask: int, intervals: int, fixed: bool, sink: bool) -> None:
    kind = next(name for name, number in KINDS.items() if number == mask)
    assert resources(of(variant(width, kind, INTERVALS=intervals, FIXED=fixed, SINK=sink))).shared <= SHARED
