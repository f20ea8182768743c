"""Who is measured: tilefold, PyTorch's SDPA, attention as in the textbook, and FlexAttention.

Everything a user would prepare once is prepared before the clock starts: dense masks, block masks,
compilation. A contestant that cannot run a case says why, in sentences.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilefold
from tilefold.errors import ArgumentError
from tilefold.masks.context import Points
from tilefold.testing.cases import DTYPES, Call

from .cases import BenchCase

Attend = Callable[[Call], Tensor]

OURS = "tilefold"
# The definition of these masks is a short formula of the indices, which FlexAttention compiles.
_FORMULAS = ("causal", "window", "prefix_lm", "dilated")


@dataclass(frozen=True)
class Contestant:
    """One way to compute attention.

    Attributes:
        name: as typed on the command line.
        about: one line for the report.
        why_not: `(case, device, backward)` -> every reason why it cannot run that; empty if it can.
        prepare: `(case, call)` -> a function from calls of that case to `out [B, Hq, Lq, Dv]`. Not timed.
    """

    name: str
    about: str
    why_not: Callable[[BenchCase, str, bool], list[str]]
    prepare: Callable[[BenchCase, Call], Attend]


def outcome(attend: Attend, call: Call, wanted: Iterable[str] = ()) -> dict[str, Tensor]:
    """`out`, and `grad <argument>` of the wanted arguments under `call.dout`."""
    names = tuple(wanted)
    if not names:
        with torch.no_grad():
            return {"out": attend(call)}
    leaves = {name: call.arguments[name].detach().requires_grad_() for name in names}
    out = attend(call.with_arguments(**leaves))
    grads = torch.autograd.grad(out, list(leaves.values()), call.dout)
    return {"out": out.detach(), **{f"grad {name}": x for name, x in zip(names, grads, strict=True)}}


# tilefold.


def _tilefold(case: BenchCase, call: Call) -> Attend:
    return lambda c: tilefold.attention(c.q, c.k, c.v, **c.options)


# Dense tensors, made once.


def _visible(case: BenchCase, call: Call) -> Tensor | None:
    """The mask as bool `[B or 1, H or 1, Lq, Lk]`; None without one."""
    if call.mask is None:
        return None
    (B, Hq, Lq, _), Lk = call.q.shape, call.k.shape[2]
    dense = call.mask.materialize(B, Hq, Lq, Lk, call.q.device)
    # What does not depend on batch element or head is stored once.
    same = [n for n in (0, 1) if dense.shape[n] > 1 and dense.stride(n) == 0]
    for n in same:
        dense = dense.narrow(n, 0, 1)
    return dense.contiguous()


def _distances(call: Call) -> Tensor:
    """`|i + Lk - Lq - j|`, `[Lq, Lk]`."""
    Lq, Lk = call.q.shape[2], call.k.shape[2]
    i, j = (torch.arange(n, device=call.q.device) for n in (Lq, Lk))
    return (i[:, None] + (Lk - Lq) - j).abs()


def _alibi(call: Call) -> Tensor | None:
    """ALiBi as an additive `[1, Hq, Lq, Lk]` in q's dtype."""
    slopes = call.options.get("alibi_slopes")
    return None if slopes is None else (-slopes.view(1, -1, 1, 1) * _distances(call)).to(call.q.dtype)


def _score_bytes(case: BenchCase) -> int:
    (Lq, Lk), width = case.lengths, DTYPES[case.dtype].itemsize
    return case.batch * case.heads[0] * Lq * Lk * width


def _too_large(case: BenchCase, device: str) -> list[str]:
    """Whether one score matrix takes more than its part of the memory; a backward pass holds several."""
    kind = torch.device(device).type
    limit = torch.cuda.get_device_properties(device).total_memory // 8 if kind == "cuda" else 2 << 30
    need = _score_bytes(case)
    if need <= limit:
        return []
    return [
        f"its score matrix would take {need / 2**30:.1f} GiB; at most {limit / 2**30:.1f} GiB is spent on one"
    ]


def _other_bits(case: BenchCase) -> list[str]:
    if not case.dropout_p:
        return []
    return ["its dropout draws other random bits, so that its results cannot be checked"]


# Scaled dot product attention.


def _sdpa_why_not(case: BenchCase, device: str, backward: bool) -> list[str]:
    reasons = _other_bits(case)
    if case.softcap is not None:
        reasons.append("it has no soft cap")
    if case.sink:
        reasons.append("it has no attention sink")
    return reasons


def _sdpa(case: BenchCase, call: Call) -> Attend:
    """`is_causal` where that is the mask; else a dense `attn_mask`, boolean or additive."""
    gqa = case.heads[0] != case.heads[1]
    fixed = _alibi(call)
    square = case.lengths[0] == case.lengths[1]
    if case.mask == "causal" and square and fixed is None and not case.bias:
        return lambda c: F.scaled_dot_product_attention(c.q, c.k, c.v, is_causal=True, enable_gqa=gqa)
    visible = _visible(case, call)
    if fixed is not None:
        visible, fixed = None, _hide(fixed, visible)

    def attend(c: Call) -> Tensor:
        added = c.options.get("bias")
        mask = visible if fixed is None else fixed
        if added is not None:
            added = added if fixed is None else added + fixed
            # Four dimensions: the fused kernels take nothing less.
            mask = _hide(added.reshape((1,) * (4 - added.dim()) + added.shape), visible)
        return F.scaled_dot_product_attention(c.q, c.k, c.v, attn_mask=mask, enable_gqa=gqa)

    return attend


def _hide(added: Tensor, visible: Tensor | None) -> Tensor:
    return added if visible is None else added.masked_fill(~visible, -torch.inf)


# The textbook.


def _standard_why_not(case: BenchCase, device: str, backward: bool) -> list[str]:
    return _other_bits(case) + _too_large(case, device)


def _standard(case: BenchCase, call: Call) -> Attend:
    """The whole score matrix in plain PyTorch."""
    visible, alibi, group = _visible(case, call), _alibi(call), case.heads[0] // case.heads[1]
    hidden = None if visible is None else ~visible

    def attend(c: Call) -> Tensor:
        k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (c.k, c.v))
        s = c.q @ k.transpose(-1, -2) * c.q.shape[-1] ** -0.5
        if case.softcap is not None:
            s = case.softcap * torch.tanh(s / case.softcap)
        if alibi is not None:
            s = s + alibi
        if case.bias:
            s = s + c.options["bias"]
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        if case.sink:
            sink = c.options["sink"].view(1, -1, 1, 1).expand(*s.shape[:3], 1)
            return torch.cat([s, sink], dim=-1).softmax(-1)[..., :-1] @ v
        return s.softmax(-1) @ v

    return attend


# FlexAttention.


def _compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _flex_why_not(case: BenchCase, device: str, backward: bool) -> list[str]:
    reasons = _other_bits(case)
    if torch.device(device).type == "cpu":
        if _compiler() is None:
            reasons.append("on a CPU it is compiled by a C++ compiler, and none is installed")
        if backward:
            reasons.append("it has no backward pass on a CPU")
        if case.sink:
            reasons.append("it returns no lse on a CPU, which a sink needs")
    return reasons


def _mask_mod(case: BenchCase, call: Call) -> Callable[..., Tensor]:
    """The mask as a function of scalar indices: its own definition if that is a short formula, else a look-up
    in the dense tensor.
    """
    mask, (Lq, Lk) = call.mask, case.lengths
    assert mask is not None
    if case.mask in _FORMULAS:
        return lambda b, h, q, k: mask.visible(Points(b, h, q, k, Lq, Lk))
    dense = _visible(case, call)
    assert dense is not None
    B, H = dense.shape[:2]
    return lambda b, h, q, k: dense[b if B > 1 else 0, h if H > 1 else 0, q, k]


def _score_mod(case: BenchCase, call: Call) -> Callable[..., Any] | None:
    """Soft cap, ALiBi and bias of `call` on one score; None without any."""
    if case.softcap is None and not case.alibi and not case.bias:
        return None
    slopes, bias = call.options.get("alibi_slopes"), call.options.get("bias")
    shift = case.lengths[1] - case.lengths[0]
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)

    def modified(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if case.softcap is not None:
            s = case.softcap * torch.tanh(s / case.softcap)
        if slopes is not None:
            s = s - slopes[h] * (q + shift - k).abs()
        if bias is not None:
            s = s + bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, q, k]
        return s

    return modified


def _flex(case: BenchCase, call: Call) -> Attend:
    """Compiled for this shape alone. A sink is applied to the results, from their lse."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    (Hq, Hk), (Lq, Lk), blocks = case.heads, case.lengths, None
    if call.mask is not None:
        # Only padding differs between batch elements, and no mask here differs between heads.
        B = case.batch if case.mask == "padding" else None
        blocks = create_block_mask(_mask_mod(case, call), B, None, Lq, Lk, device=str(call.q.device))

    def attend(c: Call) -> Tensor:
        options: dict[str, Any] = {
            "score_mod": _score_mod(case, c), "block_mask": blocks, "enable_gqa": Hq != Hk
        }  # fmt: skip
        if not case.sink:
            return compiled(c.q, c.k, c.v, **options)
        out, more = compiled(c.q, c.k, c.v, return_aux=AuxRequest(lse=True), **options)
        share = torch.sigmoid(more.lse - c.options["sink"].float()[:, None])
        return out * share[..., None].to(out.dtype)

    return attend


CONTESTANTS: Mapping[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Contestant(OURS, "tilefold.attention, automatic choice of backend", lambda *_: [], _tilefold),
        Contestant(
            "sdpa", "PyTorch's SDPA: is_causal, or the mask as a dense tensor made before the clock starts",
            _sdpa_why_not, _sdpa,
        ),
        Contestant(
            "standard", "plain PyTorch, the whole score matrix at once", _standard_why_not, _standard
        ),
        Contestant(
            "flex", "FlexAttention compiled for each shape, compilation not timed", _flex_why_not, _flex
        ),
    )
}  # fmt: skip


def pick(names: Iterable[str]) -> list[Contestant]:
    """The contestants of these names, in the order of the table; all without names. tilefold always takes
    part: its results are what the others are compared with.

    Raises:
        ArgumentError: an unknown name.
    """
    names = set(names)
    unknown = names - set(CONTESTANTS)
    if unknown:
        raise ArgumentError(f"contestants: expected some of {', '.join(CONTESTANTS)}, got {sorted(unknown)}")
    return [c for name, c in CONTESTANTS.items() if not names or name in names or name == OURS]
