"""Peak memory: what an algorithm holds at once, played through before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Heap:
    """A heap that only counts. Code that predicts memory holds and frees by name what the real code would.

    Attributes:
        held: bytes held now.
        peak: the most bytes held at once so far.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, int] = {}
        self.held = 0
        self.peak = 0

    def hold(self, name: str, count: float) -> None:
        """Hold `count` bytes under `name`. A block of that name is replaced, after the new one was made."""
        old = self._blocks.get(name, 0)
        self._blocks[name] = int(count)
        self.held += int(count)
        self.peak = max(self.peak, self.held)
        self.held -= old

    def free(self, *names: str) -> None:
        """Let blocks go.

        Raises:
            KeyError: nothing is held under that name.
        """
        for name in names:
            self.held -= self._blocks.pop(name)

    @contextmanager
    def holding(self, **blocks: float) -> Iterator[None]:
        """Blocks that are held inside a `with`."""
        for name, count in blocks.items():
            self.hold(name, count)
        yield
        self.free(*blocks)
