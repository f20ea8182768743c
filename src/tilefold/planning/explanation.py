"""What is known about a call before it runs, as a value that prints itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilefold.cost.estimate import Estimate
from tilefold.cost.units import flops, seconds, size

from .plan import Plan


@dataclass(frozen=True, slots=True)
class TileCount:
    """Tiles of the score matrix over all batch elements and query heads, as the backend classifies them: by
    bounds per tile, which may call an empty or a full tile partial, and never the other way round.

    Attributes:
        rows, keys: the sides of a tile.
        total: all of them.
        visited: those in which somebody sees something; the sum of `full` and `partial`.
        full: those without a hidden element, in which no mask code runs.
        partial: the others that are visited.
        share: elements of visited tiles over all elements.
    """

    rows: int
    keys: int
    total: int
    visited: int
    full: int
    partial: int
    share: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a call runs as it does, and what that costs. `print` it, or take its fields.

    Attributes:
        call: the question in words: shapes, dtype, options.
        mask: the mask as text, or "none".
        form: what the mask was lowered to: "band", "rows", "cols" or "bits".
        machine: name of the machine whose figures are used.
        doubt: why these figures should be believed less; "" if nothing is known against them.
        plan: the plan that the next such call will use.
        how: one sentence: how the chosen backend will run it.
        refusals: every other backend, with all of its reasons.
        tiles: the tiles of the score matrix.
        forward: the forward pass.
        backward: the backward pass.
        lse_bytes: bytes of `lse`.
        bound_bytes: the least that any exact algorithm moves forward with the fast memory of one core (Saha &
            Ye, ICML 2024), up to the theorem's open constant, which is taken as 1; under a mask a yardstick,
            the same count over what is visible.
        advice: what is expensive and what could be done about it, one sentence each.
    """

    call: str
    mask: str
    form: str
    machine: str
    plan: Plan
    how: str
    refusals: tuple[tuple[str, tuple[str, ...]], ...]
    tiles: TileCount
    forward: Estimate
    backward: Estimate
    lse_bytes: int
    bound_bytes: float
    doubt: str = ""
    advice: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """Who runs the call."""
        return self.plan.backend

    @property
    def step_extra_bytes(self) -> int:
        """The most bytes held at once in a forward and its backward pass, beyond arguments, `out` and
        gradients. `lse` is kept from the one to the other.
        """
        first = self.forward.extra_bytes - self.backward.result_bytes
        return self.lse_bytes + max(first, self.backward.extra_bytes)

    @property
    def distance(self) -> float:
        """How many times the bound the forward pass moves."""
        return self.forward.bytes / self.bound_bytes if self.bound_bytes else 1.0

    def __str__(self) -> str:
        lines = [
            f"call       {self.call}",
            f"mask       {self.mask}, lowered to {self.form}",
            f"machine    {self.machine}" + (f" ({self.doubt})" if self.doubt else ""),
            f"backend    {self.backend}: {self.how}",
        ]
        lines += [f"           not {name}: {reason}" for name, reasons in self.refusals for reason in reasons]
        t = self.tiles
        lines += [
            f"tiles      {t.visited:,} of {t.total:,} visited ({t.rows} x {t.keys}): {t.full:,} full, "
            f"{t.partial:,} partial; {t.share:.1%} of the elements",
            *_columns(("forward", self.forward), ("backward", self.backward)),
            f"bound      {size(self.bound_bytes)} forward at least, with one core's fast memory: "
            f"this moves {self.distance:.3g} times as much",
        ]
        lines += [f"advice     {sentence}" for sentence in self.advice]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "call": self.call,
            "mask": self.mask,
            "form": self.form,
            "machine": self.machine,
            "doubt": self.doubt,
            "backend": self.backend,
            "how": self.how,
            "refusals": [{"backend": name, "reasons": list(reasons)} for name, reasons in self.refusals],
            "tiles": asdict(self.tiles),
            "forward": self.forward.to_dict(),
            "backward": self.backward.to_dict(),
            "step_extra_bytes": self.step_extra_bytes,
            "bound_bytes": self.bound_bytes,
            "distance": self.distance,
            "advice": list(self.advice),
        }


def _columns(*passes: tuple[str, Estimate]) -> list[str]:
    """Both passes beside each other."""
    rows: list[tuple[str, list[str]]] = [
        ("", [name for name, _ in passes]),
        ("time", [seconds(e.seconds) for _, e in passes]),
        ("bound by", [e.wall for _, e in passes]),
        ("work", [flops(e.flops) for _, e in passes]),
        ("moved", [size(e.bytes) for _, e in passes]),
        ("intensity", [f"{e.intensity:.0f} FLOP/byte" for _, e in passes]),
        ("extra", [size(e.extra_bytes) for _, e in passes]),
        ("results", [size(e.result_bytes) for _, e in passes]),
    ]
    return [f"{name:10} " + "".join(f"{cell:>18}" for cell in cells) for name, cells in rows]
