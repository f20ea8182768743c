"""Which entry of the tables a call takes."""

import dataclasses

import pytest
import torch

from tilefold.masks.band import Band
from tilefold.planning import tuned
from tilefold.planning.backend import Work
from tilefold.problem import Problem
from tilefold.scores import Scores

pytest.importorskip("triton", reason="Triton is not installed")
from tilefold.backends.triton import backward
from tilefold.backends.triton.sizes import WHOLE, kind_of, needed
from tilefold.backends.triton.variant import PER_KEY, PER_ROW, PER_SCORE

PLAIN = Problem(2, 4, 4, 1024, 2048, 64, 64, torch.bfloat16, "cuda")
FULL = Band(None, None)


@pytest.mark.parametrize(
    "form, change, kind",
    [
        (FULL, {}, "full"),
        (FULL, {"options": ("sink",)}, "full"),
        (FULL, {"options": ("dropout",)}, "band"),
        (FULL, {"options": ("softcap",)}, "band"),
        (FULL, {"options": ("alibi", "sink")}, "band"),
        (FULL, {"q_length": 1025}, "band"),
        (FULL, {"k_length": 2047}, "band"),
        (Band(None, None, 3), {}, "band"),
        (Band(None, 0), {}, "band"),
        (Band(0, None), {}, "band"),
        (Band(-9, 0), {}, "short"),
        (Band(-9, 0), {"options": ("dropout",)}, "short"),
    ],
)
def test_the_kind_of_a_call(form: Band, change: dict[str, object], kind: str) -> None:
    assert kind_of(dataclasses.replace(PLAIN, **change), form) == kind


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("kernel", ["forward", "queries", "dk", "dv"])
def test_sizes_for_whole_tiles_leave_no_edge(kernel: str, head_dim: int) -> None:
    p = dataclasses.replace(PLAIN, head_dim=head_dim, v_head_dim=head_dim)
    with tuned.assuming("sm90"):
        sizes = needed(kernel, p, kind_of(p, FULL))
    assert WHOLE % sizes.rows == 0 and WHOLE % sizes.keys == 0
    assert sizes.constants(p)["EVEN"]


@pytest.mark.parametrize("chains", [True, False])
def test_who_sends_for_tiles_of_a_bias(chains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "chains", lambda device: chains)

    def ahead(bias: torch.Tensor | None, gradient: int = PER_SCORE, **changes: object) -> int:
        p = dataclasses.replace(PLAIN, q_length=16, k_length=24, **changes)
        q = torch.zeros(2, 4, 16, 64, dtype=torch.bfloat16)
        k = torch.zeros(2, 4, 24, 64, dtype=torch.bfloat16)
        return backward._ahead(Work(p, q, k, k, FULL, Scores(1.0, bias=bias)), gradient)

    bias = torch.zeros(2, 4, 16, 24, dtype=torch.bfloat16)
    assert ahead(bias) == (backward._TILES_AHEAD if chains else 0)
    assert ahead(None) == ahead(bias, PER_ROW) == ahead(bias, PER_KEY) == ahead(bias, 0) == 0
    assert ahead(bias.float()) == ahead(bias, head_dim=96) == ahead(bias, dtype=torch.float32) == 0
    # Its lines start anywhere, or its keys are no neighbours.
    assert ahead(torch.zeros(2, 4, 16, 25, dtype=torch.bfloat16)[..., :24]) == 0
    assert ahead(bias.transpose(2, 3).contiguous().transpose(2, 3)) == 0
