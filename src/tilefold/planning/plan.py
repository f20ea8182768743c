"""How a call will be done, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision about one call.

    Attributes:
        backend: who runs it.
        refusals: `(name, reasons)` of every backend that was asked before it and declined.
    """

    backend: str
    refusals: tuple[tuple[str, tuple[str, ...]], ...] = ()
