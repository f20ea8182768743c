"""Explains a call: the plan that it will run by, what everybody else had against it, what it will take.

Nothing runs. Reading the states of tiles may synchronise with a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilefold.cost import hardware, io, measure, roofline, tiles
from tilefold.cost.hardware import Hardware
from tilefold.cost.steps import Bias
from tilefold.errors import ArgumentError
from tilefold.problem import Problem

from .advice import Facts, advise
from .backend import KNOWN_BACKENDS, Backend
from .explanation import Explanation, TileCount
from .plan import Plan

Load = Callable[[str], "Backend | str"]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What is to be explained.

    Attributes:
        problem: the call; its device is that of the machine.
        form: the lowered mask.
        mask: the mask as text.
        plan: the plan of the call.
        machine: the machine.
        q, k, v, bias: the tensors, for advice about their values and strides; None, or without data, where
            only shapes are known.
        bias_kind: the bias in metadata, or None.
    """

    problem: Problem
    form: Any
    mask: str
    plan: Plan
    machine: Hardware
    q: Any = None
    k: Any = None
    v: Any = None
    bias: Any = None
    bias_kind: Bias | None = None


def machine_of(name: str | None, device: torch.device, dtype: torch.dtype, load: Load) -> Hardware:
    """The machine called `name`, or the one of a device.

    Raises:
        ArgumentError: an unknown name, or a device without figures.
    """
    if name is not None:
        return hardware.find(name)
    if device.type == "cpu":
        eager = load("eager")
        assert not isinstance(eager, str)
        return measure.this_cpu(str(dtype).removeprefix("torch."), eager.measure)
    if device.type == "cuda" and torch.cuda.is_available():
        called = torch.cuda.get_device_name(device)
        found = hardware.recognised(called)
        if found is not None:
            return found
    else:
        called = str(device)
    known = ", ".join(hardware.MACHINES)
    raise ArgumentError(
        f"machine: expected a name for {called}, of which no figures are known; one of {known}"
    )


def explain(question: Question, load: Load) -> Explanation:
    """Everything about one call; `load` gives a backend by name, or says why it is not there."""
    p, form, plan = question.problem, question.form, question.plan
    backend = load(plan.backend)
    assert not isinstance(backend, str)
    passes = [backend.declare(p, form, b, question.bias_kind) for b in (False, True)]
    forward, backward = (roofline.estimate(d, question.machine) for d in passes)
    counted = count_tiles(p, form, passes[0].rows, passes[0].keys)

    def without(option: str) -> tuple[float, float]:
        """Seconds of both passes if one option were not there."""
        less = replace(p, options=tuple(o for o in p.options if o != option))
        bias = None if option == "bias" else question.bias_kind
        estimates = [
            roofline.estimate(backend.declare(less, form, b, bias), question.machine) for b in (False, True)
        ]
        return estimates[0].seconds, estimates[1].seconds

    def touched(side: int) -> float:
        return count_tiles(p, form, side, side).share

    facts = Facts(question, counted, forward, backward, without, touched)
    return Explanation(
        call=describe(p, question.bias_kind),
        mask=question.mask,
        form=form.kind,
        machine=question.machine.name,
        doubt=question.machine.doubt,
        plan=plan,
        how=passes[0].how,
        refusals=tuple(_others(p, form, plan.backend, load)),
        tiles=counted,
        forward=forward,
        backward=backward,
        bound_bytes=_bound(p, form, question.machine),
        lse_bytes=p.batch * p.q_heads * p.q_length * p.accumulator.itemsize,
        advice=tuple(advise(facts)),
    )


def _bound(p: Problem, form: Any, machine: Hardware) -> float:
    """Bytes that any exact forward pass moves; the query heads of a group count as rows of their key head."""
    if p.is_empty:
        return 0.0
    share = form.visible_count(p.q_length, p.k_length) / (p.q_length * p.k_length)
    size = p.dtype.itemsize
    elements = io.lower_bound(
        p.q_length * p.group,
        p.head_dim,
        machine.fast_bytes // size,
        Lk=p.k_length,
        dv=p.v_head_dim,
        pairs=p.batch * p.k_heads,
        share=share,
    )
    return elements * size


def _others(problem: Problem, form: Any, chosen: str, load: Load) -> list[tuple[str, tuple[str, ...]]]:
    """Every backend but the chosen one, with its reasons."""
    free, found = replace(problem, backend=None), []
    for name in KNOWN_BACKENDS:
        if name != chosen:
            backend = load(name)
            reasons = (backend,) if isinstance(backend, str) else tuple(backend.why_not(free, form))
            after = f"it would run this call too, but {chosen} "
            after += "was asked for by name" if problem.backend else "comes first"
            found.append((name, reasons or (after,)))
    return found


def count_tiles(problem: Problem, form: Any, rows: int, keys: int) -> TileCount:
    """Tiles of `rows x keys` over all batch elements and query heads."""
    p = problem
    if p.is_empty:
        return TileCount(rows, keys, 0, 0, 0, 0, 0.0)
    if form.kind == "band" and form.step == 1:
        return _count_band(p, form, rows, keys)
    states = tiles.states(form, p.q_length, p.k_length, rows, keys)
    tables = states.shape[0] * states.shape[1]
    seen, repeated = states != tiles.EMPTY, p.batch * p.q_heads // tables
    area = tiles.sides(p.q_length, rows)[:, None] * tiles.sides(p.k_length, keys)
    share = float((seen * area).sum()) / (tables * p.q_length * p.k_length)
    visited, full = (int(n) * repeated for n in (seen.sum(), (states == tiles.FULL).sum()))
    return TileCount(rows, keys, states.numel() * repeated, visited, full, visited - full, share)


def _count_band(p: Problem, form: Any, rows: int, keys: int) -> TileCount:
    """The same for a band without steps, line by line: sequences of any length have few lines."""
    lines, columns = -(-p.q_length // rows), -(-p.k_length // keys)
    first = torch.arange(0, p.q_length, rows, device="cpu")
    last, away = (first + rows).clamp(max=p.q_length) - 1, p.k_length - p.q_length
    lo = -p.q_length - p.k_length if form.lo is None else form.lo
    hi = p.q_length + p.k_length if form.hi is None else form.hi
    # What some row of a line sees, then what all of them see, as half-open ranges of keys.
    start, end = ((x + away + by).clamp(0, p.k_length) for x, by in ((first, lo), (last, hi + 1)))
    every, until = ((x + away + by).clamp(0, p.k_length) for x, by in ((last, lo), (first, hi + 1)))
    begin, stop = start // keys, torch.where(end > start, -(-end // keys), start // keys)
    begin, stop = (x * int(not form.is_empty) for x in (begin, stop))
    whole = torch.where(until == p.k_length, columns, until // keys)
    full = int((whole - -(-every // keys)).clamp(min=0).sum()) * p.batch * p.q_heads
    visited = int((stop - begin).sum()) * p.batch * p.q_heads
    width = (stop * keys).clamp(max=p.k_length) - (begin * keys).clamp(max=p.k_length)
    share = float((width * (last + 1 - first)).sum()) / (p.q_length * p.k_length)
    total = lines * columns * p.batch * p.q_heads
    return TileCount(rows, keys, total, visited, full, visited - full, share)


def describe(p: Problem, bias: Bias | None) -> str:
    """A call in one line."""
    shapes = (
        ("q", (p.batch, p.q_heads, p.q_length, p.head_dim)),
        ("k", (p.batch, p.k_heads, p.k_length, p.head_dim)),
        ("v", (p.batch, p.k_heads, p.k_length, p.v_head_dim)),
    )
    text = ", ".join(f"{name} {list(shape)}" for name, shape in shapes)
    text += f", {str(p.dtype).removeprefix('torch.')} on {p.device}"
    options = [f"bias {list(bias.shape)}" if o == "bias" and bias is not None else o for o in p.options]
    return f"{text}, with {', '.join(options)}" if options else text
