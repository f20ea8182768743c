"""Forward-mode derivatives of attention and of its gradients, in plain tensor operations, query stripe by
query stripe.

With `f(x) = (out, lse)` of the arguments `x = (q, k, v, bias, sink, alibi_slopes)` and `w = (dout, dlse)`,
two functions give every
derivative up to the second:

    forward(x, u)          J u: the tangent of (out, lse) in direction u                      (forward mode)
    backward(x, w, u, tw)  the tangent of J^T w in direction (u, tw)                          (forward over
    reverse)

and since the Hessian of `<w, f(x)>` is symmetric, the vector-Jacobian product of the gradients needs no
formula of its own: for cotangents `u` of `J^T w` it is `backward(x, w, u, 0)` for x, and `forward(x, u)`
for w.

`attention` is the call in operations that PyTorch differentiates itself. Nestings of transforms that are too
deep for PyTorch's Functions run on it.

Memory is O(stripe x Lk) for each batch element and head. Under functorch all of this runs on wrapped tensors,
so nothing is done in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .problem import Problem
from .scores import Places, Scores, bias_tile
from .select import product

#: Elements of one stripe of scores over all batch elements and heads.
_STRIPE_ELEMENTS = 1 << 22

Six = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What is not differentiated: the problem, the lowered mask, the numbers and the seed of the scores, the
    position tables.
    """

    problem: Problem
    form: Any
    scores: Scores
    tables: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Stripe:
    """A stripe `rows` of the score matrix: arguments in the accumulator's dtype (heads repeated), and what
    both formulas share.
    """

    rows: slice
    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    lse: Tensor
    p_sink: Tensor | None
    visible: Tensor
    live: Tensor
    slope1: Tensor | None
    slope2: Tensor | None
    places: Places | None
    kept: Tensor | None
    setting: Setting

    def selected(self, x: Tensor) -> Tensor:
        """`x` where a score is visible, else 0: behind the mask may stand NaN, and 0 * NaN is NaN."""
        return torch.where(self.visible, x, 0.0)

    def times(self, weights: Tensor, x: Tensor) -> Tensor:
        """`weights [.., rows, keys] @ x [.., keys, X]`, hidden entries of x left out."""
        return product(weights, x, self.visible)

    def back(self, weights: Tensor, x: Tensor) -> Tensor:
        """`weights [.., rows, keys]^T @ x [.., rows, X]`, hidden entries of x left out."""
        return product(weights.transpose(-1, -2), x, self.visible.transpose(-1, -2))

    def drop(self, x: Tensor) -> Tensor:
        """Dropout's factor, applied to probabilities or to their gradients."""
        return (
            x if self.kept is None else torch.where(self.kept, x / (1.0 - self.setting.scores.dropout_p), 0.0)
        )


def _stripes(problem: Problem) -> list[slice]:
    per_row = max(problem.batch * problem.q_heads * problem.k_length, 1)
    height = min(max(_STRIPE_ELEMENTS // per_row, 1), max(problem.q_length, 1))
    return [slice(r, min(r + height, problem.q_length)) for r in range(0, problem.q_length, height)]


def _heads(x: Tensor, problem: Problem) -> Tensor:
    return x.to(problem.accumulator).repeat_interleave(problem.group, dim=1)


def _by_key_head(x: Tensor, problem: Problem) -> Tensor:
    return x if problem.group == 1 else x.unflatten(1, (problem.k_heads, problem.group)).sum(2)


def _everything(setting: Setting) -> slice:
    return slice(0, setting.problem.k_length)


def _stripe(x: Six, rows: slice, setting: Setting) -> _Stripe:
    problem, scores = setting.problem, setting.scores
    dtype = problem.accumulator
    q, k, v, bias, sink, slopes = x
    assert q is not None
    assert k is not None
    assert v is not None
    keys = _everything(setting)
    q, k, v = q[:, :, rows].to(dtype), _heads(k, problem), _heads(v, problem)
    s = (q @ k.transpose(-1, -2)) * scores.scale
    slope1 = slope2 = None
    if scores.softcap is not None:
        t = torch.tanh(s / scores.softcap)
        s, slope1 = scores.softcap * t, 1.0 - t * t
        slope2 = -2.0 / scores.softcap * t * slope1
    places = (
        Places.of(problem, setting.tables, q.device) if {"alibi", "dropout"} & set(problem.options) else None
    )
    if slopes is not None:
        assert places is not None
        s = s - places.slopes(slopes, rows, dtype) * places.distance(rows, keys)
    if bias is not None:
        s = s + bias_tile(bias, rows, keys).to(dtype)
    visible = setting.form.tile(
        rows.start, rows.stop, keys.start, keys.stop, problem.q_length, problem.k_length, q.device
    )
    s = torch.where(visible, s, -torch.inf)
    if slope1 is not None and slope2 is not None:
        slope1, slope2 = (torch.where(visible, x, 0.0) for x in (slope1, slope2))
    p, p_sink, lse = _softmax(s, sink)
    kept = places.kept(scores, rows, keys) if scores.dropout_p > 0.0 and places is not None else None
    live, visible = lse > -torch.inf, visible.expand(s.shape)
    return _Stripe(rows, q, k, v, p, lse, p_sink, visible, live, slope1, slope2, places, kept, setting)


def _softmax(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Probabilities of a stripe, of the sink `[B, Hq, rows, 1]` or None, and lse `[B, Hq, rows, 1]`.

    Rows that see nothing have zeros, and lse -inf.
    """
    columns = s
    if sink is not None:
        columns = torch.cat([s, sink.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)], dim=-1)
    if columns.shape[-1] == 0:
        return s, None, s.new_full((*s.shape[:3], 1), -torch.inf)
    top = columns.detach().amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(columns - top)
    total = weights.sum(-1, keepdim=True)
    safe = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, -torch.inf, top + torch.log(safe))
    p = weights / safe
    return (p, None, lse) if sink is None else (p[..., :-1], p[..., -1:], lse)


def _raw_tangent(st: _Stripe, u: Six) -> Tensor:
    """Tangent of a stripe's `scale * q.k`."""
    problem, total = st.setting.problem, torch.zeros_like(st.p)
    if u[0] is not None:
        total = total + u[0][:, :, st.rows].to(st.q.dtype) @ st.k.transpose(-1, -2)
    if u[1] is not None:
        total = total + st.q @ _heads(u[1], problem).transpose(-1, -2)
    return st.selected(total * st.setting.scores.scale)


def _after_cap(st: _Stripe, raw: Tensor, u: Six) -> Tensor:
    """Tangent of a stripe's scores before the softmax, from that of `scale * q.k`."""
    keys = _everything(st.setting)
    s = raw if st.slope1 is None else raw * st.slope1
    if u[5] is not None:
        assert st.places is not None
        s = s - st.places.slopes(u[5], st.rows, s.dtype) * st.places.distance(st.rows, keys)
    if u[3] is not None:
        s = s + bias_tile(u[3], st.rows, keys).to(s.dtype)
    return torch.where(st.p > 0, s, 0.0)


def _sink_row(st: _Stripe, t_sink: Tensor | None) -> Tensor | float:
    """The sink's share in the tangent of lse."""
    if st.p_sink is None or t_sink is None:
        return 0.0
    return st.p_sink * t_sink.to(st.p.dtype)[None, :, None, None]


def attention(x: Six, setting: Setting) -> tuple[Tensor, Tensor]:
    """`(out, lse)` by operations that PyTorch differentiates itself, to any order and in any mode."""
    outs, lses = [], []
    for rows in _stripes(setting.problem):
        st = _stripe(x, rows, setting)
        outs.append(st.times(st.drop(st.p), st.v))
        lses.append(st.lse[..., 0])
    return _joined(outs, lses, x, setting.problem)


def _joined(outs: list[Tensor], lses: list[Tensor], x: Six, problem: Problem) -> tuple[Tensor, Tensor]:
    assert x[0] is not None
    if not outs:
        shape = (problem.batch, problem.q_heads, problem.q_length)
        return x[0].new_zeros((*shape, problem.v_head_dim)), x[0].new_zeros(shape, dtype=problem.accumulator)
    return torch.cat(outs, 2).to(problem.dtype), torch.cat(lses, 2)


def forward(x: Six, u: Six, setting: Setting) -> tuple[Tensor, Tensor]:
    """Tangents of `(out, lse)` at arguments `x` in direction `u` (None: zero), in their dtypes."""
    problem = setting.problem
    outs, lses = [], []
    for rows in _stripes(problem):
        st = _stripe(x, rows, setting)
        ts = _after_cap(st, _raw_tangent(st, u), u)
        t_lse = (st.p * ts).sum(-1, keepdim=True) + _sink_row(st, u[4])
        t_out = st.times(st.drop(st.p * (ts - t_lse)), st.v)
        if u[2] is not None:
            t_out = t_out + st.times(st.drop(st.p), _heads(u[2], problem))
        outs.append(t_out)
        lses.append(t_lse[..., 0])
    return _joined(outs, lses, x, problem)


def backward(
    x: Six,
    dout: Tensor | None,
    dlse: Tensor | None,
    u: Six,
    t_dout: Tensor | None,
    t_dlse: Tensor | None,
    setting: Setting,
) -> Six:
    """Tangents of the gradients of `x` under upstream `(dout, dlse)`, in direction `u` of x and `(t_dout,
    t_dlse)` of the upstream.

    None stands for zero among the directions. Returns one tensor for each argument that is not None, in its
    shape and dtype.
    """
    total: list[Tensor | None] = [
        None if a is None else torch.zeros_like(a, dtype=setting.problem.accumulator) for a in x
    ]
    q_stripes = []
    for rows in _stripes(setting.problem):
        st = _stripe(x, rows, setting)
        parts = _stripe_backward(st, x, dout, dlse, u, t_dout, t_dlse)
        q_stripes.append(parts[0])
        for index in range(1, 6):
            sum_, part = total[index], parts[index]
            if sum_ is not None and part is not None:
                total[index] = sum_ + part
    if q_stripes:
        total[0] = torch.cat(q_stripes, 2)
    return tuple(None if t is None or a is None else t.to(a.dtype) for t, a in zip(total, x, strict=True))  # pyright: ignore[reportReturnType]


def _upstream(st: _Stripe, g: Tensor | None, like: Tensor) -> Tensor:
    """A stripe of an upstream gradient (or of its tangent), with 0 in rows that see nothing."""
    if g is None:
        return torch.zeros_like(like)
    live = st.live if g.dim() == 4 else st.live[..., 0]
    return torch.where(live, g[:, :, st.rows].to(like.dtype), 0.0)


def _stripe_backward(
    st: _Stripe,
    x: Six,
    dout: Tensor | None,
    dlse: Tensor | None,
    u: Six,
    t_dout: Tensor | None,
    t_dlse: Tensor | None,
) -> list[Tensor | None]:
    """One stripe's share. Names: `d` gradients, `t` tangents; `delta = rowsum(P * dP) - dlse`."""
    problem, p = st.setting.problem, st.p
    scale = st.setting.scores.scale
    rows_out = p.new_zeros((*p.shape[:3], problem.v_head_dim))
    do, t_do = _upstream(st, dout, rows_out), _upstream(st, t_dout, rows_out)
    dl, t_dl = (_upstream(st, g, st.lse[..., 0])[..., None] for g in (dlse, t_dlse))
    vt = st.v.transpose(-1, -2)
    dp, t_dp = (st.selected(st.drop(g @ vt)) for g in (do, t_do))
    if u[2] is not None:
        t_dp = t_dp + st.selected(st.drop(do @ _heads(u[2], problem).transpose(-1, -2)))
    t_raw = _raw_tangent(st, u)
    ts = _after_cap(st, t_raw, u)
    t_lse = (p * ts).sum(-1, keepdim=True) + _sink_row(st, u[4])
    t_p = p * (ts - t_lse)
    delta = (p * dp).sum(-1, keepdim=True) - dl
    t_delta = (t_p * dp + p * t_dp).sum(-1, keepdim=True) - t_dl
    ds = p * (dp - delta)
    t_ds = t_p * (dp - delta) + p * (t_dp - t_delta)
    raw_ds, t_raw_ds = ds, t_ds
    if st.slope1 is not None and st.slope2 is not None:
        raw_ds, t_raw_ds = ds * st.slope1, t_ds * st.slope1 + ds * st.slope2 * t_raw
    t_dq = st.times(t_raw_ds, st.k)
    t_dk = st.back(t_raw_ds, st.q)
    if u[1] is not None:
        t_dq = t_dq + st.times(raw_ds, _heads(u[1], problem))
    if u[0] is not None:
        t_dk = t_dk + st.back(raw_ds, u[0][:, :, st.rows].to(p.dtype))
    t_dv = st.back(st.drop(t_p), do) + st.back(st.drop(p), t_do)
    return [
        t_dq * scale,
        _by_key_head(t_dk * scale, problem),
        _by_key_head(t_dv, problem),
        _bias_part(t_ds, x[3], st.rows),
        None if x[4] is None else _sink_part(st, t_lse, delta, t_delta, u[4]),
        None if x[5] is None else _slopes_part(st, t_ds, x[5]),
    ]


def _bias_part(t_ds: Tensor, bias: Tensor | None, rows: slice) -> Tensor | None:
    """A stripe's tangent of the bias gradient in the bias' own shape, zero outside the stripe."""
    if bias is None:
        return None
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if shape[2] == 1:
        return t_ds.sum_to_size(shape).reshape(bias.shape)
    part = t_ds.sum_to_size((*shape[:2], t_ds.shape[2], shape[3]))
    padded = torch.nn.functional.pad(part, (0, 0, rows.start, shape[2] - rows.stop))
    return padded.reshape(bias.shape)


def _sink_part(st: _Stripe, t_lse: Tensor, delta: Tensor, t_delta: Tensor, t_sink: Tensor | None) -> Tensor:
    assert st.p_sink is not None
    shift = -t_lse if t_sink is None else t_sink.to(st.p.dtype)[None, :, None, None] - t_lse
    return -(st.p_sink * (shift * delta + t_delta)).sum((0, 2, 3))


def _slopes_part(st: _Stripe, t_ds: Tensor, slopes: Tensor) -> Tensor:
    assert st.places is not None
    distance = st.places.distance(st.rows, _everything(st.setting))
    return st.places.collect_slopes(-(t_ds * distance).sum(-1), st.rows, slopes)
