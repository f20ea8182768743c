"""Gluon, under the names that this package uses: the only file that knows which release of Triton it is.

Triton 3.9 renamed the copies between global and shared memory.
"""

# The language of Gluon is not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false

from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate

__all__ = [
    "aggregate", "copy_in", "copy_out", "copy_out_wait", "fence_async_shared", "gl", "gluon", "mbarrier",
    "shared_layout", "tma", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip

aggregate: Any = getattr(gluon, "aggregate", None) or getattr(gl, "aggregate", None) or _aggregate
copy_in: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy_out_wait: Any = tma.store_wait


def shared_layout(block: tuple[int, ...], dtype: str) -> Any:
    """The layout of a block in shared memory that TMA and the matrix units both take; dtype "bf16" or
    "fp16".
    """
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)
