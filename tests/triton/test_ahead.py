"""The Triton kernels compiled ahead of time, for GPUs that are not here: that every kind of variant compiles,
and what the shipped sizes cost in shared memory and spills.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tilefold.planning import tuned
from tilefold.problem import Problem

triton = pytest.importorskip("triton", reason="Triton is not installed")

from tilefold.backends.triton import _shared_memory_taken, backward, bias, delta, forward, parts  # noqa: E402
from tilefold.backends.triton import variant as v  # noqa: E402
from tilefold.backends.triton.ahead import Resources, compiled, resources  # noqa: E402
from tilefold.backends.triton.kernel import Kernel  # noqa: E402
from tilefold.backends.triton.sizes import HEADS, Sizes, names_of  # noqa: E402
from tilefold.backends.triton.variant import Variant  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter stands in for the compiler"
)

KERNELS: dict[str, Kernel] = {
    "forward": forward.forward_kernel,
    "keys": backward.keys_kernel,
    "dk": backward.keys_kernel,
    "dv": backward.keys_kernel,
    "queries": backward.queries_kernel,
    "bias": bias.bias_kernel,
    "delta": delta.delta_kernel,
    "join": parts.join_kernel,
}
ARCHITECTURES = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx942")
#: Sizes of heads of keys and values; 576 and 512 are those of absorbed MLA.
DIMS = ((64, 64), (128, 128), (96, 96), (192, 128), (40, 40), (72, 72), (64, 32), (256, 256), (576, 512))
#: Bytes of shared memory that one program can have.
SHARED = {"sm80": 163 << 10, "sm86": 99 << 10, "sm90": 227 << 10}
TABLES = Path(tuned.__file__).parent / "tables"


# -- the shipped tables --------------------------------------------------------------------------------------


def _entries(table: str, bits: str) -> list[str]:
    """Names of the entries of one file, those of the files beneath it left out."""
    names = json.loads((TABLES / f"{table}.json").read_text())
    return [name for name in names if name.startswith("triton/") and name.split("/")[2] == bits]


#: What takes most shared memory: plain scores leave room for the deepest pipeline, a bias is loaded with it,
#: and dropout exchanges its random words there. Without the repair of broken results, which spills more than
#: the kernel that calls it.
_PLAIN: dict[str, Any] = {"CAREFUL": False}
_LADEN: dict[str, Any] = {
    "CAREFUL": True,
    "MASK": v.BITS,
    "ALIBI": True,
    "SOFTCAP": True,
    "DROPOUT": True,
    "QUADS": True,
}
_BIASED: dict[str, Any] = {"BIAS": True, "BIAS_UNIT": 8, "BIAS_DENSE": True}


def _sizes(value: Sequence[int]) -> Sizes:
    return Sizes(*value)


@cache
def _of_entry(name: str, arch: str, laden: bool) -> tuple[Resources, bool]:
    """What the kernel of a table's entry takes, and whether it uses the matrix units of a warp group."""
    table = "sm90" if arch == "sm90" else "gpu"
    rows, keys, warps, stages, loops, registers = _sizes(tuned.shipped(table)[name])
    _, kernel, bits, head, *special = name.split("/")
    size = int(head)
    # Calls of the kind "full" have no options at all.
    traits = dict(_LADEN if laden and special != ["full"] else _PLAIN)
    for kind in special:
        traits |= {"BIAS": True} if kind == "bias" else {"MASK": v.KINDS.get(kind, v.BAND)}
    if laden and (special == ["bias"] or (not special and f"{name}/bias" not in tuned.shipped(table))):
        traits |= _BIASED
    if kernel == "bias":
        traits |= {"CAREFUL": False, "BIAS": True}
    C = Variant(
        size, 512 if size == HEADS[-1] else size, rows, keys, STAGES=stages, LOOPS=loops,
        EVEN=special == ["full"], UNIT=128 // int(bits), OUT_UNIT=8,
        PLAIN=bits == "16" and not {"BIAS", "ALIBI"} & set(traits), WANT_K=kernel != "dv",
        WANT_V=kernel != "dk", **traits,
    )  # fmt: skip
    made = compiled(KERNELS[kernel], C, {"16": "bf16", "32": "fp32"}[bits], warps, arch, registers)
    return resources(made), "wgmma.mma_async" in made.asm["ptx"]


@pytest.mark.parametrize("name", _entries("sm90", "16"))
def test_sizes_for_hopper_fit_and_use_its_matrix_units(name: str) -> None:
    taken, warp_groups = _of_entry(name, "sm90", False)
    assert taken.shared <= SHARED["sm90"]
    rows, keys, *_ = tuned.shipped("sm90")[name]
    # The instruction takes 64 lines of the first operand at a time; those of transposed tiles are keys.
    lines = keys if name.split("/")[1] in ("keys", "dk", "dv") else rows
    assert warp_groups == (lines >= 64)
    assert taken.tensor_ops > 0


_MEASURED_WITH = tuned.shipped("sm90")["stack_bytes"]["triton"]


@pytest.mark.skipif(
    triton.__version__ != _MEASURED_WITH, reason=f"spills are stated for Triton {_MEASURED_WITH}"
)
@pytest.mark.parametrize("name", _entries("sm90", "16"))
def test_sizes_for_hopper_spill_no_more_than_their_table_says(name: str) -> None:
    taken, _ = _of_entry(name, "sm90", False)
    # Kernels for whole tiles keep some bytes that no loop touches.
    most = 64 if name.endswith("/full") else 1 << 16
    assert taken.stack <= min(tuned.shipped("sm90")["stack_bytes"][name], most)


def test_every_tuned_size_states_its_spills() -> None:
    stated = set(tuned.shipped("sm90")["stack_bytes"]) - {"triton"}
    assert stated == set(_entries("sm90", "16"))


@pytest.mark.parametrize("name", _entries("gpu", "16"))
def test_sizes_for_every_gpu_fit_the_smallest_shared_memory(name: str) -> None:
    assert _of_entry(name, "sm86", False)[0].shared <= SHARED["sm86"]


@pytest.mark.slow
@pytest.mark.parametrize("laden", [False, True])
@pytest.mark.parametrize("arch", ["sm80", "sm86"])
@pytest.mark.parametrize("name", [*_entries("gpu", "16"), *_entries("gpu", "32")])
def test_sizes_for_every_gpu_fit(name: str, arch: str, laden: bool) -> None:
    _, _, bits, head, *_ = name.split("/")
    taken = _of_entry(name, arch, laden)[0].shared
    # What the smallest GPUs have no room for is refused there.
    known = _shared_memory_taken(torch.float32 if bits == "32" else torch.bfloat16, int(head))
    assert taken <= max(SHARED[arch], known)


@pytest.mark.parametrize("name", ["triton/forward/16/64", "triton/forward/16/128"])
def test_sizes_for_most_calls_fit_with_every_option(name: str) -> None:
    assert _of_entry(name, "sm90", True)[0].shared <= SHARED["sm90"]


@pytest.mark.slow
@pytest.mark.parametrize("name", _entries("sm90", "16"))
def test_sizes_for_hopper_fit_with_every_option(name: str) -> None:
    assert _of_entry(name, "sm90", True)[0].shared <= SHARED["sm90"]


# -- variants ------------------------------------------------------------------------------------------------


def _traits(kernel: str, dtype: str, arch: str, draw: random.Random) -> dict[str, Any]:
    """Traits that a call can have together, drawn at random; `arguments.traits` says what excludes what."""

    def some() -> bool:
        return draw.random() < 0.35

    if kernel == "delta":
        return {"SINK": some(), "LSE_GRADIENT": some()}
    if kernel == "join":
        return {"WEIGHTED": some()}
    found: dict[str, Any] = {"MASK": draw.randrange(4)}
    if found["MASK"] == v.BAND:
        found["STEPPED"] = some()
    elif found["MASK"] != v.BITS:
        found["INTERVALS"] = draw.choice((1, 2))
    for name in ("SOFTCAP", "ALIBI", "BIAS", "SINK", "DROPOUT", "TABLES"):
        found[name] = some()
    found["BIAS"] |= kernel == "bias"
    found["SLOPE_ROWS"] = found["ALIBI"] and found["TABLES"] and some()
    found["QUADS"] = found["DROPOUT"] and not found["TABLES"] and some()
    if found["BIAS"]:
        found["BIAS_DENSE"] = some()
        found["BIAS_UNIT"] = 8 if found["BIAS_DENSE"] else 1
    scored = found["SOFTCAP"] or found["ALIBI"] or found["BIAS"]
    found["PLAIN"] = dtype != "fp32" and not scored
    found["TF32"] = dtype == "fp32" and some()
    found["EVEN"] = some()
    if kernel == "bias":
        found["SHARED"] = some()
    elif found["MASK"] == v.BITS:
        found["SPLIT"] = draw.choice((0, 16))
    if kernel != "bias":
        found["CAREFUL"] = draw.random() < 0.66
    if kernel == "queries":
        found["SLOPE_GRADIENT"] = found["ALIBI"] and some()
        found["BIAS_GRADIENT"] = draw.choice((0, v.PER_ROW, v.PER_SCORE)) if found["BIAS"] else 0
        per_score = found["BIAS_GRADIENT"] == v.PER_SCORE and found["BIAS_UNIT"] == 8
        found["AHEAD"] = 3 if per_score and arch.startswith("sm") else 0
    if kernel in ("keys", "dk"):
        found["BIAS_GRADIENT"] = draw.choice((0, v.PER_KEY)) if found["BIAS"] else 0
    return found


def _variant(
    kernel: str, dtype: str, dims: tuple[int, int], arch: str, draw: random.Random
) -> tuple[Any, ...]:
    """`(kernel, variant, dtype, warps, arch)` with the sizes that a call on `arch` would take."""
    bits, traits = 32 if dtype == "fp32" else 16, _traits(kernel, dtype, arch, draw)
    if kernel == "delta":
        sizes = Sizes(*(64 if dims[1] <= 128 else 16,) * 2, 4, 1)
    elif kernel == "join":
        sizes = Sizes(16, draw.choice((16, 32, 64, 128)), 4, 1)
    else:
        kept = torch.float32 if bits == 32 else torch.bfloat16
        options = ("bias",) if traits["BIAS"] else ()
        problem = Problem(1, 4, 4, 512, 512, *dims, kept, "cuda", options=options)
        kind = next(name for name, number in v.KINDS.items() if number == traits["MASK"])
        table = tuned.shipped(arch)
        sizes = _sizes(next(table[name] for name in names_of(kernel, problem, kind) if name in table))
    out_unit = 8 if dims[1] % 8 == 0 and (kernel == "forward" or dims[0] % 8 == 0) else 1
    C = Variant(
        *dims, sizes.rows, sizes.keys, STAGES=sizes.stages, LOOPS=sizes.loops,
        UNIT=128 // bits, OUT_UNIT=out_unit, WANT_K=kernel != "dv", WANT_V=kernel != "dk", **traits,
    )  # fmt: skip
    return kernel, C, dtype, sizes.warps, arch


def _exists(kernel: str, dtype: str, dims: tuple[int, int]) -> bool:
    """Whether there are sizes for it: wide heads have no kernel for dK and dV together."""
    return kernel != "keys" or max(dims) <= 128


def _grid() -> Iterator[tuple[Any, ...]]:
    """Every kernel with every head size and dtype on every architecture, the other traits drawn."""
    draw = random.Random(0)
    for arch in ARCHITECTURES:
        for kernel in KERNELS:
            for dims in DIMS:
                for dtype in ("bf16", "fp16", "fp32"):
                    if _exists(kernel, dtype, dims):
                        yield _variant(kernel, dtype, dims, arch, draw)


def _name(point: tuple[Any, ...]) -> str:
    """Kernel, dtype, architecture, and the traits that are not as by default."""
    kernel, C, dtype, _, arch = point
    usual = Variant(1, 1, 1, 1)
    traits = (
        f"{name}{int(value) if value is not True else ''}"
        for name, value in vars(C).items()
        if value != getattr(usual, name)
    )
    return "-".join([kernel, dtype, arch, *traits])


_GRID = list(_grid())
#: Four of each architecture, kernels and head sizes in turn.
_SOME = [
    next(p for p in random.Random(f"{arch} {n}").sample(_GRID, len(_GRID)) if p[4] == arch and p[0] == kernel)
    for i, arch in enumerate(ARCHITECTURES)
    for n, kernel in enumerate([*KERNELS][j % len(KERNELS)] for j in range(i, i + 4))
]
_MLA = [
    _variant("forward", "bf16", (576, 512), arch, random.Random(1)) for arch in ("sm90", "sm100", "gfx942")
]


def _compiles(point: tuple[Any, ...]) -> None:
    kernel, C, dtype, warps, arch = point
    made = compiled(KERNELS[kernel], C, dtype, warps, arch)
    assert made.asm["hsaco" if arch.startswith("gfx") else "cubin"]
    if arch in SHARED:
        assert made.metadata.shared <= SHARED[arch]


@pytest.mark.parametrize("point", [*_SOME, *_MLA], ids=_name)
def test_a_sample_of_variants_compiles(point: tuple[Any, ...]) -> None:
    _compiles(point)


def _machine_code(made: Any) -> str:
    """As text; Triton's own ends after some 4,096 instructions."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "name",
    [
        "forward/16/128/short", "forward/16/128/rows", "forward/16/64/rows", "queries/16/128/rows",
        "forward/16/64/full", "forward/16/128/full", "queries/16/128/full", "keys/16/128/full",
    ],
)  # fmt: skip
def test_products_of_kernels_are_not_serialised(name: str) -> None:
    """`ptxas` waits after each single matrix instruction where it cannot follow what a loop carries."""
    rows, keys, warps, stages, loops, registers = _sizes(tuned.shipped("sm90")["triton/" + name])
    kernel, _, size, kind = name.split("/")
    C = Variant(
        int(size), int(size), rows, keys, STAGES=stages, LOOPS=loops, UNIT=8, OUT_UNIT=8, PLAIN=True,
        CAREFUL=kind != "full", EVEN=True, MASK=v.KINDS.get(kind, v.BAND),
    )  # fmt: skip
    made = compiled(KERNELS[kernel], C, "bf16", warps, "sm90", registers)
    instructions = re.findall(r"\bHGMMA\b|\bWARPGROUP\.DEPBAR\b", _machine_code(made))
    # All of them are seen.
    assert instructions.count("HGMMA") == made.asm["ptx"].count("wgmma.mma_async")
    runs = "".join("x" if name == "HGMMA" else " " for name in instructions).split()
    assert min(map(len, runs)) >= 4


@pytest.mark.parametrize("ahead", [0, 3])
def test_tiles_of_a_bias_are_sent_for_where_that_is_wanted(ahead: int) -> None:
    rows, keys, warps, stages, loops, registers = _sizes(tuned.shipped("sm90")["triton/queries/16/64/bias"])
    C = Variant(
        64, 64, rows, keys, STAGES=stages, LOOPS=loops, UNIT=8, OUT_UNIT=8, EVEN=True, CAREFUL=False,
        BIAS_GRADIENT=v.PER_SCORE, AHEAD=ahead, **_BIASED,
    )  # fmt: skip
    made = compiled(KERNELS["queries"], C, "bf16", warps, "sm90", registers)
    # In the loop over full tiles and in the one over partial tiles.
    assert made.asm["ptx"].count("prefetch.global.L2") == (2 if ahead else 0)
    # The pipeline is there as before.
    assert made.asm["ptx"].count("cp.async.cg") >= 2 * 24


_BEGINS, _WAITS = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
_SIGNS = {v.APART: [], v.HEAD: [_BEGINS], v.AFTER: [_WAITS, _BEGINS], v.BESIDE: [_BEGINS, _WAITS]}


@pytest.mark.parametrize(
    "kernel, place",
    [
        ("delta", v.APART), ("delta", v.HEAD),
        *itertools.product(("queries", "keys", "bias"), (v.APART, v.AFTER, v.BESIDE)),
    ],
)  # fmt: skip
def test_kernels_of_a_chain_wait_where_they_must(kernel: str, place: int) -> None:
    """Those that need what the one ahead wrote before they read anything, others when they have written
    everything, repairs included.
    """
    bias = {"BIAS": True, "BIAS_UNIT": 8, "BIAS_DENSE": True} if kernel == "bias" else {"CAREFUL": True}
    C = Variant(64, 64, 64, 64, UNIT=8, OUT_UNIT=8, PLAIN=kernel != "bias", CHAIN=place, **bias)
    text = compiled(KERNELS[kernel], C, "bf16", 4, "sm90").asm["ptx"]
    # The kernel alone, without the function that repairs.
    text = text[text.index(f".entry {KERNELS[kernel].name}") :]
    text = text[: text.index("\n}")]
    orders = re.findall(r"griddepcontrol\.\w+|ld\.global|cp\.async|st\.global|call\.uni", text)
    assert [order for order in orders if order.startswith("griddepcontrol")] == _SIGNS[place]
    if place in (v.HEAD, v.AFTER):
        assert orders[: len(_SIGNS[place])] == _SIGNS[place]
    elif place == v.BESIDE:
        assert (orders[0], orders[-1]) == (_BEGINS, _WAITS)


@pytest.mark.slow
@pytest.mark.parametrize("point", _GRID, ids=_name)
def test_every_kernel_compiles_for_every_architecture(point: tuple[Any, ...]) -> None:
    _compiles(point)
