"""Runs the Hopper kernel on a CPU: its roles as threads, its barriers with their phases, its copies and
products on torch tensors. What is read too early is NaN, products are taken when they are waited for, and who
waits for ever is told so.

Layouts, registers and the order of the machine's memory are not there; numbers and the protocol are.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilefold.backends.hopper as package
from tilefold.backends.hopper import variant
from tilefold.backends.hopper.variant import Variant

#: Seconds after which a barrier that nobody completes is a deadlock.
PATIENCE = 5.0


# Values. Scalars are numbers that know `to`; everything else is a torch tensor.


class Real(float):
    def to(self, dtype: torch.dtype) -> Real:
        return self


class Whole(int):
    def to(self, dtype: torch.dtype) -> Any:
        return Real(self) if dtype.is_floating_point else self


def _lifted(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: Whole, other: Any) -> Any:
        if isinstance(other, Tensor | float | Pointer):
            return NotImplemented
        found = plain(int(self), int(other))
        return found if isinstance(found, bool) else Whole(found)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "xor", "and", "or", "rshift"):
    for _way in ("", "r"):
        setattr(Whole, f"__{_way}{_name}__", _lifted(f"__{_way}{_name}__"))


class Values(torch.Tensor):
    """A tensor whose layout can be asked for."""

    @property
    def type(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return types.SimpleNamespace(layout=None)


def values(x: Any) -> Any:
    return x.as_subclass(Values) if isinstance(x, Tensor) else x


def scalar(x: Any) -> Any:
    return Real(x) if x.dtype.is_floating_point else Whole(int(x))


class Pointer:
    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + other)


# Shared memory and barriers.


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            self.changed.notify_all()


class Memory:
    """Shared memory, or a part of it."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def index(self, n: int) -> Memory:
        return Memory(self.held[int(n)])

    def reshape(self, shape: Sequence[int]) -> Memory:
        return Memory(self.held.view(*shape))

    def slice(self, start: int, length: int) -> Memory:
        return Memory(self.held[start : start + length])

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.held.permute(*order))

    def load(self, layout: Any) -> Tensor:
        return values(self.held.clone())

    def store(self, value: Tensor) -> None:
        self.held.copy_(value)


class Descriptor:
    """A tensor map of `[B, H, L, X]`."""

    def __init__(self, x: Tensor, block: tuple[int, ...]) -> None:
        starts = [stride * x.element_size() % 16 for stride in x.stride()[:-1]]
        assert not any(starts) and x.stride(-1) == 1, "TMA copies rows that start at multiples of 16 bytes"
        self.x, self.block, self.dtype, self.layout = x, block, x.dtype, None
        self.shape, self.strides = [Whole(n) for n in x.shape], [Whole(n) for n in x.stride()]
        self.block_type = types.SimpleNamespace(nbytes=block[2] * block[3] * x.element_size())

    def part(self, at: Sequence[Any]) -> tuple[Any, Any]:
        """Where the block meets the tensor, and where that lies in the block."""
        b, h, row, column = map(int, at)
        rows = max(0, min(self.block[2], self.x.shape[2] - row))
        columns = max(0, min(self.block[3], self.x.shape[3] - column))
        whole = self.x[b, h, row : row + rows, column : column + columns]
        return whole, (0, 0, slice(rows), slice(columns))


class MBarrier:
    #: Set when a role has failed: then all others give up, too.
    failed = threading.Event()
    MBarrierLayout = staticmethod(lambda: "barrier")

    @staticmethod
    def init(bar: Memory, count: int) -> None:
        bar.held[0].count = bar.held[0].pending = count

    @staticmethod
    def expect(bar: Memory, size: int) -> None:
        b = bar.held[0]
        with b.changed:
            b.bytes += size
            b.pending -= 1
            b.settle()

    @staticmethod
    def arrive(bar: Memory, count: int = 1) -> None:
        b = bar.held[0]
        with b.changed:
            assert b.pending >= count, "more arrivals than a phase has"
            b.pending -= count
            b.settle()

    @staticmethod
    def wait(bar: Memory, parity: Any, pred: Any = True) -> None:
        b = bar.held[0]
        if pred:
            end = time.monotonic() + PATIENCE
            with b.changed:
                while b.phase == int(parity):
                    assert not MBarrier.failed.is_set(), "another role has failed"
                    assert time.monotonic() < end, "deadlock"
                    b.changed.wait(0.05)


def copy_in(desc: Descriptor, at: Sequence[Any], bar: Memory, place: Memory) -> None:
    b = bar.held[0]
    with b.changed:
        place.held.fill_(0)
        whole, inside = desc.part(at)
        place.held[inside] = whole
        b.bytes -= desc.block_type.nbytes
        b.settle()


#: Copies to `out` of this thread: those that still read their place, and those that have left it but are not
#: there yet. Who does not settle may see the first one arrive last.
_leaving = threading.local()


def copy_out(desc: Descriptor, at: Sequence[Any], place: Memory) -> None:
    whole, inside = desc.part(at)
    _leaving.reading = [*getattr(_leaving, "reading", ()), (whole, place.held, inside)]


def copy_out_wait(left: int) -> None:
    assert left == 0
    gone = [(whole, held[inside].clone()) for whole, held, inside in getattr(_leaving, "reading", ())]
    _leaving.flying = [*getattr(_leaving, "flying", ()), *gone]
    _leaving.reading = []


def settle() -> None:
    copy_out_wait(0)
    for whole, content in reversed(_leaving.flying):
        whole.copy_(content)
    _leaving.flying = []


# Products.


class Token:
    """A product that is taken when somebody waits for it."""

    def __init__(self, take: Callable[[], Tensor]) -> None:
        self.take = take


def _operand(x: Any) -> Tensor:
    return (x.held if isinstance(x, Memory) else x).float()


def warpgroup_mma(a: Any, b: Memory, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Token:
    assert is_async
    return Token(lambda: values(_operand(a) @ _operand(b) + (acc if use_acc else 0.0)))


def warpgroup_mma_wait(left: int, tokens: Sequence[Token]) -> Tensor:
    (token,) = tokens
    return token.take()


# The language.


def _load(at: Pointer, mask: Any = None, other: Any = 0, volatile: bool = False) -> Any:
    if isinstance(at.at, Tensor):
        place = at.at.long()
        inside = torch.ones_like(place, dtype=torch.bool) if mask is None else mask
        # An address outside is an error, as it may be on a GPU.
        found = at.memory[torch.where(inside, place, torch.zeros_like(place))]
        wide = found if found.dtype.is_floating_point else found.long()
        return values(torch.where(inside, wide, torch.full_like(wide, other)))
    if mask is not None and not mask:
        return Whole(other)
    assert 0 <= int(at.at) < at.memory.numel()
    return scalar(at.memory[int(at.at)])


def _store(at: Pointer, value: Any, mask: Any = None) -> None:
    if isinstance(at.at, Tensor):
        inside = torch.ones_like(at.at, dtype=torch.bool) if mask is None else mask.expand_as(at.at)
        at.memory[at.at.long()[inside]] = value[inside].to(at.memory.dtype)
    elif mask is None or mask:
        at.memory[int(at.at)] = value


def _pair(call: Callable[[Tensor, Tensor], Tensor], plain: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def both(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return values(call(torch.as_tensor(a), torch.as_tensor(b)))
        return Whole(plain(a, b))

    return both


def _where(condition: Any, a: Any, b: Any) -> Any:
    if any(isinstance(x, Tensor) for x in (condition, a, b)):
        return values(torch.where(torch.as_tensor(condition), a, b))
    return (Whole(a) if isinstance(a, int) else a) if condition else (Whole(b) if isinstance(b, int) else b)


def _most(x: Tensor, axis: int) -> Any:
    # As on the machine, a NaN is passed over.
    clean = torch.where(x != x, -torch.inf, x) if x.dtype.is_floating_point else x
    found = clean.amax(axis)
    return scalar(found) if found.dim() == 0 else values(found)


def _sum(x: Tensor, axis: int) -> Any:
    found = x.sum(axis)
    return scalar(found) if found.dim() == 0 else values(found)


def _specialise(roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    failures: list[BaseException] = []

    def play(role: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            # Threads do not inherit it.
            with torch.no_grad():
                role(*arguments)
                settle()
        except BaseException as failure:
            failures.append(failure)
            MBarrier.failed.set()

    MBarrier.failed.clear()
    threads = [threading.Thread(target=play, args=role) for role in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Memory:
    if layout == "barrier":
        return Memory([[Barrier()] for _ in range(shape[0])])
    empty = torch.full(tuple(shape), float("nan") if dtype.is_floating_point else -1, dtype=dtype)
    return Memory(empty)


class Language:
    """`gl`."""

    float32, int32, int64, bfloat16, float16 = (
        torch.float32, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    )  # fmt: skip
    tensor = shared_memory_descriptor = object
    program = 0
    constexpr = staticmethod(lambda x: x)
    to_tensor = staticmethod(Whole)
    static_range = staticmethod(range)
    load, store, where, max = (staticmethod(call) for call in (_load, _store, _where, _most))
    sum = staticmethod(_sum)
    minimum = staticmethod(_pair(torch.minimum, builtins.min))
    maximum = staticmethod(_pair(torch.maximum, builtins.max))
    exp2 = staticmethod(lambda x: values(torch.exp2(x)))
    log2 = staticmethod(lambda x: values(torch.log2(x)))
    permute = staticmethod(lambda x, order: values(x.permute(order)))
    split = staticmethod(lambda x: (values(x[..., 0]), values(x[..., 1])))
    abs = staticmethod(lambda x: values(x.abs()))
    fma = staticmethod(lambda a, b, c: values(a * b + c))
    arange = staticmethod(lambda start, end, layout=None: values(torch.arange(start, end)))
    full = staticmethod(lambda shape, x, dtype, layout=None: values(torch.full(tuple(shape), x, dtype=dtype)))
    convert_layout = staticmethod(lambda x, layout: x)
    allocate_shared_memory = staticmethod(_allocate)
    warp_specialize = staticmethod(_specialise)
    NVMMADistributedLayout = SliceLayout = DotOperandLayout = BlockedLayout = SwizzledSharedLayout = (
        staticmethod(lambda *_: None)
    )

    @classmethod
    def program_id(cls, axis: int) -> Whole:
        return Whole(cls.program)


def _jit(function: Any = None, **_: Any) -> Any:
    return function if callable(function) else _jit


#: Pointers in shared memory, by their places.
_kept: dict[int, Pointer] = {}


def _modules() -> types.ModuleType:
    """The kernel's own files, on this language instead of Gluon."""
    names = "emulated_hopper"
    root = types.ModuleType(names)
    root.__path__ = []
    sys.modules[names] = root
    dialect = types.ModuleType(f"{names}.dialect")
    here = globals()
    for name in ("copy_in", "copy_out", "copy_out_wait", "warpgroup_mma", "warpgroup_mma_wait"):
        setattr(dialect, name, here[name])
    vars(dialect).update(
        gl=Language, mbarrier=MBarrier, aggregate=lambda cls: cls,
        fence_async_shared=lambda: None, tma=types.SimpleNamespace(tensor_descriptor=object),
        gluon=types.SimpleNamespace(jit=_jit, constexpr_function=_jit),
    )  # fmt: skip
    machine = types.ModuleType(f"{names}.machine")
    vars(machine).update(
        packed=lambda x, dtype: values(x.to(dtype)),
        unpacked=lambda x, dtype, layout: x,
        log2=Language.log2,
        begin_beside=lambda: None,
        settle=settle,
        keep_pointer=lambda place, pointer: _kept.__setitem__(place.held.data_ptr(), pointer),
        kept_pointer=lambda place, dtype: _kept[place.held.data_ptr()],
    )
    vars(root).update(dialect=dialect, variant=variant, machine=machine)
    for name in ("dialect", "variant", "machine"):
        sys.modules[f"{names}.{name}"] = getattr(root, name)
    folder = Path(str(package.__file__)).parent
    for name in ("program", "mask", "score", "finish", "attend", "careful", "forward"):
        spec = importlib.util.spec_from_file_location(f"{names}.{name}", folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"{names}.{name}"] = module
        setattr(root, name, module)
        spec.loader.exec_module(module)
    return root.forward


@functools.cache
def modules() -> types.ModuleType:
    """`forward.py` in this language."""
    return _modules()


def part(name: str) -> types.ModuleType:
    """Another of the kernel's files in this language."""
    return sys.modules[f"{modules().__package__}.{name}"]


def run(C: Variant, programs: int, mapped: Sequence[Tensor], arguments: Sequence[Any]) -> None:
    """What `launch` does on a GPU; arguments as there."""
    kernel = modules().forward_kernel
    maps = [Descriptor(x.detach(), block) for x, block in zip(mapped, variant.blocks_of(C), strict=True)]

    def argument(x: Any) -> Any:
        if isinstance(x, Tensor):
            # As memory: whatever its shape, in the order in which it lies.
            x = x.detach()
            size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
            return Pointer(x.as_strided((size,), (1,)))
        return Whole(x) if isinstance(x, int) else x

    for program in range(programs):
        Language.program = program
        kernel(*maps, *map(argument, arguments), C)
