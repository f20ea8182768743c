"""The named cases that are measured, in one table: bench, tune and tests take their shapes from here.

A mask is a function of the lengths, and its parameters are shares of them. So a case has a short version of
the same family, which the gate checks against float64.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold import masks
from tilefold.errors import ArgumentError
from tilefold.testing import inputs
from tilefold.testing.cases import DTYPES, Call

CPU, CUDA = ("cpu",), ("cuda",)


@dataclass(frozen=True)
class BenchCase:
    """One call in metadata.

    Attributes:
        name: unique; what is typed on the command line.
        about: one short sentence.
        batch, heads, lengths, dims: `B`, `(Hq, Hk)`, `(Lq, Lk)`, `(D, Dv)`.
        dtype: a name of `testing.cases.DTYPES`.
        mask: a name of `MASKS`.
        softcap, alibi, sink, dropout_p: options of the scores.
        bias: "" or the shape of the additive bias, such as "HQK" or "11QK".
        bias_grad: whether the bias wants a gradient.
        backward: whether the backward pass is measured too.
        devices: the device kinds that the shapes are meant for.
    """

    name: str
    about: str
    batch: int = 1
    heads: tuple[int, int] = (8, 8)
    lengths: tuple[int, int] = (1024, 1024)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "fp32"
    mask: str = "none"
    softcap: float | None = None
    alibi: bool = False
    bias: str = ""
    bias_grad: bool = False
    sink: bool = False
    dropout_p: float = 0.0
    backward: bool = True
    devices: tuple[str, ...] = CPU

    @property
    def wanted(self) -> tuple[str, ...]:
        """The arguments that get gradients."""
        return ("q", "k", "v", *(["bias"] if self.bias_grad else []), *(["sink"] if self.sink else []))

    @property
    def shape(self) -> str:
        """The sizes as text."""
        (Hq, Hk), (Lq, Lk), (D, Dv) = self.heads, self.lengths, self.dims
        heads, lengths, dims = (f"{a}" if a == b else f"{a}/{b}" for a, b in ((Hq, Hk), (Lq, Lk), (D, Dv)))
        return f"B {self.batch} H {heads} L {lengths} D {dims} {self.dtype}"


def offsets(length: int, about: int) -> Tensor:
    """int32: offsets of documents of 0.7 to 1.3 times `about` tokens, from 0 to `length`."""
    generator, cuts = inputs.generator(1), [0]
    while cuts[-1] < length:
        size = int(torch.randint(about * 7 // 10, about * 13 // 10, (1,), generator=generator))
        cuts.append(min(length, cuts[-1] + max(size, 1)))
    return torch.tensor(cuts, dtype=torch.int32)


def document_columns(length: int, about: int) -> Tensor:
    """int32 `[1, 1, length, 1]` for `columns(causal=True)`: each key is hidden from the rows after its
    document.
    """
    cuts = offsets(length, about).long()
    document = torch.searchsorted(cuts, torch.arange(length), right=True)
    return cuts[document].to(torch.int32).view(1, 1, length, 1)


def _block(length: int) -> int:
    """Tokens per block of a block mask: 64 from 8k on, fewer in short versions."""
    return min(64, max(8, length // 128))


#: `(B, Lq, Lk) -> Mask`, tensors on the CPU.
MASKS: Mapping[str, Callable[[int, int, int], masks.Mask | None]] = {
    "none": lambda B, Lq, Lk: None,
    "causal": lambda B, Lq, Lk: masks.causal(),
    "window": lambda B, Lq, Lk: masks.window(Lk // 8 - 1, 0),
    "documents": lambda B, Lq, Lk: masks.documents(offsets(Lq, Lq // 8), within=masks.causal()),
    # The last rows belong to no document.
    "documents_and_rest": lambda B, Lq, Lk: masks.documents(
        offsets(Lq - Lq // 16, Lq // 64), offsets(Lk - Lk // 16, Lk // 64), within=masks.causal()
    ),
    "prefix_lm": lambda B, Lq, Lk: masks.prefix(Lk // 4) | masks.causal(),
    "padding": lambda B, Lq, Lk: masks.padding(torch.arange(B, 0, -1, dtype=torch.int32) * Lk // B),
    "columns": lambda B, Lq, Lk: masks.columns(document_columns(Lk, Lk // 8), causal=True),
    "bigbird": lambda B, Lq, Lk: masks.bigbird(block=_block(Lk)),
    "random_blocks": lambda B, Lq, Lk: masks.random_blocks(0.2, block=_block(Lk)),
    "dilated": lambda B, Lq, Lk: masks.dilated(max(Lk // 128, 2), 8),
}


def _plain() -> list[BenchCase]:
    """Full and causal on a CPU."""
    return [
        BenchCase(
            f"{mask}-{L // 1024}k-{dtype}-d{D}",
            f"{'every key' if mask == 'full' else 'causal'}, {dtype}, head size {D}",
            heads=(width // D, width // D),
            lengths=(L, L),
            dims=(D, D),
            dtype=dtype,
            mask="none" if mask == "full" else mask,
        )
        for mask in ("full", "causal")
        for L, width in ((1024, 512), (4096, 256))
        for dtype in ("fp32", "bf16")
        for D in (64, 128)
    ]


def _sparse() -> list[BenchCase]:
    """Masks on a CPU, 8k tokens unless said."""
    long: dict[str, Any] = {"heads": (2, 2), "lengths": (8192, 8192)}
    return [
        BenchCase("window-8k", "sliding window of 1024 tokens", mask="window", **long),
        BenchCase("documents-8k", "causal documents of about 1k tokens", mask="documents", **long),
        BenchCase(
            "prefix-lm-4k", "the first quarter sees itself, then causal", mask="prefix_lm",
            heads=(4, 4), lengths=(4096, 4096),
        ),
        BenchCase(
            "padding-2k", "four sequences of 100, 75, 50 and 25 percent", mask="padding",
            batch=4, heads=(4, 4), lengths=(2048, 2048),
        ),
        BenchCase("columns-8k", "FlashMask columns: causal documents by key", mask="columns", **long),
        BenchCase("bigbird-8k", "window, global and random blocks of 64", mask="bigbird", **long),
        BenchCase("random-blocks-8k", "a fifth of the blocks of 64, at random", mask="random_blocks", **long),
        BenchCase("dilated-8k", "every 8th key, 64 to each side", mask="dilated", **long),
    ]  # fmt: skip


def _heads() -> list[BenchCase]:
    """Groups of heads and uneven lengths on a CPU."""
    even: dict[str, Any] = {"lengths": (2048, 2048), "mask": "causal"}
    return [
        BenchCase("gqa-2k", "8 query heads read 2 key heads, causal", heads=(8, 2), **even),
        BenchCase("mqa-2k", "8 query heads read 1 key head, causal", heads=(8, 1), **even),
        BenchCase(
            "decode-8k", "one new token for each of 8 sequences", batch=8, heads=(8, 8), lengths=(1, 8192),
            backward=False,
        ),
        BenchCase("cross-4k", "512 queries look at 4096 keys", heads=(8, 8), lengths=(512, 4096)),
        BenchCase("small-16", "16 tokens: the time of the host", lengths=(16, 16)),
        BenchCase(
            "long-32k", "one long causal head", heads=(1, 1), lengths=(32768, 32768), mask="causal",
            backward=False,
        ),
    ]  # fmt: skip


def _scores() -> list[BenchCase]:
    """Options of the scores on a CPU."""
    size: dict[str, Any] = {"heads": (4, 4), "lengths": (2048, 2048), "mask": "causal"}
    return [
        BenchCase("softcap-2k", "soft cap of 20, causal", softcap=20.0, **size),
        BenchCase("alibi-2k", "ALiBi slopes, causal", alibi=True, **size),
        BenchCase("bias-2k", "bias of its own per head, with gradient", bias="HQK", bias_grad=True, **size),
        BenchCase("bias-shared-2k", "one bias for all heads, without gradient", bias="11QK", **size),
        BenchCase("dropout-2k", "dropout of 10 percent, causal", dropout_p=0.1, **size),
        BenchCase("sink-2k", "a sink per head, causal", sink=True, **size),
    ]


def _cuda() -> list[BenchCase]:
    """16k tokens and 2048 channels in bf16, as a large GPU likes them."""
    common: dict[str, Any] = {"dtype": "bf16", "devices": CUDA}
    found = [
        BenchCase(
            f"cuda-{mask}-{L // 1024}k-d{D}",
            f"{'every key' if mask == 'full' else 'causal'}, head size {D}",
            batch=16384 // L, heads=(2048 // D, 2048 // D), lengths=(L, L), dims=(D, D),
            mask="none" if mask == "full" else mask, **common,
        )
        for mask in ("full", "causal") for L in (1024, 4096, 16384) for D in (64, 128)
    ]  # fmt: skip
    long: dict[str, Any] = {"heads": (16, 16), "lengths": (16384, 16384), "dims": (128, 128), **common}
    return [
        *found,
        BenchCase("cuda-window-16k", "sliding window of 2048 tokens", mask="window", **long),
        BenchCase("cuda-documents-16k", "causal documents of about 2k tokens", mask="documents", **long),
        BenchCase(
            "cuda-gqa-8k", "32 query heads read 8 key heads, causal", mask="causal",
            batch=2, heads=(32, 8), lengths=(8192, 8192), dims=(128, 128), **common,
        ),
        BenchCase(
            "cuda-decode-8k", "one new token for each of 64 sequences", backward=False,
            batch=64, heads=(32, 8), lengths=(1, 8192), dims=(128, 128), **common,
        ),
    ]  # fmt: skip


CASES: Mapping[str, BenchCase] = {
    case.name: case for case in (*_plain(), *_sparse(), *_heads(), *_scores(), *_cuda())
}


#: Calls that hold a lot at once, one per way in which memory is held: copies inside PyTorch's kernels, padded
#: heads, empty rows, sums in float32, gradients of a bias; and, last, masks and options that stay small by
#: design. Predicted memory is checked on them.
MEMORY: Mapping[str, BenchCase] = {
    case.name: case
    for case in (
        BenchCase("large-full", "every key", 32, (8, 8), (512, 512), (128, 128)),
        BenchCase("large-groups", "grouped heads, causal", 32, (16, 4), (512, 512), mask="causal"),
        BenchCase("large-narrow", "narrow values", 16, (8, 8), (512, 512), (128, 64), mask="causal"),
        BenchCase("large-wide", "wide values", 16, (8, 8), (512, 512), (64, 128)),
        BenchCase("large-rest", "rows of no document", 1, (8, 8), (40960, 40960), mask="documents_and_rest"),
        BenchCase("large-blocks", "bigbird, bf16", 4, (8, 8), (8192, 8192), dtype="bf16", mask="bigbird"),
        BenchCase(
            "large-bias",
            "a bias with gradient, bf16",
            1,
            (8, 8),
            (1536, 1536),
            (32, 32),
            "bf16",
            bias="HQK",
            bias_grad=True,
        ),
        BenchCase("small-window", "sliding window", 1, (8, 8), (8192, 8192), mask="window"),
        BenchCase("small-softcap", "soft cap", 1, (2, 2), (8192, 8192), mask="window", softcap=20.0),
    )
}


def select(patterns: Iterable[str], device: str) -> list[BenchCase]:
    """The cases of a device kind whose names match one of the patterns (globs, or beginnings of names); all
    of them without patterns.

    Raises:
        ArgumentError: a pattern matches no case of this device kind.
    """
    kind = torch.device(device).type
    here = [case for case in CASES.values() if kind in case.devices]
    patterns = list(patterns)
    for pattern in patterns:
        # Every name begins with nothing at all, which is hardly what was meant.
        if not pattern or not any(_matches(case.name, pattern) for case in here):
            raise ArgumentError(
                f"case: expected the name, a glob or the beginning of a case for {kind}, got {pattern!r}"
            )
    return [case for case in here if not patterns or any(_matches(case.name, p) for p in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern)


def short(case: BenchCase, length: int = 256) -> BenchCase:
    """The same case with at most `length` tokens, two batch elements and two key heads."""
    (Hq, Hk), (Lq, Lk) = case.heads, case.lengths
    factor, heads = max(1, math.ceil(max(Lq, Lk) / length)), min(Hk, 2)
    return dataclasses.replace(
        case,
        batch=min(case.batch, 2),
        heads=(heads * (Hq // Hk), heads),
        lengths=(max(1, Lq // factor), max(1, Lk // factor)),
    )


def mask_of(case: BenchCase, device: torch.device | str = "cpu") -> masks.Mask | None:
    """The mask of `case`, its tensors on `device`."""
    mask = MASKS[case.mask](case.batch, *case.lengths)
    return None if mask is None else mask.to(device)


def build(case: BenchCase, device: torch.device | str = "cpu", seed: int = 0) -> Call:
    """The tensors of `case`: Gaussian, the same for the same seed on every device. Masks do not depend on the
    seed.
    """
    (Hq, Hk), (Lq, Lk), (D, Dv), B = case.heads, case.lengths, case.dims, case.batch
    draw = inputs.generator(seed)

    def normal(*shape: int) -> Tensor:
        return inputs.normal(shape, draw).to(DTYPES[case.dtype]).to(device)

    q, k, v = normal(B, Hq, Lq, D), normal(B, Hk, Lk, D), normal(B, Hk, Lk, Dv)
    dout = normal(B, Hq, Lq, Dv)
    options: dict[str, Any] = {}
    mask = mask_of(case, device)
    if mask is not None:
        options["mask"] = mask
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if case.alibi:
        options["alibi_slopes"] = 2.0 ** (-8.0 * torch.arange(1, Hq + 1, device=device) / Hq)
    if case.bias:
        sizes = {"B": B, "H": Hq, "Q": Lq, "K": Lk, "1": 1}
        options["bias"] = normal(*(sizes[letter] for letter in case.bias))
    if case.sink:
        options["sink"] = normal(Hq)
    if case.dropout_p:
        options |= {"dropout_p": case.dropout_p, "seed": seed}
    return Call(q, k, v, dout, None, options)


def build_sets(case: BenchCase, device: torch.device | str, count: int) -> list[Call]:
    """`count` sets of inputs of one case. They share the mask, as the calls of a program do."""
    first = build(case, device, 0)
    mask = {"mask": first.mask} if first.mask is not None else {}
    others: Sequence[Call] = [build(case, device, seed) for seed in range(1, count)]
    return [first, *(call.with_arguments(**mask) for call in others)]
