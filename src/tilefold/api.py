"""The public calls: fill defaults, check once, delegate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import masks, ops
from .checks import FLOATS, Arguments, check
from .masks import Mask
from .problem import Positions

_NO_POSITIONS = Positions()
_FULL: tuple[str, tuple[Tensor, ...]] = masks.full().spec()

#: Calls whose metadata has been checked -> (scale, softcap, dropout_p, options).
_checked: dict[Any, tuple[float, float | None, float, str]] = {}
_CHECKED_LIMIT = 4096


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> Any:
    """Exact attention, `softmax(scores) @ v`, in O(N) extra memory.

    The score of query `i` and key `j` is, in this order: `scale * q.k`; `softcap * tanh(s / softcap)`;
    `- slope * |i + Lk - Lq - j|`; `+ bias[i, j]`; then the mask selects. Query head `h` reads key head
    `h // (Hq // Hk)`. A row that sees no key has `out = 0` and `lse = -inf` (with a sink: `lse = sink`), and
    zero gradients.

    Args:
        q: `[B, Hq, Lq, D]`, float64, float32, float16 or bfloat16, any strides.
        k: `[B, Hk, Lk, D]` with `Hk` dividing `Hq`, dtype and device of q.
        v: `[B, Hk, Lk, Dv]`, dtype and device of q.
        mask: who may look at whom (`tilefold.masks`); None is everybody.
        scale: factor of the dot product; default `1 / sqrt(D)`.
        softcap: positive; caps scores smoothly to (-softcap, softcap) (Gemma 2).
        alibi_slopes: `[Hq]` or `[B, Hq]`, floating point (Press et al. 2022).
        bias: additive, floating point, broadcastable to `[B, Hq, Lq, Lk]`; its gradient comes back in its
            own shape.
        sink: `[Hq]`, one logit per query head that joins the softmax denominator only (StreamingLLM,
            gpt-oss), unscaled.
        dropout_p: in [0, 1); each probability is dropped with this rate, the others are divided by
            `1 - dropout_p`. Always applied: pass 0 outside training. Bit-identical on every backend for the
            same seed.
        seed: int or int64 tensor without dimensions on q's device; by default drawn from that device's
            default generator.
        return_lse: also return the natural log of the softmax denominator, before dropout.
        deterministic: demand bit-stable gradients of every argument.
        backend: "eager", "triton" or "hopper" to demand one; None takes the fastest that runs the call.
        validate: also check values that live on a GPU (offsets of masks), at the price of a synchronisation.

    Returns:
        `out [B, Hq, Lq, Dv]` in q's dtype, or `(out, lse)` with `lse [B, Hq, Lq]` in float32 (float64 for
        float64). Differentiable in q, k, v, bias, sink and alibi_slopes through both, up to the second order.

    Raises:
        ShapeError, DtypeError, DeviceError, MaskError, ArgumentError: bad values (all are ValueError).
        ArgumentTypeError: the wrong kind of object (a TypeError).
        BackendError: the backend asked for by name is unknown or declines; the message holds all of its
            reasons.

    Source: FlashAttention (Dao et al. 2022) and FlashAttention-2 (Dao 2023).
    """
    if isinstance(q, Tensor) and q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast(q, k, v)
    try:
        spec, mask_tensors = _FULL if mask is None else _spelled(mask, q, k)
        key = (
            q.shape, k.shape, v.shape, q.layout, k.layout, v.layout, q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, spec, scale, softcap, dropout_p, deterministic, backend,
            validate, return_lse, seed is None,
            # Equal numbers of another kind (True == 1) must not pass for what was checked.
            scale.__class__, softcap.__class__, dropout_p.__class__, deterministic.__class__,
            validate.__class__, return_lse.__class__,
            None if alibi_slopes is None else _metadata(alibi_slopes),
            None if bias is None else _metadata(bias),
            None if sink is None else _metadata(sink),
        )  # fmt: skip
        known = (
            None if mask_tensors or seed is not None or torch.compiler.is_compiling() else _checked.get(key)
        )
    except (AttributeError, TypeError, IndexError, RuntimeError):
        # Something is of the wrong kind. The checks say what; if they do not, the error as it came.
        check(
            Arguments(
                q,
                k,
                v,
                mask,
                scale,
                softcap,
                alibi_slopes,
                bias,
                sink,
                dropout_p,
                seed,
                deterministic,
                backend,
                validate,
            )
        )
        raise
    if known is None:
        call = Arguments(
            q, k, v, mask, scale, softcap, alibi_slopes, bias, sink, dropout_p, seed, deterministic,
            backend, validate, return_lse,
        )  # fmt: skip
        known = _check(call)
        if not torch.compiler.is_compiling():
            _remember(key, known)
    scale_, softcap_, dropout, options = known
    random = _seed(seed, q.device) if dropout > 0.0 else None
    out, lse = ops.attend(
        q,
        k,
        v,
        bias,
        sink,
        alibi_slopes,
        random,
        list(mask_tensors),
        [],
        spec,
        scale_,
        softcap_,
        dropout,
        options,
    )
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    validate: bool = False,
) -> Any:
    """Exact attention of documents packed one after another; each query sees only keys of its own document.

    Equal to calling `attention` for every document `d` with rows `cu_seqlens_q[d]:cu_seqlens_q[d + 1]` and
    keys `cu_seqlens_k[d]:cu_seqlens_k[d + 1]`: positions are local to the document, which is also the batch
    index of dropout and of ALiBi slopes. Masks are made of one batch element, so that a `predicate` is called
    with `b = 0` and the document's positions.

    Args:
        q: `[Tq, Hq, D]`; k: `[Tk, Hk, D]`; v: `[Tk, Hk, Dv]`. Dtypes and devices as in `attention`.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[documents + 1]`, offsets from 0, on q's device. Rows
            past the last offset see nothing: `out = 0` and `lse = -inf` (with a sink: `lse = sink`).
        mask: evaluated in each document's own coordinates (its own bottom-right diagonal).
        alibi_slopes: `[Hq]` or `[documents, Hq]`.

    The other arguments, the errors and the derivatives are those of `attention`.

    Returns:
        `out [Tq, Hq, Dv]`, or `(out, lse)` with `lse [Hq, Tq]`.
    """
    if isinstance(q, Tensor) and q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast(q, k, v)
    call = Arguments(
        q, k, v, mask, scale, softcap, alibi_slopes, None, sink, dropout_p, seed, deterministic,
        backend, validate, return_lse, cu_seqlens_q, cu_seqlens_k, packed=True,
    )  # fmt: skip
    needs_tables = alibi_slopes is not None or (isinstance(dropout_p, float) and dropout_p > 0.0)
    scale_, softcap_, dropout, options = _check(
        call, Positions(tables=True) if needs_tables else _NO_POSITIONS
    )
    packed = masks.documents(cu_seqlens_q, cu_seqlens_k, within=masks.full() if mask is None else mask)
    packed.check(1, q.shape[1], q.shape[0], k.shape[0], q.device)
    batched = tuple(x.transpose(0, 1)[None] for x in (q, k, v))
    spec, mask_tensors = _spelled(packed, batched[0], batched[1])
    tables = _packed_positions(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]) if needs_tables else []
    random = _seed(seed, q.device) if dropout > 0.0 else None
    out, lse = ops.attend(
        *batched,
        None,
        sink,
        alibi_slopes,
        random,
        list(mask_tensors),
        tables,
        spec,
        scale_,
        softcap_,
        dropout,
        options,
    )
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def _spelled(mask: Mask, q: Tensor, k: Tensor) -> tuple[str, tuple[Tensor, ...]]:
    """The mask as the op takes it; a mask that has no spelling of its own (a predicate) is lowered first."""
    if mask.needs_build and not torch.compiler.is_compiling():
        mask = mask.build(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
    return mask.spec()


def _check(call: Arguments, positions: Positions = _NO_POSITIONS) -> tuple[float, float | None, float, str]:
    """Check a call's metadata and fill its defaults."""
    check(call)
    scale = 1.0 / math.sqrt(call.q.shape[-1]) if call.scale is None else float(call.scale)
    softcap = None if call.softcap is None else float(call.softcap)
    return (
        scale,
        softcap,
        float(call.dropout_p),
        ops.encode(call.backend, call.deterministic, call.validate, positions),
    )


def _metadata(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.layout, x.dtype, x.device


def _remember(key: Any, value: tuple[float, float | None, float, str]) -> None:
    if len(_checked) >= _CHECKED_LIMIT:
        _checked.clear()
    _checked[key] = value


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's dtype, as its lower-precision list would cast them; float64 stays."""
    dtype = torch.get_autocast_dtype(q.device.type)
    cast = (x.to(dtype) if isinstance(x, Tensor) and x.dtype in FLOATS[1:] else x for x in (q, k, v))
    return tuple(cast)  # pyright: ignore[reportReturnType]


def _seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """The key of the dropout generator, int64 without dimensions on `device`."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    return seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64, device=device)


def _packed_positions(cu_q: Tensor, cu_k: Tensor, rows: int, keys: int) -> list[Tensor]:
    """The position tables of packed documents: int32 `[3, rows]` (position, key position on its diagonal,
    document) and `[keys]`.
    """
    starts_q, starts_k = cu_q.to(torch.int64), cu_k.to(torch.int64)
    lengths = starts_k.diff() - starts_q.diff()
    row, key = (torch.arange(n, device=cu_q.device) for n in (rows, keys))
    if cu_q.shape[0] == 1:
        zeros = torch.zeros_like(row)
        return [torch.stack([row, row, zeros]).to(torch.int32), key.to(torch.int32)]
    documents = (torch.searchsorted(starts_q, row, right=True) - 1).clamp(0, lengths.shape[0] - 1)
    of_key = (torch.searchsorted(starts_k, key, right=True) - 1).clamp(0, lengths.shape[0] - 1)
    position = row - starts_q[documents]
    table = torch.stack([position, position + lengths[documents], documents]).to(torch.int32)
    return [table, (key - starts_k[of_key]).to(torch.int32)]
