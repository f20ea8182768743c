"""Decoding with a paged cache. So far: who owns which pages."""

from __future__ import annotations

from .pages import Copy, PageAllocator, Started

__all__ = ["Copy", "PageAllocator", "Started"]
