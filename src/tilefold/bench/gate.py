"""Exactness before speed: nothing is timed that was not checked.

Each case is checked twice. A short version of it, results and gradients, against float64 within the error
budget of `testing.tolerance`. And at full size: all rows against float64 where they are few, else some of
them; and all of a rival's `out` against tilefold's. Where these two differ, float64 settles who is wrong, at
the row of the largest difference. tilefold has to stay within the budget; a rival, which promises less,
within a few of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilefold import Positions, masks
from tilefold.testing import inputs
from tilefold.testing.cases import Call
from tilefold.testing.evaluate import Expectation, Subject, by_reference, expect, observe
from tilefold.testing.tolerance import Verdict, baseline_dtype, judge, max_error, pool, rounding_unit

from .cases import BenchCase, build, short
from .contestants import OURS, Contestant, outcome

RIVAL_BUDGETS = 4.0
# At full size: rows of a group, groups, elements of all score matrices up to which every row is checked, and
# elements of those that are computed at once then.
ROWS, GROUPS = 16, 8
ALL_ROWS, STRIPE = 2**24, 2**22


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
    full_size = _FullSize(whole)
    findings: dict[str, Finding] = {}
    for contestant in contestants:
        finding = findings[contestant.name] = Finding(contestant.why_not(case, device, False))
        if finding.refused:
            continue
        wanted = case.wanted if backward and not contestant.why_not(case, device, True) else ()
        if contestant.name == OURS:
            finding.verdicts += _check_ours(little, expected, device, wanted)
            out = outcome(contestant.prepare(case, whole), whole)["out"]
            finding.verdicts.append(full_size.judge_ours(out))
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
        theirs, ours = full_size.judge_rival(contestant.name, out)
        finding.verdicts += theirs
        findings[OURS].verdicts += ours
    return findings


def tilefold_is_exact(findings: Mapping[str, Mapping[str, Finding]]) -> bool:
    """Whether tilefold passed in every case."""
    return all(found[OURS].status == "ok" for found in findings.values())


def _check_ours(call: Call, expected: Expectation, device: str, wanted: Sequence[str]) -> list[Verdict]:
    """`out`, `lse` and gradients of the short case, in poisoned memory."""
    return expected.judge(
        observe(Subject(None, device), call, wanted), f"at {call.q.shape[2]} x {call.k.shape[2]}"
    )


def _spans(call: Call) -> list[tuple[int, int]]:
    """`(start, stop)` of the query rows that are checked at full size, in the order of the rows: all of them
    in stripes where the scores are few; else the first, the last, and random ones between them, one group in
    each of equal stretches.
    """
    (B, Hq, Lq, _), Lk = call.q.shape, call.k.shape[2]
    few = B * Hq * Lq * Lk <= ALL_ROWS
    if few or Lq <= GROUPS * ROWS:
        step = max(ROWS, STRIPE // max(B * Hq * Lk, 1)) if few else ROWS
        return [(start, min(start + step, Lq)) for start in range(0, Lq, step)]
    stretch, draw = (Lq - 2 * ROWS) // (GROUPS - 2), inputs.generator(0)
    between = [
        ROWS + n * stretch + int(torch.randint(stretch - ROWS + 1, (1,), generator=draw))
        for n in range(GROUPS - 2)
    ]
    return [(start, start + ROWS) for start in (0, *between, Lq - ROWS)]


class _Rows:
    """Some query rows of a call, known in float64.

    Attributes:
        spans: `(start, stop)` of each group of rows.
        truth: `out` of these rows, one group after another, float64 `[B, Hq, rows, Dv]`.
        baseline: the same by plain PyTorch in the dtype of the call.
    """

    def __init__(self, call: Call, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = spans
        narrow = baseline_dtype(call.q.dtype)
        self.truth, self.baseline = (
            torch.cat([by_reference(_part(call, *span).map(lambda x, d=d: x.to(d)))[0] for span in spans], 2)
            for d in (torch.float64, narrow)
        )

    def judge(self, name: str, out: Tensor) -> Verdict:
        """These rows of `out [B, Hq, Lq, Dv]` against float64."""
        picked = torch.cat([out[:, :, start:stop] for start, stop in self.spans], dim=2)
        return judge(name, picked, self.truth, [self.baseline])


def _part(call: Call, start: int, stop: int) -> Call:
    """The call of the rows from `start` to before `stop` alone, at their places in the whole."""
    Lq, Lk = call.q.shape[2], call.k.shape[2]
    at = Positions(q_origin=start, diagonal=Lk - Lq)
    changes: dict[str, object] = {"q": call.q[:, :, start:stop], "positions": at}
    if call.mask is not None:
        changes["mask"] = masks.shift(call.mask, start, 0, Lq, Lk)
    bias = call.options.get("bias")
    if bias is not None and bias.shape[-2] > 1:
        changes["bias"] = bias[..., start:stop, :]
    return Call(call.q, call.k, call.v, None, None, call.options).with_arguments(**changes)


class _FullSize:
    """The checks of `out` at full size, tilefold's first."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.rows = _Rows(call, _spans(call))
        checked = sum(stop - start for start, stop in self.rows.spans)
        self.name = f"out at full size, {'all' if checked == call.q.shape[2] else 'some'} rows"
        self.ours: Tensor | None = None

    def judge_ours(self, out: Tensor) -> Verdict:
        """The verdict on tilefold, whose `out` is kept for `judge_rival`."""
        self.ours = out
        return self.rows.judge(self.name, out)

    def judge_rival(self, name: str, out: Tensor) -> tuple[list[Verdict], list[Verdict]]:
        """Verdicts on a rival and, where float64 has to settle who of both is wrong, on tilefold."""
        assert self.ours is not None
        known, beside = self.rows.judge(self.name, out), self._compare(out, self.ours)
        if beside.ok:
            return [known, beside], []
        start, stop = self._around(_farthest(out, self.ours))
        where = f"out at full size, rows {start} to {stop - 1}, where"
        rival, ours = self._settle(
            _Rows(self.call, [(start, stop)]),
            (f"{where} it differs most from tilefold", out),
            (f"{where} {name} differs most from it", self.ours),
        )
        return [known, rival], [ours]

    def _compare(self, out: Tensor, ours: Tensor) -> Verdict:
        """All of `out` against ours: two results may be one budget away from the truth each."""
        error = max_error(out, ours)
        baseline = max_error(self.rows.baseline, self.rows.truth)
        return Verdict(
            "out at full size against tilefold", error, 2 * baseline, 2 * rounding_unit(ours, ours.dtype)
        )

    def _around(self, row: int) -> tuple[int, int]:
        """At most `ROWS` rows with `row` in the middle, or as near to it as the ends allow."""
        Lq = self.call.q.shape[2]
        start = max(0, min(row - ROWS // 2, Lq - ROWS))
        return start, min(start + ROWS, Lq)

    def _settle(self, rows: _Rows, *found: tuple[str, Tensor]) -> list[Verdict]:
        """Verdicts at the disputed rows. Their budget is that of all rows that are known: these few were
        picked for their error, and plain PyTorch's largest one may lie elsewhere.
        """
        verdicts = []
        for name, out in found:
            everywhere = dataclasses.replace(self.rows.judge(name, out), error=0.0)
            verdicts += pool([[rows.judge(name, out)], [everywhere]])
        return verdicts


def _farthest(out: Tensor, ours: Tensor) -> int:
    """The row `[:, :, row]` with the largest difference; one that is finite on one side only is infinite."""
    same = (out == ours) | (out.isnan() & ours.isnan())
    apart = torch.where(same, 0.0, (out.double() - ours.double()).abs())
    return int(apart.nan_to_num(nan=torch.inf, posinf=torch.inf).amax(dim=(0, 1, 3)).argmax())


def _lengths(case: BenchCase) -> str:
    return "{} x {}".format(*case.lengths)


def in_words(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    line = next(iter(str(error).strip().splitlines()), "no message")
    return f"{type(error).__name__}: {line}"
