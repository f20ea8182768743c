"""Laws of the mask: what nobody sees is selected away, whatever is stored there, and rows without keys are
defined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import masks
from . import tolerance
from .cases import Call, Case, build
from .evaluate import Expectation, Subject, expect, observe
from .law import contiguous, law
from .tolerance import Verdict


def _sees_nothing(call: Call) -> tuple[Tensor, Tensor]:
    """Rows without keys, bool `[B, Hq, Lq]`, and keys that no row of their group sees, bool `[B, Hk, Lk]`."""
    visible = call.visible()
    Hk = call.k.shape[1]
    seen = visible.any(2).unflatten(1, (Hk, call.q.shape[1] // Hk)).any(2)
    return ~visible.any(-1), ~seen


@law(applies=lambda case: case.mask != "none" or case.lengths[1] == 0, limit=80)
def empty_rows_are_zero(case: Case, subject: Subject) -> list[Verdict]:
    """A row that sees no key: out 0, lse -inf or the sink, dq 0; a key that no row sees: dk and dv 0. All
    exactly.
    """
    call = build(case, subject.device)
    results = observe(subject, call)
    rows, keys = _sees_nothing(call)
    sink = call.options.get("sink")
    lonely = torch.full_like(results["lse"], -torch.inf)
    if sink is not None:
        lonely = sink.to(lonely.dtype)[None, :, None].expand_as(lonely)
    assert not results["out"][rows].any(), "out of a row without keys"
    assert torch.equal(results["lse"][rows], lonely[rows]), "lse of a row without keys"
    assert bool((results["lse"][~rows] > -torch.inf).all()), "lse of a row with keys"
    assert not results["grad q"][rows].any(), "dq of a row without keys"
    assert not results["grad k"][keys].any(), "dk of a key without rows"
    assert not results["grad v"][keys].any(), "dv of a key without rows"
    assert not any(bool(x.isnan().any()) for x in results.values())
    return []


def _hiding(case: Case, device: str) -> Call:
    """The call with its last keys hidden from everyone as well, a different number in each batch element."""
    call = build(case, device).map(contiguous)
    Lk = case.lengths[1]
    kept = torch.tensor([max(0, Lk - 2 - 3 * b) for b in range(case.batch)], device=device)
    hidden = masks.padding(kept)
    return call.with_arguments(mask=hidden if call.mask is None else call.mask & hidden)


@law(applies=lambda case: case.lengths[1] > 1 and not case.empty, limit=60)
def hidden_keys_change_nothing(case: Case, subject: Subject) -> list[Verdict]:
    """What is stored in keys and values that nobody sees changes nothing, be it NaN or inf, and gets a
    gradient of exactly 0.

    Finite values change no bit. NaN and inf may send the call along another route, which is within the error
    budget, and is the same for all of them.
    """
    call = _hiding(case, subject.device)
    _, keys = _sees_nothing(call)

    def store(value: float) -> Call:
        hidden = keys[..., None]
        return call.with_arguments(k=torch.where(hidden, value, call.k), v=torch.where(hidden, value, call.v))

    clean = observe(subject, store(0.0))
    tolerance.check_identical(clean, observe(subject, store(7.0)), context=f"7 in hidden keys: {case.name}")
    expected = expect(store(0.0))
    spoiled = {value: observe(subject, store(value)) for value in (float("nan"), torch.inf, -torch.inf)}
    for value, results in spoiled.items():
        tolerance.check_identical(
            results, spoiled[torch.inf], context=f"{value} and inf in hidden keys: {case.name}"
        )
        assert not results["grad k"][keys].any()
        assert not results["grad v"][keys].any()
    return expected.judge(clean, "clean") + expected.judge(spoiled[torch.inf], "inf in hidden keys")


@law(
    applies=lambda case: (
        case.bias in ("BHQK", "QK", "B1QK", "HQK") and case.mask != "none" and not case.empty
    ),
    limit=25,
)
def hidden_bias_changes_nothing(case: Case, subject: Subject) -> list[Verdict]:
    """NaN and inf in the bias of pairs that the mask hides change nothing and get a gradient of exactly 0."""
    call = build(case, subject.device)
    bias = call.options["bias"]
    seen = call.visible().to(torch.float32).sum_to_size(bias.shape) > 0
    expected, verdicts = expect(call), []
    for value in (float("nan"), torch.inf, -torch.inf):
        results = observe(subject, call.with_arguments(bias=torch.where(seen, bias, value)))
        assert not results["grad bias"][~seen].any()
        verdicts += expected.judge(results, f"{value} in the hidden bias")
    return verdicts


def _mild(case: Case) -> bool:
    """Whether NaN is the only thing that can be wrong: no weight underflows or is dropped."""
    small = case.values == "gaussian" or (case.values == "structured" and case.scale is None)
    return small and not case.dropout_p and not case.empty


@law(applies=lambda case: _mild(case) and case.mask not in ("none", "full", "empty"), limit=40)
def a_row_feels_only_the_keys_it_sees(case: Case, subject: Subject) -> list[Verdict]:
    """NaN in a key or a value turns exactly the rows that see it into NaN."""
    call = build(case, subject.device).map(contiguous)
    share = call.visible().float().mean((0, 1, 2))
    key = int((share - 0.5).abs().argmin())
    feels = call.visible()[..., key]  # [B, Hq, Lq]
    expected, verdicts = expect(call), []
    for name in ("k", "v"):
        spoiled = contiguous(getattr(call, name))
        spoiled[:, :, key] = float("nan")
        results = observe(subject, call.with_arguments(**{name: spoiled}), wanted=())
        assert bool(results["out"][feels].isnan().all()), f"out of a row that sees NaN in {name}"
        if name == "k":
            assert bool(results["lse"][feels].isnan().all()), "lse of a row that sees NaN in k"
        verdicts += _untouched(expected, results, feels, name)
    return verdicts


@law(applies=_mild, limit=40)
def a_query_keeps_its_nan_to_itself(case: Case, subject: Subject) -> list[Verdict]:
    """NaN in a query is not lost: its out and lse are NaN, unless it sees no key; and all other rows are as
    before.
    """
    call = build(case, subject.device).map(contiguous)
    row = case.seed % case.lengths[0]
    spoiled = contiguous(call.q)
    spoiled[:, :, row, 0] = float("nan")
    feels = torch.zeros(call.q.shape[:3], dtype=torch.bool, device=call.q.device)
    feels[:, :, row] = call.visible()[:, :, row].any(-1)
    results = observe(subject, call.with_arguments(q=spoiled), wanted=())
    assert bool(results["out"][feels].isnan().all()), "out of the row"
    assert bool(results["lse"][feels].isnan().all()), "lse of the row"
    return _untouched(expect(call), results, feels, "q")


def _untouched(expected: Expectation, results: dict[str, Tensor], feels: Tensor, name: str) -> list[Verdict]:
    """Verdicts on the rows that do not feel a NaN in the argument `name`."""
    others = expected.map(lambda result, x: x[~feels] if result in ("out", "lse") else x)
    return others.judge({result: x[~feels] for result, x in results.items()}, f"NaN in {name}")
