"""Gluon, and how its kernels are launched, under the names that this package uses: the only file that knows
which release of Triton it is.

Triton 3.9 renamed the copies between global and shared memory.
"""

# The language of Gluon is not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate

from tilefold.backends.triton.kernel import _listening as listening

__all__ = [
    "Run", "aggregate", "copy_in", "copy_out", "copy_out_wait", "fence_async_shared", "gl", "gluon",
    "mbarrier", "shared_layout", "tma", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip

aggregate: Any = getattr(gluon, "aggregate", None) or getattr(gl, "aggregate", None) or _aggregate
copy_in: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy_out_wait: Any = tma.store_wait

_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
#: What the launcher of Triton 3.6 takes before a kernel's own arguments.
_BASE_ARGUMENTS = "iiiKKppOOOOOO"
#: Tensor maps that are kept, by address and shape: a training step comes back to the same ones.
_MOST_MAPS = 4096


def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The layout of a block in shared memory that TMA and the matrix units both take."""
    kind: Any = gl.NVMMASharedLayout
    return kind.get_default_for(list(block), _ELEMENTS[dtype])


def descriptor(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """A tensor map of `x`, copied in blocks."""
    layout = shared_layout(block, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def _bare(compiled: Any) -> tuple[Any, list[Any]] | None:
    """The launcher of Triton 3.6 that takes tensor maps ready made, and what its descriptors are like; None
    for releases that are built in another way.
    """
    launch: Any = getattr(compiled.run, "launch", None)
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    known = {"launcher", "tensordesc_meta", "tensordesc_indices"} <= set(names)
    if not known or getattr(driver, "_BASE_ARGS_FORMAT", None) != _BASE_ARGUMENTS:
        return None
    held: dict[str, Any] = {
        name: cell.cell_contents for name, cell in zip(names, launch.__closure__, strict=True)
    }
    return held["launcher"], held["tensordesc_meta"]


class Run:
    """A kernel in one variant, whose first arguments are tensor maps. A repeated call goes straight to the
    compiled kernel, with the tensor maps of its addresses as they were made before.
    """

    def __init__(
        self, kernel: Any, variant: Any, blocks: tuple[tuple[int, ...], ...], warps: int = 4
    ) -> None:
        self._kernel, self._variant, self._blocks, self._warps = kernel, variant, blocks, warps
        self._ready: dict[int, tuple[Any, ...]] = {}
        self._maps: dict[Any, list[Any]] = {}

    def __call__(
        self, programs: int, mapped: tuple[Tensor, ...], arguments: list[Any], device: torch.device
    ) -> None:
        """Run `programs` programs on the tensors' device, on its current stream.

        Args:
            mapped: the tensors behind the tensor maps, in the order of `blocks`.
            arguments: all others but the variant, which comes last; tensors as such. The list is used up.
        """
        if device.index == torch._C._cuda_getDevice():
            self._run(programs, mapped, arguments, device.index)
        else:
            with torch.cuda.device(device):
                self._run(programs, mapped, arguments, device.index)

    def _run(self, programs: int, mapped: tuple[Tensor, ...], arguments: list[Any], index: int) -> None:
        ready = self._ready.get(index)
        hooks = knobs.runtime
        if ready is None or listening(hooks.launch_enter_hook) or listening(hooks.launch_exit_hook):
            # Triton's own binding compiles, and tells a profiler about the launch.
            maps = [descriptor(x, block) for x, block in zip(mapped, self._blocks, strict=True)]
            compiled = self._kernel[(programs,)](
                *maps, *arguments, self._variant, num_warps=self._warps, enable_fp_fusion=True
            )
            bare = _bare(compiled)
            if bare is not None:
                pointers = tuple(n for n, x in enumerate(arguments) if isinstance(x, Tensor))
                launcher, about = bare
                self._ready[index] = launcher, compiled.function, compiled.packed_metadata, about, pointers
            return
        launcher, function, metadata, about, pointers = ready
        flat: list[Any] = []
        for n, x in enumerate(mapped):
            key = (n, x.data_ptr(), x.shape, x.stride())
            found = self._maps.get(key)
            if found is None:
                found = self._map(key, x, self._blocks[n], about[n])
            flat += found
        held = [arguments[n] for n in pointers]
        for n, tensor in zip(pointers, held, strict=True):
            arguments[n] = tensor.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(index)
        launcher(
            programs, 1, 1, stream, function, False, False, None, None, metadata, None, None, None, *flat,
            *arguments, self._variant,
        )  # fmt: skip

    def _map(self, key: Any, x: Tensor, block: tuple[int, ...], about: Any) -> list[Any]:
        make: Any = driver.make_tensordesc_arg
        if len(self._maps) >= _MOST_MAPS:
            self._maps.clear()
        found = self._maps[key] = make(descriptor(x, block), about)
        return found
