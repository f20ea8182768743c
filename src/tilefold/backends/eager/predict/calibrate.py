"""What this backend's steps take on the CPU that runs this process: small runs of the very code, per dtype.

A rate is seconds per unit. Costs that depend on the head size are a line through three sizes: `X` seconds per
unit, and `X per D` seconds per unit and channel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tilefold.cost.measure import seconds_of
from tilefold.masks import causal, full, lower, padding, random_blocks, strided
from tilefold.planning.backend import Work
from tilefold.problem import Problem
from tilefold.scores import Scores

from .. import fold, fused, views
from ..merge import merge_into
from ..pieces import rows_per_block
from ..rects import Rect

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SIZES = (32, 64, 128)
#: Rows of a call, by the class of rows per block that it stands for.
FEW = (1, 8, 32, 64, 256)
_KEYS = 2048
#: What a public call costs on the host beyond its kernels, in operations on tiny tensors.
_CALL, _CALL_BACKWARD = 16, 55


def class_of(rows: int) -> int:
    """The class of a kernel call on that many rows: how many it works on at once."""
    if rows >= 24:
        return rows_per_block(rows)
    return 1 if rows == 1 else 8


def measure(dtype: str) -> dict[str, float]:
    """Every rate for inputs of `dtype`, in seconds per unit."""
    kind = getattr(torch, dtype)
    with torch.no_grad():
        return {**_kernels(kind), **_around(kind), **_fold(kind)}


def _line(points: dict[int, float]) -> tuple[float, float]:
    """Constant and slope of the least-squares line through values by head size."""
    n, mean_x = len(points), sum(points) / len(points)
    mean_y = sum(points.values()) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / sum(
        (x - mean_x) ** 2 for x in points
    )
    return mean_y - slope * mean_x, slope


def _kernels(dtype: torch.dtype) -> dict[str, float]:
    """PyTorch's fused kernels, per element of the score matrix of the busiest thread."""
    rates: dict[str, float] = {}
    for rows in FEW:
        lines: dict[str, dict[int, float]] = {"forward": {}, "backward": {}, "backward alone": {}}
        height = 1024 if rows == 256 else rows * (3 if rows == 64 else 1)
        for size in _SIZES:
            runs = _kernel_runs(dtype, height, size)
            for name, run in runs.items():
                pairs = 1 if name.endswith("alone") else torch.get_num_threads()
                elements = height * _KEYS * (pairs / torch.get_num_threads() if pairs == 1 else 1)
                lines[name][size] = seconds_of(run, least=0.004, turns=3) / elements
        for name, points in lines.items():
            constant, slope = _line(points)
            rates[f"kernel {name}, {rows} rows"] = constant
            rates[f"kernel {name}, {rows} rows, per D"] = slope
    return rates | _masked(dtype)


def _kernel_runs(dtype: torch.dtype, rows: int, size: int) -> dict[str, Callable[[], object]]:
    def made(pairs: int) -> tuple[Tensor, ...]:
        q = torch.ones(1, pairs, rows, size, dtype=dtype)
        k = torch.ones(1, pairs, _KEYS, size, dtype=dtype)
        return (q, k, k, *_kernel(q, k, k, 0.0, False))

    def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Callable[[], object]:
        return functools.partial(_kernel_backward, out, q, k, v, out, lse, 0.0, False)

    many, one = made(torch.get_num_threads()), made(1)
    return {
        "forward": functools.partial(_kernel, *many[:3], 0.0, False),
        "backward": backward(*many),
        "backward alone": backward(*one),
    }


def _masked(dtype: torch.dtype) -> dict[str, float]:
    """What an additive mask adds to an element."""
    threads = torch.get_num_threads()
    q = torch.ones(1, threads, 512, 64, dtype=dtype)
    k = torch.ones(1, threads, _KEYS, 64, dtype=dtype)
    mask = torch.zeros(512, _KEYS, dtype=dtype)
    out, lse = _kernel(q, k, k, 0.0, False)
    rates = {}
    for name, run in (
        ("forward", lambda m: _kernel(q, k, k, 0.0, False, attn_mask=m)),
        ("backward", lambda m: _kernel_backward(out, q, k, k, out, lse, 0.0, False, attn_mask=m)),
    ):
        with_mask, without = (seconds_of(functools.partial(run, m), 0.004, 3) for m in (mask, None))
        rates[f"kernel mask {name}"] = max(with_mask - without, 0.0) / (512 * _KEYS)
    return rates


def _around(dtype: torch.dtype) -> dict[str, float]:
    """What stands around the kernels: copies, merges, gathers, and the host's own time."""
    rows, size = 2048, 64
    x = torch.ones(1, 8, rows, size, dtype=dtype)
    y = torch.empty_like(x)
    sums = torch.zeros(1, 8, rows, size, dtype=torch.promote_types(dtype, torch.float32))
    lse, other = torch.zeros(1, 8, rows, dtype=sums.dtype), torch.ones(1, 8, rows, dtype=sums.dtype)
    index = torch.arange(rows).flip(0)
    bytes_, elements = x.numel() * x.element_size(), x.numel()
    return {
        "copy": seconds_of(lambda: y.copy_(x)) / bytes_,
        "add": seconds_of(lambda: sums.add_(x)) / elements,
        "sum": seconds_of(lambda: x.sum()) / bytes_,
        "fill": seconds_of(lambda: torch.zeros_like(x)) / bytes_,
        "merge": seconds_of(lambda: merge_into(sums, lse, x, other)) / elements,
        "gather": seconds_of(lambda: x.index_select(2, index)) / bytes_,
        "scatter": seconds_of(lambda: sums.index_add_(2, index, x.to(sums.dtype))) / elements,
        **_host(dtype),
    }


def _host(dtype: torch.dtype) -> dict[str, float]:
    """Seconds of one call without work, and of one rectangle more."""
    q = torch.ones(1, 2, 512, 16, dtype=dtype)
    stepped = lower(causal() & strided(32), (), 1, 2, 512, 512, "cpu")
    pieces = fused.plan(stepped, 1, 2, 2, 512, 512)
    out, lse = _known(fused.forward(pieces, q, q, q, 1.0))
    part = q[:, :, :16]
    small_out, small_lse = _kernel(part, part, part, 0.0, True)
    count = len(pieces.groups)
    forward = seconds_of(lambda: fused.forward(pieces, q, q, q, 1.0), turns=3)
    backward = seconds_of(lambda: fused.backward(pieces, out, q, q, q, out, lse, 1.0), turns=3)
    alone = seconds_of(lambda: _kernel(part, part, part, 0.0, True), turns=3)
    alone_back = seconds_of(
        lambda: _kernel_backward(small_out, part, part, part, small_out, small_lse, 0.0, True), turns=3
    )
    tiny = torch.ones(4)
    operation = seconds_of(lambda: tiny + tiny)
    return {
        "rectangle forward": forward / count,
        "rectangle backward": backward / count,
        "kernel call forward": alone,
        "kernel call backward": alone_back,
        "call forward": _CALL * operation,
        "call backward": _CALL_BACKWARD * operation,
        **_hidden_seconds(dtype),
    }


def _known(result: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    assert result is not None
    return result


def _hidden_seconds(dtype: torch.dtype) -> dict[str, float]:
    """Seconds to write hidden elements into masks: for a granule of a gathered stripe, and for an element of
    a table's rectangle.
    """
    bits = lower(random_blocks(0.5, block=16), (), 1, 1, 512, 512, "cpu")
    keys, rows = torch.arange(512), torch.arange(64)
    spans = (tuple((64 * n, 64 * n, 64 * n + 64) for n in range(8)),)
    span = seconds_of(lambda: views.gather_mask(bits, rows[None], keys[None], spans, dtype), turns=3) / 8
    table = lower(padding(torch.tensor([400])), (), 1, 1, 512, 512, "cpu")
    program = fused.plan(table, 1, 1, 1, 512, 512).groups[0].program
    program = dataclasses.replace(program, form=table)
    rect = Rect("table", 0, 512, 0, 512, parts=((0, 512),))
    element = seconds_of(lambda: views.rect_mask(program, rect, dtype), turns=3) / 512**2
    return {"hidden span": span, "hidden element": element}


# The fold, by running it: one stripe of two tiles, with each option alone.


def _fold(dtype: torch.dtype) -> dict[str, float]:
    """Seconds per element of the score matrix that the fold visits."""
    rates: dict[str, float] = {}
    plain: dict[str, dict[int, float]] = {"forward": {}, "backward": {}}
    for size in _SIZES:
        for name, seconds in _fold_seconds(dtype, size).items():
            plain[name][size] = seconds
    for name, points in plain.items():
        rates[f"fold {name}"], rates[f"fold {name}, per D"] = _line(points)
    base = {name: plain[name][64] for name in plain}
    for option in ("softcap", "alibi", "bias", "shared bias", "bias gradient", "dropout", "mask"):
        for name, seconds in _fold_seconds(dtype, 64, option).items():
            rates[f"fold {option} {name}"] = max(seconds - base[name], 0.0)
    return rates


def _fold_seconds(dtype: torch.dtype, size: int, option: str = "") -> dict[str, float]:
    pairs = 8
    block = fold.block_of(Problem(1, pairs, pairs, 1, 1, size, size, dtype))
    rows, keys = (block, block) if option == "mask" else (block, 2 * block)
    q = torch.ones(1, pairs, rows, size, dtype=dtype)
    k = torch.ones(1, pairs, keys, size, dtype=dtype)
    scores = _scores(option, pairs, rows, keys, dtype)
    problem = Problem(1, pairs, pairs, rows, keys, size, size, dtype, options=scores.flags)
    mask = causal() if option == "mask" else full()
    form = lower(mask, (), 1, pairs, rows, keys, "cpu")
    work = Work(problem, q, k, k, form, scores)
    out, lse = fold.forward(work)
    needs = (True, True, True, option == "bias gradient", False, False)
    elements = pairs * rows * keys
    return {
        "forward": seconds_of(lambda: fold.forward(work), 0.01, 3) / elements,
        "backward": seconds_of(lambda: fold.backward(work, out, None, out, lse, needs), 0.01, 3) / elements,
    }


def _scores(option: str, heads: int, rows: int, keys: int, dtype: torch.dtype) -> Scores:
    if option == "softcap":
        return Scores(0.1, softcap=30.0)
    if option == "alibi":
        return Scores(0.1, alibi_slopes=torch.full((heads,), 0.01))
    if option in ("bias", "bias gradient"):
        return Scores(0.1, bias=torch.zeros(1, heads, rows, keys, dtype=dtype))
    if option == "shared bias":
        return Scores(0.1, bias=torch.zeros(1, 1, rows, keys, dtype=dtype))
    if option == "dropout":
        return Scores(0.1, dropout_p=0.1, seed=torch.tensor(1))
    return Scores(0.1)
