"""How fast the kernels are, as measured on one GPU, as shares of what it could do: other GPUs are taken to be
like it.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any, NamedTuple

from tilefold.problem import Problem

from .sizes import Sizes

#: Share of the peak, by bits of the dtype, and visits per program of kernels that nobody has measured.
_SHARES, _FIXED = {16: 0.15, 32: 0.5}, 4.0
#: Warps that a core holds: the kernels leave no register unused, 255 for each of 32 threads.
_WARPS = 8


class Rate(NamedTuple):
    """What was measured of a kernel.

    Attributes:
        share: of the peak of matrix units, that its products reach while every core is busy.
        fixed: what a program costs beside its visits, in visits of a full tile.
        programs: how many a core runs at once, as registers and shared memory of the compiled kernel allow.
    """

    share: float
    fixed: float
    programs: int


@functools.cache
def _table() -> dict[str, Any]:
    file = resources.files("tilefold") / "planning" / "tables" / "rates" / "h200.json"
    return json.loads(file.read_text())


def rate_of(names: list[str], p: Problem, sizes: Sizes) -> Rate:
    """The rate of a kernel under the first of its names that was measured.

    Tiles of other sizes, such as those of another architecture, are taken to reach the same share; how many
    programs share a core is then counted in warps.
    """
    programs, table = max(1, _WARPS // sizes.warps), _table()
    found = next((table[name] for name in names if name in table), None)
    if found is None:
        return Rate(_SHARES[8 * p.dtype.itemsize], _FIXED, programs)
    return Rate(
        found["share"], found["fixed"], found["programs"] if Sizes(*found["sizes"]) == sizes else programs
    )
