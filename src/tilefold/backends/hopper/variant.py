"""What a kernel is compiled for: one frozen value, which the kernel takes as its only constexpr argument."""

from __future__ import annotations

from dataclasses import dataclass

BAND, ROWS, COLS, BITS = range(4)
KINDS = {"band": BAND, "rows": ROWS, "cols": COLS, "bits": BITS}
#: From natural exponents to those of base 2.
LOG2E = 1.4426950408889634
#: Rows of a warp group: what one matrix instruction takes.
LINES = 64
#: Bits of the word for a tile of a list, of the first warp group and the next ones: its rows see nothing of
#: the tile; they do not see all of it.
HIDDEN, MIXED = 24, 27


def entry_words(mask: int) -> int:
    """Words for a tile of a list: those bits with the tile's number, and for BITS the codes of up to three
    warp groups.
    """
    return 4 if mask == BITS else 1


@dataclass(frozen=True)
class Variant:
    """Everything about a call that changes the code of the kernel.

    Attributes:
        D, DV: columns of tiles of keys and of values, powers of two; TMA fills what heads do not have.
        BN: keys of a tile.
        STAGES: tiles of keys, and of values, in shared memory.
        GROUPS: consumer warp groups, of 64 rows each.
        REGISTERS: of each thread of the consumers but the first, which gets what is left.
        MASK: BAND, ROWS, COLS or BITS; MASKED: whether some tile needs it.
        INTERVALS: per line of the table of ROWS or COLS.
        CAREFUL: tiles may mix what a row sees with what it does not see: lines of tiles with a result that
            is not finite are computed once more, selecting.
        STEPPED: the band shows every `step`-th key only. BELOW: it has a lower bound.
        FIXED: the reference of a warp group's softmax is that of its first tile, if its rows see all of that.
        TRIAL: long lines are given up early if their sums are lost.
        PLAIN: the score is nothing but a positive scale times the product.
        SOFTCAP, ALIBI, BIAS: options in use.
        TABLES: positions come from two tables. SLOPE_ROWS: each row has a slope of its own (packed
            documents).
        SINK: each head has a sink.
        PERIOD: rows of a head, a power of two, where all query heads of a key head lie in one tile, one after
            the other; 0 where each has its own.
        PADDED: heads of values have fewer columns than their tiles.
        HALVES: `out` has shared memory for half of its columns at a time.
        SLOTS: how many q of a warp group shared memory holds: with two, the next ones may come while these
            are in use.
        HELD: q is held in registers, so that its shared memory is free for the next one at once.
        TURNS: the consumers take turns at the matrix units, one for each tile that their line visits.
        EARLY: the product of the second tile is sent before the softmax of the first one. Without turns.
        JOINED: one barrier says that a tile of keys and its values are free.
    """

    D: int
    DV: int
    BN: int
    STAGES: int
    GROUPS: int
    REGISTERS: int
    MASK: int = BAND
    MASKED: bool = False
    CAREFUL: bool = False
    INTERVALS: int = 1
    STEPPED: bool = False
    BELOW: bool = False
    FIXED: bool = False
    TRIAL: bool = False
    PLAIN: bool = True
    SOFTCAP: bool = False
    ALIBI: bool = False
    BIAS: bool = False
    TABLES: bool = False
    SLOPE_ROWS: bool = False
    SINK: bool = False
    PERIOD: int = 0
    PADDED: bool = False
    HALVES: bool = False
    SLOTS: int = 1
    HELD: bool = False
    TURNS: bool = False
    EARLY: bool = False
    JOINED: bool = False


def blocks_of(variant: Variant) -> tuple[tuple[int, ...], ...]:
    """What TMA copies at a time of q, k, v and `out`."""
    C = variant
    columns = C.DV // 2 if C.HALVES else C.DV
    return (1, 1, LINES, C.D), (1, 1, C.BN, C.D), (1, 1, C.BN, C.DV), (1, 1, LINES, columns)
