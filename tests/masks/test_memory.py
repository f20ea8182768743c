"""Nothing of size Lq x Lk is made for Band, Rows and Cols."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilefold import masks
from tilefold.masks import Mask, lower

L = 65_536
CU = torch.arange(0, L + 1, 1024)
STARTS = torch.arange(L, dtype=torch.int32).view(1, 1, L, 1)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest storage that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


def test_the_probe_sees_a_matrix() -> None:
    with Largest() as largest:
        masks.causal().materialize(1, 1, 500, 500)
    assert largest.bytes >= 500 * 500


@pytest.mark.parametrize(
    "kind, mask",
    [
        ("band", masks.full()),
        ("band", masks.causal()),
        ("band", masks.window(1023, 0) & masks.causal()),
        ("band", masks.dilated(512, 8)),
        ("rows", masks.documents(CU)),
        ("rows", masks.documents(CU, within=masks.causal())),
        ("rows", masks.documents(CU, within=masks.window(63, 0) | masks.prefix(4))),
        ("rows", masks.padding(torch.tensor([50_000]))),
        ("rows", masks.prefix(1000) | masks.causal()),
        ("rows", masks.window(1023, 0) | masks.global_tokens(4)),
        ("rows", ~masks.window(100, 100)),
        ("cols", masks.columns(STARTS + 2048, causal=True)),
        ("cols", masks.columns(torch.cat([STARTS + 2048, STARTS - 2048], -1), causal=False)),
    ],
    ids=repr,
)
def test_lowering_is_linear(kind: str, mask: Mask) -> None:
    with Largest() as largest:
        form = lower(mask, (), 1, 1, L, L, "cpu")
        form.empty_rows(L, L, "cpu")
        form.tile(L - 64, L, 0, 64, L, L, "cpu")
    assert form.kind == kind
    assert largest.bytes <= 8 * 8 * (L + 1)  # at most eight int64 numbers per line
    if kind == "band":
        assert form.tensors() == ()
        return
    with Largest() as largest:
        states = form.tile_states(L, L, 128, 128, "cpu")
    assert states.shape == (1, 1, L // 128, L // 128)
    # No more than the table itself, int32 for two intervals; a tile takes one byte.
    assert largest.bytes <= 16 * L


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(1023, 0), masks.dilated(512, 8)], ids=repr)
def test_tile_states_of_a_band_are_linear_in_tiles(mask: Mask) -> None:
    form = lower(mask, (), 1, 1, L, L, "cpu")
    with Largest() as largest:
        states = form.tile_states(L, L, 128, 128, "cpu")
    assert largest.bytes <= 8 * states.numel()


@pytest.mark.parametrize(
    "mask",
    [
        masks.bigbird(),
        masks.bigbird() & masks.causal(),
        masks.butterfly(),
        masks.documents(CU, within=masks.bigbird()),
    ],
    ids=repr,
)
def test_bits_are_linear_in_granules(mask: Mask) -> None:
    with Largest() as largest:
        form = lower(mask, (), 1, 1, L, L, "cpu")
    assert form.kind == "bits"
    assert largest.bytes <= 8 * (L // 64) ** 2 + 2**22
