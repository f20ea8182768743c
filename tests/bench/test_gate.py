"""Nobody who computes something else is timed, and if that is tilefold, nobody is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilefold
from tilefold.bench import run
from tilefold.bench.cases import BenchCase, build
from tilefold.bench.contestants import CONTESTANTS, Contestant, pick
from tilefold.bench.gate import Finding, _Rows, check, tilefold_is_exact
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
    assert names[-1] == "out at full size, some rows"
    assert tilefold_is_exact({"tiny": findings})


def one_row(out: Tensor) -> Tensor:
    """Wrong in a row that the comparison with float64 does not see."""
    return torch.cat([out[:, :, :25], out[:, :, 25:26] * 1.01, out[:, :, 26:]], dim=2)


def wrong_gradient(out: Tensor) -> Tensor:
    """Right results, and gradients that are too large."""
    return out + (out - out.detach()) * 0.01


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda out: out * 1.001, "some rows"),
        (lambda out: out + 1e-3, "against tilefold"),
        (one_row, "against tilefold"),
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


def test_a_row_at_its_place_in_the_whole() -> None:
    """Rows that are checked at full size take ALiBi, dropout and the mask from their place."""
    case = BenchCase(
        "r",
        "",
        heads=(2, 2),
        lengths=(70, 90),
        dims=(8, 8),
        mask="causal",
        alibi=True,
        dropout_p=0.3,
        bias="HQK",
    )
    call = build(case)
    rows = _Rows(call)
    whole = by_reference(call.map(Tensor.double))[0]
    assert rows.starts == [0, 27, 54]
    torch.testing.assert_close(rows.truth, torch.cat([whole[:, :, s : s + 16] for s in rows.starts], dim=2))
