"""The IO experiment of the FlashAttention paper: what attention moves to and from a small fast memory.

Three schedules run on a machine with two levels of memory that counts every element which crosses, and that
refuses to hold more than it can. Beside the counts stand the closed forms and what no schedule can go below.

Run: python examples/03_io_of_attention.py [--png FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from tilefold.cost import io, schedules
from tilefold.cost.machine import Machine

SCHEDULES = {
    "standard": (schedules.standard, io.standard),
    "key-outer": (schedules.key_outer, io.key_outer),
    "query-outer": (schedules.query_outer, io.query_outer),
}

torch.manual_seed(0)


def count(sizes: Sequence[int], N: int, d: int) -> dict[str, list[int]]:
    """Elements that each schedule moves for every size of the fast memory; all must compute the same."""
    q, k, v = (torch.randn(N, d, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    moved: dict[str, list[int]] = {name: [] for name in SCHEDULES}
    for M in sizes:
        for name, (run, _) in SCHEDULES.items():
            machine = Machine(M)
            out, _ = run(machine, q, k, v)
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
            moved[name].append(machine.moved)
    return moved


def slope(sizes: Sequence[int], moved: Sequence[int]) -> float:
    """Of the straight line that fits log(moved) over log(M) best."""
    x, y = ([math.log(value) for value in values] for values in (sizes, moved))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def draw(path: Path, sizes: Sequence[int], moved: dict[str, list[int]], bound: Sequence[float]) -> None:
    """Counted elements over the size of the fast memory, both logarithmic, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, counts in moved.items():
        axes.loglog(sizes, counts, marker="o", label=name)
    axes.loglog(sizes, bound, linestyle="--", color="black", label="lower bound")
    axes.set_xlabel("fast memory, elements")
    axes.set_ylabel("elements moved")
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="rows and keys, N")
    parser.add_argument("--size", type=int, default=16, help="size of a row, d")
    parser.add_argument("--png", type=Path, help="where to draw the counts (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.png and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png: expected matplotlib, which is not installed (pip install 'tilefold[plots]')")
    N, d = options.length, options.size
    sizes = [4 * d**2 * 2**i for i in range(32) if 4 * d**2 * 2**i <= N * d // 4]
    if len(sizes) < 2:
        parser.error("--length, --size: expected N >= 32 d, so that several M lie between 4 d^2 and N d / 4")

    moved = count(sizes, N, d)
    print(f"N = {N} rows and keys of size d = {d}; elements moved, counted and in closed form\n")
    print(f"{'M':>7}" + "".join(f"{name:>13}{'formula':>11}" for name in SCHEDULES) + f"{'lower bound':>14}")
    bound = [io.lower_bound(N, d, M) for M in sizes]
    for at, M in enumerate(sizes):
        cells = (f"{moved[name][at]:13,}{form(N, d, M):11,.0f}" for name, (_, form) in SCHEDULES.items())
        print(f"{M:7,}" + "".join(cells) + f"{bound[at]:14,.0f}")

    print()
    M = sizes[-1]
    for name, counts in moved.items():
        ratio = io.distance(counts[-1], N, d, M)
        print(f"{name:>12}: slope {slope(sizes, counts):5.2f}, {ratio:5.1f} times the bound at M = {M:,}")
    print(
        "\nTwice the fast memory halves what a tiled schedule moves. Standard attention pays for its scores."
    )
    if options.png:
        draw(options.png, sizes, moved, bound)
        print(f"drawn: {options.png}")


if __name__ == "__main__":
    main()
