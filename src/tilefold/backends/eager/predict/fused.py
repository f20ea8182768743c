"""What the fused path will do for a call: `fused.py` and `backprop.py` played through on integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tilefold.problem import Problem
from tilefold.select import SUMMED

from ..pieces import rows_per_block
from ..programs import Group, Pieces, Program
from ..rects import Rect
from ..views import BATCH_BYTES, batches, parts
from .bill import Bill, matrix_units
from .calibrate import KEY_BLOCK

#: Least rows and keys from which operands are packed.
_PACKED_FROM = 64
#: Operations of one rectangle that the host issues, forward and backward.
_OPS = {"forward": 8, "backward": 24}


class _Sizes:
    """Sizes of a call in elements and bytes."""

    def __init__(self, problem: Problem) -> None:
        p = problem
        self.B, self.Hq, self.Hk, self.Lq, self.Lk = p.batch, p.q_heads, p.k_heads, p.q_length, p.k_length
        self.width = max(p.head_dim, p.v_head_dim)
        self.k_size, self.v_size = p.head_dim, p.v_head_dim
        self.keys_wider = None if p.head_dim == p.v_head_dim else p.head_dim > p.v_head_dim
        self.size, self.wide = p.dtype.itemsize, p.accumulator.itemsize
        self.q = self.B * self.Hq * self.Lq * self.width
        self.k = self.B * self.Hk * self.Lk * self.width
        self.lse = self.B * self.Hq * self.Lq * self.wide


def forward(problem: Problem, pieces: Pieces) -> Bill:
    """Steps and memory of `fused.forward`."""
    sizes = _Sizes(problem)
    bill = Bill(sizes.width, sizes.size, packs=problem.dtype == torch.bfloat16 and matrix_units())
    bill.add("call forward", 1, ops=20)
    _widen(bill, sizes, backward=False)
    if pieces.single is not None:
        bill.add("kernel call forward", 1)
        bill.kernel("forward", pieces.single, sizes.B * sizes.Hq, sizes.Lq, sizes.Lk)
        packed = _packed(bill, sizes, sizes.B * sizes.Hq, sizes.B * sizes.Hk, sizes.Lq, sizes.Lk)
        with bill.heap.holding(packed=packed):
            _scratch(bill, sizes, sizes.Lq)
    else:
        stored = pieces.whole and all(g.program.rows_once for g in pieces.groups)
        bill.add("copy" if stored else "fill", 0 if stored else sizes.q * sizes.size)
        for group in pieces.groups:
            _group_forward(bill, sizes, group)
    if pieces.masked:
        bill.add("sum", sizes.q * sizes.size, passes=sizes.q * sizes.size, ops=1)
        if problem.dtype == torch.float16:
            bill.heap.hold("widened", min(sizes.q, SUMMED) * sizes.wide)
            bill.heap.free("widened")
    if "sink" in problem.options:
        bill.add("merge", sizes.q)
    return bill


def backward(problem: Problem, pieces: Pieces, empty_rows: bool) -> Bill:
    """Steps and memory of `fused.backward`, without an incoming gradient of lse.

    Args:
        problem, pieces: the call.
        empty_rows: whether some row sees no key at all.
    """
    sizes = _Sizes(problem)
    bill = Bill(sizes.width, sizes.size)
    if empty_rows:
        bill.add("copy", sizes.q * sizes.size, ops=4)
        bill.heap.hold("dout without empty rows", sizes.q * sizes.size + sizes.lse)
    bill.add("call backward", 1, ops=40)
    _widen(bill, sizes, backward=True)
    if pieces.single is not None:
        bill.add("kernel call backward", 1)
        bill.kernel(
            "backward", pieces.single, sizes.B * sizes.Hq, sizes.Lq, sizes.Lk, group=sizes.Hq // sizes.Hk
        )
        with bill.heap.holding(copied=sizes.q * sizes.size):
            _scratch(bill, sizes, sizes.Lq, gradients=True)
    else:
        _groups_backward(bill, sizes, pieces)
    if pieces.masked or sizes.size == 2:
        bill.add("sum", (sizes.q + sizes.k) * sizes.size, ops=2)
    return bill


def _widen(bill: Bill, sizes: _Sizes, backward: bool) -> None:
    """Copies of the narrower tensors with as many channels as the wider ones have, and results of that width
    beside their slices.
    """
    if sizes.keys_wider is None:
        return
    narrow = {"v": sizes.k} if sizes.keys_wider else {"q": sizes.q, "k": sizes.k}
    if backward and sizes.keys_wider:
        narrow |= {"out": sizes.q, "dout": sizes.q}
    for name, elements in narrow.items():
        bill.add("copy", elements * sizes.size, passes=2 * elements * sizes.size, ops=1)
        bill.heap.hold(f"wide {name}", elements * sizes.size)
    # Results of the full width, of which slices are copied.
    surplus = sizes.width - (sizes.v_size if sizes.keys_wider else sizes.k_size)
    rows = sizes.k if backward and sizes.keys_wider else sizes.q
    rows += sizes.k if backward and not sizes.keys_wider else 0
    if backward or sizes.keys_wider:
        bill.add("copy", rows * sizes.size, ops=1)
        bill.heap.hold("surplus", rows // sizes.width * surplus * sizes.size)


def _scratch(bill: Bill, sizes: _Sizes, rows: int, gradients: bool = False) -> None:
    """The kernel's own buffers: a block of scores and of output for each thread."""
    height = rows_per_block(rows)
    block = height * min(KEY_BLOCK, sizes.Lk) * (2 if gradients else 1) + height * (sizes.width + 2)
    bill.heap.hold("scratch", bill.threads * block * sizes.wide)
    if sizes.size < sizes.wide:
        bill.heap.hold("narrow scratch", bill.threads * block * sizes.size)
    bill.heap.free("scratch", *(["narrow scratch"] if sizes.size < sizes.wide else []))


def _packed(bill: Bill, sizes: _Sizes, pairs: int, key_pairs: int, rows: int, keys: int) -> int:
    """Bytes of the copies of keys and values that PyTorch's forward kernel makes in bfloat16 where the CPU
    has matrix units (AMX), if they are worth it: enough rows for each thread.
    """
    if not bill.packs or min(rows, keys) < _PACKED_FROM:
        return 0
    height = rows_per_block(rows)
    blocks = -(-pairs * -(-rows // height) // bill.threads)
    return 2 * key_pairs * keys * sizes.width * sizes.size if blocks * height >= 4 * pairs else 0


def _group_forward(bill: Bill, sizes: _Sizes, group: Group) -> None:
    buffered = not group.program.rows_once and sizes.size < sizes.wide
    per_head = sizes.Lq * sizes.width * sizes.wide if buffered else 0
    for part in parts(group, per_head):
        heads, B = part.h1 - part.h0, part.b1 - part.b0
        if buffered:
            sums = B * heads * sizes.Lq * sizes.width * sizes.wide // group.step
            bill.heap.hold("sums", sums)
            bill.add("fill", sums)
            bill.add("copy", sums)
        for rect in part.program.forward:
            _rect_forward(bill, sizes, part, rect)
        for gather in part.program.gathers:
            _gather_forward(bill, sizes, part, gather)
        if buffered:
            bill.heap.free("sums")


def _rect_forward(bill: Bill, sizes: _Sizes, group: Group, rect: Rect) -> None:
    heads, B = group.h1 - group.h0, group.b1 - group.b0
    _table_mask(bill, sizes, group.program, rect)
    each = (heads * rect.rows + (group.k1 - group.k0) * rect.keys) * sizes.width * sizes.size
    for n, times in _counted(batches(rect, B, each)):
        pairs = (n if B == 1 else B) * heads
        written = pairs * rect.rows * sizes.width
        bill.kernel("forward", rect.kind, pairs, rect.rows, rect.keys, times)
        bill.add("rectangle forward", times, ops=times * _OPS["forward"])
        if rect.kind == "flipped":
            bill.add("copy", times * (written * 2 + 2 * pairs * rect.keys * sizes.width) * sizes.size)
        if rect.first:
            bill.add("copy", times * written * sizes.size)
        else:
            bill.add("merge", times * written)
        # The last result is still held while the next is made.
        key_pairs = pairs // heads * (group.k1 - group.k0)
        packed = _packed(bill, sizes, pairs, key_pairs, rect.rows, rect.keys)
        for _ in range(min(times, 2)):
            part = written * sizes.size + pairs * rect.rows * sizes.wide
            with bill.heap.holding(new=part, packed=packed):
                _scratch(bill, sizes, rect.rows)
            bill.heap.hold("part", 0)
            bill.heap.hold("part", part)
        if not rect.first:
            bill.heap.hold("merging", written * sizes.wide if sizes.size < sizes.wide else 0)
            bill.heap.free("merging")
    bill.heap.hold("part", 0)
    _drop_table_mask(bill, rect)


def _gather_forward(bill: Bill, sizes: _Sizes, group: Group, gather: Any) -> None:
    heads, k_heads = group.h1 - group.h0, group.k1 - group.k0
    rows, width = gather.rows.shape[1], gather.keys.shape[1]
    for n, spans, times in _gathered(sizes, group, gather, 1):
        moved = n * (2 * heads * rows + 2 * k_heads * width) * sizes.width * sizes.size
        kind = "table" if spans else "full"
        bill.kernel("forward", kind, n * heads, rows, width, times)
        bill.add("rectangle forward", 2 * times, ops=2 * times * _OPS["forward"])
        bill.add("gather", times * moved)
        _gather_mask(bill, sizes, n * rows * width, spans, times)
        out = n * heads * rows * sizes.width * sizes.size
        packed = _packed(bill, sizes, n * heads, n * k_heads, rows, width)
        for _ in range(2):
            bill.heap.hold("gathered", moved - out)
            bill.heap.hold("mask", n * rows * width * sizes.size if spans else 0)
            with bill.heap.holding(new=out, packed=packed):
                _scratch(bill, sizes, rows)
            bill.heap.hold("part", 0)
            bill.heap.hold("part", out)
    bill.heap.free("gathered", "mask", "part")


def _gathered(sizes: _Sizes, group: Group, gather: Any, copies: int) -> Iterator[tuple[int, int, int]]:
    """`(stripes, hidden spans, times)` of the batches of a gather, as `views.gathered_batches` makes them for
    so many copies of keys and values.
    """
    count, width = gather.keys.shape
    per_key = copies * (group.k1 - group.k0) * sizes.width * sizes.size
    per = min(count, max(1, BATCH_BYTES // (2 * width * per_key)))
    B = group.b1 - group.b0
    for first in range(0, count, per):
        spans = sum(len(p) for p in gather.parts[first : first + per])
        yield min(per, count - first), spans, B


def _gather_mask(bill: Bill, sizes: _Sizes, elements: int, spans: int, times: int) -> None:
    if spans:
        bill.add("fill", times * elements * sizes.size)
        bill.add("hidden span", times * spans, ops=10 * times * spans)


def _table_mask(bill: Bill, sizes: _Sizes, program: Program, rect: Rect) -> None:
    """The mask of a "table" rectangle is made anew in every call; that of a "band" is kept."""
    if rect.kind == "table":
        hidden = sum(end - start for start, end in rect.parts) * rect.rows
        bill.add("fill", rect.rows * rect.keys * sizes.size)
        bill.add("hidden span", len(rect.parts), ops=10 * len(rect.parts))
        bill.add("hidden element", hidden)
        bill.heap.hold("mask", rect.rows * rect.keys * sizes.size)
        bill.heap.hold("hidden", 2 * max((end - start for start, end in rect.parts), default=0) * rect.rows)
        bill.heap.free("hidden")


def _drop_table_mask(bill: Bill, rect: Rect) -> None:
    if rect.kind == "table":
        bill.heap.free("mask")


def _counted(sizes: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """`(n, times)` for stripes that run as one call: all but the last batch are alike."""
    found: dict[int, int] = {}
    for _, n in sizes:
        found[n] = found.get(n, 0) + 1
    return list(found.items())


def _groups_backward(bill: Bill, sizes: _Sizes, pieces: Pieces) -> None:
    programs = [g.program for g in pieces.groups]
    rows_whole = pieces.whole and all(p.grad_rows == (True, True) for p in programs)
    keys_whole = (
        pieces.keys_whole and not pieces.shared_keys and all(p.grad_keys == (True, True) for p in programs)
    )
    bill.add("fill", 0 if rows_whole else sizes.q * sizes.size)
    bill.add("fill", 0 if keys_whole else 2 * sizes.k * sizes.size)
    if pieces.shared_keys and sizes.size < sizes.wide:
        bill.heap.hold("key sums", 2 * sizes.k * sizes.wide)
        bill.add("copy", 2 * sizes.k * sizes.wide)
    for group in pieces.groups:
        _group_backward(bill, sizes, group, pieces.shared_keys)


def _group_backward(bill: Bill, sizes: _Sizes, group: Group, shared: bool) -> None:
    program, narrow = group.program, sizes.size < sizes.wide
    sum_rows = narrow and not program.grad_rows[0]
    sum_keys = narrow and not program.grad_keys[0] and not shared
    per_head = (
        (sizes.Lq * sum_rows + 2 * sizes.Lk * sum_keys * sizes.Hk // sizes.Hq) * sizes.width * sizes.wide
    )
    for part in parts(group, per_head):
        sums = (part.b1 - part.b0) * (part.h1 - part.h0) * per_head // group.step
        bill.heap.hold("sums", sums)
        bill.add("fill", sums)
        bill.add("copy", sums)
        for rect in program.backward:
            _rect_backward(bill, sizes, part, rect, shared)
        for gather in program.gathers:
            _gather_backward(bill, sizes, part, gather)
        bill.heap.free("sums")


def _rect_backward(bill: Bill, sizes: _Sizes, group: Group, rect: Rect, shared: bool) -> None:
    heads, k_heads, B = group.h1 - group.h0, group.k1 - group.k0, group.b1 - group.b0
    program = group.program
    _table_mask(bill, sizes, program, rect)
    each = (3 * heads * rect.rows + 2 * k_heads * rect.keys) * sizes.width * sizes.size
    for n, times in _counted(batches(rect, B, each)):
        stripes = n if B == 1 else B
        pairs = stripes * heads
        rows, keys = pairs * rect.rows * sizes.width, 2 * stripes * k_heads * rect.keys * sizes.width
        bill.kernel("backward", rect.kind, pairs, rect.rows, rect.keys, times, group=heads // k_heads)
        bill.add("rectangle backward", times, ops=times * _OPS["backward"])
        stored = program.grad_keys[0] and not shared
        bill.add(
            "copy" if program.grad_rows[0] else "add",
            times * rows * (sizes.size if program.grad_rows[0] else 1),
        )
        bill.add("copy" if stored else "add", times * keys * (sizes.size if stored else 1))
        if rect.kind == "flipped":
            bill.add("copy", times * (4 * rows + 2 * keys) * sizes.size)
        with bill.heap.holding(gradients=(rows + keys) * sizes.size):
            # The kernel copies the result that it is given.
            with bill.heap.holding(copied=rows * sizes.size):
                _scratch(bill, sizes, rect.rows, gradients=True)
            if sizes.size < sizes.wide:
                # What is added to a wider sum is widened first.
                added = max(0 if program.grad_rows[0] else rows, 0 if stored else keys // 2)
                bill.heap.hold("widened", added * sizes.wide)
                bill.heap.free("widened")
    _drop_table_mask(bill, rect)


def _gather_backward(bill: Bill, sizes: _Sizes, group: Group, gather: Any) -> None:
    heads, k_heads = group.h1 - group.h0, group.k1 - group.k0
    rows, width = gather.rows.shape[1], gather.keys.shape[1]
    for n, spans, times in _gathered(sizes, group, gather, 2):
        queries, keys = n * heads * rows * sizes.width, n * k_heads * width * sizes.width
        kind = "table" if spans else "full"
        bill.kernel("backward", kind, n * heads, rows, width, times, group=heads // k_heads)
        bill.add("rectangle backward", 2 * times, ops=2 * times * _OPS["backward"])
        bill.add("gather", times * (4 * queries + 2 * keys) * sizes.size)
        bill.add("scatter", times * 2 * keys)
        _gather_mask(bill, sizes, n * rows * width, spans, times)
        for _ in range(2):
            bill.heap.hold("gathered", (3 * queries + 2 * keys) * sizes.size)
            bill.heap.hold("mask", n * rows * width * sizes.size if spans else 0)
            with bill.heap.holding(copied=queries * sizes.size):
                bill.heap.hold("gradients", (queries + 2 * keys) * sizes.size)
                _scratch(bill, sizes, rows, gradients=True)
    bill.heap.free("gathered", "mask", "gradients")
