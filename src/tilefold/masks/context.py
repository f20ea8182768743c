"""Where a mask is evaluated: points, lines (rows or columns) and boxes (tiles) of the matrix, in tensors.

All carry the lengths of the coordinate system they live in, which are ints for the call itself and tensors
inside `documents`, where every query and key has its own lengths. So every mask composes with every other
one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

Length = int | Tensor


@dataclass(frozen=True)
class Points:
    """Single elements of the matrix; all tensors broadcast together.

    Attributes:
        b, h, i, j: int64 indices of batch element, query head, query and key.
        q_length, k_length: lengths of the coordinate system, ints or tensors that broadcast with the indices.
    """

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    q_length: Length
    k_length: Length


@dataclass(frozen=True)
class Lines:
    """Query rows (or key columns) of one call.

    Attributes:
        b, h: int64 `[B or 1, 1, 1]` and `[1, H or 1, 1]`, indices of batch element and query head.
        at: int64, broadcastable to `[B, H, N]`: positions of the lines.
        q_length, k_length: lengths of the coordinate system, ints or tensors that broadcast with `at`.
    """

    b: Tensor
    h: Tensor
    at: Tensor
    q_length: Length
    k_length: Length


@dataclass(frozen=True)
class Boxes:
    """Non-empty tiles `[q0, q1) x [k0, k1)`.

    Attributes:
        b, h: int64 `[B or 1, 1, 1, 1]` and `[1, H or 1, 1, 1]`.
        q0, q1, k0, k1: int64, broadcastable to `[B, H, nq, nk]`.
        q_length, k_length: lengths of the coordinate system.
        size: no side of a box is longer than this.
    """

    b: Tensor
    h: Tensor
    q0: Tensor
    q1: Tensor
    k0: Tensor
    k1: Tensor
    q_length: Length
    k_length: Length
    size: int


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: what is made then holds nothing before it is replayed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def indices(B: int, H: int, dims: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Index tensors of batch elements and query heads with `dims` dimensions in all, the two leading ones
    being theirs.
    """
    tail = (1,) * (dims - 2)
    b = torch.arange(B, device=device).view(B, 1, *tail)
    return b, torch.arange(H, device=device).view(1, H, *tail)


def query_lines(B: int, H: int, Lq: int, Lk: int, device: torch.device) -> Lines:
    """All query rows of a call."""
    b, h = indices(B, H, 3, device)
    return Lines(b, h, torch.arange(Lq, device=device).view(1, 1, Lq), Lq, Lk)


def key_lines(B: int, H: int, Lq: int, Lk: int, device: torch.device) -> Lines:
    """All key columns of a call."""
    b, h = indices(B, H, 3, device)
    return Lines(b, h, torch.arange(Lk, device=device).view(1, 1, Lk), Lq, Lk)


def grid(B: int, H: int, Lq: int, Lk: int, size: int, device: torch.device) -> Boxes:
    """The tiles of `size x size` that cover a call, clipped at its edges."""
    b, h = indices(B, H, 4, device)
    q0 = torch.arange(0, Lq, size, device=device).view(1, 1, -1, 1)
    k0 = torch.arange(0, Lk, size, device=device).view(1, 1, 1, -1)
    return Boxes(b, h, q0, (q0 + size).clamp(max=Lq), k0, (k0 + size).clamp(max=Lk), Lq, Lk, size)


def stripes(boxes: Boxes, most: int = 2**18) -> list[Boxes]:
    """A grid as stripes of rows of about `most` tiles each, at least one."""
    rows = max(1, most // max(1, boxes.b.numel() * boxes.h.numel() * boxes.k0.numel()))
    parts = zip(boxes.q0.split(rows, dim=2), boxes.q1.split(rows, dim=2), strict=True)
    return [replace(boxes, q0=q0, q1=q1) for q0, q1 in parts]


def position(i: Tensor, q_length: Length, k_length: Length) -> Tensor:
    """The key position at which query `i` stands: the bottom-right alignment that all masks share."""
    return i + (k_length - q_length)


def states(empty: Tensor, full: Tensor) -> Tensor:
    """int8: 0 where `empty`, 2 where `full`, else 1. Where both claims hold the box has no element, and 1 is
    safe.
    """
    return 1 + full.to(torch.int8) - empty.to(torch.int8)
