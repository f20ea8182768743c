"""Bugs once reported against other attention libraries, kept out by their whole kind: numerics, dropout,
gradients, layouts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold import Partial, attention, attention_varlen, masks, merge, nn, reference
from tilefold.problem import Positions
from tilefold.testing import evaluate, inputs, textbook, tolerance
from tilefold.testing.cases import Call

SUBJECT = evaluate.Subject(None)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draws(
    q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """q `[B, Hq, Lq, D]`, k and v `[B, Hk, Lk, D]`, Gaussian."""
    return torch.randn(q).to(dtype), torch.randn(k).to(dtype), torch.randn(k).to(dtype)


def check(
    build: Callable[[], Call], context: str, wanted: tuple[str, ...] | None = None
) -> dict[str, Tensor]:
    """The results of the first of several draws, all of which are held against the error budget together."""
    calls = [build() for _ in range(12)]
    results = [evaluate.observe(SUBJECT, call, wanted) for call in calls]
    verdicts = [evaluate.expect(call).judge(x) for call, x in zip(calls, results, strict=True)]
    tolerance.assert_within(tolerance.pool(verdicts), context)
    return results[0]


# Extreme scores.


def far_below(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.full((1, 1, 1, 128), 400.0)
    q[..., -1] = 1.0
    k = torch.full((1, 1, 6, 128), -16.0)
    k[0, 0, :, -1] = 8.0 * torch.arange(6)
    return q.to(dtype), k.to(dtype), torch.eye(6, dtype=dtype)[None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 5]])
def test_scores_far_below_zero_are_not_an_empty_row(dtype: torch.dtype, cuts: list[int]) -> None:
    """flashinfer-ai/flashinfer#4267: a running maximum that starts from a finite sentinel zeroes rows below
    it.
    """
    q, k, v = far_below(dtype)
    edges = [0, *cuts, 6]
    parts = [
        Partial(*attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True))
        for a, b in itertools.pairwise(edges)
    ]
    out, lse = merge(parts)
    expected = torch.softmax(torch.arange(6.0) * 8 / math.sqrt(128), 0)
    true_out, true_lse = reference.attention(*(x.double() for x in (q, k, v)))
    # One unit of a score near -71842 in float32 is 0.0078; 0.02 is what the report asks for.
    unit = 71842 * torch.finfo(torch.float32).eps
    assert float((out[0, 0, 0].float() - expected).abs().max()) <= 0.02
    assert float((lse - true_lse).abs()) <= 2 * unit
    assert tolerance.max_error(out, true_out) <= 2 * unit + torch.finfo(dtype).eps
    assert float(lse) == pytest.approx(-71837.85, abs=0.05)
    hidden = attention(q, k, v, mask=masks.empty(), return_lse=True)
    assert float(hidden[1]) == -torch.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 1e6}, {"mask": masks.causal()}, {"bias": torch.zeros(4)}],
    ids=["plain", "softcap", "causal", "bias"],
)
def test_dot_products_beyond_half_precision_are_accumulated_wider(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """pytorch/pytorch#119131: fp16 dot products past 65504 gave NaN where the fused path did not."""
    q = torch.full((1, 1, 4, 64), 350.0)
    k = torch.full((1, 1, 4, 64), 350.0)
    k[0, 0, :, 0] += 0.25 * torch.arange(4)
    q, k, v = q.to(dtype), k.to(dtype), torch.eye(4, dtype=dtype)[None, None]
    if isinstance(options.get("bias"), Tensor):
        options = options | {"bias": options["bias"].to(dtype)}
    out, lse = attention(q, k, v, return_lse=True, **options)
    wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items()}
    true_out, true_lse = reference.attention(*(x.double() for x in (q, k, v)), **wide)
    unit = 980000 * torch.finfo(torch.float32).eps
    assert not out.isnan().any()
    assert tolerance.max_error(lse, true_lse) <= unit
    # These products are exact in float32: only tanh rounds a score. The report asks for 0.002.
    assert tolerance.max_error(out, true_out) <= (2 * unit if "softcap" in options else 2e-3)


@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_a_common_offset_of_the_scores_changes_only_the_lse(shift: float) -> None:
    q, k, v = draws((1, 2, 20, 16), (1, 2, 30, 16))
    out, lse = attention(q, k, v, return_lse=True)
    moved, moved_lse = attention(q, k, v, bias=torch.full((1,), shift), return_lse=True)
    unit = abs(shift) * torch.finfo(torch.float32).eps
    assert tolerance.max_error(moved, out.double()) <= 4 * unit * float(v.abs().max())
    assert tolerance.max_error(moved_lse, lse.double() + shift) <= 4 * unit


# Head sizes.


@pytest.mark.parametrize("D", [1, 3, 40, 72, 80, 96, 104, 120, 256])
def test_every_head_size_is_computed_with_its_own_scale(D: int) -> None:
    """thu-ml/SageAttention#23: a head size of 72 was accepted and gave garbage."""
    for options in ({}, {"mask": masks.causal()}):

        def build(options: dict[str, Any] = options) -> Call:
            q, k, v = draws((1, 2, 128, D), (1, 2, 128, D), torch.float16)
            return Call(q, k, v, torch.randn_like(q), None, options)

        check(build, f"D={D} {options}")


# Sizes past 32 bits.


@pytest.mark.parametrize(
    "options, S",
    [
        ("bias", 65536),
        ("bias", 65537),
        ("bias", 73728),
        ("dropout", 73728),
        pytest.param("dropout", 65537, marks=pytest.mark.slow),
    ],
)
def test_nothing_wraps_past_two_to_the_thirty_two(options: str, S: int) -> None:
    """pytorch/pytorch#162588: late rows were wrong once Lq * Lk passed 2^32. Sampled rows against the
    definition, forward and dk.
    """
    left, D = 40, 8
    q, k, v = draws((1, 1, S, D), (1, 1, S, D))
    bias = torch.randn(S) if options == "bias" else None
    more: dict[str, Any] = {"dropout_p": 0.3, "seed": 9} if bias is None else {"bias": bias[None, :]}
    dout = torch.zeros(1, 1, S, D)
    rows = sorted({0, 1, 2**32 // S - 1, min(2**32 // S, S - 1), S - 2, S - 1})
    dout[:, :, rows] = 1.0
    leaf = k.clone().requires_grad_()
    out = attention(q, leaf, v, mask=masks.window(left, 0), **more)
    (dk,) = torch.autograd.grad(out, leaf, dout)
    true_dk = torch.zeros_like(k, dtype=torch.float64)
    for r in rows:
        first = max(0, r - left)
        near = k[:, :, first : r + 1].double().requires_grad_()
        local: dict[str, Any] = {}
        if bias is not None:
            local["bias"] = bias[None, first : r + 1].double()
        else:
            local |= {"dropout_p": 0.3, "seed": torch.tensor(9)}
        at = Positions(q_origin=r, k_origin=first, diagonal=0)
        true, _ = reference.attention(
            q[:, :, r : r + 1].double(), near, v[:, :, first : r + 1].double(), positions=at, **local
        )
        assert tolerance.max_error(out[:, :, r : r + 1], true) <= 16 * torch.finfo(torch.float32).eps * float(
            v.abs().max()
        ), r
        true_dk[:, :, first : r + 1] += torch.autograd.grad(true.sum(), near)[0]
    seen = true_dk.abs().sum(-1) > 0
    assert not dk[~seen].any()
    torch.testing.assert_close(dk.double(), true_dk, rtol=1e-4, atol=1e-5)


# Layouts of the incoming gradient.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["transposed", "scalar_expanded", "strided", "sliced"])
def test_the_layout_of_the_incoming_gradient_does_not_matter(kind: str, dtype: torch.dtype) -> None:
    """Dao-AILab/flash-attention#355: backward was wrong unless the incoming gradient was contiguous."""

    def build() -> Call:
        q, k, v = (torch.randn(2, 32, heads, 128).transpose(1, 2).to(dtype) for heads in (4, 1, 1))
        return Call(q, k, v, inputs.LAYOUTS[kind](torch.randn(2, 4, 32, 128).to(dtype)), None, {})

    call = build()
    assert call.dout is not None
    assert not call.dout.is_contiguous()
    plain = dataclasses.replace(call, dout=call.dout.contiguous().clone())
    results = [evaluate.observe(SUBJECT, c, deterministic=True) for c in (call, plain)]
    tolerance.check_identical(*results, context=kind)
    check(build, kind)


# Dropout.


def test_a_module_in_evaluation_does_not_drop() -> None:
    """pytorch/pytorch#124464: dropout was applied during evaluation."""
    layer = nn.Attention(64, 4, dropout=0.5).eval()
    plain = nn.Attention(64, 4, dropout=0.0)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(1, 32, 64)
    assert torch.equal(layer(x), layer(x))
    assert torch.equal(layer(x), plain(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_a_seed_decides_alone_which_probabilities_are_dropped() -> None:
    """pytorch/pytorch#124464 and facebookresearch/xformers#173: not the module's mode, nor addresses, nor
    other draws.
    """
    q, k, v = (x.requires_grad_() for x in draws((1, 4, 32, 16), (1, 4, 32, 16)))

    def run(seed: int) -> tuple[Tensor, ...]:
        out = attention(q, k, v, dropout_p=0.5, seed=seed)
        return (out, *torch.autograd.grad(out.sum(), (q, k, v)))

    first = run(1)
    junk = [torch.randn(1000 + i) for i in range(20)]
    second = run(1)
    assert len(junk) == 20
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], run(2)[0])
    share = attention(
        torch.zeros_like(q), torch.zeros_like(k), torch.eye(32).expand(1, 4, 32, 32), dropout_p=0.5, seed=1
    )
    assert float((share == 0).float().mean()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(4 * 32 * 32))


# Determinism.


@pytest.mark.parametrize("variant", ["causal", "window", "packed"])
def test_deterministic_calls_are_bit_identical(variant: str) -> None:
    """Dao-AILab/flash-attention#2244: dq differed between runs although determinism was asked for."""
    q, k, v = (x.requires_grad_() for x in draws((2, 8, 300, 32), (2, 2, 300, 32), torch.bfloat16))
    mask = masks.causal() if variant != "window" else masks.window(50, 0)
    cu = torch.tensor([0, 90, 91, 300])
    runs = []
    for _ in range(6):
        if variant == "packed":
            out, lse = attention_varlen(
                *(x[0].transpose(0, 1) for x in (q, k, v)),
                cu,
                cu,
                mask=mask,
                deterministic=True,
                return_lse=True,
            )
        else:
            out, lse = attention(q, k, v, mask=mask, deterministic=True, return_lse=True)
        gradients = torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v))
        runs.append(dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)))
    for other in runs[1:]:
        tolerance.check_identical(runs[0], other, context=variant)


# Gradients.


@pytest.mark.parametrize("only", ["bias", "sink", "alibi_slopes", "q", "k", "v"])
@pytest.mark.parametrize("D", [16, 64])
def test_a_single_argument_can_ask_for_its_gradient(only: str, D: int) -> None:
    """pytorch/pytorch#148476: backward crashed when only the additive mask required a gradient."""
    for extra in ({}, {"mask": masks.causal()}):

        def build(extra: dict[str, Any] = extra) -> Call:
            more = {"bias": torch.randn(1, 1, 64, 64), "sink": torch.randn(2), "alibi_slopes": torch.rand(2)}
            return Call(
                *draws((1, 2, 64, D), (1, 1, 64, D)), torch.ones(1, 2, 64, D), None, {**more, **extra}
            )

        results = check(build, only, wanted=(only,))
        assert results[f"grad {only}"].abs().max() > 0
        call = build()
        leaves = {n: x.clone().requires_grad_(n == only) for n, x in call.arguments.items()}
        changed = call.with_arguments(**leaves)
        attention(changed.q, changed.k, changed.v, **changed.options).sum().backward()
        assert {n for n, x in leaves.items() if x.grad is not None} == {only}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_flow_through_the_lse(causal: bool, dtype: torch.dtype) -> None:
    """Dao-AILab/flash-attention#889: the lse was returned and its gradient silently dropped."""
    hidden = torch.ones(64, 64, dtype=torch.bool)
    hidden[5] = False
    mask = masks.dense(hidden) & (masks.causal() if causal else masks.full())

    def losses(out: Tensor, lse: Tensor) -> list[Tensor]:
        seen = torch.where(lse == -torch.inf, 0.0, lse)
        return [seen.sum(), out.sum() + 0.1 * seen.square().sum()]

    def derive(run: Any, tensors: list[Tensor], **more: Any) -> dict[str, Tensor]:
        found = {}
        for index, loss in enumerate(losses(*run(*tensors, mask=mask, **more))):
            gradients = torch.autograd.grad(
                loss, tensors, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            found |= {f"loss {index} d{name}": g for name, g in zip("qkv", gradients, strict=True)}
        return found

    def by_hand(tensors: list[Tensor]) -> dict[str, Tensor]:
        """The textbook's gradients: delta and the gradient of lse as terms of their own."""
        out, lse = reference.attention(*tensors, mask=mask)
        upstream = [
            torch.autograd.grad(loss, (o, seen), retain_graph=True, allow_unused=True, materialize_grads=True)
            for o, seen in [(out.clone().requires_grad_(), lse.clone().requires_grad_())]
            for loss in losses(o, seen)
        ]
        calls = [Call(*tensors, dout, dlse, {"mask": mask}) for dout, dlse in upstream]
        return {
            f"loss {index} d{name}": textbook.results(call)[f"grad {name}"]
            for index, call in enumerate(calls)
            for name in "qkv"
        }

    verdicts, mine = [], {}
    for _ in range(12):
        leaves = [x.requires_grad_() for x in draws((1, 2, 64, 32), (1, 2, 64, 32), dtype)]
        mine = derive(attention, leaves, return_lse=True)
        truth = derive(reference.attention, [x.detach().double().requires_grad_() for x in leaves])
        plain = derive(reference.attention, [x.detach().requires_grad_() for x in leaves])
        verdicts.append(tolerance.judge_all(mine, truth, [plain, by_hand([x.detach() for x in leaves])]))
    tolerance.assert_within(tolerance.pool(verdicts))
    assert mine["loss 0 dq"].abs().max() > 0
    assert not mine["loss 0 dv"].any()


@pytest.mark.parametrize("S", [256, 200])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": masks.causal()},
        {"mask": masks.window(40, 10)},
        {"softcap": 2.0},
        {"alibi_slopes": torch.tensor([0.1, 0.5])},
        {"mask": masks.causal(), "softcap": 2.0, "alibi_slopes": torch.tensor([0.1, 0.5])},
    ],
    ids=["plain", "causal", "window", "softcap", "alibi", "all"],
)
def test_backward_honours_what_forward_honoured(S: int, options: dict[str, Any]) -> None:
    """triton-lang/triton#5660: gradients were always those of the causal problem."""
    options = {n: x.half() if isinstance(x, Tensor) else x for n, x in options.items()}

    def build() -> Call:
        q, k, v = draws((1, 2, S, 64), (1, 2, S, 64), torch.float16)
        return Call(q, k, v, torch.randn_like(q), None, options)

    check(build, str(options))


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_bias_of_another_dtype_is_converted_not_reinterpreted(
    dtype: torch.dtype, bias_dtype: torch.dtype, requires_grad: bool
) -> None:
    """pytorch/pytorch#191612: an fp32 additive mask (here 0 and -inf) was read as if it were fp16."""
    q, k, v = draws((2, 4, 32, 16), (2, 4, 32, 16), dtype)
    causal = torch.zeros(32, 32, dtype=bias_dtype).masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf)
    bias = causal.requires_grad_(requires_grad)
    out = attention(q, k, v, bias=bias)
    truth, _ = reference.attention(q.double(), k.double(), v.double(), mask=masks.causal())
    plain, _ = reference.attention(q, k, v, mask=masks.causal())
    tolerance.check({"out": out}, {"out": truth}, {"out": plain})
    if requires_grad:
        (gradient,) = torch.autograd.grad(out.float().sum(), bias)
        assert gradient.dtype == bias_dtype
        assert not gradient.isnan().any()
        assert not gradient[causal == -torch.inf].any()


# Heads.


def test_query_heads_read_key_heads_in_blocks() -> None:
    """fla-org/flash-linear-attention#1029, control: heads 0-2 use key head 0 and 3-5 use key head 1."""
    q = torch.randn(1, 6, 64, 64).half()
    k = torch.randn(1, 2, 64, 64).half()
    v = torch.arange(2).half().reshape(1, 2, 1, 1).expand(1, 2, 64, 64)
    out = attention(q, k, v)
    assert not out[:, :3].any()
    torch.testing.assert_close(out[:, 3:], torch.ones_like(out[:, 3:]))
    cu = torch.tensor([0, 64])
    packed = attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), cu, cu)
    torch.testing.assert_close(packed.transpose(0, 1)[None], out)
