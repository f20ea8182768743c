"""Entries of the tables in `planning/tables` that hold sizes of Triton kernels: which there are, which sizes
may fit, and which calls use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from tilefold.errors import ArgumentError
from tilefold.planning import tuned

from .cases import BenchCase

#: Rows, keys, warps and stages, and what else the table says; None for dK and dV apart.
Sizes = tuple[int, ...] | None

#: In the order of their tuning: dK and dV apart are known before they meet the kernel of both. The values
#: are the arguments whose gradients call the kernel and no other one of these.
KERNELS: Mapping[str, tuple[str, ...]] = {
    "forward": (),
    "queries": ("q",),
    "dk": ("k",),
    "dv": ("v",),
    "keys": ("k", "v"),
    "bias": ("bias",),
}
#: Kinds of entries: a mask of `cases.MASKS`, the shape of a bias, and the length of a timed sequence as a
#: multiple of `Scale.length`. "any" is the entry of whatever has none of its own.
KINDS: Mapping[str, tuple[str, str, int]] = {
    "any": ("causal", "", 1),
    "full": ("none", "", 1),
    "short": ("window", "", 2),
    "rows": ("documents", "", 2),
    "cols": ("columns", "", 2),
    "bits": ("bigbird", "", 2),
    "bias": ("none", "HQK", 1),
}
#: By bits; the first dtype is the one that is timed.
DTYPES = {16: ("bf16", "fp16"), 32: ("fp32",)}
#: Head sizes of keys and values where they are not both the entry's: absorbed MLA.
DIMS = {576: (576, 512)}
ROWS = KEYS = (16, 32, 64, 128)
WARPS, STAGES = (4, 8), (1, 2, 3, 4)
#: Registers of a thread, threads of a warp, bytes of a register.
REGISTERS, THREADS = 255, 32
#: What the interpreter takes on a CPU.
INTERPRETED = (32, 32, 4, 1)
#: Lengths of calls of the kind "full" are multiples of this: no tile lies over an edge.
WHOLE = 128


@dataclass(frozen=True)
class Entry:
    """An entry of a table: "triton/forward/16/128" or "triton/forward/16/128/rows"."""

    kernel: str
    bits: int
    head: int
    kind: str = "any"

    @property
    def name(self) -> str:
        name = f"triton/{self.kernel}/{self.bits}/{self.head}"
        return name if self.kind == "any" else f"{name}/{self.kind}"

    @property
    def names(self) -> list[str]:
        """Where its sizes are looked up, itself first."""
        return list(dict.fromkeys([self.name, replace(self, kind="any").name]))

    @property
    def dims(self) -> tuple[int, int]:
        return DIMS.get(self.head, (self.head, self.head))

    # What tuning asks of an entry.

    backend: ClassVar[str] = "triton"

    @property
    def gradients(self) -> tuple[str, ...]:
        """The arguments whose gradients call the kernel; none for a forward pass."""
        return KERNELS[self.kernel]

    def current(self, device_type: str) -> Sizes:
        """The sizes in use."""
        return tuned.sizes(self.names, device_type, INTERPRETED if device_type == "cpu" else None)

    def stored(self, sizes: Sizes) -> list[int] | None:
        """Sizes as they stand in a table."""
        return None if sizes is None else list(sizes)

    def in_short(self, sizes: Sizes) -> str:
        """ "128 x 64, 4 warps, 3 stages"."""
        if sizes is None:
            return "apart"
        rows, keys, warps, stages, *rest = sizes
        parts = [f"{rows} x {keys}", f"{warps} warps", f"{stages} stage{'s' * (stages > 1)}"]
        parts += [f"{loops} loop{'s' * (loops > 1)}" for loops in rest[:1]]
        return ", ".join(parts + [f"{registers} registers" for registers in rest[1:] if registers])

    def fits(self, sizes: tuple[int, ...], shared: int) -> bool:
        return fits(self, sizes, shared)

    def first_candidates(self, old: Sizes) -> list[Sizes]:
        return first_candidates(self, old)

    def deeper(self, fastest: Sequence[Sizes]) -> list[Sizes]:
        return deeper(self, fastest)

    def timed_case(self, scale: Scale) -> BenchCase:
        return timed_case(self, scale)

    def checked_cases(self, scale: Scale, everything: bool = False) -> list[BenchCase]:
        return checked_cases(self, scale, everything)

    def in_force(self, sizes: Sizes) -> AbstractContextManager[None]:
        return in_force(self, sizes)


@dataclass(frozen=True)
class Scale:
    """How large the calls are.

    Attributes:
        odd: lengths of queries and keys of the calls that are checked; squares have the second one.
        length, tokens, channels: of the calls that are timed: about `tokens // length` sequences, and
            `channels` columns of all heads.
    """

    odd: tuple[int, int] = (645, 709)
    length: int = 4096
    tokens: int = 16384
    channels: int = 2048


# Which entries.


def choose(
    arch: str,
    kernels: Sequence[str] = (),
    heads: Sequence[int] = (),
    bits: Sequence[int] = (16,),
    kinds: Sequence[str] = (),
) -> list[Entry]:
    """Entries of the shipped table of `arch`, those of dK and dV together wherever there are some for dK; in
    the order of their tuning. With `kinds`, every combination, whether the table has it or not.

    Raises:
        ArgumentError: names or numbers that no entry has.
    """
    table = [parse(name) for name in tuned.shipped(arch) if name.startswith("triton/")]
    table += [replace(entry, kernel="keys") for entry in table if entry.kernel == "dk"]
    known = sorted({entry.head for entry in table})
    for argument, given, possible in (
        ("kernels", kernels, list(KERNELS)),
        ("heads", heads, known),
        ("bits", bits, list(DTYPES)),
        ("kinds", kinds, list(KINDS)),
    ):
        for value in given:
            if value not in possible:
                expected = ", ".join(map(str, possible))
                raise ArgumentError(f"{argument}: expected some of {expected}, got {value!r}")
    if kinds:
        table = [
            Entry(kernel, width, head, kind)
            for kernel in KERNELS for width in bits for head in known for kind in kinds
            if kernel != "bias" or kind == "any"
        ]  # fmt: skip
    found = [
        entry
        for entry in dict.fromkeys(table)
        if entry.bits in bits
        and (not kernels or entry.kernel in kernels)
        and (not heads or entry.head in heads)
    ]
    order = list(KERNELS)
    return sorted(found, key=lambda e: (e.bits, e.head, list(KINDS).index(e.kind), order.index(e.kernel)))


def parse(name: str) -> Entry:
    """The entry of a name."""
    _, kernel, bits, head, *kind = name.split("/")
    return Entry(kernel, int(bits), int(head), *kind)


# Which candidates.


def shared_memory(device: torch.device | str) -> int:
    """Bytes that one program can have; without bound on a CPU."""
    if torch.device(device).type != "cuda":
        return 1 << 62
    properties: Any = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block


def fits(entry: Entry, sizes: tuple[int, ...], shared: int) -> bool:
    """Whether sizes may fit: the stages of the pipeline beyond the one at work into shared memory, and what
    is summed, with one tile of scores, into registers.
    """
    rows, keys, warps, stages = sizes[:4]
    D, Dv = entry.dims
    by_key = entry.kernel in ("keys", "dk", "dv")
    moving = (rows if by_key else keys) * (D + Dv) * entry.bits // 8
    sums = {
        "forward": rows * Dv, "queries": rows * D, "dk": keys * D, "dv": keys * Dv, "keys": keys * (D + Dv),
        "bias": rows * keys,
    }  # fmt: skip
    held = sums[entry.kernel] + rows * keys
    return max(stages - 1, 1) * moving <= shared and held <= REGISTERS * THREADS * warps


def first_candidates(entry: Entry, old: Sizes) -> list[Sizes]:
    """Every shape of tiles and number of warps with the other numbers of the old sizes, those most like them
    first. For dK and dV together, a kernel each comes before all.
    """
    rows, keys, warps, *rest = old or (64, 64, 4, 2)

    def steps(sizes: tuple[int, ...]) -> int:
        pairs = zip(sizes, (rows, keys, warps), strict=False)
        return sum(abs(one.bit_length() - other.bit_length()) for one, other in pairs)

    grid = sorted(((r, k, w, *rest) for r in ROWS for k in KEYS for w in WARPS), key=steps)
    return [*([None] if entry.kernel == "keys" else []), *grid]


def deeper(entry: Entry, fastest: Sequence[Sizes]) -> list[Sizes]:
    """The fastest candidates with other stages and the other number of loops, which the kernel of the bias
    does not have.
    """
    found: list[Sizes] = []
    for sizes in fastest:
        if sizes is not None:
            rows, keys, warps, old, *rest = sizes
            loops, *registers = rest or [2]
            found += [(rows, keys, warps, stages, *rest) for stages in STAGES]
            if entry.kernel != "bias":
                found.append((rows, keys, warps, old, 3 - loops, *registers))
    return found


# Which calls.


def timed_case(entry: Entry, scale: Scale) -> BenchCase:
    """The typical call of an entry."""
    mask, bias, factor = KINDS[entry.kind]
    length = min(scale.length * factor, scale.tokens)
    if entry.kind == "full":
        # Its calls have whole tiles only.
        length = -(-length // WHOLE) * WHOLE
    if entry.kernel == "bias":
        # Shared by two batch elements or more: only then the kernel is called.
        bias, length = "1HQK", min(length, scale.tokens // 2)
    heads = max(1, scale.channels // entry.head)
    return BenchCase(
        entry.name, "tuning", max(1, scale.tokens // length), (heads, heads), (length, length), entry.dims,
        DTYPES[entry.bits][0], mask, bias=bias, bias_grad=entry.kernel == "bias",
    )  # fmt: skip


def checked_cases(entry: Entry, scale: Scale, everything: bool = False) -> list[BenchCase]:
    """Small calls that use an entry, of odd lengths but for the kind "full". A causal mask and none, or the
    mask of the entry's kind, since others do not use it.

    Args:
        everything: every dtype, for the entry "any" all kinds of masks, and dropout, which takes fast memory
            and registers of its own, at odd and at whole lengths.
    """
    (Lq, Lk), case = scale.odd, timed_case(entry, scale)
    small = replace(case, batch=2, heads=(4, 2), lengths=(Lk, Lk))
    if entry.kind == "full":
        small = replace(small, lengths=(-(-Lq // WHOLE) * WHOLE, -(-2 * Lk // WHOLE) * WHOLE))
    cases = [small]
    if entry.kind in ("any", "bias"):
        cases = [replace(small, mask="causal", lengths=(Lq, Lk)), replace(small, mask="none")]
    if case.bias:
        # A bias whose lines begin at multiples of eight elements is loaded in another way.
        cases.append(replace(small, lengths=(Lk // 8 * 8, Lk // 8 * 8)))
    if everything and entry.kind == "any":
        cases += [replace(small, mask=KINDS[kind][0]) for kind in ("short", "rows", "cols", "bits")]
    if everything and entry.kind != "full":
        whole = -(-Lk // WHOLE) * WHOLE
        cases += [replace(small, dropout_p=0.25, lengths=(n, n)) for n in (Lk, whole)]
    dtypes = DTYPES[entry.bits] if everything else DTYPES[entry.bits][:1]
    return [replace(one, dtype=dtype) for dtype in dtypes for one in cases]


@contextmanager
def in_force(entry: Entry, sizes: Sizes) -> Iterator[None]:
    """Inside a `with`, calls that use the entry take these sizes; and no kernel for dK and dV together stands
    before one that is tried alone.
    """
    with ExitStack() as stack:
        stack.enter_context(tuned.trying(entry.name, sizes))
        if entry.kernel in ("dk", "dv"):
            for kind in KINDS:
                stack.enter_context(tuned.trying(replace(entry, kernel="keys", kind=kind).name, None))
        yield
