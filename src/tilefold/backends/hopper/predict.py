"""What the forward kernel will do for a call: its side of the cost model, in the Triton backend's terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilefold.backends import triton
from tilefold.backends.triton import predict
from tilefold.backends.triton.sizes import Sizes
from tilefold.cost.steps import Bias, Declaration
from tilefold.masks.band import Band
from tilefold.problem import Problem

from .sizes import kind_of, sizes_of, width_of
from .variant import KINDS, LINES, entry_words

#: Warps of a program whose registers are a whole core's.
_WARPS = 8


def declare(problem: Problem, form: Any, bias: Bias | None) -> Declaration:
    """The forward pass; see `planning.backend.Backend.declare`."""
    one = _played(problem, form, bias)
    # Its matrix units multiply the columns of its tiles, whether heads have them or not.
    padded = replace(problem, head_dim=one.width, v_head_dim=one.width)
    wide = one if padded == problem else _played(padded, form, bias)
    found, sizes = triton.backend.declare(problem, form, False, bias), one.sizes("forward")
    return replace(
        found,
        how=one.how(False),
        steps=tuple(wide.steps),
        rows=sizes.rows,
        keys=sizes.keys,
        traffic=dict(one.traffic),
        extra_bytes=max(one.heap.peak - found.result_bytes, 0),
    )


def _played(problem: Problem, form: Any, bias: Bias | None) -> _Forward:
    made = _Forward(problem, form, bias)
    made.forward()
    return made


class _Forward(predict._Pass):
    """Its rates have names of their own in the table, "hopper/128/band" before "hopper/128"."""

    def __init__(self, problem: Problem, form: Any, bias: Bias | None) -> None:
        super().__init__(problem, form, bias)
        self.width = width_of(problem.head_dim, problem.v_head_dim)
        self.kind = kind_of(form, self.width, problem.k_length, "bias" in problem.options)

    def names(self, kernel: str) -> list[str]:
        """See `predict._Pass.names`."""
        return [f"hopper/{self.width}/{self.kind}", f"hopper/{self.width}"]

    def sizes(self, kernel: str) -> Sizes:
        """Rows and keys of the tiles of all warp groups together."""
        found = sizes_of(self.width, self.kind)
        return Sizes(LINES * found["GROUPS"], found["BN"], _WARPS, found["STAGES"])

    def lists(self, *kernels: str) -> dict[str, int]:
        """See `predict._Pass.lists`: it keeps what it makes of them beside them, and no index."""
        found = super().lists(*kernels)
        found = {name: size for name, size in found.items() if not name.startswith("index")}
        if not isinstance(self.form, Band):
            tables, sizes = self.form.tensors()[0].shape[:2].numel(), self.sizes("forward")
            lines, tiles = -(-self.p.q_length // sizes.rows), -(-self.p.k_length // sizes.keys)
            found["words of tiles"] = 4 * entry_words(KINDS[self.form.kind]) * tables * lines * tiles
        return found

    def may_split(self, name: str) -> bool:
        """Its lines are never cut into parts."""
        return False

    def how(self, backward: bool) -> str:
        """One sentence."""
        sizes = self.sizes("forward")
        text = f"fused Hopper kernel, forward in tiles of {sizes.rows} x {sizes.keys}"
        return f"{text}; q, k and v are copied to rows of 16 bytes" if self.copies("q", "k", "v") else text
