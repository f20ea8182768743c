"""Calls of the Hopper kernel on a CPU, in the emulator, beside what is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold import masks, reference
from tilefold.backends.hopper import launch, sizes
from tilefold.masks.base import Mask
from tilefold.planning.backend import Work
from tilefold.problem import Problem
from tilefold.scores import Scores

Tensors = tuple[Tensor, Tensor, Tensor]


def draw(
    lengths: tuple[int, int] = (300, 333),
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16, inside: bool = False,
) -> Tensors:  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def one(count: int, length: int) -> Tensor:
        shape = (batch, length, count, head_dim) if inside else (batch, count, length, head_dim)
        x = torch.randn(shape, generator=generator).to(dtype)
        return x.transpose(1, 2) if inside else x

    return one(heads[0], lengths[0]), one(heads[1], lengths[1]), one(heads[1], lengths[1])


def work_of(x: Tensors, mask: Mask | None = None, **options: Any) -> Work:
    q, k, v = x
    (B, H, L, D), (Hk, Lk) = q.shape, k.shape[1:3]
    whole = masks.full() if mask is None else mask
    built = whole.build(B, H, L, Lk, "cpu") if whole.needs_build else whole
    spec, held = built.spec()
    scores = Scores(options.pop("scale", D**-0.5), **options)
    problem = Problem(B, H, Hk, L, Lk, D, v.shape[3], q.dtype, "cpu", options=scores.flags)
    form = masks.lower(spec, held, B, H, L, Lk, "cpu")
    return Work(problem, q, k, v, form, scores)


def resize(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Other sizes than the table's, from now on."""
    monkeypatch.setattr(launch, "sizes_of", lambda width, kind: sizes.sizes_of(width, kind) | changes)


def hopper(x: Tensors, mask: Mask | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    return launch.forward(work_of(x, mask, **options))


def right(x: Tensors, mask: Mask | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    q, k, v = (t.double() for t in x)
    found = reference.attention(q, k, v, mask=mask, **options)
    return found[0].float(), found[1].float()


def agree(x: Tensors, mask: Mask | None = None, **options: Any) -> None:
    out, lse = hopper(x, mask, **options)
    wanted = right(x, mask, **options)
    torch.testing.assert_close(out.float(), wanted[0], atol=0.03, rtol=0.03)
    torch.testing.assert_close(lse, wanted[1], atol=2e-3, rtol=2e-3)
