"""Memory accesses of Triton kernels under its interpreter, held against the tensors of each launch.

On a GPU an address a few elements past a tensor is rarely a fault: it is somebody else's number. The
interpreter computes the same addresses, so each of them can be looked at. Only where `TRITON_INTERPRET=1` was
set before the first import of Triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor


class Extent(NamedTuple):
    """The addresses `[start, end)` of one argument of a launch."""

    argument: str
    start: int
    end: int

    def distance(self, address: int) -> int:
        """Bytes between an address and the extent; 0 inside."""
        return max(self.start - address, address - self.end + 1, 0)


@dataclass
class Accesses:
    """What was looked at so far, and the launch that is running.

    Attributes:
        launches: kernels run.
        loads, stores: addresses that were not masked out.
        kernel: name of the running kernel.
        extents: of its tensors.
        fault: the access outside of them that is on its way out.
    """

    launches: int = 0
    loads: int = 0
    stores: int = 0
    kernel: str = ""
    extents: list[Extent] = field(default_factory=list)
    fault: AssertionError | None = None

    def check(self, what: str, addresses: Any, mask: Any, width: int) -> int:
        """Assert that every access lies inside one extent; how many there were.

        Args:
            what: "load" or "store".
            addresses: array of the first byte of each access.
            mask: array of the same or a broadcastable shape, true where there is an access.
            width: bytes per access.

        Raises:
            AssertionError: some do not.
        """
        import numpy as np

        addresses = np.asarray(addresses).astype(np.uint64)
        # The last bytes are compared, so that an access cannot begin inside and end outside.
        first = addresses[np.broadcast_to(np.asarray(mask), addresses.shape).astype(bool)]
        inside = np.zeros(first.shape, bool)
        for extent in self.extents:
            inside |= (first >= extent.start) & (first + np.uint64(width) <= extent.end)
        if not inside.all():
            stray = int(first[~inside][0])
            nearest = min(self.extents, key=lambda extent: extent.distance(stray), default=None)
            near = "it has no tensors"
            if nearest is not None:
                near = f"{nearest.distance(stray)} bytes from {nearest.argument}, the nearest argument"
            self.fault = AssertionError(
                f"{self.kernel}: {what} outside of its tensors at {int((~inside).sum())} of {first.size} "
                f"addresses; the first lies {near}"
            )
            raise self.fault
        return int(first.size)


def extents_of(names: Sequence[str], arguments: Sequence[Any]) -> list[Extent]:
    """The memory of the tensors among `arguments`, from the first element of each to its last."""
    found = []
    for name, x in zip(names, arguments, strict=False):  # the variant has a name, too
        if isinstance(x, Tensor) and x.numel():
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            found.append(Extent(name, x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()))
    return found


@contextlib.contextmanager
def memory_checked() -> Iterator[Accesses]:
    """Inside, every load and store of a kernel that is not masked out must lie inside the memory of one of
    the tensors which that launch was given.

    Raises:
        RuntimeError: Triton's interpreter is not in force.
        AssertionError: from the launch, naming the kernel, the kind of access, how many addresses are outside
            and the nearest argument.
    """
    from triton import knobs
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    if not knobs.runtime.interpret:
        raise RuntimeError("memory_checked: expected TRITON_INTERPRET=1 in the environment")
    seen = Accesses()
    launch = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def checked_launch(grid: Any, *arguments: Any, **options: Any) -> None:
        seen.launches += 1
        seen.kernel, seen.extents = grid.fn.__name__, extents_of(grid.arg_names, arguments)
        try:
            launch(grid, *arguments, **options)
        except InterpreterError as error:
            # The interpreter wraps whatever a kernel raises, once per function of the kernel.
            if seen.fault is None:
                raise
            fault, seen.fault = seen.fault, None
            raise fault from error

    def checked_load(builder: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        seen.loads += seen.check("load", pointers.data, mask.data, _width(pointers))
        return load(builder, pointers, mask, *rest, **options)

    def checked_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        seen.stores += seen.check("store", pointers.data, mask.data, _width(pointers))
        return store(builder, pointers, value, mask, *rest, **options)

    with (
        mock.patch.object(GridExecutor, "__call__", checked_launch),
        mock.patch.object(InterpreterBuilder, "create_masked_load", checked_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", checked_store),
    ):
        yield seen


def _width(pointers: Any) -> int:
    """Bytes of what the interpreter's pointers point to."""
    return max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
