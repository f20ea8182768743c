"""NaN and inf behind a mask: either the fused routes keep them apart, or they decline."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tilefold.backends.eager import fused
from tilefold.masks.band import Band

from .forms import KINDS, draw, visible
from .test_fused import make

B, H, L, D = 1, 2, 150, 16
POISONS = (float("nan"), float("inf"), -float("inf"))


def attend(inputs: dict[str, Tensor], form: object) -> tuple[Tensor, ...] | None:
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    pieces = fused.plan(form, B, H, H, L, L)
    result = fused.forward(pieces, q, k, v, 0.25)
    if result is None:
        return None
    gradients = fused.backward(pieces, dout, q, k, v, *result, 0.25)
    return None if gradients is None else (*result, *gradients)


@pytest.mark.parametrize("where", ["k", "v", "q", "dout"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_poison_stays_where_it_is_seen(kind: str, where: str, dtype: torch.dtype) -> None:
    rng = random.Random(f"{kind} {where}")
    for poison in POISONS:
        form = draw(rng, kind, B, H, L, L)
        inputs = make(B, H, H, L, L, D, D, dtype)
        clean = attend(inputs, form)
        assert clean is not None
        at = rng.randrange(L)
        inputs[where][:, :, at, rng.randrange(D)] = poison
        found = attend(inputs, form)
        if found is None:
            continue
        seen = visible(form, B, H, L, L)
        rows = seen[..., at] if where in ("k", "v") else torch.arange(L).eq(at).expand(B, H, L)
        # Keys are touched by gradients of the touched rows that see them.
        keys = (seen & rows.unsqueeze(-1)).any(2)
        for n, (value, usual) in enumerate(zip(found, clean, strict=True)):
            untouched = ~(rows if n < 3 else keys)
            assert torch.equal(value[untouched], usual[untouched]), (poison, at, n)


@pytest.mark.parametrize("poison", POISONS)
def test_poisoned_rows_without_keys(poison: float) -> None:
    inputs = make(B, H, H, L, L, D, D, torch.float32)
    form = Band(None, -50)
    inputs["dout"][:, :, 10] = poison
    found = attend(inputs, form)
    assert found is not None and all(bool(torch.isfinite(x).all()) for x in (found[0], *found[2:]))


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scales_that_turn_masks_around_are_declined(scale: float) -> None:
    q, k, v, _ = make(B, H, H, L, L, D, D, torch.float32).values()
    assert fused.forward(fused.plan(Band(None, 0), B, H, H, L, L), q, k, v, scale) is None
    result = fused.forward(fused.plan(Band(None, None), B, H, H, L, L), q, k, v, scale)
    assert result is not None and bool(torch.isfinite(result[0]).all())


@pytest.mark.parametrize("keys", [1, 7, 15, 16, 17, 40, 513])
@pytest.mark.parametrize("poison", POISONS)
def test_what_a_row_sees_is_not_lost(keys: int, poison: float) -> None:
    """NaN in a query makes its row NaN, however few keys there are."""
    for Lq, form in ((keys, Band(None, 0)), (3, Band(None, None)), (keys, Band(0, None))):
        q, k, v, _ = make(1, 1, 1, Lq, keys, D, D, torch.float32).values()
        q[0, 0, min(1, Lq - 1)] = poison
        result = fused.forward(fused.plan(form, 1, 1, 1, Lq, keys), q, k, v, 0.25)
        assert result is None or all(bool(x[0, 0, min(1, Lq - 1)].isnan().all()) for x in result)
