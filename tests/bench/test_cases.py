"""The table of cases, their short versions, and the contestants that run them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tilefold import masks
from tilefold.bench import cases, contestants
from tilefold.bench.cases import CASES, BenchCase
from tilefold.errors import ArgumentError
from tilefold.testing.cases import DTYPES, Call
from tilefold.testing.evaluate import by_reference

NAMES = sorted(CASES)
# Of the whole matrix; a CPU with two cores does the visible part in about a second and a half.
MOST_FLOPS = 3e11


def products(case: BenchCase) -> float:
    """FLOPs of the products of a whole score matrix, forward, or forward and backward."""
    (Lq, Lk), (D, Dv) = case.lengths, case.dims
    return 2.0 * case.batch * case.heads[0] * Lq * Lk * (D + Dv) * (3.5 if case.backward else 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_case_names_things_that_exist(name: str) -> None:
    case = CASES[name]
    assert case.name == name
    assert case.about
    assert case.dtype in DTYPES and case.mask in cases.MASKS
    assert case.heads[0] % case.heads[1] == 0
    assert set(case.devices) <= {"cpu", "cuda"} and case.devices
    assert not case.bias_grad or case.bias


@pytest.mark.parametrize("name", [name for name in NAMES if "cpu" in CASES[name].devices])
def test_cases_for_a_cpu_are_small_enough_for_one(name: str) -> None:
    assert products(CASES[name]) <= MOST_FLOPS


@pytest.mark.parametrize("name", [name for name in NAMES if "cuda" in CASES[name].devices])
def test_cases_for_cuda_fill_a_large_gpu(name: str) -> None:
    case = CASES[name]
    assert case.dtype == "bf16"
    if case.lengths[0] > 1:
        assert case.batch * case.lengths[0] == 16384


def test_the_table_covers_masks_options_and_shapes() -> None:
    cpu = [case for case in CASES.values() if "cpu" in case.devices]
    held = set(cases.MEMORY.values())
    assert {case.mask for case in {*cpu, *held}} == set(cases.MASKS)
    assert any(case.softcap for case in cpu) and any(case.alibi for case in cpu)
    assert any(case.sink for case in cpu) and any(case.dropout_p for case in cpu)
    assert {(case.bias, case.bias_grad) for case in cpu} == {("", False), ("HQK", True), ("11QK", False)}
    assert any(case.lengths[0] == 1 for case in cpu) and any(case.heads[1] == 1 for case in cpu)


@pytest.mark.parametrize("name", NAMES)
def test_a_short_version_keeps_the_family(name: str) -> None:
    case, small = CASES[name], cases.short(CASES[name])
    assert max(small.lengths) <= 256 and small.batch <= 2
    assert small.heads[0] // small.heads[1] == case.heads[0] // case.heads[1]
    same = ("name", "dims", "dtype", "mask", "softcap", "alibi", "bias", "sink", "dropout_p", "backward")
    assert [getattr(small, field) for field in same] == [getattr(case, field) for field in same]


@pytest.mark.parametrize(
    "lengths, expected", [((300, 300), (150, 150)), ((1, 8192), (1, 256)), ((9, 9), (9, 9))]
)
def test_a_short_version_has_at_most_256_tokens(lengths: tuple[int, int], expected: tuple[int, int]) -> None:
    assert cases.short(BenchCase("x", "", lengths=lengths)).lengths == expected


@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_a_short_version(name: str) -> None:
    small = cases.short(CASES[name])
    call, again, other = cases.build(small), cases.build(small), cases.build(small, seed=1)
    assert call.q.shape == (small.batch, small.heads[0], small.lengths[0], small.dims[0])
    assert call.k.shape == (small.batch, small.heads[1], small.lengths[1], small.dims[0])
    assert torch.equal(call.q, again.q) and torch.equal(call.dout, again.dout)  # pyright: ignore[reportArgumentType]
    assert not torch.equal(call.q, other.q)
    assert torch.equal(call.visible(), other.visible())
    assert set(small.wanted) <= set(call.arguments)
    # A row that sees nothing is a matter of taste among rivals, and would be no fair case.
    assert call.visible().any(-1).all()
    share = call.visible().double().mean()
    assert share > 0.01
    assert share == 1.0 if small.mask == "none" else share < 0.9


def test_sets_share_their_mask_and_nothing_else() -> None:
    case = cases.short(CASES["documents-8k"])
    first, second, third = cases.build_sets(case, "cpu", 3)
    assert first.mask is second.mask is third.mask is not None
    assert not torch.equal(first.q, second.q) and not torch.equal(second.v, third.v)


def test_a_mask_at_full_size_is_what_it_says() -> None:
    assert cases.mask_of(CASES["window-8k"]) == masks.window(1023, 0)
    padding = cases.build(dataclasses.replace(CASES["padding-2k"], lengths=(8, 8))).visible()
    assert padding[:, 0, 0].sum(-1).tolist() == [8, 6, 4, 2]
    documents = cases.offsets(8192, 1024).diff()
    assert documents.sum() == 8192
    assert documents[:-1].min() >= 716 and documents.max() <= 1331


def test_columns_and_documents_are_the_same_mask() -> None:
    by_row, by_key = (cases.MASKS[name](1, 256, 256) for name in ("documents", "columns"))
    assert by_row is not None and by_key is not None
    assert torch.equal(by_row.materialize(1, 1, 256, 256), by_key.materialize(1, 1, 256, 256))


@pytest.mark.parametrize(
    "patterns, expected",
    [
        (["window-8k"], ["window-8k"]),
        (["full-1k-fp32"], ["full-1k-fp32-d64", "full-1k-fp32-d128"]),
        (["*-1k-bf16-d64"], ["full-1k-bf16-d64", "causal-1k-bf16-d64"]),
        (["sink", "gqa"], ["gqa-2k", "sink-2k"]),
    ],
)
def test_cases_are_found_by_name_beginning_and_glob(patterns: list[str], expected: list[str]) -> None:
    assert [case.name for case in cases.select(patterns, "cpu")] == expected


def test_all_cases_of_a_device_without_patterns() -> None:
    cpu, cuda = cases.select([], "cpu"), cases.select([], "cuda")
    assert len(cpu) + len(cuda) == len(CASES)
    assert all(case.name.startswith("cuda-") for case in cuda)


@pytest.mark.parametrize("pattern, device", [("nothing", "cpu"), ("window-8k", "cuda"), ("", "cpu")])
def test_a_pattern_that_matches_nothing_is_refused(pattern: str, device: str) -> None:
    with pytest.raises(ArgumentError, match=f"case: expected .* for {device}, got '{pattern}'"):
        cases.select(["cuda" if device == "cuda" else "full", pattern], device)


# Contestants.


def test_contestants_are_picked_by_name_and_tilefold_is_always_there() -> None:
    assert [c.name for c in contestants.pick(["standard"])] == ["tilefold", "standard"]
    assert [c.name for c in contestants.pick([])] == ["tilefold", "sdpa", "standard", "flex"]
    with pytest.raises(ArgumentError, match=r"contestants: expected some of tilefold, sdpa.*got \['xyz'\]"):
        contestants.pick(["xyz", "sdpa"])


@pytest.mark.parametrize("who", ["tilefold", "sdpa", "standard"])
@pytest.mark.parametrize("name", [name for name in NAMES if "cpu" in CASES[name].devices])
def test_contestants_compute_the_case(name: str, who: str) -> None:
    contestant = contestants.CONTESTANTS[who]
    case = dataclasses.replace(cases.short(CASES[name], 64), dtype="fp32")
    reasons = contestant.why_not(case, "cpu", case.backward)
    if reasons:
        assert who != "tilefold" and all(reason for reason in reasons)
        return
    call = cases.build(case)
    found = contestants.outcome(contestant.prepare(case, call), call, case.wanted)

    def definition(c: Call) -> torch.Tensor:
        return by_reference(c)[0]

    expected = contestants.outcome(definition, call, case.wanted)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "who, name, backward, words",
    [
        ("sdpa", "softcap-2k", True, "no soft cap"),
        ("sdpa", "sink-2k", True, "no attention sink"),
        ("sdpa", "dropout-2k", True, "other random bits"),
        ("standard", "dropout-2k", True, "other random bits"),
        ("standard", "long-32k", False, "would take 4.0 GiB; at most 2.0 GiB"),
        ("flex", "full-1k-fp32-d64", True, "no backward pass on a CPU"),
        ("flex", "sink-2k", False, "no lse on a CPU"),
    ],
)
def test_who_cannot_says_why(who: str, name: str, backward: bool, words: str) -> None:
    reasons = contestants.CONTESTANTS[who].why_not(CASES[name], "cpu", backward)
    assert any(words in reason for reason in reasons)


def test_flex_needs_a_compiler_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "_compiler", lambda: None)
    reasons = contestants.CONTESTANTS["flex"].why_not(CASES["full-1k-fp32-d64"], "cpu", False)
    assert reasons == ["on a CPU it is compiled by a C++ compiler, and none is installed"]


@pytest.mark.parametrize("name", ["window-8k", "padding-2k", "bigbird-8k"])
def test_the_mask_that_flex_gets(name: str) -> None:
    case = cases.short(CASES[name], 64)
    call = cases.build(case)
    see = contestants._mask_mod(case, call)
    visible = call.visible()
    for b, h, q, k in [(0, 0, 0, 0), (1, 1, 5, 60), (0, 1, 63, 60), (1, 0, 40, 39), (0, 0, 40, 3)]:
        b = min(b, case.batch - 1)
        index = [torch.tensor(n) for n in (b, h, q, k)]
        assert bool(see(*index)) == bool(visible[b, h, q, k])


def test_the_scores_that_flex_gets() -> None:
    case = dataclasses.replace(
        cases.short(CASES["softcap-2k"], 64), alibi=True, bias="HQK", softcap=3.0, mask="none"
    )
    call = cases.build(case)
    modify = contestants._score_mod(case, call)
    assert modify is not None
    slopes, bias, s = call.options["alibi_slopes"], call.options["bias"], torch.tensor(2.0)
    got = modify(s, *(torch.tensor(n) for n in (0, 1, 10, 30)))
    expected = 3.0 * torch.tanh(s / 3.0) - slopes[1] * 20 + bias[1, 10, 30]
    torch.testing.assert_close(got, expected)
    assert contestants._score_mod(CASES["full-1k-fp32-d64"], call) is None


def test_masks_are_kept_small_where_all_heads_share_them() -> None:
    case = cases.short(CASES["window-8k"], 64)
    dense = contestants._visible(case, cases.build(case))
    assert dense is not None and dense.shape == (1, 1, 64, 64)


def test_alibi_distances_are_those_of_the_definition() -> None:
    case = dataclasses.replace(cases.short(CASES["alibi-2k"], 64), lengths=(8, 64))
    call = cases.build(case)
    assert contestants._distances(call)[0, 0] == 56 and contestants._distances(call)[7, 63] == 0
