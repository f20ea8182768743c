"""Launching: a repeated call goes straight to the compiled kernel, without Triton's own binding of arguments.

A compiled kernel depends on its variant, on the dtypes of its pointers, and on the alignment of the only
pointer that may be unaligned, the bias. Whoever keeps a `Launch` keeps it per all of these.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from .variant import AFTER, BESIDE, Variant

#: Seconds that first calls spent in the compiler or in reading its cache, by kernel, variant and device.
first_call_seconds: dict[tuple[str, Variant, int], float] = {}
#: Arguments that may point anywhere. The launchers see to it that all others are aligned to 16 bytes.
UNALIGNED = (
    "bounds", "index", "tiles", "counts", "order", "slopes", "sink", "seed", "row_table", "key_table",
    "lse", "dlse",
)  # fmt: skip


class Kernel:
    """A Triton function. Its integer arguments are annotated with their types, and are not specialised on
    their values.
    """

    def __init__(self, function: Any) -> None:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        numbers = [name for name in names if str(function.__annotations__.get(name)) in ("int32", "int64")]
        anywhere = [name for name in names if name in UNALIGNED]
        self.name = function.__name__
        options: dict[str, Any] = {"do_not_specialize": numbers, "do_not_specialize_on_alignment": anywhere}
        self.jitted: Any = triton.jit(function, **options)
        #: As a function that a kernel may call, compiled apart from it.
        apart: dict[str, Any] = {"noinline": True}
        self.apart: Any = triton.jit(function, **apart)


class Launch:
    """A kernel in one variant, ready to run."""

    def __init__(self, kernel: Kernel, variant: Variant, warps: int, registers: int = 0) -> None:
        self.kernel, self.variant, self.warps = kernel, variant, warps
        self._options: dict[str, Any] = {"num_stages": variant.STAGES, "enable_fp_fusion": True}
        if variant.CHAIN in (AFTER, BESIDE):
            self._options["launch_pdl"] = True
        if registers and torch.version.hip is None:
            self._options["maxnreg"] = registers
        self._compiled: dict[int, tuple[Any, Any, Any]] = {}
        self._pointers: tuple[int, ...] = ()

    def __call__(self, programs: int, arguments: list[Any], device: torch.device) -> None:
        """Run `programs` programs on the tensors' device, on its current stream.

        Args:
            arguments: of the kernel, without the variant, which comes last; tensors as such. The list is
                used up.
        """
        if programs == 0:
            return
        index = device.index
        if device.type == "cpu":
            self.kernel.jitted[(programs,)](*arguments, self.variant, num_warps=self.warps)
        elif index == torch._C._cuda_getDevice():
            self._run(programs, arguments, index)
        else:
            with torch.cuda.device(index):
                self._run(programs, arguments, index)

    def _run(self, programs: int, arguments: list[Any], index: int) -> None:
        ready = self._compiled.get(index)
        if ready is None:
            start = time.perf_counter()
            compiled = self._bound(programs, arguments)
            self._compiled[index] = compiled.run, compiled.function, compiled.packed_metadata
            self._pointers = tuple(n for n, x in enumerate(arguments) if isinstance(x, Tensor))
            name = (self.kernel.name, self.variant, index)
            first_call_seconds.setdefault(name, time.perf_counter() - start)
            return
        hooks = knobs.runtime
        if _listening(hooks.launch_enter_hook) or _listening(hooks.launch_exit_hook):
            # A profiler wants to be told about the launch.
            self._bound(programs, arguments)
            return
        run, function, metadata = ready
        # As numbers, which Triton's launcher takes as they are: it would ask CUDA about each tensor. The list
        # may be all that keeps a tensor alive until the launch.
        held = [arguments[n] for n in self._pointers]
        for n, tensor in zip(self._pointers, held, strict=True):
            arguments[n] = tensor.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(index)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, self.variant)

    def _bound(self, programs: int, arguments: list[Any]) -> Any:
        """Launch through Triton's own binding of arguments, which compiles; the compiled kernel."""
        return self.kernel.jitted[(programs,)](
            *arguments, self.variant, num_warps=self.warps, **self._options
        )


def _listening(hook: Any) -> bool:
    """Whether somebody is told by a hook of Triton's, which is a chain of functions since release 3.5."""
    return hook is not None and bool(getattr(hook, "calls", True))
