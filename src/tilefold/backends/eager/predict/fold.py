"""What the tiled fold will do for a call: `fold.py` played through on the states of its tiles."""

from __future__ import annotations

from typing import Any

from tilefold.cost import tiles
from tilefold.cost.memory import Heap
from tilefold.cost.steps import Bias
from tilefold.problem import Problem

from ..fold import block_of
from .bill import Bill

#: Elementwise reads and writes of a tile's elements, forward and backward, without options and for each.
_PASSES = {
    "": (10, 17),
    "softcap": (6, 13),
    "alibi": (5, 9),
    "bias": (3, 5),
    "dropout": (60, 66),
    "mask": (3, 3),
}
#: PyTorch operations of a tile, likewise.
_OPS = {
    "": (25, 35),
    "softcap": (3, 9),
    "alibi": (6, 14),
    "bias": (3, 6),
    "dropout": (160, 165),
    "mask": (8, 9),
}
#: Bytes per element that the dropout generator holds at once: four 64-bit words per four elements, and as
#: many in the making.
_PHILOX = 24


def visited(problem: Problem, form: Any) -> tuple[int, int, int]:
    """`(tiles, elements, elements of mixed tiles)` that the fold visits, over rows and keys; a tile counts if
    any batch element or head sees something there.
    """
    block, rows, keys = block_of(problem), problem.q_length, problem.k_length
    states = tiles.states(form, rows, keys, block, block)
    low, high = states.amin((0, 1)), states.amax((0, 1))
    area = tiles.sides(rows, block)[:, None] * tiles.sides(keys, block)
    seen, mixed = high != tiles.EMPTY, (high != tiles.EMPTY) & (low != tiles.FULL)
    return int(seen.sum()), int((area * seen).sum()), int((area * mixed).sum())


def declare(problem: Problem, form: Any, backward: bool, bias: Bias | None) -> Bill:
    """Steps and memory of `fold.forward` or `fold.backward`, with the gradients of q, k and v."""
    dims = (problem.head_dim + problem.v_head_dim) / 2
    bill = Bill(round(dims), problem.accumulator.itemsize, serial=True)
    direction = "backward" if backward else "forward"
    bill.add(f"call {direction}", 1, ops=40)
    if problem.is_empty:
        return bill
    count, elements, mixed = visited(problem, form)
    pairs = problem.batch * problem.q_heads
    work = float(pairs * elements)
    flops = (6.0 * problem.head_dim + 4.0 * problem.v_head_dim) if backward else 4.0 * dims
    index = int(backward)

    def costs(option: str, units: float) -> dict[str, float]:
        special = 1 if option in ("", "softcap") else 0
        return {
            "passes": _PASSES[option][index] * units * bill.size,
            "exps": special * units,
            "ops": _OPS[option][index] * count,
        }

    bill.add_sized(f"fold {direction}", work, flops=flops * work, **costs("", work))
    if mixed:
        masked = float(pairs * mixed)
        bill.add(f"fold mask {direction}", masked, **costs("mask", masked))
    for option in problem.options:
        if option != "sink":
            bill.add(f"fold {_named(option, bias)} {direction}", work, **costs(option, work))
    (_Backward if backward else _Forward)(problem, bill.heap, bias).play(mixed > 0)
    return bill


def _named(option: str, bias: Bias | None) -> str:
    """An option as the rates call it."""
    if option == "bias" and bias is not None:
        return "shared bias" if bias.full[1] == 1 else "bias gradient" if bias.gradient else "bias"
    return option


class _Forward:
    """What a tile holds, in the order of `fold._stripe_forward`. Names are those of its variables."""

    def __init__(self, problem: Problem, heap: Heap, bias: Bias | None) -> None:
        p = problem
        block = block_of(p)
        self.problem, self.heap, self.options = p, heap, set(p.options)
        self.rows, self.keys = min(block, p.q_length), min(block, p.k_length)
        self.size = p.accumulator.itemsize
        self.several = p.k_length > block
        self.casts = p.dtype.itemsize < self.size
        self.elements = p.batch * p.q_heads * self.rows * self.keys
        self.tile = self.elements * self.size
        self.row = p.batch * p.q_heads * self.rows * self.size
        self.bias = bias

    def play(self, masked: bool) -> None:
        """Hold and free what a stripe of several tiles does."""
        p, heap = self.problem, self.heap
        heap.hold("acc", self.row * p.v_head_dim)
        for _ in range(2 if self.several else 1):
            self.scores("s")
            if masked:
                heap.hold("visible", self.rows * self.keys)
                heap.hold("s", self.tile)
            heap.hold("difference", self.tile)
            heap.hold("p", self.tile)
            heap.free("difference")
            if "dropout" in self.options:
                self.dropout("weights")
            with heap.holding(product=self.row * p.v_head_dim, scaled=self.row * p.v_head_dim):
                if self.casts:
                    heap.hold("v", p.batch * p.k_heads * self.keys * p.v_head_dim * self.size)
                    heap.free("v")
            heap.hold("acc", self.row * p.v_head_dim)

    def scores(self, name: str) -> None:
        """`score(raw(tile))` under a name; the old holder of the name is still there meanwhile."""
        self.raw()
        self.heap.free(*{"raw", self.score()})
        self.heap.hold(name, 0)
        self.heap.hold(name, self.tile)

    def raw(self) -> None:
        p, heap = self.problem, self.heap
        if self.casts:
            heap.hold("rows", self.row * p.head_dim)
            heap.hold("keys", p.batch * p.k_heads * self.keys * p.head_dim * self.size)
        heap.hold("product", self.tile)
        if self.casts:
            heap.free("rows", "keys")
        heap.hold("raw", self.tile)
        heap.free("product")

    def score(self) -> str:
        """What `score` makes of the raw scores; the name under which the result is held."""
        heap, name = self.heap, "raw"
        if "softcap" in self.options:
            heap.hold("divided", self.tile)
            heap.hold("tanh", self.tile)
            heap.free("divided")
            heap.hold("scored", self.tile)
            heap.free("tanh")
            name = "scored"
        if "alibi" in self.options:
            self.distances()
            heap.hold("scored", self.tile)
            heap.free("alibi")
            name = "scored"
        if "bias" in self.options:
            heap.hold("bias", self.cast_bias())
            heap.hold("scored", self.tile)
            heap.free("bias")
            name = "scored"
        return name

    def cast_bias(self) -> int:
        """Bytes of a tile of the bias in the accumulator's dtype, where that is another."""
        if self.bias is None or self.bias.dtype == self.problem.accumulator:
            return 0
        batch, heads, rows, keys = self.bias.full
        return batch * heads * min(rows, self.rows) * min(keys, self.keys) * self.size

    def distances(self) -> None:
        """ALiBi's part of a tile of scores, `[1 or B, Hq, rows, keys]`."""
        with self.heap.holding(distance=16 * self.rows * self.keys):
            self.heap.hold("alibi", self.tile // self.problem.batch)

    def dropout(self, name: str) -> None:
        """`drop(x, kept)` under a name."""
        heap = self.heap
        heap.hold("philox", _PHILOX * self.elements)
        heap.free("philox")
        heap.hold("kept", self.elements)
        heap.hold("divided", self.tile)
        heap.hold(name, self.tile)
        heap.free("divided")


class _Backward(_Forward):
    """What a tile holds, in the order of `fold._tile_backward`."""

    def play(self, masked: bool) -> None:
        """Hold and free what one tile does, beside the sums of the whole call."""
        p, heap = self.problem, self.heap
        sums = p.batch * (p.q_heads * p.q_length + p.k_heads * p.k_length) * p.head_dim
        sums += p.batch * p.k_heads * p.k_length * p.v_head_dim
        wide, narrow = self.sums(sums)
        # Results are made at the end, beside the sums; sums in their dtype are the results.
        heap.hold("sums", wide - narrow)
        heap.hold("do", self.row * p.v_head_dim * (2 if self.casts else 1))
        heap.hold("selected", self.elements if masked else 0)
        self.raw()
        kept = self.score()
        heap.hold("difference", self.tile)
        if kept != "raw":
            heap.free(kept)
        heap.hold("exp", self.tile)
        heap.free("difference")
        heap.hold("p", self.tile)
        heap.free("exp")
        if "dropout" in self.options:
            self.dropout("weights")
        self.products(masked)
        self.softmax()
        self.inputs()
        heap.free("raw", "p", "dp", "ds", "sums")
        heap.hold("sums", wide)

    def sums(self, elements: int) -> tuple[int, int]:
        """Bytes of the gradients' sums, and of the results that are not the sums themselves."""
        wide, narrow = elements * self.size, elements * self.problem.dtype.itemsize
        if self.bias is not None and self.bias.gradient:
            wide += self.bias.elements * self.size
            narrow += self.bias.elements * self.bias.dtype.itemsize
        return (wide, narrow) if self.casts else (0, 0)

    def products(self, masked: bool) -> None:
        """dV and dP; a group of query heads under one another is a copy."""
        p, heap = self.problem, self.heap
        if p.group > 1:
            heap.hold("packed", self.tile + (self.elements if masked else 0))
        with heap.holding(dv=p.batch * p.k_heads * self.keys * p.v_head_dim * self.size):
            pass
        heap.hold("dp", self.tile)
        if "dropout" in self.options:
            heap.hold("divided", self.tile)
            heap.hold("dp", self.tile)
            heap.free("divided")

    def softmax(self) -> None:
        """dS of the scores before the soft cap, then times the scale."""
        heap = self.heap
        heap.hold("difference", self.tile)
        heap.hold("product", self.tile)
        heap.free("difference")
        heap.hold("ds", self.tile)
        heap.free("product")
        if "alibi" in self.options:
            with heap.holding(distance=8 * self.rows * self.keys, product=self.tile):
                pass
        if "softcap" in self.options:
            heap.hold("one", self.tile)
            heap.hold("two", self.tile)
            heap.free("one")
            heap.hold("ds", self.tile)
            heap.free("two")
        heap.hold("ds", self.tile)

    def inputs(self) -> None:
        """dQ and dK."""
        p, heap = self.problem, self.heap
        rows = self.row * p.head_dim
        keys = p.batch * p.k_heads * self.keys * p.head_dim * self.size
        with heap.holding(product=rows):
            heap.hold("keys", keys if self.casts else 0)
            heap.free("keys")
        with heap.holding(queries=rows if self.casts else 0, product=keys):
            pass
