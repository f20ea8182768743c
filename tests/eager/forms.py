"""Lowered masks for the tests of the eager routes, drawn at random or by name, and what they show."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from torch import Tensor

from tilefold.backends.eager.programs import Group, Pieces
from tilefold.backends.eager.rects import Rect
from tilefold.backends.eager.views import gather_mask, rect_mask
from tilefold.masks.band import Band
from tilefold.masks.bits import Bits, packed
from tilefold.masks.cols import Cols
from tilefold.masks.rows import Rows

CPU = torch.device("cpu")
Form = Band | Rows | Cols | Bits
KINDS = ("band", "window", "step", "rows", "two rows", "documents", "columns", "ragged columns", "bits")


def visible(form: Form, B: int, Hq: int, Lq: int, Lk: int) -> Tensor:
    """bool `[B, Hq, Lq, Lk]`."""
    return form.tile(0, Lq, 0, Lk, Lq, Lk, CPU).expand(B, Hq, Lq, Lk)


def draw(rng: random.Random, kind: str, B: int, Hq: int, Lq: int, Lk: int) -> Form:
    """A form of one kind; tables are shared by batch elements and heads or not."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    tables = (rng.choice([1, B]), rng.choice([1, Hq]))
    if kind in ("band", "step"):
        lo, hi = (rng.choice([None, rng.randint(-Lk, Lq)]) for _ in range(2))
        return Band(lo, hi, rng.choice([2, 3, 7]) if kind == "step" else 1)
    if kind == "window":
        most = max(1, Lk // 8)
        left, right = rng.randint(0, most), rng.choice([0, 0, rng.randint(0, most)])
        return Band(-left, right)
    if kind in ("rows", "two rows"):
        return Rows(_intervals(rng, generator, (*tables, Lq), 1 if kind == "rows" else 2, Lk))
    if kind == "documents":
        return Rows(_documents(rng, min(Lq, Lk), Lq))
    if kind == "columns":
        return Cols(_hidden_after_documents(rng, Lq, Lk))
    if kind == "ragged columns":
        return Cols(_intervals(rng, generator, (*tables, Lk), 2, Lq))
    return _bits(generator, tables, Lq, Lk)


def _intervals(
    rng: random.Random, generator: torch.Generator, shape: tuple[int, ...], n: int, length: int
) -> Tensor:
    """int32 `[*shape, 2 * n]`: sorted intervals, ragged, moving in step with the line, or standing still."""
    bounds = torch.randint(0, length + 1, (*shape, 2 * n), generator=generator).sort(-1).values
    if rng.random() < 0.5:
        steps = torch.arange(shape[-1]).unsqueeze(1) * rng.choice([0, 1])
        bounds = (bounds[..., :1, :] + steps).clamp(max=length)
    empty = (bounds[..., 0::2] >= bounds[..., 1::2]).repeat_interleave(2, -1)
    return bounds.masked_fill(empty, 0).to(torch.int32)


def _cuts(rng: random.Random, length: int) -> list[int]:
    inner = rng.sample(range(1, length), min(rng.randint(0, 12), length - 1)) if length > 1 else []
    return [0, *sorted(inner), length]


def _documents(rng: random.Random, packed_length: int, Lq: int) -> Tensor:
    """Documents, full, causal or with a window; rows after the last document see nothing."""
    bounds = torch.zeros(1, 1, Lq, 2, dtype=torch.int32)
    causal, window = rng.random() < 0.5, rng.choice([None, 5, 40])
    cuts = _cuts(rng, packed_length)
    for start, end in pairwise(cuts):
        i = torch.arange(start, end, dtype=torch.int32)
        bounds[0, 0, start:end, 0] = start if window is None else (i - window).clamp(min=start)
        bounds[0, 0, start:end, 1] = i + 1 if causal else end
    return bounds


def _hidden_after_documents(rng: random.Random, Lq: int, Lk: int) -> Tensor:
    """Hidden from earlier rows, and from the rows after the key's document."""
    bounds = torch.zeros(1, 1, Lk, 4, dtype=torch.int32)
    cuts = _cuts(rng, Lk)
    for start, end in pairwise(cuts):
        for j in range(start, end):
            before, after = min(j, Lq), min(end, Lq)
            spans = [(0, before)] if before else []
            if after < Lq:
                spans.append((after, Lq)) if after > before else spans.__setitem__(slice(None), [(0, Lq)])
            for n, (a, b) in enumerate(spans):
                bounds[0, 0, j, 2 * n], bounds[0, 0, j, 2 * n + 1] = a, b
    return bounds


def _bits(generator: torch.Generator, tables: tuple[int, int], Lq: int, Lk: int) -> Bits:
    nq, nk = -(-Lq // 64), -(-Lk // 64)
    states = torch.randint(0, 3, (*tables, nq, nk), generator=generator)
    states[torch.rand(states.shape, generator=generator) < 0.6] = 0
    if Lq % 64:
        states[:, :, -1] = states[:, :, -1].clamp(max=1)
    if Lk % 64:
        states[..., -1] = states[..., -1].clamp(max=1)
    mixed = states == 1
    index = torch.full(states.shape, -1, dtype=torch.int32)
    index[mixed] = torch.arange(int(mixed.sum()), dtype=torch.int32)
    inside = torch.zeros(nq * 64, nk * 64, dtype=torch.bool)
    inside[:Lq, :Lk] = True
    granules = torch.rand(*states.shape, 64, 64, generator=generator) < 0.5
    granules &= inside.view(nq, 64, nk, 64).transpose(1, 2)
    return Bits(states.to(torch.int8), index, packed(granules[mixed]))


def counted(pieces: Pieces, direction: str, B: int, Hq: int, Lq: int, Lk: int) -> Tensor:
    """int32 `[B, Hq, Lq, Lk]`: in how many rectangles and gathered stripes each element is visible."""
    count = torch.zeros(B, Hq, Lq, Lk, dtype=torch.int32)
    for group in pieces.groups:
        rows = torch.arange(group.q_origin, Lq, group.step)
        keys = torch.arange(group.k_origin, Lk, group.step)
        part = torch.zeros(len(rows), len(keys), dtype=torch.int32)
        for rect in getattr(group.program, direction):
            _count_rect(part, group, rect)
        for gather in group.program.gathers:
            mask = gather_mask(group.program.form, gather.rows, gather.keys, gather.parts, torch.float32)
            for n, (r, k) in enumerate(zip(gather.rows, gather.keys, strict=True)):
                part[r.unsqueeze(1), k] += 1 if mask is None else (mask[n, 0] == 0).to(torch.int32)
        whole = torch.zeros(Lq, Lk, dtype=torch.int32)
        whole[rows.unsqueeze(1), keys] = part
        count[group.b0 : group.b1, group.h0 : group.h1] += whole
    return count


def _count_rect(part: Tensor, group: Group, rect: Rect) -> None:
    row, key = torch.arange(rect.rows).unsqueeze(1), torch.arange(rect.keys)
    shown = {"full": key >= 0, "causal": key <= row, "flipped": key >= row}.get(rect.kind)
    if shown is None:
        mask = rect_mask(group.program, rect, torch.float32)
        assert mask is not None
        shown = mask == 0
    for i in range(rect.n):
        q0, k0 = rect.q0 + i * rect.q_step, rect.k0 + i * rect.k_step
        assert q0 >= 0 and q0 + rect.rows <= part.shape[0] and k0 >= 0 and k0 + rect.keys <= part.shape[1]
        part[q0 : q0 + rect.rows, k0 : k0 + rect.keys] += shown.to(torch.int32)
