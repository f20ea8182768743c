"""The public `explain`: the road of a call up to the point where it would run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import masks, ops
from .api import autocast
from .checks import FLOATS, Arguments, check
from .cost.steps import Bias
from .errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from .masks import Mask
from .problem import Problem, is_aligned
from .scores import OPTIONS, Scores

if TYPE_CHECKING:
    from .planning.explanation import Explanation

_META = torch.device("meta")


def explain(
    q: Tensor | Problem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    validate: bool = False,
    machine: str | None = None,
) -> Explanation:
    """Why `attention` with these arguments runs as it does, and what that costs. Nothing is computed.

    Args:
        q, k, v: as in `attention`; tensors on the meta device give shapes only. Or q is a `Problem`, and k
            and v are left out: its own `options` count as in use, as do those given here.
        mask: as in `attention`.
        scale, softcap, alibi_slopes, bias, sink, dropout_p, seed, return_lse, deterministic, backend,
            validate: as in `attention`; only whether they are used, and the shape of `bias`, matter.
        machine: name of the machine whose figures count ("H200", "H100", "A100", "L40S", "RTX 4090",
            "MI300X", "B200"); None is the one on which the tensors lie. The first question about a CPU
            measures it, some seconds for each dtype, and keeps the result in `$TILEFOLD_CACHE` or the
            user's cache.

    Returns:
        The plan that the next such call uses, everybody else's reasons, tiles, FLOPs, bytes, and for both
        passes predicted time and memory, with advice. `print` it. Times are measured rates on this CPU, and
        rooflines on machines of the table, for kernels with the share of them that they reach on an H200.

    Raises:
        As `attention`; and ArgumentError for an unknown machine, or for tensors on a device of which no
        figures are known while `machine` is None.
    """
    if isinstance(q, Problem):
        if k is not None or v is not None:
            raise ArgumentTypeError("k, v: expected nothing beside a Problem, got tensors")
        problem = q
        q, k, v = _shapes_of(problem)
        device = _device_of(problem)
        backend, deterministic = backend or problem.backend, deterministic or problem.deterministic
    else:
        problem = None
        if isinstance(q, Tensor) and not q.is_meta and torch.is_autocast_enabled(q.device.type):
            q, k, v = autocast(q, k, v)  # pyright: ignore[reportArgumentType]
        device = q.device if isinstance(q, Tensor) else _META
    call = Arguments(
        q, k, v, mask, scale, softcap, alibi_slopes, bias, sink, dropout_p, seed, deterministic, backend,
        validate, return_lse,
    )  # fmt: skip
    _check(call, device if problem is None else _META)
    used = Scores(1.0, softcap, dropout_p, bias, sink, alibi_slopes).flags
    if problem is not None:
        used = tuple(name for name in OPTIONS if name in used or name in problem.options)
    return _explained(call, device, used, problem, machine)


def _explained(
    call: Arguments, device: torch.device, used: tuple[str, ...], asked: Problem | None, machine: str | None
) -> Explanation:
    """The explanation of a checked call."""
    from .planning.explain import Question, explain, machine_of
    from .planning.tuned import assuming

    q, k, v = call.q, call.k, call.v
    hardware = machine_of(machine, device, q.dtype, ops.load)
    (B, Hq, Lq, D), (Hk, Lk) = q.shape, k.shape[1:3]
    where = device.type if machine is None else hardware.device
    problem = Problem(
        B, Hq, Hk, Lq, Lk, D, v.shape[3], q.dtype, where, options=used, deterministic=call.deterministic,
        backend=call.backend, aligned=all(map(is_aligned, (q, k, v))),
    )  # fmt: skip
    if asked is not None:
        problem = dataclasses.replace(problem, positions=asked.positions, aligned=asked.aligned)
    mask = masks.full() if call.mask is None else call.mask
    lies = q.device if not q.is_meta else mask._device(None)
    if mask.needs_build:
        mask = mask.build(B, Hq, Lq, Lk, lies)
    spec, tensors = mask.spec()
    form = masks.lower(spec, tensors, B, Hq, Lq, Lk, lies, validate=call.validate)
    # What is counted is counted on the CPU, whatever the default device.
    with assuming(None if machine is None else hardware.architecture), torch.device("cpu"):
        question = Question(
            problem=problem,
            form=form,
            mask="none" if call.mask is None else repr(call.mask),
            plan=ops.plan_of(problem, form, bool(tensors)),
            machine=hardware,
            q=q,
            k=k,
            v=v,
            bias=call.bias,
            bias_kind=_bias(call, used),
        )
        return explain(question, ops.load)


def _bias(call: Arguments, used: tuple[str, ...]) -> Bias | None:
    """The bias in metadata; one that a `Problem` only names is taken to be the same for the whole batch."""
    if call.bias is not None:
        return Bias(tuple(call.bias.shape), call.bias.dtype, call.bias.requires_grad)
    _, heads, rows, keys = call.sizes
    return Bias((1, heads, rows, keys), call.q.dtype) if "bias" in used else None


def _check(call: Arguments, device: torch.device) -> None:
    """The checks of `attention`; where only shapes are known, other tensors may lie anywhere."""
    if device.type != "meta":
        check(call)
        return

    def shape(x: Any) -> Any:
        return x.to(_META) if isinstance(x, Tensor) else x

    names = ("bias", "sink", "alibi_slopes", "seed")
    moved = {name: shape(getattr(call, name)) for name in names}
    check(dataclasses.replace(call, mask=None if isinstance(call.mask, Mask) else call.mask, **moved))
    if isinstance(call.mask, Mask):
        B, Hq, Lq, Lk = call.sizes
        call.mask.check(B, Hq, Lq, Lk, call.mask._device(None))


def _device_of(p: Problem) -> torch.device:
    try:
        return torch.device(p.device)
    except (RuntimeError, TypeError):
        raise ArgumentError(
            f"q: expected a Problem whose device is a device kind, got {p.device!r}"
        ) from None


def _shapes_of(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a problem, without data."""
    for name in ("batch", "q_heads", "k_heads", "q_length", "k_length", "head_dim", "v_head_dim"):
        value = getattr(p, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentTypeError(
                f"q: expected a Problem whose {name} is an int, got {type(value).__name__}"
            )
        if value < 0:
            raise ShapeError(f"q: expected a Problem whose {name} is at least 0, got {value}")
    if p.dtype not in FLOATS:
        raise DtypeError(f"q: expected a Problem of float64, float32, float16 or bfloat16, got {p.dtype}")
    unknown = [name for name in p.options if name not in OPTIONS]
    if unknown:
        raise ArgumentError(f"q: expected a Problem with options among {', '.join(OPTIONS)}, got {unknown}")
    keys = (p.batch, p.k_heads, p.k_length)
    shapes = ((p.batch, p.q_heads, p.q_length, p.head_dim), (*keys, p.head_dim), (*keys, p.v_head_dim))
    q, k, v = (torch.empty(shape, dtype=p.dtype, device=_META) for shape in shapes)
    return q, k, v
