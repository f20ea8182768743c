"""What a kernel is compiled for: one frozen value, which the kernels take as their only constexpr
argument."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

BAND, ROWS, COLS, BITS = range(4)
KINDS = {"band": BAND, "rows": ROWS, "cols": COLS, "bits": BITS}

#: How the gradient of a bias leaves the kernels: not at all, one value per row, one per key, or one per
#: score.
NO_BIAS_GRADIENT, PER_ROW, PER_KEY, PER_SCORE = range(4)

#: Places of a kernel in a chain; see `Variant.CHAIN`.
APART, HEAD, AFTER, BESIDE = range(4)

#: Stands for this file in the names under which Triton caches compiled kernels, which hold the values of a
#: variant but not what its properties make of them.
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]

#: Lines per step of a repair, on either side. It multiplies in float32 without matrix units, since Triton 3.6
#: miscompiles products for Hopper whose operands go through registers, as selected ones do, for some widths.
REPAIR_LINES, REPAIR_CHUNK = 32, 16
#: For heads wider than 64: else it would spill, and the widest would not fit the shared memory of small GPUs.
REPAIR_LINES_WIDE = 16


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size` and 16, which matrix units need."""
    return max(16, 1 << (size - 1).bit_length())


def split(size: int) -> tuple[int, int]:
    """Widths of the one or two blocks that hold `size` columns: 96 is 64 and 32, not a block of 128."""
    whole = power_of_two(size)
    if size <= 64 or size == whole:
        return whole, 0
    first = whole // 2
    second = power_of_two(size - first)
    return (first, second) if first + second < whole else (whole, 0)


@dataclass(frozen=True)
class Variant:
    """Everything about a call that changes the code of a kernel.

    Attributes:
        D, DV: head sizes of keys and of values.
        BM, BN: rows and keys of a tile.
        MASK: BAND, ROWS, COLS or BITS.
        INTERVALS: per line of the table of ROWS or COLS.
        STEPPED: the band shows every `step`-th key only.
        CAREFUL: tiles may mix what a row sees with what it does not see, or drops: a program with a NaN in
            its results computes them again. REPAIR: it does, and selects away what is not seen.
        LINES, CHUNK: the most lines of its own tile, and of the other side, that a program takes in one step.
        PLAIN: the score is nothing but a positive scale times the product, in a 16-bit dtype: the scale goes
            into the exponent.
        SOFTCAP, ALIBI, BIAS, SINK, DROPOUT: options in use.
        SLOPE_ROWS: each row has a slope of its own (packed documents).
        TABLES: positions come from two tables.
        QUADS: four neighbouring keys of a tile share one counter of the dropout generator.
        BIAS_UNIT, BIAS_DENSE: strides of the bias are multiples of so many elements; neighbouring keys are
            neighbours in memory.
        BIAS_GRADIENT: see above.
        AHEAD: how many tiles before it is read a tile of the bias is sent for, into the L2 cache; 0: never.
        LSE_GRADIENT: `lse` has an incoming gradient.
        SLOPE_GRADIENT: the gradient of the ALiBi slopes is wanted.
        WANT_K, WANT_V: which gradients a kernel for keys computes.
        UNIT, OUT_UNIT: strides of inputs and of results are multiples of this many elements.
        TF32: products of float32 are rounded to that format.
        WIDE: operands of products are widened to float32 first (the interpreter has no bfloat16 products).
        STAGES: depth of the software pipeline.
        LOOPS: 2 for a loop over full tiles and one over partial ones, 1 for one over both with the mask under
            a branch, which fills its pipeline once.
        EVEN: both lengths are multiples of the tile's: no tile lies over an edge.
        SHARED: all batch elements and heads have the same table (known where it matters).
        SPLIT: tiles in a part of a long line (see `lists.Split`); 0 if no line is cut.
        WEIGHTED: parts are joined by weights of the softmax.
        BATCHES_FIRST: neighbouring programs work on the same head of several batch elements, which share a
            bias.
        CHAIN: APART; or a kernel of a chain, where programs of the next one fill the cores that the last ones
            of this one leave idle (CUDA's programmatic dependent launch). HEAD begins a chain, in the order
            of the stream. AFTER waits, first of all, until the kernel ahead is done. BESIDE needs nothing of
            it, and waits at its end, so that who comes after both finds both done.
        SOURCE: see above.
    """

    D: int
    DV: int
    BM: int
    BN: int
    MASK: int = BAND
    INTERVALS: int = 1
    STEPPED: bool = False
    CAREFUL: bool = False
    REPAIR: bool = False
    LINES: int = 256
    CHUNK: int = 256
    PLAIN: bool = False
    SOFTCAP: bool = False
    ALIBI: bool = False
    BIAS: bool = False
    SINK: bool = False
    DROPOUT: bool = False
    SLOPE_ROWS: bool = False
    TABLES: bool = False
    QUADS: bool = False
    BIAS_UNIT: int = 1
    BIAS_DENSE: bool = False
    BIAS_GRADIENT: int = NO_BIAS_GRADIENT
    AHEAD: int = 0
    LSE_GRADIENT: bool = False
    SLOPE_GRADIENT: bool = False
    WANT_K: bool = True
    WANT_V: bool = True
    UNIT: int = 1
    OUT_UNIT: int = 1
    TF32: bool = False
    WIDE: bool = False
    STAGES: int = 2
    LOOPS: int = 2
    EVEN: bool = False
    SHARED: bool = False
    SPLIT: int = 0
    WEIGHTED: bool = False
    BATCHES_FIRST: bool = False
    CHAIN: int = APART
    SOURCE: str = _SOURCE

    @property
    def AGAIN(self) -> Variant:  # noqa: N802 - as the others
        """What repairs broken results."""
        lines = REPAIR_LINES if max(self.D, self.DV) <= 64 else REPAIR_LINES_WIDE
        return replace(
            self,
            CAREFUL=False,
            REPAIR=True,
            LINES=lines,
            CHUNK=REPAIR_CHUNK,
            WIDE=True,
            STAGES=1,
            CHAIN=APART,
        )

    @property
    def BASE2(self) -> bool:  # noqa: N802 - as the others
        """Whether exponents, and the lse that the backward kernels read, are in base 2: one operation less
        for each score, and a rounding that 16-bit inputs do not show. Not with a bias: the least number of
        its dtype, which many masks are made of, would overflow.
        """
        return self.UNIT == 8 and not self.BIAS

    @property
    def BARE(self) -> bool:  # noqa: N802 - as the others
        """Whether scores need no tensor, nor positions that may differ from call to call."""
        return not (self.ALIBI or self.BIAS or self.SINK or self.DROPOUT or self.TABLES)

    @property
    def CLIP_FROM(self) -> int:  # noqa: N802 - the kernels read it beside their other constants
        """The first phase of a kernel (see `tile.visited`) whose tiles may lie over an edge."""
        return 4 if self.EVEN else 1

    @property
    def MASKED(self) -> bool:  # noqa: N802 - as above
        """Whether there are partial tiles."""
        return self.CAREFUL or not self.EVEN

    @property
    def D0(self) -> int:  # noqa: N802 - the kernels read them beside their other constants
        return split(self.D)[0]

    @property
    def D1(self) -> int:  # noqa: N802 - the kernels read them beside their other constants
        return split(self.D)[1]

    @property
    def V0(self) -> int:  # noqa: N802 - the kernels read them beside their other constants
        return split(self.DV)[0]

    @property
    def V1(self) -> int:  # noqa: N802 - the kernels read them beside their other constants
        return split(self.DV)[1]
