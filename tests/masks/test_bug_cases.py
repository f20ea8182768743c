"""Bugs reported against other libraries, as laws of masks: alignment, windows, copies, memory."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tilefold import masks
from tilefold.errors import MaskError
from tilefold.masks import Mask, lower


def counts(mask: Mask, Lq: int, Lk: int) -> list[int]:
    """Visible keys per row, by the definition and by the lowered form."""
    dense = mask.materialize(1, 1, Lq, Lk)[0, 0]
    tile = lower(mask, (), 1, 1, Lq, Lk, "cpu").tile(0, Lq, 0, Lk, Lq, Lk, "cpu")[0, 0]
    assert torch.equal(dense, tile)
    return dense.sum(-1).tolist()


def test_br05_alignment_is_a_named_choice() -> None:
    """pytorch#108108: bottom-right in one library, top-left in another."""
    assert counts(masks.causal(), 2, 5) == [4, 5]
    assert counts(masks.causal(), 5, 2) == [0, 0, 0, 1, 2]
    assert counts(masks.causal(align="bottom-right"), 5, 2) == [0, 0, 0, 1, 2]
    assert counts(masks.causal(align="top-left"), 2, 5) == [1, 2]
    assert counts(masks.causal(align="top-left"), 5, 2) == [1, 2, 2, 2, 2]
    form = lower(masks.causal(), (), 1, 1, 5, 2, "cpu")
    assert form.empty_rows(5, 2, "cpu").flatten().tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("Lq", [12, 5, 1])
def test_br08_window_bounds_are_inclusive_offsets(Lq: int) -> None:
    """transformers#39408: a window of W tokens is left = W - 1, in decode as in prefill."""
    last = (masks.causal() & masks.window(3, 0)).materialize(1, 1, Lq, 12)[0, 0, -1]
    assert last.nonzero().flatten().tolist() == [8, 9, 10, 11]
    assert counts(masks.window(3, 0), Lq, 12)[-1] == 4
    assert counts(masks.window(4, 0), Lq, 12)[-1] == 5


@pytest.mark.parametrize("far", [2**31, 2**40, 2**63 - 1, 2**63, 10**30])
@pytest.mark.parametrize(
    "make",
    [
        lambda far: masks.window(-far, None),
        lambda far: masks.window(None, -far),
        lambda far: masks.window(far, far),
        lambda far: ~masks.window(-far, far),
        lambda far: masks.prefix(far),
        lambda far: masks.global_tokens(far),
        lambda far: masks.strided(far),
        lambda far: masks.dilated(far, far),
    ],
    ids=["left", "right", "both", "complement", "prefix", "global", "strided", "dilated"],
)
def test_bounds_beyond_every_length_mean_what_they_say(make: Callable[[int], Mask], far: int) -> None:
    """No bound overflows where it meets a tensor, alone, inside documents, or beside a mask of tables."""
    mask, like = make(far), make(100)
    padding = masks.padding(torch.tensor([3]))
    offsets = torch.tensor([0, 4, 9])
    for combine in (
        lambda m: m,
        lambda m: m | padding,
        lambda m: masks.documents(offsets, within=m),
        lambda m: m | masks.random_blocks(0.3, 2),
    ):
        assert counts(combine(mask), 9, 9) == counts(combine(like), 9, 9)


def test_br10_windows_wider_than_the_keys_are_not_clamped() -> None:
    """flash-attention#895, #1116: a right bound beyond Lk hides nothing; a negative one is honoured."""
    for right in (9, 1000, 2**31 - 1, 2**31, 2**40, 2**63, 10**30):
        assert counts(masks.window(None, right), 10, 4) == [4] * 10
        assert counts(masks.window(right, right), 10, 4) == [4] * 10
        assert counts(masks.window(None, right) & masks.prefix(4), 10, 4) == [4] * 10
        assert (
            counts(
                masks.documents(torch.tensor([0, 10]), torch.tensor([0, 4]), masks.window(right, right)),
                10,
                4,
            )
            == [4] * 10
        )
    assert counts(masks.window(None, 4), 10, 4) == [0, 0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert counts(masks.window(None, -3), 10, 4) == [0] * 9 + [1]
    assert counts(masks.window(-1, 2), 4, 4) == [2, 2, 1, 0]
    assert counts(masks.window(None, -(2**70)), 10, 4) == [0] * 10


CHANGES: dict[str, Callable[[Mask], Mask]] = {
    "to": lambda mask: mask.to("cpu"),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "spec": lambda mask: masks.parse(*mask.spec()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_br44_copies_keep_the_rule(change: Callable[[Mask], Mask]) -> None:
    """xformers#1185: a causal block-diagonal mask became its non-causal parent when moved."""
    causal = masks.documents(torch.tensor([0, 2, 4]), within=masks.causal())
    busy = causal & masks.window(1, 0) & masks.padding(torch.tensor([3]))
    for mask in (
        causal,
        busy,
        ~busy,
        masks.documents(torch.tensor([0, 2, 4]), within=masks.window(0, 0) | masks.prefix(1)),
    ):
        again = change(mask)
        assert type(again) is type(mask)
        assert repr(again) == repr(mask)
        assert torch.equal(again.materialize(1, 1, 4, 4), mask.materialize(1, 1, 4, 4))
    assert causal.materialize(1, 1, 4, 4)[0, 0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]


def test_br44_to_moves_every_tensor() -> None:
    moved = (
        masks.documents(torch.tensor([0, 4]), within=masks.prefix(torch.tensor([2])))
        | ~masks.padding(torch.tensor([3]))
    ).to("meta")
    assert [tensor.device.type for tensor in moved.spec()[1]] == ["meta"] * 3


def test_br44_a_closure_is_not_pickled_silently() -> None:
    mask = masks.predicate(lambda b, h, q, k: q >= k) & masks.window(1, 0)
    with pytest.raises(
        MaskError, match=r"fn of predicate: expected a function of a module, .* got .*<lambda>"
    ):
        pickle.dumps(mask)
    for again in (copy.deepcopy(mask), copy.copy(mask), mask.to("cpu")):
        assert torch.equal(again.materialize(1, 1, 4, 4), mask.materialize(1, 1, 4, 4))
    built = pickle.loads(pickle.dumps(mask.build(1, 1, 4, 4)))
    assert torch.equal(built.materialize(1, 1, 4, 4), mask.materialize(1, 1, 4, 4))


PEAK = """
import resource, sys, torch
from tilefold import masks
from tilefold.masks import lower
S = 96_000
def build(S):
    cu = torch.arange(0, S + 1, 1000)
    packed, blocks = masks.documents(cu, within=masks.causal()), masks.bigbird()
    for mask in (masks.causal(), masks.window(1023, 0), packed, blocks, blocks & masks.causal()):
        form = lower(mask, (), 1, 1, S, S, "cpu")
        form.tile_states(S, S, 128, 128, "cpu")
build(2000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
build(S)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_br58_building_a_mask_does_not_build_the_matrix() -> None:
    """pytorch#134756: a sparse block mask of 96,000 tokens first made the full one, 9.2 GB."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 64
