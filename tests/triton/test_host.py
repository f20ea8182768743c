"""What the Triton backend works out on the host: lists of tiles, widths of blocks, rows that are dense,
launches.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold import masks
from tilefold.masks import lower
from tilefold.testing import inputs
from tilefold.testing.cases import MASKS

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from tilefold.backends.triton import forward
from tilefold.backends.triton.arguments import dense_rows
from tilefold.backends.triton.kernel import Launch, _listening, first_call_seconds
from tilefold.backends.triton.lists import FULL, PARTIAL, lists_of
from tilefold.backends.triton.variant import Variant, power_of_two, split

LENGTHS = [(200, 150), (128, 256), (130, 61)]
TILES = [(64, 32), (32, 64), (128, 64), (64, 128)]
TABLES = {
    "rows": ("documents_causal", "padding_left"),
    "cols": ("columns2", "columns4"),
    "bits": ("random_blocks", "dense_each"),
}


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("rows, keys", TILES)
@pytest.mark.parametrize("Lq, Lk", LENGTHS)
@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in TABLES.items() for name in names])
def test_lists_hold_the_states_of_the_tiles(
    kind: str, name: str, Lq: int, Lk: int, rows: int, keys: int, by_key: bool
) -> None:
    B, H = 2, 3
    mask = MASKS[name](B, H, Lq, Lk, inputs.generator(5))
    assert mask is not None
    if mask.needs_build:
        mask = mask.build(B, H, Lq, Lk, torch.device("cpu"))
    spec, tensors = mask.spec()
    form = lower(spec, tensors, B, H, Lq, Lk, torch.device("cpu"))
    assert form.kind == kind
    states = form.tile_states(Lq, Lk, rows, keys, "cpu").flatten(0, 1)
    # A tile over the end of the loop is clipped, which only the masked phase does.
    along, side = (1, (Lq, rows)) if by_key else (2, (Lk, keys))
    if side[0] % side[1]:
        states.select(along, -1).clamp_(max=PARTIAL)
    states = states.transpose(1, 2) if by_key else states
    lists = lists_of(form, Lq, Lk, rows, keys, by_key)
    assert lists.tiles.shape == states.shape
    assert lists.capacity == states.shape[2]
    for table, lines in enumerate(states):
        for line, tiles in enumerate(lines):
            full, partial = lists.counts[table, line].tolist()
            listed = lists.tiles[table, line]
            assert set(listed[:full].tolist()) == set((tiles == FULL).nonzero().flatten().tolist())
            some = listed[full : full + partial].tolist()
            assert sorted(some) == (tiles == PARTIAL).nonzero().flatten().tolist()
        work = lists.counts[table].sum(-1)[lists.order[table].long()]
        assert sorted(lists.order[table].tolist()) == list(range(len(lines)))
        assert work.tolist() == sorted(work.tolist(), reverse=True)


class _Played(Launch):
    """On a GPU that only notes how it is called."""

    def __init__(self) -> None:
        super().__init__(forward.forward_kernel, Variant(16, 16, 16, 16), 4)
        self.ran: list[tuple[str, list[Any]]] = []
        self.alive: Any = None

    def _bound(self, programs: int, arguments: list[Any]) -> Any:
        self.ran.append(("bound", list(arguments)))

        def straight(*given: Any) -> None:
            gc.collect()
            assert self.alive is None or self.alive() is not None
            self.ran.append(("straight", list(given[9:])))

        return SimpleNamespace(run=straight, function=None, packed_metadata=None)


def test_repeated_launches_skip_the_binding_unless_one_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    launch, x = _Played(), torch.zeros(3)
    for _ in range(2):
        launch._run(1, [x, None, 7], 0)
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        listener = list.append
        hook.add(listener)
        try:
            launch._run(1, [x, None, 7], 0)
        finally:
            hook.remove(listener)
    launch._run(1, [x, None, 7], 0)
    assert [how for how, _ in launch.ran] == ["bound", "straight", "bound", "bound", "straight"]
    for how, arguments in launch.ran:
        assert arguments == ([x, None, 7] if how == "bound" else [x.data_ptr(), None, 7, launch.variant])
    assert len([name for name in first_call_seconds if name[1] == launch.variant]) == 1
    # A tensor that nobody else holds lives until it is launched.
    arguments = [torch.zeros(3), None, 7]
    launch.alive = weakref.ref(arguments[0])
    launch._run(1, arguments, 0)
    assert not _listening(None)
    assert _listening(print)


def test_compiled_kernels_are_cached_under_the_code_of_their_variant() -> None:
    """Triton's names for them hold the text of a variant's values, not what its properties compute."""
    one = Variant(16, 16, 16, 16)
    assert one.SOURCE in str(one)
    assert one.AGAIN.SOURCE == one.SOURCE


def test_lists_are_kept_with_their_form() -> None:
    spec, tensors = masks.padding(torch.tensor([40, 70])).spec()
    form = lower(spec, tensors, 2, 1, 80, 80, torch.device("cpu"))
    assert lists_of(form, 80, 80, 32, 32, False) is lists_of(form, 80, 80, 32, 32, False)
    assert lists_of(form, 80, 80, 32, 32, True) is not lists_of(form, 80, 80, 32, 32, False)


@pytest.mark.parametrize(
    "size, widths",
    [
        (1, (16, 0)),
        (16, (16, 0)),
        (17, (32, 0)),
        (40, (64, 0)),
        (64, (64, 0)),
        (65, (64, 16)),
        (72, (64, 16)),
        (80, (64, 16)),
        (96, (64, 32)),
        (97, (128, 0)),
        (128, (128, 0)),
        (192, (128, 64)),
        (500, (512, 0)),
        (512, (512, 0)),
        (576, (512, 64)),
    ],
)
def test_a_head_takes_one_block_or_two(size: int, widths: tuple[int, int]) -> None:
    assert split(size) == widths


def test_blocks_hold_the_head_and_are_no_wider_than_one_block() -> None:
    for size in range(1, 577):
        first, second = split(size)
        assert size <= first + second <= power_of_two(size)
        assert second == 0 or first < size
        assert all(width == 0 or (width >= 16 and width & (width - 1) == 0) for width in (first, second))


def _strided(dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 3, 5, 32).to(dtype)[..., ::2]


KEPT = {
    "contiguous": lambda dtype: torch.randn(2, 3, 5, 16).to(dtype),
    "heads inside rows": lambda dtype: torch.randn(2, 5, 3, 16).to(dtype).transpose(1, 2),
    "expanded batch": lambda dtype: torch.randn(1, 3, 5, 16).to(dtype).expand(2, -1, -1, -1),
    "expanded heads": lambda dtype: torch.randn(2, 1, 5, 16).to(dtype).expand(-1, 3, -1, -1),
    "part of padded rows": lambda dtype: torch.randn(2, 3, 5, 16).to(dtype)[..., :13],
}
COPIED = {
    "odd size": lambda dtype: torch.randn(2, 3, 5, 13).to(dtype),
    "one channel": lambda dtype: torch.randn(2, 3, 5, 1).to(dtype),
    "every other channel": _strided,
    "expanded channels": lambda dtype: torch.randn(2, 3, 5, 1).to(dtype).expand(-1, -1, -1, 16),
    "from the second channel on": lambda dtype: torch.randn(2, 3, 5, 24).to(dtype)[..., 1:17],
    "transposed": lambda dtype: torch.randn(2, 3, 16, 5).to(dtype).transpose(2, 3),
    "rows beyond 32-bit offsets": lambda dtype: torch.empty_strided(
        (1, 1, 2, 16), (0, 0, 1 << 23, 1), dtype=dtype
    ).normal_(),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*KEPT, *COPIED])
def test_rows_start_at_16_bytes_and_are_dense(name: str, dtype: torch.dtype) -> None:
    x = (KEPT | COPIED)[name](dtype)
    dense = dense_rows(x)
    assert (dense is x) == (name in KEPT)
    assert torch.equal(dense, x)
    unit = 16 // x.element_size()
    assert dense.stride(3) == 1
    assert all(stride % unit == 0 for stride in dense.stride()[:3])
    assert dense.data_ptr() % 16 == 0
    assert dense.stride(2) < 1 << 23
