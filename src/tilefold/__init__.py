"""Exact, IO-aware attention for PyTorch. One call, every mask, every device."""

from __future__ import annotations

from . import errors, masks
from .api import attention, attention_varlen
from .explaining import explain
from .partial import Partial, merge
from .problem import Positions, Problem

__version__ = "0.1.0"

__all__ = [
    "Partial",
    "Positions",
    "Problem",
    "attention",
    "attention_varlen",
    "errors",
    "explain",
    "masks",
    "merge",
]
