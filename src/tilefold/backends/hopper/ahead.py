"""Ahead-of-time compilation of the kernel, without a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from .dialect import shared_layout
from .forward import forward_kernel
from .variant import Variant, blocks_of

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_POINTERS = {"lse": "*fp32", "bias": "*bf16", "sink": "*fp32", "slopes": "*fp32", "cap": "fp32"}
_POINTERS |= dict.fromkeys(("bias_b", "bias_h", "bias_q", "bias_k"), "i64")
_INTEGERS = (
    "work", "portions", "lines", "tiles", "bounds", "row_table", "key_table",
)  # fmt: skip


def compiled(variant: Variant, dtype: torch.dtype, warps: int = 4) -> Any:
    """The kernel compiled for q, k and v of `dtype`, bfloat16 or float16."""
    C = variant

    def described(block: tuple[int, ...]) -> str:
        return f"tensordesc<{_NAMES[dtype]}{list(block)},{shared_layout(block, dtype)!r}>"

    maps = zip(("q_desc", "k_desc", "v_desc", "o_desc"), map(described, blocks_of(C)), strict=True)
    known = {
        **dict(maps), **_POINTERS, **dict.fromkeys(_INTEGERS, "*i32"), "values": f"*{_NAMES[dtype]}",
        "scale": "fp32", "C": "constexpr",
    }  # fmt: skip
    names = [parameter.name for parameter in forward_kernel.params]
    signature = {name: known.get(name, "i32") for name in names}
    # What PyTorch allocates starts at multiples of 16 bytes.
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name][0] == "*"}
    source = GluonASTSource(
        forward_kernel, signature=signature, constexprs={(names.index("C"),): C}, attrs=aligned
    )
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": True}
    )
