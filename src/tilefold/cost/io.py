"""Elements and bytes that attention moves between slow and fast memory, in closed form; nothing is computed.

The machine has two levels: a slow memory that holds everything, and a fast one of `M` elements in which all
arithmetic happens (Hong & Kung 1981). The schedules are those of `schedules.py`, and the counts are exact for
the tiles that the functions ending in `_tiles` choose. Leading terms, for `N` rows and keys of size `d`:

    standard       4 N^2 + 4 N^2 d^2 / M       writes and reads the scores, then the probabilities
    key_outer      12 N^2 d^2 / M              FlashAttention (Dao et al. 2022), algorithm 1
    query_outer    8 N^2 d^2 / M               FlashAttention-2 (Dao 2023)
    small_cache    4 sqrt(3) N^2 d / sqrt(M)   tiled matrix products (Saha & Ye 2024), for M < d^2

With a share `s` of the tiles visible, `key_outer` and `query_outer` move Theta(N d + s N^2 d^2 / M).
`fold_traffic` counts the eager fold instead, in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor

from tilefold.errors import ArgumentError
from tilefold.problem import Problem

from . import tiles

#: Vectors of one element per row that a tile of the online softmax keeps: maximum, denominator, new maximum.
ROW_STATE = 3


# Tile sizes (rows, keys) of the schedules.


def standard_tiles(N: int, d: int, M: int, *, Lk: int | None = None) -> tuple[int, int]:
    """Rows and keys of a tile of the matrix products: the rows take half of the fast memory."""
    keys = N if Lk is None else Lk
    _enough(M, max(2 * d, ROW_STATE) + 1, "a score of one row and one key")
    rows = min(max(1, M // (2 * d)), (M - d) // (d + 1), N)
    return rows, min((M - rows * d) // (d + rows), keys)


def key_outer_tiles(
    N: int, d: int, M: int, *, Lk: int | None = None, dv: int | None = None
) -> tuple[int, int]:
    """`(Br, Bc)`: keys and values take half of the fast memory, `Bc = M / 4d`.

    The paper's `Br = min(Bc, d)` leaves the tile of scores out of its sum. Here `Br` is the largest number up
    to that one with which everything fits; the count does not depend on it.
    """
    wide, row = _widths(d, dv)
    _enough(M, wide + row + 1, "a tile of one row and one key")
    share = max(1, M // (2 * wide))
    keys = min(share, (M - row) // (wide + 1), N if Lk is None else Lk)
    return min(share, d, (M - keys * wide) // (row + keys), N), keys


def query_outer_tiles(
    N: int, d: int, M: int, *, Lk: int | None = None, dv: int | None = None
) -> tuple[int, int]:
    """`(Br, Bc)`: queries and outputs take half of the fast memory, `Br = M / 4d`, keys what is left."""
    wide, row = _widths(d, dv)
    _enough(M, wide + row + 1, "a tile of one row and one key")
    rows = min(max(1, M // (2 * wide)), (M - wide) // (row + 1), N)
    return rows, min((M - rows * row) // (wide + rows), N if Lk is None else Lk)


def small_cache_side(M: int) -> int:
    """Side of a square tile: three of them fit, with the state of the softmax."""
    _enough(M, 3 + ROW_STATE, "three tiles of one element")
    return (isqrt(ROW_STATE**2 + 12 * M) - ROW_STATE) // 6


def _widths(d: int, dv: int | None) -> tuple[int, int]:
    wide = d + (d if dv is None else dv)
    return wide, wide + ROW_STATE


def _enough(M: int, needed: int, what: str) -> None:
    if needed > M:
        raise ArgumentError(f"M: expected at least {needed} elements for {what}, got {M}")


# Elements moved by the schedules.


def standard(N: int, d: int, M: int | None = None, *, Lk: int | None = None, dv: int | None = None) -> float:
    """Elements that attention with a stored score matrix moves: Theta(N d + N^2), about
    `4 N^2 + 4 N^2 d^2 / M`, and `N^2` more where a row of scores does not fit (M <= Lk).

    Args:
        N, d: query rows, and their size.
        M: elements of fast memory; None counts every operand once, `4 N^2 + 4 N d + N`.
        Lk, dv: keys and the size of a value, if not `N` and `d`.

    Raises:
        ArgumentError: M does not hold a score with its row and key.
    """
    keys, dv = N if Lk is None else Lk, d if dv is None else dv
    first = second = passes = 1
    if M is not None:
        first = -(-N // standard_tiles(N, d, M, Lk=Lk)[0])
        second = -(-N // standard_tiles(N, dv, M, Lk=Lk)[0])
        passes = 2 if keys >= M else 1
    scores = N * d + first * keys * d + N * keys
    softmax = (passes + 1) * N * keys + N
    return float(scores + softmax + N * keys + second * keys * dv + N * dv)


def key_outer(
    N: int, d: int, M: int, share: float = 1.0, *, Lk: int | None = None, dv: int | None = None
) -> float:
    """Elements that FlashAttention moves, keys outside and queries inside: about `12 N^2 d^2 / M`.

    Every tile reads its queries, and reads and writes its rows of output, maximum and denominator.

    Args:
        N, d, M: query rows, their size, elements of fast memory.
        share: visible tiles over all tiles. Exact where rows divide into equal tiles and no key tile is
            hidden from everybody.
        Lk, dv: keys and the size of a value, if not `N` and `d`.

    Raises:
        ArgumentError: M does not hold a tile, or share lies outside [0, 1].
    """
    _in_unit("share", share)
    keys, dv = N if Lk is None else Lk, d if dv is None else dv
    _positive(N=N, d=d, M=M, Lk=keys, dv=dv)
    passes = -(-keys // key_outer_tiles(N, d, M, Lk=Lk, dv=dv)[1])
    started, ended = N * (dv + 2), 3 * N
    return started + keys * (d + dv) + share * passes * N * (d + 2 * dv + 4) + ended


def query_outer(
    N: int, d: int, M: int, share: float = 1.0, *, Lk: int | None = None, dv: int | None = None
) -> float:
    """Elements that FlashAttention-2 moves, queries outside and keys inside: about `8 N^2 d^2 / M`.

    Queries, output and lse move once; every tile reads its keys and values. Arguments and errors as
    `key_outer`; exact where keys divide into equal tiles and every query tile sees something.
    """
    _in_unit("share", share)
    keys, dv = N if Lk is None else Lk, d if dv is None else dv
    _positive(N=N, d=d, M=M, Lk=keys, dv=dv)
    passes = -(-N // query_outer_tiles(N, d, M, Lk=Lk, dv=dv)[0])
    return N * (d + dv + 1) + share * passes * keys * (d + dv)


def small_cache(N: int, d: int, M: int, *, Lk: int | None = None, dv: int | None = None) -> float:
    """Elements that two square-tiled matrix products move, about `4 sqrt(3) N^2 d / sqrt(M)`.

    The scores are written once, and read once per tile of the value size.

    Args:
        N, d, M, Lk, dv: as in `key_outer`.

    Raises:
        ArgumentError: M does not hold three tiles of one element.
    """
    keys, dv = N if Lk is None else Lk, d if dv is None else dv
    side = small_cache_side(M)
    nq, nk, nv = -(-N // side), -(-keys // side), -(-dv // side)
    scores = (N * nk + keys * nq) * d + N * keys
    return float(scores + N * keys * nv + nq * keys * dv + N * dv + 2 * N)


# What no schedule can go below.


def lower_bound(
    N: int,
    d: int,
    M: int,
    *,
    Lk: int | None = None,
    dv: int | None = None,
    pairs: int = 1,
    share: float = 1.0,
) -> float:
    """Elements that any exact attention moves, up to the constant that the theorems leave open (here 1).

    `min(N^2 d^2 / M, N^2 d / sqrt(M))` (Saha & Ye, ICML 2024): the first for M >= d^2, the second for
    smaller M and schoolbook products; they meet at M = d^2. Never below reading the inputs and writing the
    output, `4 N d`; of a masked call, below reading the rows and keys that must exist for that share to be
    visible.

    Args:
        N, d, M: query rows, their size, elements of fast memory.
        Lk, dv: keys and the size of a value, if not `N` and `d`. `N^2` becomes `N Lk`, and d the smaller
            size, since padding with zeros turns a call of that size into this one.
        pairs: batch elements times heads.
        share: visible elements over all. For a share below 1 this is the same count over what is visible, a
            yardstick and not a theorem.

    Raises:
        ArgumentError: a size below 1, or share outside [0, 1].
    """
    keys, dv = N if Lk is None else Lk, d if dv is None else dv
    _positive(N=N, d=d, M=M, Lk=keys, dv=dv, pairs=pairs)
    _in_unit("share", share)
    least, elements = min(d, dv), share * N * keys
    work = min(elements * least**2 / M, elements * least / M**0.5)
    moved = share * N * d + N * dv + share * keys * (d + dv)
    return pairs * max(float(moved), work)


def distance(moved: float, N: int, d: int, M: int, **call: Any) -> float:
    """How many times the lower bound `moved` elements are. `call` takes the keywords of `lower_bound`."""
    return moved / lower_bound(N, d, M, **call)


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"{name}: expected at least 1, got {size}")


def _in_unit(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ArgumentError(f"{name}: expected a number in [0, 1], got {value}")


# Bytes moved by the eager fold.


@dataclass(frozen=True, slots=True, eq=False)
class _Visits:
    """The visited tiles in the fold's order, and the sides of the tiles.

    Attributes:
        stripe, tile: int64 `[V]`: query stripe and key tile of each visit.
        mixed: bool `[V]`: its mask is applied.
        height, width: int64 `[nq]`, `[nk]`: rows of each stripe, keys of each tile.
    """

    stripe: Tensor
    tile: Tensor
    mixed: Tensor
    height: Tensor
    width: Tensor

    @staticmethod
    def of(problem: Problem, form: Any, rows: int, keys: int) -> _Visits:
        found = tiles.states(form, problem.q_length, problem.k_length, rows, keys)
        low, high = found.amin((0, 1)), found.amax((0, 1))
        stripe, tile = (high != tiles.EMPTY).nonzero().unbind(1)
        sides = (tiles.sides(problem.q_length, rows), tiles.sides(problem.k_length, keys))
        return _Visits(stripe, tile, low[stripe, tile] != tiles.FULL, *sides)

    def moved(self, by_row: bool, by_key: bool) -> tuple[int, bool]:
        """`(elements, whole)`: what one slot of fast memory loads while it follows the visits, per element of
        the other dimensions, and whether the region is the whole tensor at every visit.
        """
        height = self.height[self.stripe] if by_row else torch.ones_like(self.stripe)
        width = self.width[self.tile] if by_key else torch.ones_like(self.tile)
        whole = not (by_row and len(self.height) > 1) and not (by_key and len(self.width) > 1)
        region = by_row * self.stripe * max(len(self.width), 1) + by_key * self.tile
        changed = torch.ones_like(region, dtype=torch.bool)
        changed[1:] = region[1:] != region[:-1]
        return int((height * width * changed).sum()), whole


def fold_traffic(
    problem: Problem,
    form: Any,
    rows: int,
    keys: int,
    backward: bool,
    *,
    bias_shape: tuple[int, ...] | None = None,
    bias_dtype: torch.dtype | None = None,
    dlse: bool = False,
) -> dict[str, float]:
    """Bytes that the eager fold moves between slow and fast memory in one pass, by tensor.

    The fold holds one region of every tensor at a time and works on all batch elements and heads at once:
    query stripes outside, key tiles inside. A tile is visited if anybody sees some of it. The region that a
    tensor already holds is not loaded again, so a key tile that ends one stripe and starts the next counts
    once. Counted as well is what the fold does around its tiles: one pass over each operand of a selecting
    product (v; in the backward q and k) that looks for NaN and inf, the zeros that results and sums start
    from, and the rounding of the sums to a smaller dtype at the end.

    Not counted: vectors of one number per head or position (sink, slopes, positions), tile states, and the
    copies that values which are not finite cause.

    Args:
        problem: the call; its dtype is that of the inputs and results, its accumulator that of lse and sums.
        form: the lowered mask.
        rows, keys: the sides of a tile.
        backward: the backward pass, with every gradient asked for, instead of the forward pass.
        bias_shape: shape of the bias, broadcast dimensions of size 1, or None.
        bias_dtype: its dtype, if not the problem's.
        dlse: whether lse has an upstream gradient.

    Returns:
        bytes for "q", "k", "v", "out", "lse", "bias", "mask", and in the backward also for "dout", "dlse",
        "dq", "dk", "dv", "dbias"; tensors that the call does not have are left out.
    """
    for name, side in (("rows", rows), ("keys", keys)):
        if side < 1:
            raise ArgumentError(f"{name}: expected at least 1, got {side}")
    visits = _Visits.of(problem, form, rows, keys)
    found = _backward_traffic(problem, visits) if backward else _forward_traffic(problem, visits)
    if bias_shape is not None:
        dtype, shape = bias_dtype or problem.dtype, (1,) * (4 - len(bias_shape)) + tuple(bias_shape)
        lead, along = shape[0] * shape[1], (shape[2] > 1, shape[3] > 1)
        found["bias"] = _read(visits, along, lead) * dtype.itemsize
        if backward:
            found["dbias"] = _summed(problem, visits, along, lead, shape[2] * shape[3], dtype)
    if backward and dlse:
        found["dlse"] = found["lse"]
    if form.tensors():
        found["mask"] = _mask_traffic(problem, form, rows, keys, visits)
    return {name: float(size) for name, size in found.items()}


_BY_ROW, _BY_KEY = (True, False), (False, True)


def _each(p: Problem) -> tuple[int, int, int]:
    """Elements of one position of q, k and v."""
    keys = p.batch * p.k_heads
    return p.batch * p.q_heads * p.head_dim, keys * p.head_dim, keys * p.v_head_dim


def _forward_traffic(p: Problem, visits: _Visits) -> dict[str, int]:
    size, (q, k, v) = p.dtype.itemsize, _each(p)
    runs = 0 not in (p.batch, p.q_heads, p.q_length)
    written = p.batch * p.q_heads * p.q_length * (2 if len(visits.height) > 1 else 1)
    return {
        "q": _read(visits, _BY_ROW, q) * size,
        "k": _read(visits, _BY_KEY, k) * size,
        "v": _read(visits, _BY_KEY, v, scanned=p.k_length if runs else 0) * size,
        "out": written * p.v_head_dim * size,
        "lse": written * p.accumulator.itemsize,
    }


def _backward_traffic(p: Problem, visits: _Visits) -> dict[str, int]:
    size, (q, k, v) = p.dtype.itemsize, _each(p)
    rows = p.batch * p.q_heads * p.q_length
    return {
        "q": _read(visits, _BY_ROW, q, scanned=p.q_length) * size,
        "k": _read(visits, _BY_KEY, k, scanned=p.k_length) * size,
        "v": _read(visits, _BY_KEY, v) * size,
        "out": rows * p.v_head_dim * size,
        "dout": rows * p.v_head_dim * size,
        "lse": rows * p.accumulator.itemsize,
        "dq": _summed(p, visits, _BY_ROW, q, p.q_length, p.dtype),
        "dk": _summed(p, visits, _BY_KEY, k, p.k_length, p.dtype),
        "dv": _summed(p, visits, _BY_KEY, v, p.k_length, p.dtype),
    }


def _read(visits: _Visits, along: tuple[bool, bool], each: int, scanned: int = 0) -> int:
    """Elements read of a tensor with `each` elements per position, after `scanned` positions at once."""
    moved, whole = visits.moved(*along)
    return each * (scanned if scanned and whole else scanned + moved)


def _summed(
    p: Problem, visits: _Visits, along: tuple[bool, bool], each: int, positions: int, dtype: torch.dtype
) -> int:
    """Bytes of a gradient sum of `each * positions` elements: zeros, then a read and a write per change of
    region, then the rounding to `dtype`.
    """
    moved, whole = visits.moved(*along)
    held = whole or moved == 0
    elements = each * positions
    steps = elements if held else elements + 2 * each * moved
    if dtype == p.accumulator:
        return steps * dtype.itemsize
    return (steps if held else steps + elements) * p.accumulator.itemsize + elements * dtype.itemsize


def _mask_traffic(p: Problem, form: Any, rows: int, keys: int, visits: _Visits) -> int:
    """Bytes of the mask's tables, per mixed tile: the intervals of its rows or keys, or its granules."""
    table = form.tensors()[0]
    shared = prod(table.shape[:2])
    stripe, tile = visits.stripe[visits.mixed], visits.tile[visits.mixed]
    if form.kind == "rows":
        return int(visits.height[stripe].sum()) * shared * table.shape[3] * table.itemsize
    if form.kind == "cols":
        return int(visits.width[tile].sum()) * shared * table.shape[3] * table.itemsize
    states, index, words = form.tensors()
    each = states.itemsize + index.itemsize
    if words.shape[0]:
        each += words.shape[1] * words.itemsize
    tall, wide = (_touched(n, side, words.shape[1]) for n, side in ((p.q_length, rows), (p.k_length, keys)))
    return int((tall[stripe] * wide[tile]).sum()) * shared * each


def _touched(length: int, side: int, granule: int) -> Tensor:
    """int64 `[tiles]`: granules that each tile touches along one side."""
    start = torch.arange(0, length, side)
    end = (start + side).clamp(max=length)
    return (end + granule - 1) // granule - start // granule
