"""Laws of the numbers: they are those of the definition, however a call is split, packed, permuted or laid
out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

import tilefold

from .. import masks, philox
from . import inputs, tolerance
from .cases import Call, Case, build
from .evaluate import Subject, by_reference, expect, gradients, observe, prepare, under_poison
from .law import contiguous, law
from .tolerance import Verdict


@law(applies=lambda case: True)
def matches_the_reference(case: Case, subject: Subject) -> list[Verdict]:
    """Results and every gradient are within the error budget of the definition, and have the dtypes and
    shapes promised.
    """
    call, expected = prepare(case, subject.device)
    results = observe(subject, call)
    accumulator = torch.float64 if case.dtype == "fp64" else torch.float32
    assert results["out"].dtype == call.q.dtype
    assert results["lse"].dtype == accumulator
    for name, argument in call.arguments.items():
        assert results[f"grad {name}"].dtype == argument.dtype, name
    return expected.judge(results)


def _splits(case: Case) -> bool:
    """Whether a call can be split along the keys by public means alone.

    Near scores of 10^6 a partial's lse, which carries its weight, has a rounding unit of several percent:
    "extremes" do not split.
    """
    whole = case.alibi or case.dropout_p or case.values == "extremes"
    return case.lengths[1] > 1 and case.batch > 0 and not whole


def _by_reference_off_by_a_unit(call: Call) -> tuple[Tensor, Tensor]:
    """The definition, with the next larger lse."""
    out, lse = by_reference(call)
    exact = lse.detach()
    step = torch.nextafter(exact, torch.full_like(exact, torch.inf)) - exact
    return out, lse + torch.where(exact.isfinite(), step, 0.0)


@law(applies=_splits, limit=60)
def halves_merge_to_the_whole(case: Case, subject: Subject) -> list[Verdict]:
    """Attention over two parts of the keys merges to attention over all of them; the sink enters once, at the
    merge.

    Plain PyTorch is measured twice more, with the same merge: weights that come out of an lse are rounded
    with it, so the second time each lse is off by one unit of its last place.
    """
    call, expected = prepare(case, subject.device)
    Lq, Lk = case.lengths
    cut = 1 + case.seed % (Lk - 1)

    def merged(whole: Call, attend: Callable[[Call], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        bias, sink = whole.options.get("bias"), whole.options.get("sink")
        parts = []
        for start, end in ((0, cut), (cut, Lk)):
            options = {name: x for name, x in whole.options.items() if name not in ("mask", "bias", "sink")}
            if whole.mask is not None:
                options["mask"] = masks.shift(whole.mask, 0, start, Lq, Lk)
            if bias is not None:
                options["bias"] = bias[..., start:end] if bias.shape[-1] > 1 else bias
            part = Call(whole.q, whole.k[:, :, start:end], whole.v[:, :, start:end], None, None, options)
            parts.append(tilefold.Partial(*attend(part)))
        if sink is not None:
            lse = sink.to(parts[0].lse.dtype)[:, None].expand_as(parts[0].lse)
            parts.append(tilefold.Partial(torch.zeros_like(parts[0].out), lse))
        merged = tilefold.merge(parts)
        return merged.out, merged.lse

    wide = torch.promote_types(tolerance.baseline_dtype(call.q.dtype), torch.float32)
    plain = [
        gradients(lambda c, attend=attend: merged(c, attend), call.map(lambda x: x.to(wide)))
        for attend in (by_reference, _by_reference_off_by_a_unit)
    ]
    expected = dataclasses.replace(expected, baselines=[*expected.baselines, *plain])
    return expected.judge(under_poison(lambda c: merged(c, subject.attention), call))


@law(applies=lambda case: case.batch > 1 and not case.empty, limit=40)
def batch_elements_are_independent(case: Case, subject: Subject) -> list[Verdict]:
    """Other values in element 0 change no bit of the others, NaN there does not reach them, and one alone
    gives the same.
    """
    call = build(case, subject.device).map(contiguous)
    names = ("out", "lse", "grad q", "grad k", "grad v")

    def others(fill: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        changed = call.with_arguments(
            **{name: fill(contiguous(getattr(call, name))) for name in ("q", "k", "v")}
        )
        results = observe(subject, changed)
        return {name: results[name][1:] for name in names if name in results}

    def halve(x: Tensor) -> Tensor:
        x[0] *= 0.5
        return x

    def spoil(x: Tensor) -> Tensor:
        x[0] = float("nan")
        return x

    expected = expect(call).map(lambda name, x: x[1:] if name in names else x)
    tolerance.check_identical(others(lambda x: x), others(halve), context=case.name)
    verdicts = expected.judge(others(spoil), "NaN in element 0")
    if case.dropout_p == 0.0:

        def alone(x: Tensor) -> Tensor:
            return x[1:2] if x.dim() in (2, 3, 4) and x.shape[0] == case.batch else x

        single = call.map(alone).with_arguments(mask=masks.dense(call.visible()[1:2]))  # [1, Hq, Lq, Lk]
        results = {name: x for name, x in observe(subject, single).items() if name in names}
        only = expected.map(lambda name, x: x[:1] if name in names else x)
        verdicts += only.judge(results, "element 1 alone")
    return verdicts


@law(applies=lambda case: not case.positional and case.lengths[1] > 1 and case.batch > 0, limit=40)
def key_order_does_not_matter(case: Case, subject: Subject) -> list[Verdict]:
    """Without a mask, permuting keys, values and the bias along the keys permutes dk, dv and dbias and
    changes nothing else.
    """
    call, expected = prepare(case, subject.device)
    order = torch.randperm(case.lengths[1], generator=inputs.generator(case.seed)).to(subject.device)

    def permute(name: str, x: Tensor) -> Tensor:
        if name.removeprefix("grad ") in ("k", "v"):
            return x[:, :, order]
        return x[..., order] if name.removeprefix("grad ") == "bias" and x.shape[-1] > 1 else x

    permuted = call.with_arguments(**{name: permute(name, x) for name, x in call.arguments.items()})
    return expected.map(permute).judge(observe(subject, permuted))


_PACKABLE = (
    "none",
    "full",
    "empty",
    "causal",
    "causal_window",
    "window",
    "window_negative",
    "dilated",
    "prefix",
    "sinks_and_window",
)


@law(
    applies=lambda case: case.mask in _PACKABLE and not case.bias and not case.empty and case.lengths[1] > 1,
    limit=50,
)
def packed_equals_padded(case: Case, subject: Subject) -> list[Verdict]:
    """Documents in one packed row give what the same documents give in a padded batch: dropout, ALiBi,
    gradients and all.

    Document b has `n_b` queries and `n_b + Lk - Lq` keys, so that its diagonal is that of the padded
    rectangle. Tokens past the last offset see nothing and get no gradient.
    """
    (Lq, Lk), tail = case.lengths, 3
    draw = inputs.generator(case.seed)
    q_lengths = torch.randint(max(0, Lq - Lk), Lq + 1, (case.batch,), generator=draw)
    k_lengths = q_lengths + (Lk - Lq)
    padded = build(dataclasses.replace(case, layout="contiguous"), subject.device)
    rows, keys = (  # [B, L], True where a token is real
        (torch.arange(length) < lengths[:, None]).to(subject.device)
        for length, lengths in ((Lq, q_lengths), (Lk, k_lengths))
    )
    if padded.dout is not None:
        padded.dout = padded.dout * rows[:, None, :, None]
    if padded.dlse is not None:
        padded.dlse = padded.dlse * rows[:, None, :]
    within = padded.mask
    real_keys = masks.padding(k_lengths.to(subject.device))
    whole = padded.with_arguments(mask=real_keys if within is None else within & real_keys)

    def pack(x: Tensor, real: Tensor) -> Tensor:
        """`[B, H, L, D]` to `[T + tail, H, D]`; the tail is NaN."""
        tokens = x.transpose(1, 2)[real]
        return torch.cat([tokens, tokens.new_full((tail, *tokens.shape[1:]), float("nan"))])

    def unpack(x: Tensor, real: Tensor) -> Tensor:
        """`[T + tail, H, ...]` to `[B, H, L, ...]`, zero where no token is."""
        full = x.new_zeros((*real.shape, *x.shape[1:]))
        return full.index_put(real.nonzero(as_tuple=True), x[: x.shape[0] - tail]).transpose(1, 2)

    def offsets(lengths: Tensor) -> Tensor:
        return (
            torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            .to(torch.int32)
            .to(subject.device)
        )

    def by_packing(call: Call) -> tuple[Tensor, Tensor]:
        options = {name: x for name, x in call.options.items() if name != "mask"}
        out, lse = tilefold.attention_varlen(
            pack(call.q, rows),
            pack(call.k, keys),
            pack(call.v, keys),
            offsets(q_lengths),
            offsets(k_lengths),
            mask=within,
            return_lse=True,
            backend=subject.backend,
            **options,
        )
        assert not out[-tail:].any(), "tokens past the last offset see nothing"
        sink = call.options.get("sink")
        nothing = (
            lse.new_full((lse.shape[0], tail), -torch.inf) if sink is None else sink.to(lse.dtype)[:, None]
        )
        assert torch.equal(lse[:, -tail:], nothing.expand(-1, tail)), (
            "tokens past the last offset see nothing"
        )
        return unpack(out, rows), unpack(lse.transpose(0, 1), rows)

    def real_rows(name: str, x: Tensor) -> Tensor:
        if name == "lse":
            return torch.where(rows[:, None, :], x, 0.0)
        return torch.where(rows[:, None, :, None], x, 0.0) if name == "out" else x

    expected = expect(whole).map(real_rows)
    in_batch = {name: real_rows(name, x) for name, x in observe(subject, whole).items()}
    return expected.judge(in_batch, "padded") + expected.judge(under_poison(by_packing, whole), "packed")


@law(applies=lambda case: case.layout == "contiguous" and not case.empty, limit=30)
def strides_do_not_matter(case: Case, subject: Subject) -> list[Verdict]:
    """Transposed, sliced and strided tensors, and incoming gradients, give what contiguous ones give."""
    call, expected = prepare(case, subject.device)
    verdicts = []
    for layout in ("transposed", "sliced", "strided"):

        def lay(x: Tensor, change: Callable[[Tensor], Tensor] = inputs.LAYOUTS[layout]) -> Tensor:
            return change(x) if x.dim() == 4 else x

        verdicts += expected.judge(observe(subject, call.map(lay)), layout)
    return verdicts


@law(
    applies=lambda case: sum((case.sink, bool(case.alibi), bool(case.bias))) > 1 and not case.empty, limit=12
)
def each_argument_alone_gets_its_gradient(case: Case, subject: Subject) -> list[Verdict]:
    """If one argument asks for a gradient it gets the right one, and the others get None."""
    call, expected = prepare(case, subject.device)
    verdicts = []
    for name in call.arguments:
        verdicts += expected.judge(observe(subject, call, wanted=(name,)), f"only {name}")
        leaves = {n: x.detach().requires_grad_(n == name) for n, x in call.map(contiguous).arguments.items()}
        out, lse = subject.attention(call.with_arguments(**leaves))
        (out.float().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()).backward()
        assert [n for n, leaf in leaves.items() if leaf.grad is not None] == [name]
    out, lse = subject.attention(call)
    assert not out.requires_grad
    assert not lse.requires_grad
    return verdicts


@law(applies=lambda case: case.dropout_p > 0 and not case.empty and case.lengths[1] > 1, limit=25)
def dropout_is_the_published_generator(case: Case, subject: Subject) -> list[Verdict]:
    """Exactly the probabilities are dropped that Philox says, for an int seed and for a tensor; another seed
    drops others.
    """
    call = build(dataclasses.replace(case, dims=(8, case.lengths[1])), subject.device)
    (B, Hq, Lq, _), Lk = call.q.shape, case.lengths[1]
    identity = torch.eye(Lk, device=subject.device, dtype=call.v.dtype).expand_as(call.v)
    plain = {name: x for name, x in call.options.items() if name in ("mask", "dropout_p", "seed")}
    probe = Call(torch.zeros_like(call.q), torch.zeros_like(call.k), identity, None, None, plain)
    out, _ = subject.attention(probe)
    b, h, i, j = (torch.arange(n, device=subject.device) for n in (B, Hq, Lq, Lk))
    seed = torch.tensor(plain["seed"], device=subject.device)
    kept = philox.keep(seed, case.dropout_p, b[:, None, None], h[:, None], i, j)
    assert torch.equal(out != 0, kept & call.visible())
    again, _ = subject.attention(dataclasses.replace(probe, options=plain | {"seed": seed}))
    assert torch.equal(out, again)
    if int(call.visible().sum()) > 200:  # two seeds agree on so many with a probability below 10^-40
        other, _ = subject.attention(dataclasses.replace(probe, options=plain | {"seed": plain["seed"] + 1}))
        assert not torch.equal(out, other)
    return []


@law(applies=lambda case: True, limit=50)
def repeats_are_bit_identical(case: Case, subject: Subject) -> list[Verdict]:
    """The same call twice gives the same bits; for dq, under `deterministic=True`. Inputs are left as they
    were.
    """
    call = build(case, subject.device)
    before = {name: x.clone() for name, x in call.arguments.items()}
    first, second = (observe(subject, call, deterministic=True) for _ in range(2))
    tolerance.check_identical(first, second, context=case.name)
    first, second = (observe(subject, call) for _ in range(2))
    always = [name for name in first if name != "grad q"]
    tolerance.check_identical(
        {n: first[n] for n in always}, {n: second[n] for n in always}, context=case.name
    )
    tolerance.check_identical(dict(call.arguments), before, context="inputs")
    out = tilefold.attention(call.q, call.k, call.v, backend=subject.backend, **call.options)
    assert torch.equal(out, first["out"]), "return_lse does not change out"
    return []
