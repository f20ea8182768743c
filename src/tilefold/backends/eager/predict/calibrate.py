"""What this backend's steps take on the CPU that runs this process: small runs of the very code, per dtype.

A rate is seconds per unit. Costs that depend on the head size are measured at three sizes, `X, D 64` for
example; `at_size` says how a size between them is made up.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
SIZES = (32, 64, 128)
#: Classes of kernel calls by the rows that they work on at once, and how many rows are measured for each.
_CLASSES = {1: 1, 8: 8, 32: 32, 64: 192, 256: 1024}
_KEYS, _FEW_KEYS = 2048, 64
#: Keys that PyTorch's kernel takes at once.
KEY_BLOCK = 512
#: What a public call costs on the host beyond its kernels, in operations on tiny tensors.
_CALL, _CALL_BACKWARD = 16, 60
_OPTIONS = ("softcap", "alibi", "bias", "shared bias", "bias gradient", "dropout", "mask")
#: Turns of every run, and the least seconds of one.
_TURNS, _LEAST = 4, 0.004

Runs = dict[str, Callable[[], object]]


def class_of(rows: int) -> int:
    """The class of a kernel call on that many rows."""
    if rows >= 24:
        return rows_per_block(rows)
    return 1 if rows == 1 else 8


def at_size(dim: int) -> dict[int, float]:
    """Weights of the measured sizes whose sum is the cost at `dim`: straight lines between them, as at the
    least below it, in proportion above the greatest.
    """
    if dim <= SIZES[0]:
        return {SIZES[0]: 1.0}
    if dim >= SIZES[-1]:
        return {SIZES[-1]: dim / SIZES[-1]}
    low = max(size for size in SIZES if size <= dim)
    high = min(size for size in SIZES if size > low)
    share = (dim - low) / (high - low)
    return {low: 1.0 - share, high: share} if share else {low: 1.0}


def measure(dtype: str) -> dict[str, float]:
    """Every rate for inputs of `dtype`, in seconds per unit."""
    kind = getattr(torch, dtype)
    # glibc keeps memory instead of returning it once a block of nearly 32 MiB has been freed. Programs that
    # have worked for a while are in that state, and the first calls of a process are not.
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")
    with torch.no_grad(), torch.device("cpu"):
        return {
            **_kernels(kind),
            **_masked(kind),
            **_around(kind),
            **_host(kind),
            **_hidden(kind),
            **_fold(kind),
        }


def _kernels(dtype: torch.dtype) -> dict[str, float]:
    """PyTorch's fused kernels: seconds per element of the score matrix of the busiest thread, and per block
    of rows and keys that it works on at once. "alone" is a backward of a single pair of batch element and
    head.
    """
    rates: dict[str, float] = {}
    empty = seconds_of(_kernel_runs(dtype, 1, 1, SIZES[0]), _LEAST, _TURNS)
    for label, rows in _CLASSES.items():
        runs: dict[tuple[str, int], Callable[[], object]] = {}
        for size, keys in itertools.product(SIZES, (_KEYS, _FEW_KEYS)):
            for name, run in _kernel_runs(dtype, rows, keys, size).items():
                runs[f"{name}, {label} rows, D {size}", keys] = run
        found = {
            key: max(seconds - empty[key[0].partition(",")[0]], 0.0)
            for key, seconds in seconds_of(runs, _LEAST, _TURNS).items()
        }
        blocks = -(-rows // label)
        for (name, keys), many in found.items():
            if keys == _KEYS:
                few = found[name, _FEW_KEYS]
                # many = blocks * (4 f + label * _KEYS * r), few = blocks * (f + label * _FEW_KEYS * r)
                share = _FEW_KEYS / KEY_BLOCK
                fixed = max(few - many * _FEW_KEYS / _KEYS, 0.0) / (1 - share) / blocks
                rates[f"kernel block {name}"] = fixed
                rates[f"kernel {name}"] = max(many / blocks - 4 * fixed, 0.0) / (rows / blocks * _KEYS)
    return rates


def _kernel_runs(dtype: torch.dtype, rows: int, keys: int, size: int) -> Runs:
    def made(pairs: int) -> tuple[Tensor, ...]:
        q = torch.ones(1, pairs, rows, size, dtype=dtype)
        k = torch.ones(1, pairs, keys, size, dtype=dtype)
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
    rows, pairs = 512, torch.get_num_threads()
    q = torch.ones(1, pairs, rows, 64, dtype=dtype)
    k = torch.ones(1, pairs, _KEYS, 64, dtype=dtype)
    mask = torch.zeros(rows, _KEYS, dtype=dtype)
    out, lse = _kernel(q, k, k, 0.0, False)
    back = functools.partial(_kernel_backward, out, q, k, k, out, lse, 0.0, False)
    found = seconds_of(
        {
            "forward": lambda: _kernel(q, k, k, 0.0, False),
            "masked forward": lambda: _kernel(q, k, k, 0.0, False, attn_mask=mask),
            "backward": back,
            "masked backward": lambda: back(attn_mask=mask),
        },
        _LEAST,
        _TURNS,
    )
    return {
        f"kernel mask {name}": max(found[f"masked {name}"] - found[name], 0.0) / (rows * _KEYS)
        for name in ("forward", "backward")
    }


def _around(dtype: torch.dtype) -> dict[str, float]:
    """What stands around the kernels: copies, sums, merges and gathers; per byte or per element."""
    x = torch.ones(1, 8, 2048, 64, dtype=dtype)
    y, sums = torch.empty_like(x), torch.zeros(x.shape, dtype=torch.promote_types(dtype, torch.float32))
    lse, other = (torch.zeros(x.shape[:3], dtype=sums.dtype) for _ in range(2))
    index, held, elements = torch.arange(x.shape[2]), x.numel() * x.element_size(), x.numel()
    units = {"copy": held, "add": elements, "sum": held, "fill": held, "merge": elements, "gather": held}
    found = seconds_of(
        {
            "copy": lambda: y.copy_(x),
            "add": lambda: sums.add_(x),
            "sum": x.sum,
            "fill": lambda: torch.zeros_like(x),
            "merge": lambda: merge_into(sums, lse, x, other),
            "gather": lambda: views.gathered(x, index.view(4, -1)),
            "scatter": lambda: sums.index_add_(2, index, x.to(sums.dtype)),
        },
        _LEAST,
        _TURNS,
    )
    return {name: seconds / units.get(name, elements) for name, seconds in found.items()}


def _host(dtype: torch.dtype) -> dict[str, float]:
    """Seconds of one call without work, and of one rectangle more."""
    q, tiny = torch.ones(1, 2, 512, 16, dtype=dtype), torch.ones(4)
    stepped = lower(causal() & strided(32), (), 1, 2, 512, 512, "cpu")
    pieces = fused.plan(stepped, 1, 2, 2, 512, 512)
    result = fused.forward(pieces, q, q, q, 1.0)
    assert result is not None
    out, lse = result
    part = q[:, :, :16]
    small, small_lse = _kernel(part, part, part, 0.0, True)
    found = seconds_of(
        {
            "rectangle forward": lambda: fused.forward(pieces, q, q, q, 1.0),
            "rectangle backward": lambda: fused.backward(pieces, out, q, q, q, out, lse, 1.0),
            "kernel call forward": lambda: _kernel(part, part, part, 0.0, True),
            "kernel call backward": lambda: _kernel_backward(
                small, part, part, part, small, small_lse, 0.0, True
            ),
            "call forward": lambda: tiny + tiny,
        },
        _LEAST,
        _TURNS,
    )
    for direction in ("forward", "backward"):
        found[f"rectangle {direction}"] /= len(pieces.groups)
    found["call backward"] = _CALL_BACKWARD * found["call forward"]
    found["call forward"] *= _CALL
    return found


def _hidden(dtype: torch.dtype) -> dict[str, float]:
    """Seconds to write hidden elements into masks: for a granule of a gathered stripe, and for an element of
    a table's rectangle.
    """
    bits = lower(random_blocks(0.5, block=16), (), 1, 1, 512, 512, "cpu")
    keys, rows = torch.arange(512), torch.arange(64)
    spans = (tuple((64 * n, 64 * n, 64 * n + 64) for n in range(8)),)
    table = lower(padding(torch.tensor([400])), (), 1, 1, 512, 512, "cpu")
    program = dataclasses.replace(fused.plan(table, 1, 1, 1, 512, 512).groups[0].program, form=table)
    rect = Rect("table", 0, 512, 0, 512, parts=((0, 512),))
    found = seconds_of(
        {
            "hidden span": lambda: views.gather_mask(bits, rows[None], keys[None], spans, dtype),
            "hidden element": lambda: views.rect_mask(program, rect, dtype),
        },
        _LEAST,
        _TURNS,
    )
    return {"hidden span": found["hidden span"] / 8, "hidden element": found["hidden element"] / 512**2}


# The fold, by running it: one stripe of some tiles, with each option alone.


def _fold(dtype: torch.dtype) -> dict[str, float]:
    """Seconds per element of the score matrix that the fold visits."""
    runs: Runs = {}
    units: dict[str, int] = {}
    empty = seconds_of(_fold_runs(dtype, SIZES[0], "", block=1)[0], _LEAST, _TURNS)
    for size, option in (*((size, "") for size in SIZES), *((64, option) for option in _OPTIONS)):
        made, elements = _fold_runs(dtype, size, option)
        for direction, run in made.items():
            name = f"fold {option} {direction}" if option else f"fold {direction}, D {size}"
            runs[name], units[name] = run, elements
    found = {
        name: (seconds - empty["forward" if "forward" in name else "backward"]) / units[name]
        for name, seconds in seconds_of(runs, 2 * _LEAST, _TURNS).items()
    }
    for option in _OPTIONS:
        for direction in ("forward", "backward"):
            above = found[f"fold {option} {direction}"] - found[f"fold {direction}, D 64"]
            found[f"fold {option} {direction}"] = max(above, 0.0)
    return found


def _fold_runs(dtype: torch.dtype, size: int, option: str, block: int = 0) -> tuple[Runs, int]:
    """Both passes, and how many elements they visit."""
    pairs = 8
    block = block or fold.block_of(Problem(1, pairs, pairs, 1, 1, size, size, dtype))
    rows, keys = (block, block) if option == "mask" else (block, 3 * block)
    q, k = (torch.ones(1, pairs, length, size, dtype=dtype) for length in (rows, keys))
    scores = _scores(option, pairs, rows, keys, dtype)
    problem = Problem(1, pairs, pairs, rows, keys, size, size, dtype, options=scores.flags)
    form = lower(causal() if option == "mask" else full(), (), 1, pairs, rows, keys, "cpu")
    work = Work(problem, q, k, k, form, scores)
    out, lse = fold.forward(work)
    needs = (True, True, True, option == "bias gradient", False, False)
    runs: Runs = {
        "forward": functools.partial(fold.forward, work),
        "backward": functools.partial(fold.backward, work, out, None, out, lse, needs),
    }
    return runs, pairs * rows * keys


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
