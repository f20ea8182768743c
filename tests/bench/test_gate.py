"""Nobody who computes something else is timed, and if that is tilefold, nobody is."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import tilefold
from tilefold.bench import gate, run
from tilefold.bench.cases import CASES, BenchCase, build
from tilefold.bench.contestants import CONTESTANTS, Contestant, pick
from tilefold.bench.gate import Finding, _FullSize, _Rows, _spans, check, tilefold_is_exact
from tilefold.testing.cases import Call
from tilefold.testing.evaluate import by_reference
from tilefold.testing.tolerance import Verdict

TINY = BenchCase("tiny", "for tests", heads=(2, 1), lengths=(96, 96), dims=(16, 16), mask="causal", batch=2)
REAL = tilefold.attention
KINDS = {
    "plain": TINY,
    "window": BenchCase("w", "", heads=(2, 2), lengths=(300, 300), dims=(16, 8), mask="window", dtype="bf16"),
    "options": BenchCase(
        "o", "", heads=(2, 1), lengths=(130, 260), dims=(16, 16), softcap=5.0, alibi=True, sink=True
    ),
    "bias": BenchCase("b", "", heads=(2, 2), lengths=(130, 130), mask="causal", bias="HQK", bias_grad=True),
    "dropout": BenchCase("d", "", heads=(2, 2), lengths=(300, 300), dropout_p=0.2, mask="documents"),
    "decode": BenchCase("e", "", batch=3, heads=(4, 2), lengths=(1, 600), backward=False),
}


def rival(change: Any, name: str = "rival") -> Contestant:
    """tilefold's results, changed."""
    return Contestant(
        name, "", lambda *_: [], lambda case, call: lambda c: change(REAL(c.q, c.k, c.v, **c.options))
    )


def check_tiny(*rivals: Contestant, case: BenchCase = TINY) -> dict[str, Finding]:
    return check(case, [CONTESTANTS["tilefold"], *rivals], "cpu", backward=case.backward)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_exact_passes(kind: str) -> None:
    case = KINDS[kind]
    findings = check(case, pick(["sdpa", "standard"]), "cpu", case.backward)
    assert {found.status for found in findings.values()} <= {"ok", "refused"}
    ours = findings["tilefold"]
    assert ours.status == "ok" and 0.0 < ours.worst <= 1.0
    names = [verdict.name.removeprefix(f"at {min(case.lengths[0], 256)} x ") for verdict in ours.verdicts]
    for expected in ("out", "lse", *(f"grad {name}" for name in case.wanted if case.backward)):
        assert any(name.endswith(f": {expected}") for name in names)
    assert names[-1] == "out at full size, all rows"
    assert tilefold_is_exact({"tiny": findings})


def one_row(out: Tensor) -> Tensor:
    """Wrong in a row in between."""
    return torch.cat([out[:, :, :25], out[:, :, 25:26] * 1.01, out[:, :, 26:]], dim=2)


def wrong_gradient(out: Tensor) -> Tensor:
    """Right results, and gradients that are too large."""
    return out + (out - out.detach()) * 0.01


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda out: out * 1.001, "all rows"),
        (lambda out: out + 1e-3, "differs most from tilefold"),
        (one_row, "rows 17 to 32, where it differs most from tilefold"),
        (wrong_gradient, "grad q"),
        (lambda out: out * float("nan"), "error inf"),
    ],
)
def test_a_wrong_rival_is_caught(change: Any, words: str) -> None:
    findings = check_tiny(rival(change))
    assert findings["tilefold"].status == "ok"
    assert findings["rival"].status == "wrong"
    assert any(words in reason and "OVER" in reason for reason in findings["rival"].reasons)
    assert tilefold_is_exact({"tiny": findings})


def test_an_honest_rival_is_not() -> None:
    assert check_tiny(rival(lambda out: out))["rival"].status == "ok"


def test_an_error_of_a_rival_is_reported() -> None:
    def fail(out: Tensor) -> Tensor:
        raise RuntimeError("no kernel\nfor this")

    finding = check_tiny(rival(fail))["rival"]
    assert (finding.status, finding.reasons) == ("failed", ["RuntimeError: no kernel"])


def test_the_allowance_of_a_finding() -> None:
    over = Verdict("out", error=3.0, baseline=0.5, unit=0.0)
    assert Finding(verdicts=[over]).status == "wrong"
    generous = Finding(verdicts=[over], allowance=4.0)
    assert generous.status == "ok" and generous.worst == 3.0
    (text,) = Finding(verdicts=[over], allowance=2.0).wrong
    assert text.endswith("(at most 2)")
    assert Finding(verdicts=[Verdict("out", float("nan"), 1.0, 1.0)]).status == "wrong"


def broken(monkeypatch: pytest.MonkeyPatch, longer_than: int = 0) -> None:
    """tilefold gives wrong results, for calls with more rows than `longer_than`."""

    def attention(q: Tensor, *args: Any, **options: Any) -> Any:
        found = REAL(q, *args, **options)
        if q.shape[2] <= longer_than:
            return found
        return (found[0] * 1.05, found[1]) if isinstance(found, tuple) else found * 1.05

    monkeypatch.setattr(tilefold, "attention", attention)


@pytest.mark.parametrize("longer_than", [0, 256])
def test_if_tilefold_is_wrong_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, longer_than: int) -> None:
    broken(monkeypatch, longer_than)
    good, bad = TINY, KINDS["window"]
    document = run.bench([good, bad], pick(["sdpa"]), run.Options(seconds=0.0))
    assert document["exact"] is False
    states = {(row["case"], row["contestant"]): row["status"] for row in document["rows"]}
    assert states["w", "tilefold"] == "wrong"
    assert states["tiny", "tilefold"] == ("not timed" if longer_than else "wrong")
    assert all("median" not in row and row["reasons"] for row in document["rows"])


def test_a_mask_or_a_seed_that_is_ignored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        return lambda q, k, v, **options: REAL(q, k, v, **{n: x for n, x in options.items() if n != name})

    for name, case in (
        ("mask", KINDS["window"]),
        ("sink", KINDS["options"]),
        ("dropout_p", KINDS["dropout"]),
    ):
        monkeypatch.setattr(tilefold, "attention", without(name))
        assert check_tiny(case=case)["tilefold"].status == "wrong"


# Full size.

LONG = BenchCase("long", "", heads=(2, 1), lengths=(1024, 1024), dims=(16, 16), mask="causal", backward=False)


def spoil(row: int, by: float, longer_than: int = 999) -> Any:
    """`tilefold.attention` that is off in one row of long calls."""

    def attention(q: Tensor, *args: Any, **options: Any) -> Any:
        found = REAL(q, *args, **options)
        if q.shape[2] > longer_than:
            (found[0] if isinstance(found, tuple) else found)[:, :, row] += by
        return found

    return attention


@pytest.mark.parametrize("row, by", [(200, 1.0), (517, 1e-3), (999, float("nan")), (1023, float("inf"))])
def test_one_wrong_row_of_tilefold_is_seen_where_all_are_known(
    monkeypatch: pytest.MonkeyPatch, row: int, by: float
) -> None:
    monkeypatch.setattr(tilefold, "attention", spoil(row, by))
    findings = check_tiny(case=LONG)
    assert findings["tilefold"].status == "wrong"
    (reason,) = findings["tilefold"].reasons
    assert "out at full size, all rows" in reason


@pytest.mark.parametrize(
    "row, by, all_rows",
    [(200, 1.0, 0), (517, 1e-3, 0), (999, float("nan"), 0), (1023, 1.0, 0), (200, 1.0, gate.ALL_ROWS)],
)
def test_float64_settles_who_is_wrong(
    monkeypatch: pytest.MonkeyPatch, row: int, by: float, all_rows: int
) -> None:
    monkeypatch.setattr(gate, "ALL_ROWS", all_rows)

    def wrong(out: Tensor) -> Tensor:
        if out.shape[2] > 999:
            out[:, 1, row] += by
        return out

    rivals = rival(lambda out: out, "right"), rival(wrong, "wrong")
    findings = check_tiny(*rivals, case=LONG)
    assert {name: found.status for name, found in findings.items()} == {
        "tilefold": "ok", "right": "ok", "wrong": "wrong",
    }  # fmt: skip
    start = min(max(row - 8, 0), 1024 - 16)
    assert f"rows {start} to {start + 15}, where it differs most" in findings["wrong"].reasons[-1]
    # The same, and tilefold is wrong too.
    monkeypatch.setattr(tilefold, "attention", spoil(row, by))
    findings = check_tiny(rivals[0], case=LONG)
    assert {name: found.status for name, found in findings.items()} == {"tilefold": "wrong", "right": "ok"}
    assert f"rows {start} to {start + 15}, where right differs most" in findings["tilefold"].reasons[-1]
    assert not tilefold_is_exact({"long": findings})


def test_a_case_of_the_table_in_which_tilefold_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilefold, "attention", spoil(200, 1.0))
    case = dataclasses.replace(CASES["causal-1k-fp32-d64"], backward=False)
    document = run.bench([case], pick(["sdpa", "standard"]), run.Options(seconds=0.0))
    assert document["exact"] is False
    states = {row["contestant"]: row["status"] for row in document["rows"]}
    assert states == {"tilefold": "wrong", "sdpa": "not timed", "standard": "not timed"}


@pytest.mark.parametrize("all_rows", [0, gate.ALL_ROWS])
def test_a_rival_within_its_allowance_is_not_wrong(monkeypatch: pytest.MonkeyPatch, all_rows: int) -> None:
    monkeypatch.setattr(gate, "ALL_ROWS", all_rows)
    call = build(LONG)
    full_size, ours = _FullSize(call), REAL(call.q, call.k, call.v, **call.options)
    verdict = full_size.judge_ours(ours)
    other = ours.clone()
    other[:, :, 200] += 3 * verdict.allowed
    theirs, settled = full_size.judge_rival("rival", other)
    assert verdict.ok and [found.ok for found in settled] == [True]
    assert 1.9 < max(found.ratio for found in theirs) <= gate.RIVAL_BUDGETS
    assert full_size.judge_rival("rival", ours)[1] == []


@pytest.mark.parametrize("B, H, Lq, Lk", [
    (1, 1, 1, 1), (3, 4, 1, 600), (1, 8, 1024, 1024), (2, 4, 999, 2000), (64, 32, 1, 2**14),
    (1, 2, 128, 2**17), (1, 2, 129, 2**17), (1, 2, 8192, 8192), (1, 1, 32768, 32768), (2, 8, 5001, 5001),
    (1, 1, 0, 8),
])  # fmt: skip
def test_the_rows_that_are_checked(B: int, H: int, Lq: int, Lk: int) -> None:
    q, k = torch.empty(B, H, Lq, 0), torch.empty(B, 1, Lk, 0)
    spans = _spans(Call(q, k, k, None, None, {}))
    assert spans == _spans(Call(q, k, k, None, None, {}))
    rows = [row for start, stop in spans for row in range(start, stop)]
    assert rows == sorted(set(rows))
    elements = [B * H * (stop - start) * Lk for start, stop in spans]
    assert max(elements, default=0) <= max(gate.STRIPE, B * H * 16 * Lk)
    if B * H * Lq * Lk <= 2**24 or Lq <= 128:
        assert rows == [*range(Lq)]
    else:
        assert [stop - start for start, stop in spans] == [16] * 8
        assert (rows[0], rows[-1]) == (0, Lq - 1)
        assert all(a[1] <= b[0] <= a[1] + 2 * Lq // 6 for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("stripe", [1, 20000, gate.STRIPE])
@pytest.mark.parametrize("all_rows", [0, gate.ALL_ROWS])
def test_a_row_at_its_place_in_the_whole(monkeypatch: pytest.MonkeyPatch, all_rows: int, stripe: int) -> None:
    """Rows that are checked at full size take ALiBi, dropout and the mask from their place."""
    case = BenchCase(
        "r",
        "",
        heads=(2, 2),
        lengths=(150, 170),
        dims=(8, 8),
        mask="causal",
        alibi=True,
        dropout_p=0.3,
        bias="HQK",
    )
    call = build(case)
    monkeypatch.setattr(gate, "ALL_ROWS", all_rows)
    monkeypatch.setattr(gate, "STRIPE", stripe)
    spans = _spans(call)
    assert len(spans) == (8 if not all_rows else {1: 10, 20000: 3}.get(stripe, 1))
    whole = by_reference(call.map(Tensor.double))[0]
    expected = torch.cat([whole[:, :, start:stop] for start, stop in spans], dim=2)
    torch.testing.assert_close(_Rows(call, spans).truth, expected)
