"""What the kernels will do for a call: their side of the cost model.

A program visits tiles. A visit costs its matrix products, at the share of the peak that a kernel of its kind
was measured to reach, and the instructions of options around them; beside its visits a program costs a fixed
number of them. `cost.grid` turns the programs of a kernel into time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.cost import tiles
from tilefold.cost.grid import Grid
from tilefold.cost.memory import Heap
from tilefold.cost.steps import Bias, Declaration, Step
from tilefold.masks.band import Band
from tilefold.problem import Problem

from .bias import chunk_of
from .rates import Rate, rate_of
from .sizes import Sizes, kind_of, names_of, needed, sizes_of
from .variant import split
from .visits import states_of, visits_of

#: Visits of full tiles that one of a partial tile costs.
_PARTIAL = 1.15
#: Elementwise instructions per score of each option, counted in the kernels' code.
_INSTRUCTIONS = {"softcap": 30, "alibi": 5, "bias": 8, "dropout": 50}
#: Of dropout where positions are not those of neighbours, and no two keys share a counter.
_APART = 160


class _Kernel(NamedTuple):
    """Whose programs own rows or keys; what a visit multiplies, as numbers of products of head size D and Dv;
    how many of them no other kernel of the pass counts; what a program reads once, what it reads per visit,
    and what it writes.
    """

    by_key: bool
    products: tuple[int, int]
    counted: tuple[int, int]
    once: tuple[str, ...]
    visit: tuple[str, ...]
    results: tuple[str, ...]


_ROWS = ("q", "dout", "logs", "delta")
_KERNELS = {
    "forward": _Kernel(False, (1, 1), (1, 1), ("q",), ("k", "v"), ("out", "lse")),
    "keys": _Kernel(True, (2, 2), (2, 2), ("k", "v"), _ROWS, ("dk", "dv")),
    "dk": _Kernel(True, (2, 1), (2, 1), ("k", "v"), _ROWS, ("dk",)),
    "dv": _Kernel(True, (1, 1), (0, 1), ("k",), _ROWS[:3], ("dv",)),
    "queries": _Kernel(False, (2, 1), (1, 0), _ROWS, ("k", "v"), ("dq",)),
    "bias": _Kernel(False, (1, 1), (0, 0), (), (*_ROWS, "k", "v"), ("dbias",)),
}


def measure(dtype: str) -> dict[str, float]:
    """No rates: the kernels do not run on a CPU."""
    return {}


def declare(problem: Problem, form: Any, backward: bool, bias: Bias | None) -> Declaration:
    """One pass of a call; see `planning.backend.Backend.declare`.

    Memory is that of calls after the first, for inputs that are contiguous: lists of tiles are kept with the
    mask.
    """
    one = _Pass(problem, form, bias)
    (one.backward if backward else one.forward)()
    p, size, sizes = problem, problem.dtype.itemsize, one.sizes("forward")
    results, keys = _result_bytes(p, backward, bias), p.batch * p.k_heads * p.k_length
    arguments = (p.batch * p.q_heads * p.q_length * p.head_dim + keys * (p.head_dim + p.v_head_dim)) * size
    arguments += 0 if bias is None else bias.elements * bias.dtype.itemsize
    # The backward reads the results of the forward and their gradient as well.
    arguments += 2 * _result_bytes(p, False, None) if backward else 0
    return Declaration(
        how=one.how(backward),
        steps=tuple(one.steps),
        rows=sizes.rows,
        keys=sizes.keys,
        traffic=dict(one.traffic),
        products=str(p.dtype).removeprefix("torch."),
        argument_bytes=arguments,
        result_bytes=results,
        extra_bytes=max(one.heap.peak - results, 0),
    )


def _result_bytes(p: Problem, backward: bool, bias: Bias | None) -> int:
    size, rows = p.dtype.itemsize, p.batch * p.q_heads * p.q_length
    if not backward:
        return rows * (p.v_head_dim * size + 4)
    keys = p.batch * p.k_heads * p.k_length
    other = bias.elements * bias.dtype.itemsize if bias is not None and bias.gradient else 0
    return (rows * p.head_dim + keys * (p.head_dim + p.v_head_dim)) * size + other


# One pass.


class _Pass:
    """Steps, traffic and held memory of a pass, kernel by kernel, in the order of the launchers.

    Attributes:
        heap: everything that the pass allocates, results too.
        traffic: bytes between the cores and everything behind them.
    """

    def __init__(self, problem: Problem, form: Any, bias: Bias | None) -> None:
        self.p, self.form, self.bias = problem, form, bias
        self.steps: list[Step] = []
        self.traffic: dict[str, float] = defaultdict(float)
        self.heap = Heap()
        self.careful = not (isinstance(form, Band) and form.is_full)
        #: dK and dV take a kernel each where the table has no sizes for both at once.
        self.parts = (
            ("keys",) if sizes_of("keys", problem, kind_of(problem, form)) is not None else ("dk", "dv")
        )
        p, size = problem, problem.dtype.itemsize
        self.rows, self.keys = p.batch * p.q_heads * p.q_length, p.batch * p.k_heads * p.k_length
        #: Bytes of one position of a tensor.
        self.each = {"lse": 4, "logs": 4, "delta": 4}
        self.each |= dict.fromkeys(("q", "k", "dq", "dk"), p.head_dim * size)
        self.each |= dict.fromkeys(("v", "out", "dout", "dv"), p.v_head_dim * size)

    def names(self, kernel: str) -> list[str]:
        """Names of a kernel in tables, the most special one first."""
        return names_of(kernel, self.p, kind_of(self.p, self.form))

    def sizes(self, kernel: str) -> Sizes:
        """The sizes of a kernel."""
        return needed(kernel, self.p, kind_of(self.p, self.form))

    def bytes_of(self, name: str) -> int:
        """Bytes of a tensor."""
        return self.each[name] * (self.keys if name in ("k", "v", "dk", "dv") else self.rows)

    def how(self, backward: bool) -> str:
        """One sentence."""
        names = ("forward",)
        if backward:
            names = (*self.parts, "queries")
        sizes = [self.sizes(name) for name in names]
        called = {"forward": "forward", "keys": "dK and dV", "dk": "dK", "dv": "dV", "queries": "dQ"}
        parts = [f"{called[n]} in tiles of {s.rows} x {s.keys}" for n, s in zip(names, sizes, strict=True)]
        text = f"fused Triton kernel{'s' * (len(parts) > 1)}, {', '.join(parts)}"
        return f"{text}; q, k and v are copied to rows of 16 bytes" if self.copies("q", "k", "v") else text

    # Memory.

    def copies(self, *names: str) -> dict[str, int]:
        """Bytes of the copies of tensors whose rows do not start at multiples of 16 bytes."""
        found = {}
        for name in names:
            row = self.each[name]
            if row % 16:
                found[f"copy of {name}"] = self.bytes_of(name) // row * (-(-row // 16) * 16)
        return found

    def hold(self, blocks: dict[str, int]) -> None:
        for name, count in blocks.items():
            self.heap.hold(name, count)

    def lists(self, *kernels: str) -> dict[str, int]:
        """Bytes that kernels keep with the mask: lists of tiles, of which equal ones are shared, and for each
        kernel an index of granules.
        """
        found = {}
        if not isinstance(self.form, Band):
            tables = self.form.tensors()[0].shape[:2].numel()
            for kernel in kernels:
                sizes, by_key = self.sizes(kernel), _KERNELS[kernel].by_key
                sides = [-(-self.p.q_length // sizes.rows), -(-self.p.k_length // sizes.keys)]
                lines, capacity = reversed(sides) if by_key else sides
                found[f"lists {sizes.rows} {sizes.keys} {by_key}"] = 4 * tables * lines * (capacity + 3)
                if self.form.kind == "bits":
                    found[f"index of {kernel}"] = self.form.tensors()[1].nbytes
        return found

    # The passes.

    def forward(self) -> None:
        """`forward.forward`."""
        self.hold(self.lists("forward") | self.copies("q", "k", "v"))
        self.hold({name: self.bytes_of(name) for name in ("out", "lse")})
        self.kernel("forward")

    def backward(self) -> None:
        """`backward.backward`, for the gradients of q, k and v, and of the bias if it is wanted."""
        way = self._way()
        used = ("forward", "queries", *self.parts, *(("bias",) if way == "shared" else ()))
        self.hold(self.lists(*used) | self.copies("dout", "q", "k", "v"))
        self.hold({name: self.bytes_of(name) for name in ("delta", "logs")})
        with self.heap.holding(**self.copies("out")):
            self._delta()
        self.heap.hold("dq", self.bytes_of("dq"))
        self._hold_sums(way, ("row", "score"))
        self.kernel("queries", writes_bias=way == "score")
        self.hold({name: self.bytes_of(name) for name in ("dk", "dv")})
        self._hold_sums(way, ("key",))
        for part in self.parts:
            self.kernel(part)
        if way == "shared":
            self.shared_bias()
        elif way in ("row", "key"):
            self._collect(way)

    def _way(self) -> str:
        """How the gradient of the bias leaves the kernels; "" where none is wanted. See `bias.way_of`."""
        if self.bias is None or not self.bias.gradient:
            return ""
        b, h, q, k = self.bias.full
        if k == 1:
            return "row"
        if q == 1:
            return "key"
        return "score" if (b, h) == (self.p.batch, self.p.q_heads) else "shared"

    def _hold_sums(self, way: str, ways: tuple[str, ...]) -> None:
        if way in ways:
            p, pairs = self.p, self.p.batch * self.p.q_heads
            assert self.bias is not None
            count = {"row": 4 * p.q_length, "key": 4 * p.k_length}
            count["score"] = p.q_length * p.k_length * self.bias.dtype.itemsize
            self.heap.hold("sums", pairs * count[way])

    def _collect(self, way: str) -> None:
        """Sums over what shares a bias, then its dtype."""
        assert self.bias is not None
        b, h = self.bias.full[:2]
        shared = (b, h) != (self.p.batch, self.p.q_heads)
        self.heap.hold("collected", 4 * self.bias.elements if shared else 0)
        if shared and way == "row":
            # Those per key have a name of their own until the end.
            self.heap.free("sums")
        if self.bias.dtype != torch.float32:
            self.heap.hold("dbias", self.bias.elements * self.bias.dtype.itemsize)

    # Kernels.

    def _delta(self) -> None:
        moved = {name: float(self.bytes_of(name)) for name in ("out", "dout", "lse", "logs", "delta")}
        self._move(moved)
        if self.rows:
            self.steps.append(Step("triton/delta", self.rows, ops=1, moved=sum(moved.values())))

    def kernel(self, name: str, writes_bias: bool = False) -> None:
        """One of the kernels whose programs own a line of tiles."""
        p, kernel, sizes = self.p, _KERNELS[name], self.sizes(name)
        found = visits_of(p, self.form, sizes, kernel.by_key)
        if self.may_split(name):
            found, slots = found.in_parts(self.form, p.group if kernel.by_key else 1)
            self._hold_parts(name, sizes, slots)
        lines, tables = found.full.shape
        pairs = p.batch * (p.k_heads if kernel.by_key else p.q_heads)
        if lines * pairs == 0:
            return
        times = pairs / tables
        elements = float(found.elements.sum()) * times
        reads, own = float(found.reads.sum()) * times, self.keys if kernel.by_key else self.rows
        traffic = {x: float(self.each[x] * own) for x in kernel.once}
        traffic |= {x: self.each[x] * reads for x in kernel.visit}
        slow = {x: min(count, self.bytes_of(x)) for x, count in traffic.items()}
        for x in kernel.results:
            traffic[x] = slow[x] = float(self.bytes_of(x))
        if self.bias is not None:
            self._read_bias(traffic, slow, sizes, elements)
            if writes_bias:
                # Zeros first where tiles that nobody sees are not visited.
                zeros = float(self.bias.elements) if self.careful else 0.0
                traffic["dbias"] = slow["dbias"] = (zeros + elements) * self.bias.dtype.itemsize
        visited = float((found.full + found.partial).sum()) * times
        traffic["mask"] = slow["mask"] = self._mask_bytes(sizes, visited, float(found.partial.sum()) * times)
        self._move(traffic)
        rate = rate_of(self.names(name), p, sizes)
        costs = found.full + _PARTIAL * found.partial + rate.fixed
        self._add(name, sizes, rate, costs, pairs, elements, sum(slow.values()))

    def may_split(self, name: str) -> bool:
        """Whether long lines of `Bits` may go to several programs; see `backward._make`."""
        return name == "forward" or self._way() not in (("key",) if _KERNELS[name].by_key else ("row",))

    def _hold_parts(self, name: str, sizes: Sizes, slots: int) -> None:
        """Results of programs that share a line, until they are joined."""
        p, by_key = self.p, _KERNELS[name].by_key
        widths = {"forward": p.v_head_dim + 1, "queries": p.head_dim, "dk": p.head_dim, "dv": p.v_head_dim}
        width = widths.get(name, p.head_dim + p.v_head_dim)
        lines = (
            slots * (sizes.keys if by_key else sizes.rows) * p.batch * (p.k_heads if by_key else p.q_heads)
        )
        with self.heap.holding(parts=4 * lines * width):
            pass

    def shared_bias(self) -> None:
        """`bias.bias_gradient`: a program has some tiles of the gradient, and visits whoever shares them."""
        p, bias, sizes, kernel = self.p, self.bias, self.sizes("bias"), _KERNELS["bias"]
        assert bias is not None
        self.heap.hold("dbias", bias.elements * bias.dtype.itemsize)
        if p.is_empty:
            return
        b, h = bias.full[:2]
        count = (states_of(p, self.form, sizes) != tiles.EMPTY).double()
        for dim, owners, sharing in ((0, b, p.batch), (1, h, p.q_heads)):
            if owners == 1:
                count = count.sum(dim, keepdim=True) * (sharing / count.shape[dim])
        area = tiles.sides(p.q_length, sizes.rows)[:, None] * tiles.sides(p.k_length, sizes.keys)
        owners = b * h / count.shape[:2].numel()
        elements, visited = float((count * area).sum()) * owners, float(count.sum()) * owners
        traffic: dict[str, float] = {}
        for x in kernel.visit:
            traffic[x] = self.each[x] * visited * (sizes.keys if x in ("k", "v") else sizes.rows)
        slow = {x: min(size, float(self.bytes_of(x))) for x, size in traffic.items()}
        self._read_bias(traffic, slow, sizes, elements)
        # Zeros first where tiles that nobody sees are not visited.
        stored = bias.elements * bias.dtype.itemsize * (2.0 if self.careful else 1.0)
        traffic["dbias"] = slow["dbias"] = stored
        traffic["mask"] = slow["mask"] = self._mask_bytes(sizes, 0.0, visited)
        self._move(traffic)
        rate = rate_of(self.names("bias"), p, sizes)
        chunk = chunk_of(p.batch * p.q_heads // (b * h), count.shape[-1])
        costs = (
            torch.nn.functional.pad(count, (0, -count.shape[-1] % chunk)).unflatten(-1, (-1, chunk)).sum(-1)
        )
        costs = costs.reshape(-1, 1) + rate.fixed
        self._add("bias", sizes, rate, costs, round(owners), elements, sum(slow.values()))

    def _add(
        self,
        name: str,
        sizes: Sizes,
        rate: Rate,
        costs: Tensor,
        pairs: int,
        elements: float,
        moved: float,
    ) -> None:
        p, kernel = self.p, _KERNELS[name]
        tile = sizes.rows * sizes.keys
        grid = Grid(
            costs=costs,
            pairs=pairs,
            group=max(p.group, 1),
            pair_bytes=p.k_length * (p.head_dim + p.v_head_dim) * p.dtype.itemsize,
            per_core=rate.programs,
            flops=2.0 * tile * sum(n * sum(split(d)) for n, d in self._sized(kernel.products)),
            share=rate.share,
            instructions=float(tile * self._instructions()),
        )
        every, counted = (
            2.0 * elements * sum(n * d for n, d in self._sized(which))
            for which in (kernel.products, kernel.counted)
        )
        self.steps.append(
            Step(
                self.names(name)[-1],
                grid.units,
                counted,
                exps=elements * (2 if "softcap" in p.options else 1),
                ops=1,
                grid=grid,
                moved=moved,
                repeated=every - counted,
            )
        )

    def _sized(self, products: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        return (products[0], self.p.head_dim), (products[1], self.p.v_head_dim)

    def _instructions(self) -> int:
        """Per score, beyond those of a plain call."""
        at = self.p.positions
        quads = not at.tables and at.k_step == 1 and at.k_origin % 4 == 0
        costs = _INSTRUCTIONS | ({} if quads else {"dropout": _APART})
        return sum(costs.get(option, 0) for option in self.p.options)

    def _read_bias(
        self, traffic: dict[str, float], slow: dict[str, float], sizes: Sizes, elements: float
    ) -> None:
        """Each visit reads its tile of the bias. Heads that share it run together, batch elements do not."""
        assert self.bias is not None
        size = self.bias.dtype.itemsize
        again = self.p.batch / max(self.bias.full[0], 1)
        rows, keys = self.bias.full[2:]
        repeated = (sizes.rows if rows == 1 else 1) * (sizes.keys if keys == 1 else 1)
        traffic["bias"] = elements * size / repeated
        slow["bias"] = min(traffic["bias"], self.bias.elements * size * again)

    def _mask_bytes(self, sizes: Sizes, visited: float, partial: float) -> float:
        """Lists, and the tables of partial tiles: intervals of their rows or keys, or their bits."""
        if isinstance(self.form, Band):
            return 0.0
        if self.form.kind == "bits":
            each = sizes.rows * sizes.keys / 8
        else:
            each = 8.0 * self.form.count * (sizes.rows if self.form.kind == "rows" else sizes.keys)
        return 4.0 * visited + each * partial

    def _move(self, traffic: dict[str, float]) -> None:
        for name, count in traffic.items():
            if count:
                self.traffic[name] += count
