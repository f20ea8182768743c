"""Runs cases: first the gate for all of them, then the clock; the results are one JSON document."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tilefold
from tilefold.testing.cases import Call

from .cases import BenchCase, build_sets
from .contestants import OURS, Attend, Contestant
from .gate import Finding, check, in_words, tilefold_is_exact
from .machine import machine, versions
from .timing import Clock, Timing, clock_for, extra_memory, take_turns

Row = dict[str, Any]
Document = dict[str, Any]
FORWARD, BOTH = "forward", "forward + backward"


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        device: where.
        seconds: for the turns of one case and pass, all contestants together.
        rounds: at least so many turns of each contestant.
        sets: sets of inputs that the turns rotate through.
        backward: whether to measure forward and backward too.
        title: of the document.
    """

    device: str = "cpu"
    seconds: float = 3.0
    rounds: int = 3
    sets: int = 3
    backward: bool = True
    title: str = "tilefold bench"


def silent(phase: str, case: str, done: int, total: int) -> None:
    """Reports no progress."""


#: `(phase, case, cases done, cases in all)`, called before each case; the phases are "check" and "time".
Progress = Callable[[str, str, int, int], None]


def bench(
    cases: Sequence[BenchCase],
    contestants: Sequence[Contestant],
    options: Options,
    progress: Progress = silent,
    clock: Clock | None = None,
) -> Document:
    """Checks every case, then times those who passed.

    If tilefold fails one check, nothing is timed: `exact` of the document is False and its rows say what was
    wrong. Everybody else who fails, or cannot run, has a row with the reasons.
    """
    findings: dict[str, dict[str, Finding]] = {}
    for done, case in enumerate(cases):
        progress("check", case.name, done, len(cases))
        findings[case.name] = check(case, contestants, options.device, options.backward and case.backward)
    exact, rows = tilefold_is_exact(findings), []
    for done, case in enumerate(cases):
        if exact:
            progress("time", case.name, done, len(cases))
            clock = clock or clock_for(options.device)
            rows += _measured(case, contestants, findings[case.name], options, clock)
        else:
            rows += _refused(case, contestants, findings[case.name])
    return {
        "title": options.title,
        "machine": machine(options.device),
        "device": torch.device(options.device).type,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "seconds": options.seconds,
        "exact": exact,
        "contestants": {c.name: c.about for c in contestants},
        "rows": rows,
    }


def _row(case: BenchCase, what: str, contestant: Contestant, finding: Finding) -> Row:
    return {
        "case": case.name,
        "about": case.about,
        "shape": case.shape,
        "pass": what,
        "contestant": contestant.name,
        "status": finding.status,
        "reasons": finding.reasons,
        "error_over_budget": finding.worst,
    }


def _refused(
    case: BenchCase, contestants: Sequence[Contestant], findings: Mapping[str, Finding]
) -> list[Row]:
    """Rows of a run in which tilefold failed a check: no times."""
    rows = []
    for contestant in contestants:
        row = _row(case, FORWARD, contestant, findings[contestant.name])
        if row["status"] == "ok":
            row |= {"status": "not timed", "reasons": ["tilefold failed a check, so nothing was timed"]}
        rows.append(row)
    return rows


def _measured(
    case: BenchCase,
    contestants: Sequence[Contestant],
    findings: Mapping[str, Finding],
    options: Options,
    clock: Clock,
) -> list[Row]:
    """Rows of one case: each pass and contestant."""
    calls = build_sets(case, options.device, options.sets)
    estimates = predictions(calls[0], case)
    ready = {c.name: c.prepare(case, calls[0]) for c in contestants if findings[c.name].status == "ok"}
    rows: list[Row] = []
    for what in [FORWARD, BOTH] if options.backward and case.backward else [FORWARD]:
        unable = {c.name: c.why_not(case, options.device, what == BOTH) for c in contestants}
        racing = {name: attend for name, attend in ready.items() if not unable[name]}
        runs = {name: runs_of(attend, calls, case, what == BOTH) for name, attend in racing.items()}
        failed = {name: reason for name in runs if (reason := _trial(name, runs[name][0]))}
        times = take_turns(
            {name: found for name, found in runs.items() if name not in failed},
            options.seconds,
            options.rounds,
            clock,
        )
        for contestant in contestants:
            name, finding = contestant.name, findings[contestant.name]
            row = _row(case, what, contestant, finding)
            if name in times:
                # Twice, since a profiler may lose events and never makes them up.
                extra = max(extra_memory(runs[name][0], options.device) for _ in range(2))
                row |= _figures(times[name], extra, estimates[what])
                row |= _beside(times[name], row["extra_bytes"], estimates[what]) if name == OURS else {}
            elif name in failed:
                row |= {"status": "failed", "reasons": [failed[name]]}
            elif finding.status == "ok":
                row |= {"status": "refused", "reasons": unable[name]}
            rows.append(row)
    return rows


def _trial(name: str, run: Callable[[], Any]) -> str:
    """Runs once; the error of a rival as text, such as memory that a backward pass does not find."""
    try:
        run()
    except RuntimeError as error:
        if name == OURS:
            raise
        return in_words(error)
    return ""


def runs_of(
    attend: Attend, calls: Sequence[Call], case: BenchCase, backward: bool
) -> list[Callable[[], tuple[Tensor, ...]]]:
    """One run per set of inputs, with everything that is not timed done."""
    if not backward:
        return [partial(_forward, attend, call) for call in calls]
    return [partial(_step, attend, call, leaves_of(call, case)) for call in calls]


def leaves_of(call: Call, case: BenchCase) -> dict[str, Tensor]:
    """The arguments of `call` that want gradients, as leaves."""
    return {name: call.arguments[name].detach().requires_grad_() for name in case.wanted}


def _forward(attend: Attend, call: Call) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (attend(call),)


def _step(attend: Attend, call: Call, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Forward and backward."""
    out = attend(call.with_arguments(**leaves))
    return (out.detach(), *torch.autograd.grad(out, list(leaves.values()), call.dout))


@dataclass(frozen=True)
class Prediction:
    """What `tilefold.explain` says of one pass: seconds (None where the machine was busy when its figures
    were measured), FLOPs, bytes moved, and the most bytes held at once beyond arguments and results.
    """

    seconds: float | None
    flops: float
    bytes: float
    extra_bytes: int


def predictions(call: Call, case: BenchCase) -> dict[str, Prediction]:
    """The predictions of both passes.

    Of a forward pass the caller keeps `out` alone here, so the lse counts as extra memory.
    """
    leaves = leaves_of(call, case)
    asked = call.with_arguments(**leaves)
    found: Any = tilefold.explain(asked.q, asked.k, asked.v, **asked.options)
    forward, backward = found.forward, found.backward
    known = found.doubt == ""
    kept = max(0, forward.result_bytes - _bytes_of_out(call))
    return {
        FORWARD: Prediction(
            forward.seconds if known else None, forward.flops, forward.bytes, forward.extra_bytes + kept
        ),
        BOTH: Prediction(
            forward.seconds + backward.seconds if known else None,
            forward.flops + backward.flops,
            forward.bytes + backward.bytes,
            found.step_extra_bytes,
        ),
    }


def _bytes_of_out(call: Call) -> int:
    B, Hq, Lq, _ = call.q.shape
    return B * Hq * Lq * call.v.shape[3] * call.q.element_size()


def _figures(timing: Timing, extra: int, predicted: Prediction) -> Row:
    """What was measured. The work is that of the visible tiles, for everybody: who does more of it is slower,
    not busier.
    """
    return {
        "median": timing.median,
        "low": timing.low,
        "high": timing.high,
        "best": timing.best,
        "turns": len(timing.seconds),
        "extra_bytes": extra,
        "flops": predicted.flops,
        "flops_per_second": predicted.flops / timing.median,
    }


def _beside(timing: Timing, extra: int, predicted: Prediction) -> Row:
    """The prediction beside the measurement."""
    return {
        "predicted_seconds": predicted.seconds,
        "predicted_bytes": predicted.bytes,
        "predicted_extra_bytes": predicted.extra_bytes,
        "predicted_over_measured": predicted.seconds / timing.median if predicted.seconds else None,
        "predicted_over_measured_extra": predicted.extra_bytes / extra if extra > 0 else None,
    }
