"""Tile sizes, warps and pipeline depth of the kernels, from the tuned table of the architecture."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilefold.planning import tuned
from tilefold.problem import Problem

from .arguments import interpreted

#: Names of the kernels in the table: forward, dK and dV together or apart, dQ, the gradient of a shared bias.
KERNELS = ("forward", "keys", "dk", "dv", "queries", "bias")
#: The longest side of a tile: multiples of it have no tile over an edge, whatever the sizes.
WHOLE = 128
#: Head sizes up to which an entry of the table holds.
HEADS = (64, 128, 256, 576)


class Sizes(NamedTuple):
    """Of one kernel: rows and keys of a tile, warps of a program, depth of the software pipeline, loops over
    the tiles (see `Variant.LOOPS`), and the most registers of a thread, so that more programs fit a core; 0
    leaves them to the compiler.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    loops: int = 2
    registers: int = 0

    def constants(self, problem: Problem) -> dict[str, Any]:
        """What of a call's kernels they settle; see `variant.Variant`."""
        whole = problem.q_length % self.rows == 0 and problem.k_length % self.keys == 0
        return {
            "BM": self.rows,
            "BN": self.keys,
            "STAGES": self.stages,
            "LOOPS": self.loops,
            "EVEN": whole,
        }


def names_of(kernel: str, problem: Problem, kind: str) -> list[str]:
    """Entries of the table that hold, the most special one first.

    "triton/forward/16/128" is for 16-bit heads of up to 128; "triton/forward/16/128/bias" for calls with a
    bias, which needs fast memory of its own; ".../rows" and its like for kinds of masks (`kind_of`).
    """
    widest = max(problem.head_dim, problem.v_head_dim)
    bits = 8 * problem.dtype.itemsize
    name = f"triton/{kernel}/{bits}/{next(head for head in HEADS if widest <= head)}"
    special = "bias" if "bias" in problem.options else kind
    return [f"{name}/{special}", name]


def sizes_of(kernel: str, problem: Problem, kind: str) -> Sizes | None:
    """The sizes of a kernel; None for "keys" where dK and dV take a kernel each.

    Args:
        kind: of the call; see `kind_of`.
    """
    small = (32, 32, 4, 1) if interpreted() and problem.device == "cpu" else None
    found = tuned.sizes(names_of(kernel, problem, kind), problem.device, small)
    assert found is not None or kernel == "keys"
    return None if found is None else Sizes(*found)


def needed(kernel: str, problem: Problem, kind: str) -> Sizes:
    """The sizes of a kernel that every table has."""
    sizes = sizes_of(kernel, problem, kind)
    assert sizes is not None
    return sizes


def kind_of(problem: Problem, form: Any) -> str:
    """The kind of a call as far as it bears on sizes: "full" (no mask, no option of the score, lengths that
    are multiples of WHOLE: kernels without any code of masks), "short" (a band of bounded width), "band",
    "rows", "cols" or "bits".
    """
    if form.kind != "band":
        return form.kind
    if form.is_full and not set(problem.options) - {"sink"}:
        whole = problem.q_length % WHOLE == 0 and problem.k_length % WHOLE == 0
        return "full" if whole else "band"
    return "band" if form.lo is None or form.hi is None else "short"
