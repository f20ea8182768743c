"""What is expensive about a call, and what its user could do: one function per piece of advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilefold.cost.estimate import Estimate
from tilefold.cost.units import seconds as time_text
from tilefold.cost.units import size

from .explanation import TileCount

if TYPE_CHECKING:
    from .explain import Question

#: Places of a tensor that are compared before it is called the same for all heads.
_SAMPLES = 1024
#: The smallest tiles that any backend skips.
_SQUARE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What advice may look at. `without(option)` gives seconds forward and backward without one option,
    `touched(side)` the share of the elements that lie in square tiles in which something is visible.
    """

    question: Question
    tiles: TileCount
    forward: Estimate
    backward: Estimate
    without: Callable[[str], tuple[float, float]]
    touched: Callable[[int], float]

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward.seconds + self.backward.seconds


def advise(facts: Facts) -> Iterator[str]:
    """Every sentence that applies."""
    for rule in RULES:
        sentence = rule(facts)
        if sentence is not None:
            yield sentence


def _bias(facts: Facts) -> str | None:
    """A bias that is most of what moves, and whether it could be smaller."""
    moved, total = facts.forward.traffic.get("bias", 0.0), facts.forward.bytes
    if moved <= 0.5 * total or moved < 1 << 20:
        return None
    text = f"the bias is {size(moved)} of the {size(total)} moved forward"
    same = _broadcastable(facts.question.bias)
    if same:
        text += f"; it is broadcastable over {' and '.join(same)} in all {_SAMPLES:,} places compared: "
        text += "pass it with a size of 1 there"
    return text


def _broadcastable(bias: Any) -> list[str]:
    """Dimensions along which a bias repeats itself, as far as a sample of its places shows."""
    if not isinstance(bias, Tensor) or bias.is_meta:
        return []
    full = bias.detach().reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    found = []
    for dim, name in enumerate(("the batch", "heads", "queries", "keys")):
        if full.shape[dim] > 1 and (full.stride(dim) == 0 or _repeats(full, dim)):
            found.append(name)
    return found


def _repeats(full: Tensor, dim: int) -> bool:
    """Are sampled entries equal along a dimension?"""
    generator = torch.Generator().manual_seed(0)
    places = [torch.randint(0, side, (_SAMPLES,), generator=generator).to(full.device) for side in full.shape]
    first = [torch.zeros_like(place) if n == dim else place for n, place in enumerate(places)]
    return bool(torch.equal(full[tuple(places)], full[tuple(first)]))


def _options(facts: Facts) -> str | None:
    """The option without which the call would be much faster."""
    best: tuple[float, str] | None = None
    for option in facts.question.problem.options:
        seconds = sum(facts.without(option))
        if seconds < 0.6 * facts.seconds and (best is None or seconds < best[0]):
            best = seconds, option
    if best is None:
        return None
    seconds, option = best
    text = f"{option} costs most: without it {time_text(seconds)} instead of {time_text(facts.seconds)}"
    return f"{text}, forward and backward"


def _scattered(facts: Facts) -> str | None:
    """Visible elements spread over far more tiles than they would fill, however small the tiles."""
    p, form = facts.question.problem, facts.question.form
    if p.is_empty:
        return None
    visible = form.visible_count(p.q_length, p.k_length) / (p.q_length * p.k_length)
    if facts.tiles.share < 2 * visible + 0.05:
        return None
    touched = facts.touched(_SQUARE)
    if touched < 2 * visible + 0.05:
        return None
    return (
        f"the mask shows {visible:.1%} of the score matrix, scattered over {touched:.0%} of its {_SQUARE} x "
        f"{_SQUARE} squares: tokens sorted so that visible ones stand together would skip tiles"
    )


def _plain_masks(facts: Facts) -> str | None:
    """A dense mask that a mask without a tensor could replace."""
    question, p = facts.question, facts.question.problem
    if question.form.kind != "rows" or not question.mask.startswith("masks.dense("):
        return None
    band = question.form.as_band(p.q_length, p.k_length)
    if band is None:
        return None
    lo, hi = band
    left = None if lo is None else -lo
    name = "full()" if band == (None, None) else "causal()" if band == (None, 0) else f"window({left}, {hi})"
    return f"the dense mask is {name}: said so, it needs no tensor and no lowering"


def _overhead(facts: Facts) -> str | None:
    """A call that is too small to be worth its overhead."""
    if facts.forward.wall != "overhead" or facts.question.problem.device != "cpu":
        return None
    share = min(facts.forward.shares["overhead"] / max(facts.forward.seconds, 1e-12), 1.0)
    return (
        f"the host takes {share:.0%} of the time: more batch elements or heads per call cost next to nothing"
    )


def _no_kernels(facts: Facts) -> str | None:
    """A GPU call that runs without a kernel of its own."""
    if facts.question.problem.device == "cpu" or facts.question.plan.backend != "eager":
        return None
    return (
        "no GPU kernel takes this call: the tiled fold runs it as PyTorch operations, exact and linear in "
        "memory, but slow"
    )


def _copies(facts: Facts) -> str | None:
    """Inputs that must be copied first."""
    names = [
        name
        for name in ("q", "k", "v")
        if isinstance(x := getattr(facts.question, name), Tensor) and x.dim() == 4 and x.stride(-1) != 1
    ]
    if not names:
        return None
    return f"{', '.join(names)}: the last dimension is not contiguous, which costs a copy in every call"


def _padded(facts: Facts) -> str | None:
    """Head sizes that differ."""
    p = facts.question.problem
    if p.head_dim == p.v_head_dim or p.device != "cpu" or facts.question.plan.backend != "eager":
        return None
    wider = max(p.head_dim, p.v_head_dim)
    return (
        f"head sizes {p.head_dim} of keys and {p.v_head_dim} of values differ: on a CPU both are padded to "
        f"{wider}"
    )


#: Every piece of advice, most valuable first.
RULES: tuple[Callable[[Facts], str | None], ...] = (
    _no_kernels,
    _bias,
    _options,
    _scattered,
    _plain_masks,
    _overhead,
    _copies,
    _padded,
)
