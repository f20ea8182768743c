"""Exactness before speed: nothing is timed that was not checked.

Each case is checked twice. A short version of it, results and gradients, against float64 within the error
budget of `testing.tolerance`. And at full size: some rows against float64, and all of `out` against
tilefold's. tilefold has to stay within the budget; a rival, which promises less, within a few of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilefold import Positions, masks
from tilefold.testing.cases import Call
from tilefold.testing.evaluate import Expectation, Subject, by_reference, expect, observe
from tilefold.testing.tolerance import Verdict, baseline_dtype, judge, max_error, rounding_unit

from .cases import BenchCase, build, short
from .contestants import OURS, Contestant, outcome

RIVAL_BUDGETS = 4.0
ROWS = 16


@dataclass
class Finding:
    """What the gate says about one contestant and one case.

    Attributes:
        refused: why the contestant cannot run the case at all.
        failed: the error that it raised.
        verdicts: every comparison; those that are over carry `allowance` times the budget.
        allowance: budgets that this contestant may use.
    """

    refused: list[str] = field(default_factory=list)
    failed: str = ""
    verdicts: list[Verdict] = field(default_factory=list)
    allowance: float = 1.0

    @property
    def wrong(self) -> list[str]:
        """The comparisons that do not hold, as text."""
        return [
            f"{v} (at most {self.allowance:g})" if self.allowance != 1.0 else str(v)
            for v in self.verdicts
            if not v.ratio <= self.allowance
        ]

    @property
    def status(self) -> str:
        """ "refused", "failed", "wrong" or "ok"."""
        states = {"refused": self.refused, "failed": self.failed, "wrong": self.wrong}
        return next((state for state, found in states.items() if found), "ok")

    @property
    def reasons(self) -> list[str]:
        return self.refused or ([self.failed] if self.failed else self.wrong)

    @property
    def worst(self) -> float:
        """The largest error over its budget."""
        return max((verdict.ratio for verdict in self.verdicts), default=0.0)


def check(
    case: BenchCase, contestants: Sequence[Contestant], device: str, backward: bool
) -> dict[str, Finding]:
    """The findings of a case by contestant. The first contestant is tilefold, with which the others are
    compared; what it raises is raised.
    """
    small = short(case)
    little, whole = build(small, device, seed=1), build(case, device, seed=0)
    expected = expect(little)
    rows = _Rows(whole)
    findings: dict[str, Finding] = {}
    ours: Tensor | None = None
    for contestant in contestants:
        finding = findings[contestant.name] = Finding(contestant.why_not(case, device, False))
        if finding.refused:
            continue
        wanted = case.wanted if backward and not contestant.why_not(case, device, True) else ()
        if contestant.name == OURS:
            finding.verdicts += _check_ours(little, expected, device, wanted)
            ours = outcome(contestant.prepare(case, whole), whole)["out"]
            finding.verdicts += rows.judge(ours)
            continue
        finding.allowance = RIVAL_BUDGETS
        try:
            finding.verdicts += expected.judge(
                outcome(contestant.prepare(small, little), little, wanted), f"at {_lengths(small)}"
            )
            out = outcome(contestant.prepare(case, whole), whole)["out"]
        except RuntimeError as error:
            # Memory, compilers, kernels: the report tells what came.
            finding.failed = in_words(error)
            continue
        finding.verdicts += rows.judge(out)
        assert ours is not None
        finding.verdicts.append(rows.compare(out, ours))
    return findings


def tilefold_is_exact(findings: Mapping[str, Mapping[str, Finding]]) -> bool:
    """Whether tilefold passed in every case."""
    return all(found[OURS].status == "ok" for found in findings.values())


def _check_ours(call: Call, expected: Expectation, device: str, wanted: Sequence[str]) -> list[Verdict]:
    """`out`, `lse` and gradients of the short case, in poisoned memory."""
    return expected.judge(
        observe(Subject(None, device), call, wanted), f"at {call.q.shape[2]} x {call.k.shape[2]}"
    )


class _Rows:
    """Some query rows of a call, known in float64: the first, the middle and the last ones."""

    def __init__(self, call: Call) -> None:
        Lq = call.q.shape[2]
        starts = [0] if Lq <= 3 * ROWS else [0, (Lq - ROWS) // 2, Lq - ROWS]
        self.size = Lq if Lq <= 3 * ROWS else ROWS
        self.starts = starts
        parts = [self._part(call, start) for start in starts]
        narrow = baseline_dtype(call.q.dtype)
        self.truth, self.baseline = (
            torch.cat([by_reference(part.map(lambda x, d=d: x.to(d)))[0] for part in parts], dim=2)
            for d in (torch.float64, narrow)
        )

    def _part(self, call: Call, start: int) -> Call:
        """The call of these rows alone, at their places in the whole."""
        Lq, Lk = call.q.shape[2], call.k.shape[2]
        at = Positions(q_origin=start, diagonal=Lk - Lq)
        changes: dict[str, object] = {"q": call.q[:, :, start : start + self.size], "positions": at}
        if call.mask is not None:
            changes["mask"] = masks.shift(call.mask, start, 0, Lq, Lk)
        bias = call.options.get("bias")
        if bias is not None and bias.shape[-2] > 1:
            changes["bias"] = bias[..., start : start + self.size, :]
        return Call(call.q, call.k, call.v, None, None, call.options).with_arguments(**changes)

    def judge(self, out: Tensor) -> list[Verdict]:
        """These rows of `out` against float64."""
        picked = torch.cat([out[:, :, start : start + self.size] for start in self.starts], dim=2)
        return [judge("out at full size, some rows", picked, self.truth, [self.baseline])]

    def compare(self, out: Tensor, ours: Tensor) -> Verdict:
        """All of `out` against ours: two results may be one budget away from the truth each."""
        error = max_error(out, ours)
        baseline, unit = max_error(self.baseline, self.truth), rounding_unit(ours, ours.dtype)
        return Verdict("out at full size against tilefold", error, 2 * baseline, 2 * unit)


def _lengths(case: BenchCase) -> str:
    return "{} x {}".format(*case.lengths)


def in_words(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    line = next(iter(str(error).strip().splitlines()), "no message")
    return f"{type(error).__name__}: {line}"
