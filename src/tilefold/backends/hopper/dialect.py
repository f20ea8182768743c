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

from tilefold.backends.triton.arguments import rows_of
from tilefold.backends.triton.kernel import _listening as listening

__all__ = [
    "Maps", "Run", "Tail", "aggregate", "copy_in", "copy_out", "copy_out_wait", "fence_async_shared", "gl",
    "gluon", "mbarrier", "shared_layout", "tma", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip

aggregate: Any = getattr(gluon, "aggregate", None) or getattr(gl, "aggregate", None) or _aggregate
copy_out: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy_out_wait: Any = tma.store_wait
copy_in: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
#: What the launcher of Triton 3.6 takes before a kernel's own arguments.
_BASE_ARGUMENTS = "iiiKKppOOOOOO"
#: Tensor maps that are kept of each tensor, by address and strides: a training step comes back to the same
#: ones.
_MOST_MAPS = 1024


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


class Maps:
    """The tensor maps of one tensor of a kind of call, whose shape is always the same; made once per address
    and strides.
    """

    def __init__(self, block: tuple[int, ...]) -> None:
        self.block = block
        self.kept: dict[Any, list[Any]] = {}

    def get(self, x: Tensor) -> tuple[Tensor, list[Any] | None]:
        """`x`, or a copy that TMA can take, and its map if it was made before."""
        found = self.kept.get((x.data_ptr(), x.stride()))
        return (x, found) if found is not None else (rows_of(x)[0], None)

    def make(self, x: Tensor, about: Any) -> list[Any]:
        key = x.data_ptr(), x.stride()
        found = self.kept.get(key)
        if found is None:
            if len(self.kept) >= _MOST_MAPS:
                self.kept.clear()
            make: Any = driver.make_tensordesc_arg
            found = self.kept[key] = make(descriptor(x, self.block), about)
        return found


class Tail:
    """The last arguments of a kernel, as Triton's binding takes them and as its launcher does."""

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments
        self.numbers = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]


class Run:
    """A kernel in one variant, whose first arguments are tensor maps of q, k, v and `out`, and the next one
    where the values lie. A repeated call goes straight to the
    compiled kernel, with the tensor maps of its addresses as they were made before.
    """

    def __init__(self, kernel: Any, variant: Any, warps: int = 4) -> None:
        self._kernel, self._variant, self._warps = kernel, variant, warps
        self._ready: dict[int, tuple[Any, ...]] = {}

    def __call__(
        self,
        programs: int,
        maps: tuple[Maps, ...],
        mapped: tuple[Tensor, ...],
        results: tuple[Tensor, ...],
        tail: Tail,
        device: torch.device,
    ) -> None:
        """Run `programs` programs on the tensors' device, on its current stream.

        Args:
            maps, mapped: of the tensors behind the tensor maps.
            results, tail: all other arguments but the variant, which comes last; tensors as such.
        """
        if device.index == torch._C._cuda_getDevice():
            self._run(programs, maps, mapped, results, tail, device.index)
        else:
            with torch.cuda.device(device):
                self._run(programs, maps, mapped, results, tail, device.index)

    def _run(self, programs: int, maps: Any, mapped: Any, results: Any, tail: Tail, index: int) -> None:
        ready = self._ready.get(index)
        hooks = knobs.runtime
        flat: list[Any] = []
        tensors = []
        for own, x in zip(maps, mapped, strict=True):
            tensor, found = own.get(x)
            tensors.append(tensor)
            if found is None and ready is not None:
                found = own.make(tensor, ready[3][len(tensors) - 1])
            flat += found or ()
        if ready is None or listening(hooks.launch_enter_hook) or listening(hooks.launch_exit_hook):
            # Triton's own binding compiles, and tells a profiler about the launch.
            described = [descriptor(x, own.block) for own, x in zip(maps, tensors, strict=True)]
            compiled = self._kernel[(programs,)](
                *described, tensors[2], *results, *tail.arguments, self._variant, num_warps=self._warps,
                enable_fp_fusion=True, launch_pdl=True,
            )  # fmt: skip
            bare = _bare(compiled)
            if bare is not None:
                launcher, about = bare
                self._ready[index] = launcher, compiled.function, compiled.packed_metadata, about
            return
        launcher, function, metadata, _ = ready
        stream = torch._C._cuda_getCurrentRawStream(index)
        launcher(
            programs, 1, 1, stream, function, False, True, None, None, metadata, None, None, None, *flat,
            tensors[2].data_ptr(), *[x.data_ptr() for x in results], *tail.numbers, self._variant,
        )  # fmt: skip
