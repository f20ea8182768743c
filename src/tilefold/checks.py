"""Every check of user input, as one table. Only metadata is read: shapes, dtypes, devices, kinds of object.

A row of the table is a function that looks at one `Arguments` and returns None or an error. The first error
wins, so rows stand in the order in which a reader would look: kinds of object, ranks, dtypes, devices, sizes,
options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendError,
    DeviceError,
    DtypeError,
    ShapeError,
    TilefoldError,
)
from .masks import Mask
from .planning.backend import KNOWN_BACKENDS

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The arguments of one call as the user gave them (q, k and v after autocast).

    `packed` means `[T, H, D]`.
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    scale: Any = None
    softcap: Any = None
    alibi_slopes: Any = None
    bias: Any = None
    sink: Any = None
    dropout_p: Any = 0.0
    seed: Any = None
    deterministic: Any = False
    backend: Any = None
    validate: Any = False
    return_lse: Any = False
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    packed: bool = False

    @property
    def sizes(self) -> tuple[Any, Any, Any, Any]:
        """`(B, Hq, Lq, Lk)`; for packed sequences `B` is the number of documents."""
        if self.packed:
            return self.cu_seqlens_q.shape[0] - 1, self.q.shape[1], self.q.shape[0], self.k.shape[0]
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]


def check(call: Arguments) -> None:
    """Raise the first error of `call`.

    Raises:
        ArgumentTypeError: the wrong kind of object.
        ShapeError, DtypeError, DeviceError, MaskError, ArgumentError: as named; all are `ValueError`.
        BackendError: an unknown backend.
    """
    for row in CHECKS:
        error = row(call)
        if error is not None:
            raise error


def _describe(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    if tensor.is_nested:  # has no shape
        return f"nested {tensor.dtype} {tensor.device}"
    return f"{list(tensor.shape)} {tensor.dtype} {tensor.device}"


def _message(call: Arguments, argument: str, expected: str, got: str) -> str:
    tensors = f"q {_describe(call.q)}, k {_describe(call.k)}, v {_describe(call.v)}"
    return f"{argument}: expected {expected}, got {got} ({tensors})"


def _kinds(call: Arguments) -> TilefoldError | None:
    for name in ("q", "k", "v"):
        if not isinstance(getattr(call, name), Tensor):
            return ArgumentTypeError(f"{name}: expected a tensor, got {type(getattr(call, name)).__name__}")
    for name in ("bias", "sink", "alibi_slopes"):
        value = getattr(call, name)
        if value is not None and not isinstance(value, Tensor):
            return ArgumentTypeError(_message(call, name, "a tensor or None", type(value).__name__))
    for name in ("deterministic", "validate", "return_lse"):
        if not isinstance(getattr(call, name), bool):
            return ArgumentTypeError(_message(call, name, "a bool", type(getattr(call, name)).__name__))
    for name in ("cu_seqlens_q", "cu_seqlens_k") if call.packed else ():
        if not isinstance(getattr(call, name), Tensor):
            return ArgumentTypeError(
                _message(call, name, "an int32 or int64 tensor", type(getattr(call, name)).__name__)
            )
    return None


def _layouts(call: Arguments) -> TilefoldError | None:
    for name in ("q", "k", "v", "bias", "sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"):
        value = getattr(call, name)
        if value is None or (value.layout == torch.strided and not value.is_nested):
            continue
        hint = " (attention_varlen takes packed sequences)" if value.is_nested else ""
        came = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        return ArgumentError(_message(call, name, f"a dense tensor{hint}", came))
    return None


def _mask_kind(call: Arguments) -> TilefoldError | None:
    if call.mask is None or isinstance(call.mask, Mask):
        return None
    came = (
        f"a tensor of dtype {call.mask.dtype}" if isinstance(call.mask, Tensor) else type(call.mask).__name__
    )
    hint = "a Mask or None (masks.dense(t) takes a boolean tensor, bias= an additive one)"
    return ArgumentTypeError(_message(call, "mask", hint, came))


def _ranks(call: Arguments) -> TilefoldError | None:
    rank, layout = (3, "[T, H, D]") if call.packed else (4, "[B, H, L, D]")
    for name in ("q", "k", "v"):
        if getattr(call, name).dim() != rank:
            return ShapeError(
                _message(call, name, f"{rank} dimensions {layout}", f"{getattr(call, name).dim()}")
            )
    return None


def _dtypes(call: Arguments) -> TilefoldError | None:
    for name in ("q", "k", "v"):
        if getattr(call, name).dtype not in FLOATS:
            return DtypeError(
                _message(call, name, "float64, float32, float16 or bfloat16", str(getattr(call, name).dtype))
            )
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        came = f"{call.q.dtype}, {call.k.dtype} and {call.v.dtype}"
        return DtypeError(_message(call, "q, k, v", "one dtype outside autocast", came))
    for name in ("bias", "sink", "alibi_slopes"):
        value = getattr(call, name)
        if value is not None and value.dtype not in FLOATS:
            hint = (
                " (masks.dense takes boolean tensors)" if name == "bias" and value.dtype == torch.bool else ""
            )
            return DtypeError(_message(call, name, f"a floating-point dtype{hint}", str(value.dtype)))
    for name in ("cu_seqlens_q", "cu_seqlens_k") if call.packed else ():
        if getattr(call, name).dtype not in (torch.int32, torch.int64):
            return DtypeError(_message(call, name, "int32 or int64", str(getattr(call, name).dtype)))
    return None


def _devices(call: Arguments) -> TilefoldError | None:
    for name in ("k", "v", "bias", "sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"):
        value = getattr(call, name)
        if value is not None and value.device != call.q.device:
            return DeviceError(_message(call, name, f"q's device {call.q.device}", str(value.device)))
    return None


def _heads(call: Arguments) -> TilefoldError | None:
    axis = 1
    q_heads, k_heads, v_heads = call.q.shape[axis], call.k.shape[axis], call.v.shape[axis]
    if k_heads != v_heads:
        return ShapeError(_message(call, "v", f"k's {k_heads} heads", f"{v_heads}"))
    if k_heads == 0:
        return ShapeError(_message(call, "k", "at least one key head", "0"))
    if q_heads % k_heads != 0:
        expected = f"a number of query heads that {k_heads} key heads divide"
        return ShapeError(_message(call, "q", expected, f"{q_heads}"))
    return None


def _sizes(call: Arguments) -> TilefoldError | None:
    if call.q.shape[-1] == 0 or call.v.shape[-1] == 0:
        name = "q" if call.q.shape[-1] == 0 else "v"
        return ShapeError(_message(call, name, "a head size of at least 1", "0"))
    if call.q.shape[-1] != call.k.shape[-1]:
        return ShapeError(_message(call, "k", f"q's head size {call.q.shape[-1]}", f"{call.k.shape[-1]}"))
    length = 0 if call.packed else 2
    if call.k.shape[length] != call.v.shape[length]:
        return ShapeError(
            _message(call, "v", f"k's length {call.k.shape[length]}", f"{call.v.shape[length]}")
        )
    if not call.packed:
        for name in ("k", "v"):
            if getattr(call, name).shape[0] != call.q.shape[0]:
                return ShapeError(
                    _message(
                        call, name, f"q's batch size {call.q.shape[0]}", f"{getattr(call, name).shape[0]}"
                    )
                )
    return None


def _offsets(call: Arguments) -> TilefoldError | None:
    if not call.packed:
        return None
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        value = getattr(call, name)
        if value.dim() != 1 or value.shape[0] < 1:
            return ShapeError(_message(call, name, "shape [documents + 1]", str(list(value.shape))))
    if call.cu_seqlens_q.shape != call.cu_seqlens_k.shape:
        expected = f"as many offsets as cu_seqlens_q {list(call.cu_seqlens_q.shape)}"
        return ShapeError(_message(call, "cu_seqlens_k", expected, str(list(call.cu_seqlens_k.shape))))
    return None


def _number(
    name: str, valid: Callable[[Any], bool], expected: str, optional: bool
) -> Callable[[Arguments], TilefoldError | None]:
    def row(call: Arguments) -> TilefoldError | None:
        value = getattr(call, name)
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            return ArgumentTypeError(_message(call, name, expected, type(value).__name__))
        return None if valid(value) else ArgumentError(_message(call, name, expected, _shown(value)))

    row.__name__ = f"_{name}"
    return row


def _shown(value: Any) -> str:
    """A number in words; Python refuses to print ints of very many digits."""
    is_long = isinstance(value, int) and value.bit_length() > 1000
    return f"an int of {value.bit_length()} bits" if is_long else f"{value}"


def _seed(call: Arguments) -> TilefoldError | None:
    seed = call.seed
    expected = "an int in [-2^63, 2^63) or an int64 tensor without dimensions on q's device"
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            return DtypeError(_message(call, "seed", expected, str(seed.dtype)))
        if seed.dim() != 0:
            return ShapeError(_message(call, "seed", expected, f"shape {list(seed.shape)}"))
        if seed.device != call.q.device:
            return DeviceError(_message(call, "seed", expected, str(seed.device)))
        return None
    if isinstance(seed, bool) or not isinstance(seed, int):
        return ArgumentTypeError(_message(call, "seed", expected, type(seed).__name__))
    return None if -(2**63) <= seed < 2**63 else ArgumentError(_message(call, "seed", expected, _shown(seed)))


def _score_shapes(call: Arguments) -> TilefoldError | None:
    batch, heads, q_length, k_length = call.sizes
    if call.bias is not None:
        full = (batch, heads, q_length, k_length)
        got = tuple(call.bias.shape)
        aligned = (1,) * (4 - len(got)) + got
        if len(got) > 4 or any(n != 1 and n != m for n, m in zip(aligned, full, strict=True)):
            expected = f"a shape that broadcasts to [B, Hq, Lq, Lk] = {list(full)}"
            return ShapeError(_message(call, "bias", expected, str(list(got))))
    if call.sink is not None and tuple(call.sink.shape) != (heads,):
        return ShapeError(
            _message(call, "sink", f"one logit per query head [{heads}]", str(list(call.sink.shape)))
        )
    slopes = None if call.alibi_slopes is None else tuple(call.alibi_slopes.shape)
    if slopes is not None and slopes != (heads,) and slopes != (batch, heads):
        expected = f"[Hq] = [{heads}] or [B, Hq] = [{batch}, {heads}]"
        return ShapeError(_message(call, "alibi_slopes", expected, str(list(slopes))))
    return None


def _mask_fits(call: Arguments) -> TilefoldError | None:
    if call.mask is not None and not call.packed:
        batch, heads, q_length, k_length = call.sizes
        call.mask.check(batch, heads, q_length, k_length, call.q.device)
    return None


def _backend(call: Arguments) -> TilefoldError | None:
    if call.backend is None:
        return None
    if not isinstance(call.backend, str):
        return ArgumentTypeError(_message(call, "backend", "a name or None", type(call.backend).__name__))
    if call.backend not in KNOWN_BACKENDS:
        known = ", ".join(repr(name) for name in KNOWN_BACKENDS)
        return BackendError(_message(call, "backend", f"one of {known} or None", repr(call.backend)))
    return None


CHECKS: tuple[Callable[[Arguments], TilefoldError | None], ...] = (
    _kinds,
    _layouts,
    _mask_kind,
    _ranks,
    _dtypes,
    _devices,
    _heads,
    _sizes,
    _offsets,
    # Comparisons, since `math.isfinite` takes neither symbolic floats nor ints beyond the range of floats.
    _number("scale", lambda x: -LARGEST <= x <= LARGEST, "a finite number or None", optional=True),
    _number("softcap", lambda x: 0 < x <= LARGEST, "a positive finite number or None", optional=True),
    _number("dropout_p", lambda x: 0.0 <= x < 1.0, "a number in [0, 1)", optional=False),
    _seed,
    _score_shapes,
    _mask_fits,
    _backend,
)
