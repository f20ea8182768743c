"""From one call's tensors to the arguments that all kernels share."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.cost.grid import section
from tilefold.masks.band import Band
from tilefold.masks.context import capturing
from tilefold.planning.backend import Work
from tilefold.problem import Problem

from . import variant
from .lists import Lists

#: Stands for "unbounded" in 32-bit arithmetic on positions.
FAR = 1 << 30
#: Rows and keys are fewer than this: with FAR added, differences of their numbers stay within 32 bits.
MOST = FAR >> 1
#: The longest stride of a row, in elements: a tile's offsets stay within 32 bits.
LONGEST = 1 << 23
_MOST_KEPT = 2048
#: Scales above this are positive in float32 too.
_LEAST_SCALE = 1e-30
_held_by_graphs: list[Any] = []


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def chains(device: torch.device) -> bool:
    """Whether kernels there may begin before those ahead of them on their stream are done."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def place_in_chain(device: torch.device, follows: bool) -> int:
    """`Variant.CHAIN` of a kernel that does not head a chain; `follows`: the launch before it on this stream
    was that of a kernel of the chain, and nothing came between.
    """
    if not chains(device):
        return variant.APART
    return variant.BESIDE if follows else variant.AFTER


def dense_rows(x: Tensor) -> Tensor:
    """`x [B, H, L, X]` itself where its rows start at multiples of 16 bytes and are dense, else a copy that
    is padded so.
    """
    return rows_of(x)[0]


def rows_of(x: Tensor) -> tuple[Tensor, int, int, int]:
    """`dense_rows(x)`, and its strides of batch elements, heads and rows in units of 16 bytes."""
    unit = 16 // x.element_size()
    batch, head, row, last = x.stride()
    if last != 1 or row >= LONGEST or batch % unit or head % unit or row % unit or x.data_ptr() % 16:
        *outer, width = x.shape
        x = x.new_empty((*outer, -(-max(width, 1) // unit) * unit))[..., :width].copy_(x)
        batch, head, row, _ = x.stride()
    return x, batch // unit, head // unit, row // unit


class MaskArguments(NamedTuple):
    """`lo, hi, step, tiles, counts, order, capacity, table_b, table_h, bounds, index` of the kernels."""

    lo: int
    hi: int
    step: int
    tiles: Tensor | None
    counts: Tensor | None
    order: Tensor | None
    capacity: int
    table_b: int
    table_h: int
    bounds: Tensor | None
    index: Tensor | None


def of_mask(form: Any, lists: Lists | None) -> MaskArguments:
    """The mask's arguments; `lists` for every form but a band."""
    if isinstance(form, Band):
        lo = -FAR if form.lo is None else max(form.lo, -FAR)
        hi = FAR if form.hi is None else min(form.hi, FAR)
        return MaskArguments(lo, hi, min(form.step, FAR), None, None, None, 0, 0, 0, None, None)
    assert lists is not None
    tables, *rest = form.tensors()
    batches, heads = tables.shape[:2]
    per_batch = (heads if batches > 1 else 0), (1 if heads > 1 else 0)
    shared = (0, 0, 1, lists.tiles, lists.counts, lists.order, lists.capacity, *per_batch)
    if form.kind == "bits":
        index, words = rest
        # Element by element, `where` would keep the strides of transposed states.
        index = torch.where(tables == 2, -2, index).contiguous()
        return MaskArguments(*shared, words.contiguous().view(torch.int32), index)
    return MaskArguments(*shared, tables.contiguous(), None)


def of_scores(work: Work) -> list[Any]:
    """The score's arguments, from `scale` to `head_origin`."""
    scores, at, problem = work.scores, work.problem.positions, work.problem
    bias = None if scores.bias is None else _of_bias(scores.bias)
    slopes = scores.alibi_slopes
    slope_strides = (
        (0, 0) if slopes is None else (slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))
    )
    drops = scores.dropout_p > 0.0
    threshold = int(scores.dropout_p * 2.0**32)
    rows, keys = (x.contiguous() for x in work.tables) if at.tables else (None, None)
    diagonal = problem.k_length - problem.q_length if at.diagonal is None else at.diagonal
    return [
        scores.scale,
        scores.softcap or 1.0,
        *(bias or (None, 0, 0, 0, 0)),
        slopes,
        *slope_strides,
        None if scores.sink is None else scores.sink.contiguous(),
        scores.seed if drops else None,
        threshold - (1 << 32) if threshold >= 1 << 31 else threshold,
        1.0 / (1.0 - scores.dropout_p),
        rows,
        keys,
        at.q_origin,
        at.q_step,
        at.k_origin,
        at.k_step,
        at.q_origin + diagonal - at.k_origin,
        at.batch_origin,
        at.head_origin,
    ]


def _of_bias(bias: Tensor) -> tuple[Any, ...]:
    """The bias and its four strides in units; broadcast dimensions have stride 0."""
    b, h, q, k = strides_of_bias(bias)
    unit = unit_of_bias(bias)
    return bias, b // unit, h // unit, q // unit, k


def strides_of_bias(bias: Tensor) -> tuple[int, int, int, int]:
    """Its strides as four dimensions, zero where it is broadcast."""
    missing = 4 - bias.dim()
    own = (stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True))
    return (0,) * missing + tuple(own)  # pyright: ignore[reportReturnType]


def unit_of_bias(bias: Tensor) -> int:
    """8 elements where its lines start at multiples of that and are as long, else 1."""
    b, h, q, k = strides_of_bias(bias)
    aligned = k == 1 and not (b % 8 or h % 8 or q % 8 or bias.shape[-1] % 8 or bias.data_ptr() % 16)
    return 8 if aligned else 1


def traits(work: Work) -> dict[str, Any]:
    """What of a call changes the code of its kernels, all but the sizes; see `variant.Variant`."""
    problem, scores, form = work.problem, work.scores, work.form
    at = problem.positions
    whole = isinstance(form, Band) and form.is_full
    half = problem.dtype in (torch.float16, torch.bfloat16)
    options = {"softcap", "alibi", "bias"} & set(problem.options)
    slopes = scores.alibi_slopes
    found: dict[str, Any] = {
        "D": problem.head_dim,
        "DV": problem.v_head_dim,
        "MASK": variant.KINDS[form.kind],
        "INTERVALS": getattr(form, "count", 1),
        "STEPPED": isinstance(form, Band) and form.step != 1,
        # A dropped key is hidden, too: what stands behind its zero weight must not come through.
        "CAREFUL": not whole or scores.dropout_p > 0.0,
        "PLAIN": half and not options and scores.scale > _LEAST_SCALE,
        "SOFTCAP": scores.softcap is not None,
        "ALIBI": slopes is not None,
        "SINK": scores.sink is not None,
        "DROPOUT": scores.dropout_p > 0.0,
        "TABLES": at.tables,
        "SLOPE_ROWS": at.tables and slopes is not None and slopes.dim() == 2,
        "QUADS": scores.dropout_p > 0.0 and not at.tables and at.k_step == 1 and at.k_origin % 4 == 0,
        "UNIT": 16 // problem.dtype.itemsize,
        "TF32": _tf32(problem),
        "WIDE": interpreted() and problem.dtype == torch.bfloat16,
    }
    if scores.bias is not None:
        found["BIAS"] = True
        found["BIAS_UNIT"] = unit_of_bias(scores.bias)
        batch, head, _, key = strides_of_bias(scores.bias)
        found["BIAS_DENSE"] = key == 1
        found["BATCHES_FIRST"] = batch == 0 and head != 0 and problem.batch > 1
    return found


def _tf32(problem: Problem) -> bool:
    """Whether the user has allowed PyTorch to round float32 products to TF32."""
    return problem.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def in_units(x: Tensor, unit: int) -> tuple[int, int, int]:
    """Strides of batch elements, heads and rows, as multiples of `unit` elements."""
    batch, head, row, _ = x.stride()
    return batch // unit, head // unit, row // unit


def dtypes(work: Work) -> tuple[Any, ...]:
    """What a compiled kernel depends on beside its variant: dtypes of the score's tensors, and whether the
    bias is aligned.
    """
    scores = work.scores
    return (
        *(None if x is None else x.dtype for x in (scores.bias, scores.sink, scores.alibi_slopes)),
        scores.bias is None or scores.bias.data_ptr() % 16 == 0,
    )


class Kept:
    """What is worked out once per kind of call: by identity of the problem and of the lowered mask where they
    come again as they were, by their values else.

    Forms with tensors are held weakly, and what was worked out for them goes with them.
    """

    def __init__(self, make: Callable[[Work, str, Any], Any]) -> None:
        self._make = make
        self._by_identity: dict[Any, tuple[Any, Any, Any]] = {}
        self._by_value: dict[Any, Any] = {}
        self._by_form: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Forget everything, as after a change of sizes."""
        self._by_identity.clear()
        self._by_value.clear()
        self._by_form.clear()

    def get(self, work: Work, name: str = "", more: Any = ()) -> Any:
        """What `make(work, name, more)` gave for a call of this kind."""
        problem, form, scores = work.problem, work.form, work.scores
        simple = scores.bias is None and scores.sink is None and scores.alibi_slopes is None
        simple = simple and problem.dtype.itemsize == 2 and type(form) is Band and not work.q.is_cpu
        quick = (id(problem), id(form), scores.scale > _LEAST_SCALE, name, more, work.q.device.index)
        if simple:
            found = self._by_identity.get(quick)
            if found is not None and found[0] is problem and found[1] is form:
                return found[2]
        shape = () if scores.bias is None else (scores.bias.shape, strides_of_bias(scores.bias))
        slopes = None if scores.alibi_slopes is None else scores.alibi_slopes.dim()
        allowed = _tf32(problem)
        key = (
            problem, scores.scale > _LEAST_SCALE, name, more, work.q.device, dtypes(work), shape, slopes,
            allowed, scores.bias is None or unit_of_bias(scores.bias),
        )  # fmt: skip
        if type(form) is Band:
            held, key = self._by_value, (*key, form)
        else:
            held = self._by_form.setdefault(form, {})
        result = held.get(key)
        if type(form) is not Band and capturing(work.q.device):
            # A graph reads the lists at every replay, which the form that they belong to may not live to see.
            result = result or self._make(work, name, more)
            _held_by_graphs.append((form, result))
            return result
        if result is None:
            if len(self._by_value) >= _MOST_KEPT:
                self._by_value.clear()
            result = held[key] = self._make(work, name, more)
        if simple:
            if len(self._by_identity) >= _MOST_KEPT:
                self._by_identity.clear()
            self._by_identity[quick] = (problem, form, result)
        return result


def span_of(work: Work, by_key: bool = False) -> int:
    """Pairs (batch element, head) that make a section (`cost.grid.section`): what their programs read, keys
    and values or `by_key` the rows of their group, fits the L2 cache together.
    """
    p = work.problem
    group = max(p.group, 1)
    length = p.q_length * group if by_key else p.k_length
    size = length * (p.head_dim + p.v_head_dim) * p.dtype.itemsize
    fitting = _l2_bytes(work.q.device) // 2 // max(size, 1)
    if by_key:
        return section(p.batch * p.k_heads, fitting)
    return section(p.batch * p.q_heads, fitting * group, group)


@functools.cache
def _l2_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 1 << 20
    return torch.cuda.get_device_properties(device).L2_cache_size
