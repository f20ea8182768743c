"""What every backend must obey. Each law is a function of one case and one subject: it asserts what is exact, and returns verdicts on the rest.

The name of a law is a sentence; its docstring says what is asserted. `applies` says for which cases it means something, `limit` how many
of them the short run takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import tilefold

from .. import masks, philox
from . import inputs, tolerance
from .cases import Call, Case, build
from .evaluate import Expectation, Subject, by_reference, expect, gradients, observe, prepare, under_poison
from .tolerance import Verdict


@dataclass(frozen=True)
class Law:
    """One law: `run(case, subject)` raises AssertionError where an exact part of it is broken, and returns the error budgets."""

    name: str
    run: Callable[[Case, Subject], list[Verdict]]
    applies: Callable[[Case], bool]
    limit: int | None

    @property
    def meaning(self) -> str:
        return self.run.__doc__ or ""


LAWS: dict[str, Law] = {}


def law(
    *, applies: Callable[[Case], bool] = lambda case: not case.empty, limit: int | None = None
) -> Callable[[Callable[[Case, Subject], list[Verdict]]], Callable[[Case, Subject], list[Verdict]]]:
    """Register a function as a law under its own name."""

    def register(run: Callable[[Case, Subject], list[Verdict]]) -> Callable[[Case, Subject], list[Verdict]]:
        LAWS[run.__name__] = Law(run.__name__, run, applies, limit)
        return run

    return register


@law(applies=lambda case: True)
def matches_the_reference(case: Case, subject: Subject) -> list[Verdict]:
    """Results and every gradient are within the error budget of the definition, and have the dtypes and shapes promised."""
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

    Near scores of 10^6 a partial's lse, which carries its weight, has a rounding unit of several percent: "extremes" do not split.
    """
    whole = case.alibi or case.dropout_p or case.values == "extremes"
    return case.lengths[1] > 1 and case.batch > 0 and not whole


@law(applies=_splits, limit=60)
def halves_merge_to_the_whole(case: Case, subject: Subject) -> list[Verdict]:
    """Attention over two parts of the keys merges to attention over all of them; the sink enters once, at the merge.

    Plain PyTorch is measured a third time, with the same merge, since weights that come out of an lse are rounded with it.
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
    plain = gradients(lambda c: merged(c, by_reference), call.map(lambda x: x.to(wide)))
    expected = dataclasses.replace(expected, baselines=[*expected.baselines, plain])
    return expected.judge(under_poison(lambda c: merged(c, subject.attention), call))


def _contiguous(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


@law(applies=lambda case: case.batch > 1 and not case.empty, limit=40)
def batch_elements_are_independent(case: Case, subject: Subject) -> list[Verdict]:
    """Other values in element 0 change no bit of the others, NaN there does not reach them, and one alone gives the same."""
    call = build(case, subject.device).map(_contiguous)
    names = ("out", "lse", "grad q", "grad k", "grad v")

    def others(fill: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        changed = call.with_arguments(**{name: fill(_contiguous(getattr(call, name))) for name in ("q", "k", "v")})
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
    """Without a mask, permuting keys, values and the bias along the keys permutes dk, dv and dbias and changes nothing else."""
    call, expected = prepare(case, subject.device)
    order = torch.randperm(case.lengths[1], generator=inputs.generator(case.seed)).to(subject.device)

    def permute(name: str, x: Tensor) -> Tensor:
        if name.removeprefix("grad ") in ("k", "v"):
            return x[:, :, order]
        return x[..., order] if name.removeprefix("grad ") == "bias" and x.shape[-1] > 1 else x

    permuted = call.with_arguments(**{name: permute(name, x) for name, x in call.arguments.items()})
    return expected.map(permute).judge(observe(subject, permuted))


_PACKABLE = ("none", "full", "empty", "causal", "causal_window", "window", "window_negative", "dilated", "prefix", "sinks_and_window")


@law(applies=lambda case: case.mask in _PACKABLE and not case.bias and not case.empty and case.lengths[1] > 1, limit=50)
def packed_equals_padded(case: Case, subject: Subject) -> list[Verdict]:
    """Documents in one packed row give what the same documents give in a padded batch: dropout, ALiBi, gradients and all.

    Document b has `n_b` queries and `n_b + Lk - Lq` keys, so that its diagonal is that of the padded rectangle. Tokens past the last
    offset see nothing and get no gradient.
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
    whole = padded.with_arguments(mask=masks.padding(k_lengths.to(subject.device)))  # type: ignore[arg-type]
    if within is not None:
        whole = padded.with_arguments(mask=within & masks.padding(k_lengths.to(subject.device)))  # type: ignore[arg-type]

    def pack(x: Tensor, real: Tensor) -> Tensor:
        """`[B, H, L, D]` to `[T + tail, H, D]`; the tail is NaN."""
        tokens = x.transpose(1, 2)[real]
        return torch.cat([tokens, tokens.new_full((tail, *tokens.shape[1:]), float("nan"))])

    def unpack(x: Tensor, real: Tensor) -> Tensor:
        """`[T + tail, H, ...]` to `[B, H, L, ...]`, zero where no token is."""
        full = x.new_zeros((*real.shape, *x.shape[1:]))
        return full.index_put(real.nonzero(as_tuple=True), x[: x.shape[0] - tail]).transpose(1, 2)

    def offsets(lengths: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32).to(subject.device)

    def by_packing(call: Call) -> tuple[Tensor, Tensor]:
        options = {name: x for name, x in call.options.items() if name != "mask"}
        out, lse = tilefold.attention_varlen(
            pack(call.q, rows), pack(call.k, keys), pack(call.v, keys), offsets(q_lengths), offsets(k_lengths),
            mask=within, return_lse=True, backend=subject.backend, **options,
        )  # fmt: skip
        assert not out[-tail:].any(), "tokens past the last offset see nothing"
        sink = call.options.get("sink")
        nothing = lse.new_full((lse.shape[0], tail), -torch.inf) if sink is None else sink.to(lse.dtype)[:, None]
        assert torch.equal(lse[:, -tail:], nothing.expand(-1, tail)), "tokens past the last offset see nothing"
        return unpack(out, rows), unpack(lse.transpose(0, 1), rows)

    def real_rows(name: str, x: Tensor) -> Tensor:
        if name == "lse":
            return torch.where(rows[:, None, :], x, 0.0)
        return torch.where(rows[:, None, :, None], x, 0.0) if name == "out" else x

    expected = expect(whole).map(real_rows)
    in_batch = {name: real_rows(name, x) for name, x in observe(subject, whole).items()}
    return expected.judge(in_batch, "padded") + expected.judge(under_poison(by_packing, whole), "packed")


def _sees_nothing(call: Call) -> tuple[Tensor, Tensor]:
    """Rows without keys, bool `[B, Hq, Lq]`, and keys that no row of their group sees, bool `[B, Hk, Lk]`."""
    visible = call.visible()
    Hk = call.k.shape[1]
    seen = visible.any(2).unflatten(1, (Hk, call.q.shape[1] // Hk)).any(2)
    return ~visible.any(-1), ~seen


@law(applies=lambda case: case.mask != "none" or case.lengths[1] == 0, limit=80)
def empty_rows_are_zero(case: Case, subject: Subject) -> list[Verdict]:
    """A row that sees no key: out 0, lse -inf or the sink, dq 0; a key that no row sees: dk and dv 0. All exactly."""
    call = build(case, subject.device)
    results = observe(subject, call)
    rows, keys = _sees_nothing(call)
    sink = call.options.get("sink")
    lonely = torch.full_like(results["lse"], -torch.inf)
    if sink is not None:
        lonely = sink.to(lonely.dtype)[None, :, None].expand_as(lonely)
    assert not results["out"][rows].any(), "out of a row without keys"
    assert torch.equal(results["lse"][rows], lonely[rows]), "lse of a row without keys"
    assert bool((results["lse"][~rows] > -torch.inf).all()), "lse of a row with keys"
    assert not results["grad q"][rows].any(), "dq of a row without keys"
    assert not results["grad k"][keys].any(), "dk of a key without rows"
    assert not results["grad v"][keys].any(), "dv of a key without rows"
    assert not any(bool(x.isnan().any()) for x in results.values())
    return []


def _hiding(case: Case, device: str) -> Call:
    """The call with its last keys hidden from everyone as well, a different number in each batch element."""
    call = build(case, device).map(_contiguous)
    Lk = case.lengths[1]
    kept = torch.tensor([max(0, Lk - 2 - 3 * b) for b in range(case.batch)], device=device)
    hidden = masks.padding(kept)
    return call.with_arguments(mask=hidden if call.mask is None else call.mask & hidden)  # type: ignore[arg-type]


@law(applies=lambda case: case.lengths[1] > 1 and not case.empty, limit=60)
def hidden_keys_change_nothing(case: Case, subject: Subject) -> list[Verdict]:
    """What is stored in keys and values that nobody sees changes nothing, be it NaN or inf, and gets a gradient of exactly 0.

    Finite values change no bit. NaN and inf may send the call along another route, which is within the error budget, and is the same
    for all of them.
    """
    call = _hiding(case, subject.device)
    _, keys = _sees_nothing(call)

    def store(value: float) -> Call:
        hidden = keys[..., None]
        return call.with_arguments(k=torch.where(hidden, value, call.k), v=torch.where(hidden, value, call.v))

    clean = observe(subject, store(0.0))
    tolerance.check_identical(clean, observe(subject, store(7.0)), context=f"7 in hidden keys: {case.name}")
    expected = expect(store(0.0))
    spoiled = {value: observe(subject, store(value)) for value in (float("nan"), torch.inf, -torch.inf)}
    for value, results in spoiled.items():
        tolerance.check_identical(results, spoiled[torch.inf], context=f"{value} and inf in hidden keys: {case.name}")
        assert not results["grad k"][keys].any()
        assert not results["grad v"][keys].any()
    return expected.judge(clean, "clean") + expected.judge(spoiled[torch.inf], "inf in hidden keys")


@law(applies=lambda case: case.bias in ("BHQK", "QK", "B1QK", "HQK") and case.mask != "none" and not case.empty, limit=25)
def hidden_bias_changes_nothing(case: Case, subject: Subject) -> list[Verdict]:
    """NaN and inf in the bias of pairs that the mask hides change nothing and get a gradient of exactly 0."""
    call = build(case, subject.device)
    bias = call.options["bias"]
    seen = call.visible().to(torch.float32).sum_to_size(bias.shape) > 0
    expected, verdicts = expect(call), []
    for value in (float("nan"), torch.inf, -torch.inf):
        results = observe(subject, call.with_arguments(bias=torch.where(seen, bias, value)))
        assert not results["grad bias"][~seen].any()
        verdicts += expected.judge(results, f"{value} in the hidden bias")
    return verdicts


def _mild(case: Case) -> bool:
    """Whether NaN is the only thing that can be wrong: no weight underflows or is dropped."""
    return case.values in ("gaussian", "structured") and not case.dropout_p and not case.empty


@law(applies=lambda case: _mild(case) and case.mask not in ("none", "full", "empty"), limit=40)
def a_row_feels_only_the_keys_it_sees(case: Case, subject: Subject) -> list[Verdict]:
    """NaN in a key or a value turns exactly the rows that see it into NaN."""
    call = build(case, subject.device).map(_contiguous)
    share = call.visible().float().mean((0, 1, 2))
    key = int((share - 0.5).abs().argmin())
    feels = call.visible()[..., key]  # [B, Hq, Lq]
    expected, verdicts = expect(call), []
    for name in ("k", "v"):
        spoiled = _contiguous(getattr(call, name))
        spoiled[:, :, key] = float("nan")
        results = observe(subject, call.with_arguments(**{name: spoiled}), wanted=())
        assert bool(results["out"][feels].isnan().all()), f"out of a row that sees NaN in {name}"
        if name == "k":
            assert bool(results["lse"][feels].isnan().all()), "lse of a row that sees NaN in k"
        verdicts += _untouched(expected, results, feels, name)
    return verdicts


@law(applies=_mild, limit=40)
def a_query_keeps_its_nan_to_itself(case: Case, subject: Subject) -> list[Verdict]:
    """NaN in a query is not lost: its out and lse are NaN, unless it sees no key; and all other rows are as before."""
    call = build(case, subject.device).map(_contiguous)
    row = case.seed % case.lengths[0]
    spoiled = _contiguous(call.q)
    spoiled[:, :, row, 0] = float("nan")
    feels = torch.zeros(call.q.shape[:3], dtype=torch.bool, device=call.q.device)
    feels[:, :, row] = call.visible()[:, :, row].any(-1)
    results = observe(subject, call.with_arguments(q=spoiled), wanted=())
    assert bool(results["out"][feels].isnan().all()), "out of the row"
    assert bool(results["lse"][feels].isnan().all()), "lse of the row"
    return _untouched(expect(call), results, feels, "q")


def _untouched(expected: Expectation, results: dict[str, Tensor], feels: Tensor, name: str) -> list[Verdict]:
    """Verdicts on the rows that do not feel a NaN in the argument `name`."""
    others = expected.map(lambda result, x: x[~feels] if result in ("out", "lse") else x)
    return others.judge({result: x[~feels] for result, x in results.items()}, f"NaN in {name}")


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


@law(applies=lambda case: sum((case.sink, bool(case.alibi), bool(case.bias))) > 1 and not case.empty, limit=12)
def each_argument_alone_gets_its_gradient(case: Case, subject: Subject) -> list[Verdict]:
    """If one argument asks for a gradient it gets the right one, and the others get None."""
    call, expected = prepare(case, subject.device)
    verdicts = []
    for name in call.arguments:
        verdicts += expected.judge(observe(subject, call, wanted=(name,)), f"only {name}")
        leaves = {n: x.detach().requires_grad_(n == name) for n, x in call.map(_contiguous).arguments.items()}
        out, lse = subject.attention(call.with_arguments(**leaves))
        (out.float().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()).backward()
        assert [n for n, leaf in leaves.items() if leaf.grad is not None] == [name]
    out, lse = subject.attention(call)
    assert not out.requires_grad
    assert not lse.requires_grad
    return verdicts


@law(applies=lambda case: case.dropout_p > 0 and not case.empty and case.lengths[1] > 1, limit=25)
def dropout_is_the_published_generator(case: Case, subject: Subject) -> list[Verdict]:
    """Exactly the probabilities are dropped that Philox says, for an int seed and for a tensor; another seed drops others."""
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
    if out.numel() > 200 and bool(call.visible().any()):
        other, _ = subject.attention(dataclasses.replace(probe, options=plain | {"seed": plain["seed"] + 1}))
        assert not torch.equal(out, other)
    return []


@law(applies=lambda case: True, limit=50)
def repeats_are_bit_identical(case: Case, subject: Subject) -> list[Verdict]:
    """The same call twice gives the same bits; for dq, under `deterministic=True`. Inputs are left as they were."""
    call = build(case, subject.device)
    before = {name: x.clone() for name, x in call.arguments.items()}
    first, second = (observe(subject, call, deterministic=True) for _ in range(2))
    tolerance.check_identical(first, second, context=case.name)
    first, second = (observe(subject, call) for _ in range(2))
    always = [name for name in first if name != "grad q"]
    tolerance.check_identical({n: first[n] for n in always}, {n: second[n] for n in always}, context=case.name)
    tolerance.check_identical(dict(call.arguments), before, context="inputs")
    out = tilefold.attention(call.q, call.k, call.v, backend=subject.backend, **call.options)
    assert torch.equal(out, first["out"]), "return_lse does not change out"
    return []
