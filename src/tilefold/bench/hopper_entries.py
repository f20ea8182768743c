"""Entries of the table of the Hopper kernel: which there are, which sizes may fit, and which calls use them;
as `entries` is for the Triton kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tilefold.errors import ArgumentError
from tilefold.planning import tuned

from .cases import BenchCase
from .entries import DTYPES, KERNELS, Entry, Scale
from .entries import KINDS as TRITON_KINDS
from .entries import choose as triton_entries

#: The table that they are in.
ARCHITECTURE = "sm90"
#: Names of a kernel's sizes with their values, in the order of the names.
Sizes = tuple[tuple[str, Any], ...]

#: By the kind of call: a mask of `cases.MASKS`, the shape of a bias, keys of the timed sequence.
KINDS: Mapping[str, tuple[str, str, int]] = {
    "full": ("none", "", 4096),
    "short full": ("none", "", 1024),
    "band": ("causal", "", 4096),
    "short band": ("causal", "", 1024),
    "window": ("window", "", 8192),
    "rows": ("documents", "", 8192),
    "cols": ("columns", "", 8192),
    "bits": ("bigbird", "", 8192),
    "bias": ("causal", "HQK", 4096),
}
#: Widths of tiles, and which of them have calls of a kind; of the others all have.
WIDTHS: tuple[int, ...] = (64, 128, 256)
ONLY: Mapping[str, tuple[int, ...]] = {"short full": (64, 128), "short band": (64, 128)}
#: Rows of a warp group, bytes of shared memory that a program can have, and what it has beside its tiles.
LINES, SHARED, BESIDE = 64, 227 << 10, 3 << 10
#: Registers of the consumers' threads, by how many consumers there are: what the core has.
REGISTERS: Mapping[int, int] = {2: 240, 3: 160}
FLAGS = ("HELD", "EARLY", "TURNS", "JOINED", "HALVES")


def as_sizes(value: Mapping[str, Any]) -> Sizes:
    return tuple(sorted(value.items()))


@dataclass(frozen=True)
class HopperEntry:
    """An entry of a table: "hopper/128/band"."""

    head: int
    kind: str

    backend: ClassVar[str] = "hopper"
    kernel: ClassVar[str] = "hopper"
    bits: ClassVar[int] = 16
    #: The kernel has no backward pass.
    gradients: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        return f"hopper/{self.head}/{self.kind}"

    def current(self, device_type: str) -> Sizes:
        """The sizes in use."""
        return as_sizes(tuned.hopper_sizes(self.head, self.kind))

    def stored(self, sizes: Sizes) -> dict[str, Any]:
        """Sizes as they stand in a table."""
        return dict(sizes)

    def in_short(self, sizes: Sizes) -> str:
        """ "128 x 64, 4 stages, held"."""
        value = dict(sizes)
        parts = [f"{LINES * value['GROUPS']} x {value['BN']}", f"{value['STAGES']} stages"]
        parts += [f"{value['SLOTS']} slots"] if value.get("SLOTS", 1) > 1 else []
        return ", ".join(parts + [name.lower() for name in FLAGS if value.get(name)])

    # Candidates.

    def fits(self, sizes: Any, shared: int) -> bool:
        """Whether a program's tiles fit into shared memory and its sums into registers, and whether the
        kernel can work like that.
        """
        value = dict(sizes)
        groups, keys, stages = value["GROUPS"], value["BN"], value["STAGES"]
        results = 0.5 if value.get("HALVES") else 1.0
        rows = groups * LINES * (value.get("SLOTS", 1) + results)
        bytes_ = 2 * self.head * (rows + 2 * stages * keys) + BESIDE
        works = tuned.makes_sense(self.name, value) and not (value.get("TURNS") and self.masked)
        # Sums, a tile of scores and its weights, of 64 rows in 128 threads.
        held = (self.head + keys + keys // 2) // 2 + (self.head // 4 if value.get("HELD") else 0)
        return bytes_ <= shared and held <= value["REGISTERS"] and works

    @property
    def masked(self) -> bool:
        return self.kind not in ("full", "short full")

    def first_candidates(self, old: Sizes) -> list[Sizes]:
        """Every shape of tiles with as many stages as fit, q in shared memory or in registers; those most
        like the old ones first.
        """
        before = dict(old)
        found = []
        for keys, groups in ((keys, groups) for groups in REGISTERS for keys in (64, 128)):
            for held in (False, True):
                value: dict[str, Any] = {"BN": keys, "GROUPS": groups, "REGISTERS": REGISTERS[groups]}
                value |= {"HELD": True} if held else {}
                value |= {"HALVES": True} if before.get("HALVES") else {}
                found += self._deepest(value)
        return sorted(found, key=lambda sizes: len(set(sizes) ^ set(old)))

    def _deepest(self, value: dict[str, Any]) -> list[Sizes]:
        for stages in range(tuned.HOPPER["STAGES"].stop - 1, 1, -1):
            sizes = as_sizes(value | {"STAGES": stages})
            if self.fits(sizes, SHARED):
                return [sizes]
        return []

    def deeper(self, fastest: Sequence[Sizes]) -> list[Sizes]:
        """The fastest candidates with other stages, two q in shared memory, and each flag the other way."""
        found = []
        for sizes in fastest:
            value = dict(sizes)
            found += [as_sizes(value | {"STAGES": value["STAGES"] + more}) for more in (-1, 1)]
            found.append(as_sizes(value | {"SLOTS": 3 - value.get("SLOTS", 1)}))
            found += [as_sizes(value | {flag: not value.get(flag, False)}) for flag in FLAGS]
        return [sizes for sizes in found if self.fits(sizes, SHARED)]

    # Calls.

    def timed_case(self, scale: Scale) -> BenchCase:
        """The typical call."""
        mask, bias, length = KINDS[self.kind]
        heads = max(1, scale.channels // self.head)
        length = min(length, scale.tokens)
        return BenchCase(
            self.name, "tuning", max(1, scale.tokens // length), (heads, heads), (length, length),
            (self.head, self.head), DTYPES[16][0], mask, bias=bias,
        )  # fmt: skip

    def checked_cases(self, scale: Scale, everything: bool = False) -> list[BenchCase]:
        """Small calls of the same kind and one as long as what is timed; `everything`: in both dtypes."""
        (Lq, Lk), case = scale.odd, self.timed_case(scale)
        if self.kind in ("full", "band"):
            # Short ones have an entry of their own.
            Lq, Lk = Lq + 1024, Lk + 1024
        small = replace(case, batch=2, heads=(4, 2), lengths=(Lk, Lk))
        cases = [small]
        if self.kind in ("full", "short full", "bias", "window"):
            whole = -(-Lk // 512) * 512
            cases += [replace(small, lengths=(Lq, Lk)), replace(small, lengths=(whole // 2, whole))]
        # Long calls are compiled in another way: what is timed is checked, for few heads.
        cases.append(replace(case, batch=1, heads=(2, 1)))
        dtypes = DTYPES[16] if everything else DTYPES[16][:1]
        return [replace(one, dtype=dtype) for dtype in dtypes for one in cases]

    @contextmanager
    def in_force(self, sizes: Any) -> Iterator[None]:
        """Inside a `with`, calls that use the entry take these sizes."""
        with tuned.trying(self.name, dict(sizes)):
            yield


#: What `tune_kernels` tunes.
AnyEntry = Entry | HopperEntry


def choose(
    arch: str,
    kernels: Sequence[str] = (),
    heads: Sequence[int] = (),
    bits: Sequence[int] = (16,),
    kinds: Sequence[str] = (),
) -> list[AnyEntry]:
    """Entries of the Triton kernels, see `entries.choose`, and on "sm90" those of the Hopper kernel, which is
    called "hopper" here: of all its widths and kinds, or some.

    Raises:
        ArgumentError: names or numbers that no entry has.
    """
    here = arch == ARCHITECTURE
    possible = {
        "kernels": (kernels, [*KERNELS, *((HopperEntry.kernel,) if here else ())]),
        "kinds": (kinds, list(dict.fromkeys([*TRITON_KINDS, *(KINDS if here else ())]))),
    }
    for argument, (given, known) in possible.items():
        for value in given:
            if value not in known:
                raise ArgumentError(f"{argument}: expected some of {', '.join(known)}, got {value!r}")
    theirs = [kernel for kernel in kernels if kernel != HopperEntry.kernel]
    their_kinds = [kind for kind in kinds if kind in TRITON_KINDS]
    found: list[AnyEntry] = []
    if (theirs or not kernels) and (their_kinds or not kinds):
        found += triton_entries(arch, theirs, heads, bits, their_kinds)
    if here and HopperEntry.bits in bits and (not kernels or HopperEntry.kernel in kernels):
        found += [
            HopperEntry(width, kind)
            for width in WIDTHS
            for kind in KINDS
            if width in ONLY.get(kind, WIDTHS) and width in (heads or WIDTHS) and kind in (kinds or KINDS)
        ]
    if not found:
        asked = f"{list(kernels)}, heads {list(heads)}, bits {list(bits)}, kinds {list(kinds)}"
        raise ArgumentError(f"kernels: expected a choice that some entry of the table has, got {asked}")
    return found
