"""Attention on a two-level machine, in the orders of the literature; `io.py` holds their counts.

Every algorithm takes `q [N, d]`, `k [Lk, d]`, `v [Lk, dv]` of one float dtype in slow memory, computes on
blocks of a `Machine` only, and returns `(out [N, dv], lse [N])`. Scores are `q.k / sqrt(d)`. Tile sizes
follow from the machine's capacity; `visible` is a boolean layout of those tiles, in which False tiles are
skipped. The denominator's block "l" ends as lse.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilefold.errors import ShapeError

from . import io
from .machine import Machine

Result = tuple[Tensor, Tensor]


def standard(machine: Machine, q: Tensor, k: Tensor, v: Tensor) -> Result:
    """The scores go to slow memory, come back for the softmax (twice, if a row of them does not fit), and
    once more for the product with v.

    Raises:
        ShapeError: sizes of q, k and v do not fit together.
        ArgumentError: the fast memory does not hold a tile.
    """
    (N, d), (Lk, dv) = _sizes(q, k, v)
    out, lse, s = _results(q, v, Lk)
    rows, keys = io.standard_tiles(N, d, machine.capacity, Lk=Lk)
    for i in _split(N, rows):
        q_i = machine.load("q", q[i])
        for j in _split(Lk, keys):
            k_j = machine.load("k", k[j])
            s_ij = machine.allocate("s", len(q_i), len(k_j), like=q)
            torch.mm(q_i, k_j.T, out=s_ij).mul_(d**-0.5)
            machine.store("s", s[i, j])
            machine.evict("k", "s")
        machine.evict("q")
    _softmax(machine, s, lse)
    rows, keys = io.standard_tiles(N, dv, machine.capacity, Lk=Lk)
    for i in _split(N, rows):
        out_i = machine.allocate("out", len(q[i]), dv, like=q)
        for j in _split(Lk, keys):
            out_i.addmm_(machine.load("s", s[i, j]), machine.load("v", v[j]))
            machine.evict("s", "v")
        machine.store("out", out[i])
        machine.evict("out")
    return out, lse


def key_outer(machine: Machine, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Result:
    """FlashAttention (Dao et al. 2022, algorithm 1): keys outside, queries inside.

    Output, maximum and denominator live in slow memory and are rewritten by every tile; the output is
    normalised all the time.

    Args:
        machine, q, k, v: see the module.
        visible: bool `[ceil(N / Br), ceil(Lk / Bc)]` for `io.key_outer_tiles`, or None for all.

    Raises:
        ShapeError: sizes do not fit together.
        ArgumentError: the fast memory does not hold a tile.
    """
    (N, d), (Lk, dv) = _sizes(q, k, v)
    rows, keys = io.key_outer_tiles(N, d, machine.capacity, Lk=Lk, dv=dv)
    visible = _layout(visible, N, Lk, rows, keys)
    out, lse, _ = _results(q, v, 0)
    maxima, sums = torch.zeros_like(lse), torch.zeros_like(lse)
    for i in _split(N, rows):
        _start_rows(machine, q[i], dv)
        _leave_rows(machine, out[i], maxima[i], sums[i])
    for n, j in enumerate(_split(Lk, keys)):
        if not visible[:, n].any():
            continue
        k_j, v_j = machine.load("k", k[j]), machine.load("v", v[j])
        for row, i in enumerate(_split(N, rows)):
            if visible[row, n]:
                q_i, out_i = machine.load("q", q[i]), machine.load("out", out[i])
                m_i, l_i = machine.load("m", maxima[i]), machine.load("l", sums[i])
                out_i.mul_(l_i[:, None])
                _fold(machine, q_i, k_j, v_j, out_i, m_i, l_i)
                out_i.div_(l_i[:, None])
                machine.evict("q")
                _leave_rows(machine, out[i], maxima[i], sums[i])
        machine.evict("k", "v")
    for i in _split(N, rows):
        m_i, l_i = machine.load("m", maxima[i]), machine.load("l", sums[i])
        l_i.log_().add_(m_i)
        machine.store("l", lse[i])
        machine.evict("m", "l")
    return out, lse


def query_outer(machine: Machine, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Result:
    """FlashAttention-2 (Dao 2023): queries outside, keys inside; a row's sums never leave fast memory.

    Args:
        machine, q, k, v: see the module.
        visible: bool `[ceil(N / Br), ceil(Lk / Bc)]` for `io.query_outer_tiles`, or None for all.

    Raises:
        ShapeError: sizes do not fit together.
        ArgumentError: the fast memory does not hold a tile.
    """
    (N, d), (Lk, dv) = _sizes(q, k, v)
    rows, keys = io.query_outer_tiles(N, d, machine.capacity, Lk=Lk, dv=dv)
    visible = _layout(visible, N, Lk, rows, keys)
    out, lse, _ = _results(q, v, 0)
    for row, i in enumerate(_split(N, rows)):
        q_i = machine.load("q", q[i])
        out_i, m_i, l_i = _start_rows(machine, q[i], dv)
        for n, j in enumerate(_split(Lk, keys)):
            if visible[row, n]:
                _fold(machine, q_i, machine.load("k", k[j]), machine.load("v", v[j]), out_i, m_i, l_i)
                machine.evict("k", "v")
        if visible[row].any():
            out_i.div_(l_i[:, None])
        l_i.log_().add_(m_i)
        machine.store("out", out[i])
        machine.store("l", lse[i])
        machine.evict("q", "out", "m", "l")
    return out, lse


def small_cache(machine: Machine, q: Tensor, k: Tensor, v: Tensor) -> Result:
    """Two matrix products in square tiles, best where M < d^2 (Saha & Ye 2024).

    A tile of fewer than d columns cannot finish a score, so the scores are summed over tiles of the head size
    and kept in slow memory. Their maximum and denominator are kept up beside them.

    Raises:
        ShapeError: sizes of q, k and v do not fit together.
        ArgumentError: the fast memory does not hold three tiles of one element.
    """
    (N, d), (Lk, dv) = _sizes(q, k, v)
    side = io.small_cache_side(machine.capacity)
    out, lse, s = _results(q, v, Lk)
    for i in _split(N, side):
        m_i = machine.allocate("m", len(q[i]), like=q, fill=-torch.inf)
        l_i = machine.allocate("l", len(q[i]), like=q)
        for j in _split(Lk, side):
            s_ij = machine.allocate("s", len(m_i), len(k[j]), like=q)
            for c in _split(d, side):
                s_ij.addmm_(machine.load("q", q[i, c]), machine.load("k", k[j, c]).T)
                machine.evict("q", "k")
            s_ij.mul_(d**-0.5)
            machine.store("s", s[i, j])
            _weigh(machine, s_ij, m_i, l_i)
            machine.evict("s", "alpha")
        l_i.log_().add_(m_i)
        machine.store("l", lse[i])
        machine.evict("m", "l")
    for i in _split(N, side):
        lse_i = machine.load("lse", lse[i])
        for c in _split(dv, side):
            out_ic = machine.allocate("out", len(lse_i), len(range(dv)[c]), like=q)
            for j in _split(Lk, side):
                p_ij = machine.load("s", s[i, j]).sub_(lse_i[:, None]).exp_()
                out_ic.addmm_(p_ij, machine.load("v", v[j, c]))
                machine.evict("s", "v")
            machine.store("out", out[i, c])
            machine.evict("out")
        machine.evict("lse")
    return out, lse


def _softmax(machine: Machine, s: Tensor, lse: Tensor) -> None:
    """Softmax of the rows of `s [N, Lk]` in slow memory."""
    (N, Lk), M = s.shape, machine.capacity
    fits = Lk < M
    for i in _split(N, M // (Lk + 1)) if fits else ():
        s_i, lse_i = machine.load("s", s[i]), machine.allocate("l", len(s[i]), like=s)
        torch.logsumexp(s_i, -1, out=lse_i)
        s_i.sub_(lse_i[:, None]).exp_()
        machine.store("s", s[i])
        machine.store("l", lse[i])
        machine.evict("s", "l")
    for i in _split(N, 1) if not fits else ():
        m_i = machine.allocate("m", 1, like=s, fill=-torch.inf)
        l_i = machine.allocate("l", 1, like=s)
        for j in _split(Lk, M - io.ROW_STATE):
            _weigh(machine, machine.load("s", s[i, j]), m_i, l_i)
            machine.evict("s", "alpha")
        l_i.log_().add_(m_i)
        machine.store("l", lse[i])
        for j in _split(Lk, M - io.ROW_STATE):
            machine.load("s", s[i, j]).sub_(l_i[:, None]).exp_()
            machine.store("s", s[i, j])
            machine.evict("s")
        machine.evict("m", "l")


def _fold(
    machine: Machine, q_i: Tensor, k_j: Tensor, v_j: Tensor, out_i: Tensor, m_i: Tensor, l_i: Tensor
) -> None:
    """One tile of the online softmax, into the un-normalised `out_i`, in place."""
    s_ij = machine.allocate("s", len(q_i), len(k_j), like=q_i)
    torch.mm(q_i, k_j.T, out=s_ij).mul_(q_i.shape[1] ** -0.5)
    alpha = _weigh(machine, s_ij, m_i, l_i)
    out_i.mul_(alpha[:, None]).addmm_(s_ij, v_j)
    machine.evict("s", "alpha")


def _weigh(machine: Machine, s_ij: Tensor, m_i: Tensor, l_i: Tensor) -> Tensor:
    """Turn scores into weights under the new maximum; returns the factor of older sums, the block "alpha".

    The maximum and the sum of a row of scores are taken to come about in registers.
    """
    alpha = machine.allocate("alpha", len(m_i), like=m_i)
    alpha.copy_(m_i)
    torch.maximum(m_i, s_ij.amax(-1), out=m_i)
    alpha.sub_(m_i).exp_()
    s_ij.sub_(m_i[:, None]).exp_()
    l_i.mul_(alpha).add_(s_ij.sum(-1))
    return alpha


def _start_rows(machine: Machine, q_i: Tensor, dv: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks "out", "m" and "l" of rows that have seen nothing yet."""
    return (
        machine.allocate("out", len(q_i), dv, like=q_i),
        machine.allocate("m", len(q_i), like=q_i, fill=-torch.inf),
        machine.allocate("l", len(q_i), like=q_i),
    )


def _leave_rows(machine: Machine, *slow: Tensor) -> None:
    for name, region in zip(("out", "m", "l"), slow, strict=True):
        machine.store(name, region)
    machine.evict("out", "m", "l")


def _results(q: Tensor, v: Tensor, Lk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slow memory for `out [N, dv]`, `lse [N]` and scores `[N, Lk]`."""
    N = q.shape[0]
    return q.new_zeros(N, v.shape[1]), q.new_zeros(N), q.new_zeros(N, Lk)


def _split(length: int, side: int) -> Iterator[slice]:
    return (slice(start, min(start + side, length)) for start in range(0, length, side))


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """`(N, d), (Lk, dv)`."""
    if q.dim() != 2 or k.dim() != 2 or v.dim() != 2 or q.shape[1] != k.shape[1] or k.shape[0] != v.shape[0]:
        got = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ShapeError(f"q, k, v: expected shapes [N, d], [Lk, d], [Lk, dv], got {got}")
    if 0 in (*q.shape, *v.shape):
        raise ShapeError(f"q, v: expected sizes of at least 1, got {list(q.shape)}, {list(v.shape)}")
    return (q.shape[0], q.shape[1]), (v.shape[0], v.shape[1])


def _layout(visible: Tensor | None, N: int, Lk: int, rows: int, keys: int) -> Tensor:
    shape = (-(-N // rows), -(-Lk // keys))
    if visible is None:
        return torch.ones(shape, dtype=torch.bool)
    if visible.shape != shape or visible.dtype != torch.bool:
        raise ShapeError(
            f"visible: expected bool {list(shape)}, one element per tile of {rows} rows and {keys} keys, got"
            f" {visible.dtype} {list(visible.shape)}"
        )
    return visible
