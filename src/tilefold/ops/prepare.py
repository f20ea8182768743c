"""From an op's arguments to a backend and its work: the only planning that happens inside an op, on real
shapes.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from tilefold import masks, tangents
from tilefold.planning import tuned
from tilefold.planning.backend import KNOWN_BACKENDS, Backend, Work
from tilefold.planning.choose import choose
from tilefold.planning.plan import Plan
from tilefold.problem import Positions, Problem, is_aligned
from tilefold.scores import Scores

_MODULES = {name: f"tilefold.backends.{name}" for name in KNOWN_BACKENDS}

#: Number of leading arguments of `forward` that can have a gradient: q, k, v, bias, sink, alibi_slopes.
DIFFERENTIABLE = 6


def encode(backend: str | None, deterministic: bool, validate: bool, positions: Positions) -> str:
    """The options of a call as the op's string argument."""
    at = positions
    numbers = (
        at.q_origin,
        at.q_step,
        at.k_origin,
        at.k_step,
        at.diagonal,
        at.batch_origin,
        at.head_origin,
        int(at.tables),
    )
    packed = ",".join("" if n is None else str(n) for n in numbers)
    return f"{backend or ''}|{int(deterministic)}|{int(validate)}|{packed}"


@functools.lru_cache(maxsize=1024)
def _decode(options: str) -> tuple[str | None, bool, bool, Positions]:
    backend, deterministic, validate, numbers = options.split("|")
    *rest, tables = numbers.split(",")
    q0, qs, k0, ks, diagonal, b0, h0 = (None if n == "" else int(n) for n in rest)
    positions = Positions(q0 or 0, qs or 0, k0 or 0, ks or 0, diagonal, b0 or 0, h0 or 0, tables == "1")
    return backend or None, deterministic == "1", validate == "1", positions


# From an op's arguments to a backend and its work.


@functools.cache
def load(name: str) -> Backend | str:
    """The backend `name`, imported at first use, or the sentence that says why it is not there."""
    if name not in _MODULES:
        return f"the {name} backend is not part of this version"
    if name in ("hopper", "triton"):
        try:
            importlib.import_module("triton")
        except ModuleNotFoundError as missing:
            if missing.name != "triton":
                raise
            return "Triton is not installed (pip install 'tilefold[triton]')"
    return importlib.import_module(_MODULES[name]).backend


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, form: Any) -> Plan:
    return choose(problem, form, load)


def plan_of(problem: Problem, form: Any, tables: bool) -> Plan:
    """The plan of a call; remembered for masks without tensors, whose forms are equal by value, and for the
    device that is there.
    """
    return choose(problem, form, load) if tables or tuned.assumed() else _plan(problem, form)


_prepared: dict[Any, tuple[Backend, Problem, Any]] = {}
_PREPARED_LIMIT = 4096


def _prepare(args: tuple[Any, ...]) -> tuple[Backend, Problem, Any]:
    """The backend, the problem and the lowered mask of a call. Repeated calls with a mask without tensors
    take one dictionary hit.
    """
    q, k, v, bias, sink, slopes, _, mask_tensors, _, mask, _, softcap, dropout_p, options = args
    used = (bias is not None, sink is not None, slopes is not None, softcap is not None, dropout_p > 0.0)
    # Where they lie decides whether a copy engine takes them, which looks at the last bits of the offsets.
    offset = (q.storage_offset() | k.storage_offset() | v.storage_offset()) % 16
    lie = (q.stride(), k.stride(), v.stride(), offset)
    key = (mask, options, q.shape, k.shape, v.shape, lie, q.dtype, q.device, used)
    if not mask_tensors:
        found = _prepared.get(key)
        if found is not None:
            return found
    backend, deterministic, validate, positions = _decode(options)
    scores = Scores(1.0, softcap, dropout_p, bias, sink, slopes)
    (batch, q_heads, q_length, head_dim), (k_heads, k_length) = q.shape, k.shape[1:3]
    problem = Problem(
        batch, q_heads, k_heads, q_length, k_length, head_dim, v.shape[3], q.dtype, q.device.type,
        positions, scores.flags, deterministic, backend, all(map(is_aligned, (q, k, v))),
    )  # fmt: skip
    form = masks.lower(
        mask, tuple(mask_tensors), batch, q_heads, q_length, k_length, q.device, validate=validate
    )
    plan = plan_of(problem, form, bool(mask_tensors))
    runner = load(plan.backend)
    assert not isinstance(runner, str)
    result = (runner, problem, form)
    if not mask_tensors:
        if len(_prepared) >= _PREPARED_LIMIT:
            _prepared.clear()
        _prepared[key] = result
    return result


def make_work(args: tuple[Any, ...]) -> tuple[Backend, Work]:
    backend, problem, form = _prepare(args)
    q, k, v, bias, sink, slopes, seed, _, tables, _, scale, softcap, dropout_p, _ = args
    scores = Scores(scale, softcap, dropout_p, bias, sink, slopes, seed)
    return backend, Work(problem, q, k, v, form, scores, tuple(tables))


def make_setting(args: tuple[Any, ...]) -> tangents.Setting:
    _, problem, form = _prepare(args)
    _, _, _, bias, sink, slopes, seed, _, tables, _, scale, softcap, dropout_p, _ = args
    return tangents.Setting(
        problem, form, Scores(scale, softcap, dropout_p, bias, sink, slopes, seed), tuple(tables)
    )


def make_six(directions: tuple[Any, ...]) -> tangents.Six:
    return directions[:DIFFERENTIABLE]  # pyright: ignore[reportReturnType]
