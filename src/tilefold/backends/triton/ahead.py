"""Ahead-of-time compilation without a GPU: what a specialisation costs in registers and spills, and that it
compiles at all.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .kernel import UNALIGNED, Kernel

#: Pointers whose dtype is not that of q, k and v.
_POINTERS = {
    **dict.fromkeys(
        ("lse", "logs", "delta", "dlse", "slope_sums", "bias_sums", "key_sums", "sink_sums"), "*fp32"
    ),
    **dict.fromkeys(("tiles", "counts", "order", "bounds", "index", "row_table", "key_table"), "*i32"),
    **dict.fromkeys(("parts", "part_lse", "dk_parts", "dv_parts"), "*fp32"),
    "joins": "*i32",
    "seed": "*i64",
}
#: Pointers that only some variants have, by the trait that brings them.
_OPTIONAL = {
    **dict.fromkeys(("tiles", "counts", "order", "bounds"), lambda C: C.MASK != 0),
    "index": lambda C: C.MASK == 3,
    "dk": lambda C: C.WANT_K,
    "dv": lambda C: C.WANT_V,
    "bias": lambda C: C.BIAS,
    "slopes": lambda C: C.ALIBI,
    "sink": lambda C: C.SINK,
    "seed": lambda C: C.DROPOUT,
    **dict.fromkeys(("row_table", "key_table"), lambda C: C.TABLES),
    "dlse": lambda C: C.LSE_GRADIENT,
    "dbias": lambda C: C.BIAS_GRADIENT == 3,
    "key_sums": lambda C: C.BIAS_GRADIENT == 2,
    "slope_sums": lambda C: C.SLOPE_GRADIENT,
    "bias_sums": lambda C: C.BIAS_GRADIENT == 1,
    **dict.fromkeys(("parts", "part_lse"), lambda C: C.SPLIT > 0 or C.WEIGHTED),
    "dk_parts": lambda C: C.SPLIT > 0 and C.WANT_K,
    "dv_parts": lambda C: C.SPLIT > 0 and C.WANT_V,
    "sink_sums": lambda C: C.SINK,
}
#: Pointers that a kernel has in each of its variants.
_ALWAYS = {("bias_kernel", "dbias"), ("join_kernel", "parts")}


def target(arch: str) -> GPUTarget:
    """Of "sm90" or "gfx942"."""
    if arch.startswith("sm"):
        return GPUTarget("cuda", int(arch[2:]), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def compiled(kernel: Kernel, variant: Any, dtype: str, warps: int, arch: str, registers: int = 0) -> Any:
    """The kernel compiled for q, k and v of `dtype` ("bf16", "fp16", "fp32") on `arch`; `registers` as in
    `sizes.Sizes`.
    """
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    constants: dict[str, Any] = {}
    function = kernel.jitted
    for at, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", variant
        elif parameter.annotation_type:
            signature[name] = parameter.annotation_type
        elif name in _OPTIONAL and not _OPTIONAL[name](variant) and (kernel.name, name) not in _ALWAYS:
            signature[name], constants[name] = "constexpr", None
        else:
            signature[name] = _POINTERS.get(name, f"*{dtype}")
            if name not in UNALIGNED:
                attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": variant.STAGES, "enable_fp_fusion": True}
    if registers and arch.startswith("sm"):
        options["maxnreg"] = registers
    return triton.compile(source, target=target(arch), options=options)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes per thread and per program."""

    registers: int
    stack: int
    shared: int
    tensor_ops: int


def resources(kernel: Any) -> Resources:
    """Registers, bytes of stack (spills among them) and of shared memory, and matrix instructions, of a
    kernel for NVIDIA GPUs.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    matrix = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", kernel.asm["ptx"]))
    return Resources(found["REG"], found["STACK"], kernel.metadata.shared, matrix)
