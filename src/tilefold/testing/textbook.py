"""Plain PyTorch a second time: attention as papers write it down, dense, with its gradients by hand.

The definition in `reference` is differentiated by autograd, which keeps the probabilities. Every
memory-saving kernel, PyTorch's own included, recomputes them from scores that may have been scaled and summed
in another order, and takes the gradient of a score as a difference of two terms; and whatever is split, along
the keys or over time, takes its weights from an lse, which is rounded too. What rounding does to these
formulas is as much the work of plain PyTorch as what it does to autograd's, and it is larger where scores are
large or gradients cancel. So the error budget looks at both.

Source: FlashAttention-2 (Dao 2023), section 2.2 and algorithm 2, as one tile; grouped heads share their keys
without repeating them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import philox
from .cases import Call

Results = dict[str, Tensor]


def results(call: Call, stored: torch.dtype | None = None, units: torch.dtype | None = None) -> Results:
    """`out`, `lse` and the gradient of every argument of `call`, in the dtype of its tensors.

    Args:
        stored: dtype to which `out` is rounded before the backward pass reads it; default that of the
            tensors.
        units: 16-bit dtype that holds the float32 tensors q and k exactly: their products are taken by a
            GPU's matrix units, which add in float32, but do not round as float32 arithmetic does.
    """
    return _Textbook(call, stored or call.q.dtype, units).results()


class _Textbook:
    """One call. Shapes: rows of the query heads of a group lie under one another, `[B, Hk, G * Lq, ...]`, in
    every product.
    """

    def __init__(self, call: Call, stored: torch.dtype, units: torch.dtype | None) -> None:
        self.call, self.options, self.stored, self.units = call, call.options, stored, units
        self.q, self.k, self.v = call.q, call.k, call.v
        self.heads, self.group = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
        scale = call.options.get("scale")
        self.scale = 1 / math.sqrt(call.q.shape[-1]) if scale is None else scale
        self.visible = call.visible()

    def pack(self, x: Tensor) -> Tensor:
        """`[B, Hq, Lq, X] -> [B, Hk, G * Lq, X]`."""
        return x.unflatten(1, (self.heads, self.group)).flatten(2, 3)

    def unpack(self, x: Tensor) -> Tensor:
        """`[B, Hk, G * Lq, X] -> [B, Hq, Lq, X]`."""
        return x.unflatten(2, (self.group, self.call.q.shape[2])).flatten(1, 2)

    def by_units(self) -> Tensor:
        """`q.k` by matrix units."""
        assert self.units is not None
        q, k = (x.to(self.units).flatten(0, 1) for x in (self.pack(self.q), self.k))
        product = torch.bmm(q, k.transpose(-1, -2), out_dtype=self.q.dtype)
        return self.unpack(product.unflatten(0, self.k.shape[:2]))

    def products(self) -> Tensor:
        """`scale * q.k`."""
        if self.units is not None:
            return self.by_units() * self.scale
        return self.unpack(self.pack(self.q) @ self.k.transpose(-1, -2)) * self.scale

    def products_again(self) -> Tensor:
        """The same, scaled before the sum over channels, which is taken in two parts."""
        if self.units is not None:
            return self.products()
        q, k, half = self.pack(self.q * self.scale), self.k.transpose(-1, -2), self.q.shape[-1] // 2
        return self.unpack(q[..., :half] @ k[..., :half, :] + q[..., half:] @ k[..., half:, :])

    def scores(self, s: Tensor) -> Tensor:
        """From `scale * q.k` to the score before the mask."""
        softcap, slopes, bias = (self.options.get(name) for name in ("softcap", "alibi_slopes", "bias"))
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None:
            Lq, Lk = s.shape[-2:]
            rows, keys = (torch.arange(n, device=s.device) for n in (Lq, Lk))
            s = s - slopes.reshape(-1, s.shape[1], 1, 1) * (rows[:, None] + Lk - Lq - keys).abs()
        return s if bias is None else s + bias

    def drop(self, p: Tensor) -> Tensor:
        """Dropout of probabilities, or of their gradients."""
        rate = self.options.get("dropout_p", 0.0)
        if rate == 0.0:
            return p
        b, h, i, j = (torch.arange(n, device=p.device) for n in p.shape)
        seed = torch.as_tensor(self.options["seed"], device=p.device)
        return torch.where(philox.keep(seed, rate, b[:, None, None], h[:, None], i, j), p / (1 - rate), 0.0)

    def results(self) -> Results:
        sink = self.options.get("sink")
        s = torch.where(self.visible, self.scores(self.products()), -math.inf)
        edge = s.new_full((*s.shape[:3], 1), -math.inf)
        edge = edge if sink is None else sink[:, None, None].expand_as(edge)
        top = torch.cat([s, edge], -1).amax(-1, keepdim=True)
        alive = top > -math.inf
        top = torch.where(alive, top, 0.0)
        total = torch.exp(s - top).sum(-1, keepdim=True) + torch.exp(edge - top)
        lse = torch.where(alive, top + torch.log(torch.where(alive, total, 1.0)), -math.inf)
        safe = torch.where(alive, lse, 0.0)
        weights = self.drop(torch.where(self.visible, torch.exp(s - safe), 0.0))
        out = self.unpack(self.pack(weights) @ self.v).to(self.stored).to(self.v.dtype)
        return {"out": out, "lse": lse[..., 0], **self.gradients(out, safe, edge, alive)}

    def gradients(self, out: Tensor, lse: Tensor, edge: Tensor, alive: Tensor) -> Results:
        """Probabilities again, `dP = dO V^T`, `dS = P * (dP - delta)`; the options between `q.k` and the
        score by autograd.
        """
        call = self.call
        dout = torch.zeros_like(out) if call.dout is None else call.dout
        delta = (dout * out).sum(-1, keepdim=True)
        if call.dlse is not None:
            delta = delta - torch.where(alive, call.dlse[..., None].to(delta.dtype), 0.0)
        leaves = {
            name: self.options[name].detach().requires_grad_()
            for name in ("alibi_slopes", "bias")
            if name in self.options
        }
        self.options = self.options | leaves
        with torch.enable_grad():
            raw = self.products_again().detach().requires_grad_()
            s = self.scores(raw)
        p = torch.where(self.visible, torch.exp(s.detach() - lse), 0.0)
        dp = self.drop(self.unpack(self.pack(dout) @ self.v.transpose(-1, -2)))
        ds = torch.where(self.visible, p * (dp - delta), 0.0)
        draw, *more = torch.autograd.grad(s, [raw, *leaves.values()], ds)
        draw = self.pack(draw * self.scale)
        found = {
            "grad q": self.unpack(draw @ self.k),
            "grad k": draw.transpose(-1, -2) @ self.pack(self.q),
            "grad v": self.pack(self.drop(p)).transpose(-1, -2) @ self.pack(dout),
        }
        found |= {f"grad {name}": x for name, x in zip(leaves, more, strict=True)}
        if "sink" in self.options:
            found["grad sink"] = -(torch.exp(edge - lse) * delta).sum((0, 2, 3))
        return found
