"""Arguments of kernels that are the same in every call of a kind with the same numbers in its score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from tilefold.scores import Scores

T = TypeVar("T")
#: Kinds of scores that are kept; a model has one or two.
_MOST = 16


class Tails(Generic[T]):
    """What was made of scores that have no tensors, by the numbers that they have."""

    def __init__(self) -> None:
        self._kept: dict[tuple[float, float | None], T] = {}

    def get(self, scores: Scores, make: Callable[[], T]) -> T:
        key = scores.scale, scores.softcap
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MOST:
                self._kept.clear()
            found = self._kept[key] = make()
        return found
