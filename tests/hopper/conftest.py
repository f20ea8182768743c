"""The emulator in place of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Three cores. The batch elements and heads whose lines of tiles were computed carefully are noted."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tilefold.backends.hopper import launch

    from . import emulator

    careful: list[tuple[int, int]] = []
    emulator.modules()
    part = emulator.part("careful")
    finish = part.finish

    def run(C: Any, programs: int, maps: Any, mapped: Any, results: Any, tail: Any, device: Any) -> None:
        mapped = [own.get(x)[0] for own, x in zip(maps, mapped, strict=True)]
        emulator.run(C, programs, mapped, [mapped[2], *results, *tail.arguments])

    def noted(w: int, s: Any, b: int, h: int, *rest: Any) -> Any:
        careful.append((int(b), int(h)))
        return finish(w, s, b, h, *rest)

    monkeypatch.setattr(launch, "_cores", lambda device: 3)
    monkeypatch.setattr(launch, "_run", lambda C, types: partial(run, C))
    monkeypatch.setattr(part, "finish", noted)
    launch.kept.clear()
    yield careful
    launch.kept.clear()
