"""Derivatives of every kind, and everything that PyTorch wraps around a call: compile, functorch, autocast,
checkpoint, export.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import tilefold
from tilefold import attention, attention_varlen, errors, masks, reference
from tilefold.testing import evaluate, tolerance
from tilefold.testing.cases import Call

B, HQ, HK, LQ, LK, D, DV = 2, 2, 1, 3, 4, 2, 3


def tensors(dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(B, HQ, LQ, D, dtype=dtype, requires_grad=requires_grad)
    k = torch.randn(B, HK, LK, D, dtype=dtype, requires_grad=requires_grad)
    v = torch.randn(B, HK, LK, DV, dtype=dtype, requires_grad=requires_grad)
    return q, k, v


def option(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


#: Every option, alone and together: a function that draws the keyword arguments.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: {"scale": 0.7},
    "softcap": lambda: {"softcap": 1.5},
    "alibi H": lambda: {"alibi_slopes": option(HQ)},
    "alibi BH": lambda: {"alibi_slopes": option(B, HQ)},
    "bias QK": lambda: {"bias": option(LQ, LK)},
    "bias BHQK": lambda: {"bias": option(B, HQ, LQ, LK)},
    "bias 1H1K": lambda: {"bias": option(1, HQ, 1, LK)},
    "bias B1Q1": lambda: {"bias": option(B, 1, LQ, 1)},
    "sink": lambda: {"sink": option(HQ)},
    "dropout": lambda: {"dropout_p": 0.4, "seed": 3},
    "causal": lambda: {"mask": masks.causal()},
    "causal top-left": lambda: {"mask": masks.causal(align="top-left")},
    "window": lambda: {"mask": masks.window(1, 1)},
    "padding": lambda: {"mask": masks.padding(torch.tensor([2, 4]))},
    "documents": lambda: {
        "mask": masks.documents(torch.tensor([0, 1, 3]), torch.tensor([0, 3, 4]), within=masks.causal())
    },
    "dense, one row empty": lambda: {
        "mask": masks.dense(torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 0]]).bool())
    },
    "everything": lambda: {
        "mask": masks.causal(),
        "scale": 0.8,
        "softcap": 2.0,
        "alibi_slopes": option(B, HQ),
        "bias": option(HQ, LQ, LK),
        "sink": option(HQ),
        "dropout_p": 0.2,
        "seed": 5,
    },
}
options = pytest.mark.parametrize("draw", OPTIONS.values(), ids=OPTIONS.keys())


def as_function(
    keywords: dict[str, Any], run: Callable[..., Any] = attention
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """The call as a function of its differentiable options, which follow q, k, v, and those options. An lse
    of -inf is shown as 0.
    """
    names = [name for name, x in keywords.items() if isinstance(x, Tensor)]
    if run is reference.attention and "seed" in keywords:
        keywords = keywords | {"seed": torch.tensor(keywords["seed"])}
    fixed = {name: x for name, x in keywords.items() if name not in names}
    more = {} if run is reference.attention else {"return_lse": True}

    def function(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = run(q, k, v, **fixed, **dict(zip(names, values, strict=True)), **more)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    return function, tuple(keywords[name] for name in names)


def scalar(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """A number in which out and lse both count, not linearly."""

    def number(*args: Tensor) -> Tensor:
        out, lse = function(*args)
        return (out.sin() * (1 + out)).sum() + (lse * lse).sum()

    return number


# Derivatives.


@options
def test_first_derivatives_are_those_of_finite_differences(draw: Callable[[], dict[str, Any]]) -> None:
    function, extra = as_function(draw())
    assert torch.autograd.gradcheck(function, (*tensors(), *extra))


@options
def test_second_derivatives_are_those_of_finite_differences(draw: Callable[[], dict[str, Any]]) -> None:
    function, extra = as_function(draw())
    assert torch.autograd.gradgradcheck(function, (*tensors(), *extra))


@options
def test_forward_mode_agrees_with_finite_differences(draw: Callable[[], dict[str, Any]]) -> None:
    function, extra = as_function(draw())
    assert torch.autograd.gradcheck(
        function, (*tensors(), *extra), check_forward_ad=True, check_backward_ad=False
    )


@options
def test_forward_over_reverse_agrees_with_finite_differences(draw: Callable[[], dict[str, Any]]) -> None:
    function, extra = as_function(draw())
    assert torch.autograd.gradgradcheck(
        function,
        (*tensors(), *extra),
        check_fwd_over_rev=True,
        check_rev_over_rev=False,
        check_undefined_grad=False,
    )


@options
def test_second_derivatives_are_those_of_the_definition(draw: Callable[[], dict[str, Any]]) -> None:
    """The whole Hessian-vector product of a scalar, exactly as autograd gets it from the dense definition."""
    keywords, inputs = draw(), tensors()
    products = []
    for run in (attention, reference.attention):
        function, extra = as_function(keywords, run)
        leaves = [x.detach().requires_grad_() for x in (*inputs, *extra)]
        first = torch.autograd.grad(scalar(function)(*leaves), leaves, create_graph=True)
        torch.manual_seed(4)
        product = sum((torch.randn(x.shape, dtype=x.dtype) * x).sum() for x in first)
        assert isinstance(product, Tensor)
        products.append(torch.autograd.grad(product, leaves))
    for mine, definition in zip(*products, strict=True):
        torch.testing.assert_close(mine, definition)
        assert mine.abs().sum() > 0


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_squared_gradient_can_be_differentiated(mask: masks.Mask | None, dtype: torch.dtype) -> None:
    """pytorch/pytorch#116350: second derivatives failed with an internal message."""

    def square(run: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
        result = run(*leaves, mask=mask)
        out = result[0] if isinstance(result, tuple) else result
        (g,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
        (g**2).sum().backward()
        return [x.grad for x in leaves if x.grad is not None]

    verdicts = []
    for _ in range(6):
        draws = [torch.randn(2, 2, 16, 8).to(dtype) for _ in range(3)]
        mine, truth, plain = (
            dict(zip("qkv", square(run, [x.to(d).clone().requires_grad_() for x in draws]), strict=True))
            for run, d in (
                (attention, dtype),
                (reference.attention, torch.float64),
                (reference.attention, torch.float32),
            )
        )
        verdicts.append(tolerance.judge_all(mine, truth, [plain]))
        assert all(x.abs().max() > 0 for x in mine.values())
    tolerance.assert_within(tolerance.pool(verdicts), "second order")


def test_a_third_derivative_is_refused() -> None:
    q, k, v = tensors()
    (first,) = torch.autograd.grad(attention(q, k, v).sin().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), q, create_graph=True)
    with pytest.raises(
        errors.DerivativeError, match=r"^attention: expected derivatives of at most second order, got a third"
    ) as caught:
        torch.autograd.grad(second.sum(), q)
    assert isinstance(caught.value, NotImplementedError)


def test_an_unused_result_gets_no_gradient_and_breaks_nothing() -> None:
    q, k, v = tensors()
    out, lse = attention(q, k, v, return_lse=True)
    (from_lse,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
    (from_out,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (both,) = torch.autograd.grad(out.sum() + lse.sum(), q)
    torch.testing.assert_close(from_lse + from_out, both)


def test_a_graph_can_be_walked_twice() -> None:
    q, k, v = tensors()
    out = attention(q, k, v, mask=masks.causal())
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_changing_an_input_in_place_before_backward_is_noticed() -> None:
    q, k, v = tensors()
    out = attention(q, k * 1.0, copy := v * 1.0)
    copy.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_grad_and_inference_mode_give_the_same_numbers() -> None:
    q, k, v = tensors()
    expected = attention(q, k, v)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = attention(q, k, v)
        assert not out.requires_grad
        assert torch.equal(out, expected)


# functorch.


@options
def test_functional_derivatives_are_those_of_the_definition(draw: Callable[[], dict[str, Any]]) -> None:
    """Dao-AILab/flash-attention#2071: grad, vjp and jacrev for each argument."""
    keywords, inputs = draw(), tensors(requires_grad=False)
    mine, extra = as_function(keywords)
    definition, _ = as_function(keywords, reference.attention)
    args = (*inputs, *(x.detach() for x in extra))
    every = tuple(range(len(args)))
    for a, b in zip(grad(scalar(mine), every)(*args), grad(scalar(definition), every)(*args), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(jacrev(mine, every)(*args), jacrev(definition, every)(*args), strict=True):
        torch.testing.assert_close(a, b)
    cotangents = tuple(torch.randn_like(x) for x in mine(*args))
    for a, b in zip(vjp(mine, *args)[1](cotangents), vjp(definition, *args)[1](cotangents), strict=True):
        torch.testing.assert_close(a, b)
    tangents = tuple(torch.randn_like(x) for x in args)
    for a, b in zip(jvp(mine, args, tangents)[1], jvp(definition, args, tangents)[1], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["plain", "causal", "softcap", "bias QK", "sink", "everything"])
def test_a_hessian_is_that_of_the_definition(name: str) -> None:
    keywords, inputs = OPTIONS[name](), tensors(requires_grad=False)
    mine, extra = as_function(keywords)
    definition, _ = as_function(keywords, reference.attention)
    args = (*inputs, *(x.detach() for x in extra))
    every = tuple(range(len(args)))
    for row, other in zip(
        hessian(scalar(mine), every)(*args), hessian(scalar(definition), every)(*args), strict=True
    ):
        for a, b in zip(row, other, strict=True):
            torch.testing.assert_close(a, b)


def test_reverse_over_reverse_under_functorch_is_that_of_the_definition() -> None:
    args = tensors(requires_grad=False)
    mine, definition = (
        as_function({"mask": masks.causal()}, run)[0] for run in (attention, reference.attention)
    )
    second = [
        grad(lambda *x, f=f: grad(scalar(f))(*x).sin().sum(), (0, 1, 2))(*args) for f in (mine, definition)
    ]
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 1), (2, 0, None)])
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...]) -> None:
    N = 3
    args = []
    for x, dim in zip(tensors(requires_grad=False), in_dims, strict=True):
        args.append(x if dim is None else torch.stack([x + 0.1 * n for n in range(N)], dim=dim))

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, mask=masks.causal(), return_lse=True)

    mapped = vmap(call, in_dims)(*args)
    for n in range(N):
        one = call(*(x if dim is None else x.select(dim, n) for x, dim in zip(args, in_dims, strict=True)))
        for a, b in zip(mapped, one, strict=True):
            torch.testing.assert_close(a[n], b)


def test_vmap_maps_options_too() -> None:
    q, k, v = tensors(requires_grad=False)
    bias, sink, slopes = (
        torch.randn(5, LQ, LK).double(),
        torch.randn(5, HQ).double(),
        torch.rand(5, HQ).double(),
    )

    def call(bias: Tensor, sink: Tensor, slopes: Tensor) -> Tensor:
        return attention(q, k, v, bias=bias, sink=sink, alibi_slopes=slopes)

    mapped = vmap(call)(bias, sink, slopes)
    for n in range(5):
        torch.testing.assert_close(mapped[n], call(bias[n], sink[n], slopes[n]))


def test_gradients_of_each_sample_are_a_loop_of_gradients() -> None:
    q, k, v = (
        torch.stack([x] * 3) + torch.randn(3, 1, 1, 1, 1).double() for x in tensors(requires_grad=False)
    )
    number = scalar(as_function({"mask": masks.causal()})[0])
    mapped = vmap(grad(number, (0, 1, 2)))(q, k, v)
    for n in range(3):
        for a, b in zip(mapped, grad(number, (0, 1, 2))(q[n], k[n], v[n]), strict=True):
            torch.testing.assert_close(a[n], b)


def test_vmap_over_directions_gives_a_jacobian() -> None:
    q, k, v = tensors(requires_grad=False)
    directions = torch.eye(q.numel(), dtype=q.dtype).reshape(-1, *q.shape)

    def along(run: Callable[..., Any], t: Tensor) -> Tensor:
        return jvp(lambda x: as_function({}, run)[0](x, k, v)[0], (q,), (t,))[1]

    mine, definition = (
        vmap(lambda t, run=run: along(run, t))(directions) for run in (attention, reference.attention)
    )
    torch.testing.assert_close(mine, definition)


def test_dual_tensors_carry_their_tangents() -> None:
    q, k, v = tensors(requires_grad=False)
    tangent = torch.randn_like(k)
    results = []
    for run in (attention, reference.attention):
        function, _ = as_function({"mask": masks.window(2, 0)}, run)
        with fwAD.dual_level():
            results.append([fwAD.unpack_dual(x).tangent for x in function(q, fwAD.make_dual(k, tangent), v)])
    for mine, definition in zip(*results, strict=True):
        torch.testing.assert_close(mine, definition)


# torch.library.


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["plain", "causal", "padding", "documents", "dropout", "everything"])
def test_the_ops_pass_opcheck(name: str, requires_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very arguments with which a call reaches the op, and those of its derivatives' ops."""
    calls: list[tuple[Any, ...]] = []
    forward, backward, second = (
        getattr(torch.ops.tilefold, op).default for op in ("forward", "backward", "second_order")
    )
    monkeypatch.setattr(tilefold.ops.kernels, "unwatched", lambda *_: False)
    monkeypatch.setattr(tilefold.ops, "forward_op", lambda *args: calls.append(args) or forward(*args))
    q, k, v = tensors(torch.float32, requires_grad=False)
    keywords = {
        n: x.detach().to(q.dtype if x.is_floating_point() else x.dtype) if isinstance(x, Tensor) else x
        for n, x in OPTIONS[name]().items()
    }
    out, lse = attention(q, k, v, return_lse=True, **keywords)
    monkeypatch.undo()
    ((*first, seed, mask_tensors, tables, spec, scale, softcap, dropout_p, options),) = calls
    leaves = [x if x is None else x.detach().requires_grad_(requires_grad) for x in first]
    args = (*leaves, seed, mask_tensors, tables, spec, scale, softcap, dropout_p, options)
    assert all("SUCCESS" in result for result in torch.library.opcheck(forward, args).values())
    needs = [x is not None for x in args[:6]]
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    upstream = (dout, dlse, out.detach(), lse.detach(), needs)
    assert all("SUCCESS" in result for result in torch.library.opcheck(backward, (*upstream, *args)).values())
    if not requires_grad:  # its own derivative is refused
        cotangents = [None if x is None else torch.randn_like(x) for x in args[:6]]
        results = torch.library.opcheck(second, (dout, dlse, cotangents, needs, *args))
        assert all("SUCCESS" in result for result in results.values())


# torch.compile.


@pytest.fixture
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(
    function: Callable[..., Any], backend: str = "aot_eager", dynamic: bool | None = True
) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


def outside(mask: masks.Mask | None) -> Callable[..., Tensor]:
    return lambda q, k, v: attention(q, k, v, mask=mask) * 2


INSIDE: dict[str, Callable[..., Tensor]] = {
    "no mask": lambda q, k, v: attention(q, k, v) * 2,
    "causal": lambda q, k, v: attention(q, k, v, mask=masks.causal()) * 2,
    "top-left": lambda q, k, v: attention(q, k, v, mask=masks.causal(align="top-left")) * 2,
    "window": lambda q, k, v: attention(q, k, v, mask=masks.causal() & masks.window(5, 0)) * 2,
    "negated": lambda q, k, v: attention(q, k, v, mask=masks.window(3, 3).complement() | masks.prefix(2)) * 2,
    "padding": lambda q, k, v: (
        attention(q, k, v, mask=masks.padding(k.new_full((2,), 7).long()) & masks.causal()) * 2
    ),
    "softcap": lambda q, k, v: attention(q, k, v, softcap=3.0, scale=0.2) * 2,
    "bias": lambda q, k, v: attention(q, k, v, bias=q[:1, :1, :, :1] + k[:1, :1, :, 0]) * 2,
    "sink": lambda q, k, v: attention(q, k, v, sink=q[0, :, 0, 0]) * 2,
    "dropout": lambda q, k, v: attention(q, k, v, dropout_p=0.3, seed=4) * 2,
    "out and lse": lambda q, k, v: torch.cat([x.flatten() for x in attention(q, k, v, return_lse=True)]),
    "size from a shape": lambda q, k, v: attention(q, k, v, mask=masks.window(q.shape[2] // 2, 0)) * 2,
}
OUTSIDE: dict[str, Callable[..., Tensor]] = {
    "causal": outside(masks.causal()),
    "window": outside(masks.window(4, 2)),
    "padding": outside(masks.padding(torch.tensor([7, 9]))),
    "documents": outside(masks.documents(torch.tensor([0, 4, 9]), within=masks.causal())),
    "dilated": outside(masks.dilated(3, 2)),
    "prefix": outside(masks.prefix(torch.tensor([3, 5])) | masks.causal()),
    "negated": outside(~masks.window(3, 3) | masks.prefix(2)),
}


def check_compiled(function: Callable[..., Tensor], lengths: list[int], **how: Any) -> None:
    run = compiled(function, **how)
    for length in lengths:
        q, k, v = (torch.randn(2, h, length, 8, requires_grad=True) for h in (4, 2, 2))
        results = []
        for f in (function, run):
            out = f(q, k, v)
            results.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
        for mine, eager in zip(*results, strict=True):
            torch.testing.assert_close(mine, eager)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", INSIDE)
def test_a_compiled_call_is_the_same_for_all_lengths(name: str) -> None:
    check_compiled(INSIDE[name], [16, 33, 9, 64, 129])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_mask_made_outside_can_be_used_inside(name: str) -> None:
    check_compiled(OUTSIDE[name], [16, 33, 9, 64])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["causal", "window", "dropout", "out and lse"])
def test_other_lengths_compile_nothing_more(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(INSIDE[name], fullgraph=True, dynamic=True, backend=counter)
    compiled_so_far = []
    with torch.no_grad():
        for length in (16, 33, 9, 64, 129, 200):
            q, k, v = (torch.randn(2, h, length, 8) for h in (4, 2, 2))
            torch.testing.assert_close(run(q, k, v), INSIDE[name](q, k, v))
            compiled_so_far.append(counter.frame_count)
    assert set(compiled_so_far) == {compiled_so_far[0]}


@pytest.mark.usefixtures("fresh_dynamo")
def test_static_lengths_compile_too() -> None:
    check_compiled(INSIDE["causal"], [16, 33], dynamic=False)


@pytest.mark.usefixtures("fresh_dynamo")
def test_tensors_of_a_mask_are_inputs_not_constants() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return attention(q, k, v, mask=masks.padding(lengths))

    run = compiled(call)
    q, k, v = (torch.randn(2, 2, 12, 8) for _ in range(3))
    for lengths in (torch.tensor([3, 12]), torch.tensor([0, 5]), torch.tensor([12, 12])):
        torch.testing.assert_close(run(q, k, v, lengths), call(q, k, v, lengths))


@pytest.mark.usefixtures("fresh_dynamo")
def test_packed_calls_compile() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return attention_varlen(
            q, k, v, cu, cu, mask=masks.causal(), alibi_slopes=q.new_ones(2), dropout_p=0.1, seed=3
        )

    run = compiled(call)
    for lengths in ([3, 8, 1], [10, 2, 20]):
        cu = torch.tensor([0, *lengths]).cumsum(0)
        q, k, v = (torch.randn(int(cu[-1]), 2, 8, requires_grad=True) for _ in range(3))
        results = [(out := f(q, k, v, cu), *torch.autograd.grad(out.sum(), (q, k, v))) for f in (call, run)]
        for mine, eager in zip(*results, strict=True):
            torch.testing.assert_close(mine, eager)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_predicate_must_be_built_before_a_compiled_region() -> None:
    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
    mask = masks.predicate(lambda b, h, q, k: (q + k) % 3 > 0)
    with pytest.raises(Exception, match=r"built before|build\(") as caught:
        compiled(outside(mask))(q, k, v)
    assert not isinstance(caught.value, AssertionError)
    built = mask.build(1, 2, 12, 12)
    torch.testing.assert_close(compiled(outside(built), dynamic=False)(q, k, v), outside(mask)(q, k, v))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_mask_built_for_another_length_is_refused_compiled_and_not() -> None:
    """pytorch/pytorch#136232: a mask built for a longer sequence gave NaN in the compiled backward."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask) -> Tensor:
        out, lse = attention(q, k, v, mask=mask, return_lse=True)
        return out * lse.exp()[..., None]

    built = masks.predicate(lambda b, h, q, k: q >= k).build(1, 12, 128, 128)
    short = [torch.randn(1, 12, 120, 64, requires_grad=True) for _ in range(3)]
    with pytest.raises(errors.MaskError, match="128"):
        call(*short, built)
    with pytest.raises(Exception, match=r"MaskError.*\(128, 128\)"):
        compiled(call)(*short, built)
    run = compiled(call)
    for length in (120, 128) * 3:
        q, k, v = (torch.randn(1, 12, length, 64, requires_grad=True) for _ in range(3))
        gradients = []
        for f in (call, run):
            out = f(q, k, v, masks.causal())
            gradients.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
        for mine, eager in zip(*gradients, strict=True):
            assert not mine.isnan().any()
            torch.testing.assert_close(mine, eager)


@pytest.mark.usefixtures("fresh_dynamo")
def test_wrong_calls_are_refused_in_compiled_code_in_the_same_words() -> None:
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 6, 8)
    # Dynamo wraps the error and writes its text as source, with escaped quotes.
    with pytest.raises(Exception, match=r"ShapeError\(.*expected .*k\W+s length 5\b.*got .*6"):
        compiled(INSIDE["no mask"])(q, k, v)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["causal", "padding", "dropout"])
def test_inductor_gives_the_same(name: str) -> None:
    check_compiled(INSIDE[name], [16, 33, 64], backend="inductor")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty_calls_compile(sizes: tuple[int, int, int]) -> None:
    """Dao-AILab/flash-attention#1159: static graphs rely on empty batches."""
    batch, rows, keys = sizes
    q = torch.randn(batch, 2, rows, 8, requires_grad=True)
    k, v = (torch.randn(batch, 2, keys, 8, requires_grad=True) for _ in range(2))
    out = compiled(INSIDE["causal"], dynamic=None)(q, k, v)
    assert out.shape == q.shape
    assert not out.any()
    for x, g in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert g.shape == x.shape
        assert not g.any()


# Autocast, checkpoint, export, modules.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_mixed_inputs_and_returns_gradients_in_their_dtypes(dtype: torch.dtype) -> None:
    """facebookresearch/xformers#1046: q and k arrive in float32 and v in half, since norms promote."""
    q, k = (torch.randn(2, 8, 32, 64, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 8, 32, 64, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        out, lse = attention(q, k, v, return_lse=True)
        explicit = attention(q.to(dtype), k.to(dtype), v)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, explicit)
    out.float().sum().backward()
    assert [x.grad.dtype for x in (q, k, v) if x.grad is not None] == [torch.float32, torch.float32, dtype]
    with pytest.raises(errors.DtypeError, match="q, k, v: expected one dtype outside autocast"):
        attention(q, k, v)


def test_autocast_casts_packed_calls_and_leaves_float64_alone() -> None:
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    cu = torch.tensor([0, 3, 8])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention_varlen(q, k.bfloat16(), v, cu, cu).dtype == torch.bfloat16
        wide = attention(*tensors())
    assert wide.dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert attention_varlen(q, k, v, cu, cu).dtype == torch.float32


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_checkpoint_changes_nothing(dropout_p: float) -> None:
    """Recomputation draws the same dropout: checkpoint restores the generator of the seed."""
    q, k, v = tensors()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=masks.causal(), dropout_p=dropout_p).tanh()

    results = []
    for wrapped in (False, True):
        torch.manual_seed(7)
        out = checkpoint(block, q, k, v, use_reentrant=False) if wrapped else block(q, k, v)
        assert isinstance(out, Tensor)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Block(torch.nn.Module):
    """A layer around one call, with what a trained model may hold."""

    def __init__(self, mask: masks.Mask | None = None) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 3 * 16)
        self.sink = torch.nn.Parameter(torch.randn(2))
        self.mask = masks.causal() & masks.window(6, 0) if mask is None else mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out, lse = attention(q, k, v, mask=self.mask, sink=self.sink, return_lse=True)
        return out.transpose(1, 2).flatten(-2) + lse.mean()


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_gives_the_same_at_other_lengths(strict: bool) -> None:
    block = Block()
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(
        block, (torch.randn(2, 20, 16),), dynamic_shapes={"x": {1: length}}, strict=strict
    )
    for n in (20, 7, 65):
        x = torch.randn(2, n, 16)
        torch.testing.assert_close(program.module()(x), block(x))


def test_an_exported_program_can_be_saved_and_loaded() -> None:
    block = Block(masks.documents(torch.tensor([0, 5, 12]), within=masks.causal()))
    x = torch.randn(2, 12, 16)
    program = torch.export.export(block, (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x), block(x))


def test_a_functional_call_differentiates_parameters() -> None:
    block, x = Block().double(), torch.randn(2, 12, 16).double()
    parameters = {name: p.detach() for name, p in block.named_parameters()}
    gradients = grad(lambda p: functional_call(block, p, (x,)).sin().sum())(parameters)
    block(x).sin().sum().backward()
    for name, p in block.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(gradients[name], p.grad)


def test_results_on_meta_and_fake_tensors_have_the_real_shapes_and_strides() -> None:
    q, k, v = tensors(torch.bfloat16, requires_grad=False)
    real = attention(q, k, v, mask=masks.causal(), return_lse=True)
    fake_mode = torch._subclasses.FakeTensorMode()
    with fake_mode:
        fake = attention(*(fake_mode.from_tensor(x) for x in (q, k, v)), mask=masks.causal(), return_lse=True)
    meta = attention(*(x.to("meta") for x in (q, k, v)), mask=masks.causal(), return_lse=True)
    for a, b, c in zip(real, fake, meta, strict=True):
        assert a.shape == b.shape == c.shape
        assert a.dtype == b.dtype == c.dtype
        assert a.stride() == b.stride() == c.stride()


def test_evaluation_and_calls_share_no_state() -> None:
    """A call inside a transform leaves ordinary calls alone, and the other way round."""
    q, k, v = tensors(requires_grad=False)
    before = attention(q, k, v)
    vmap(grad(lambda q: attention(q, k, v).sum()))(q[None])
    call = Call(q, k, v, torch.randn(B, HQ, LQ, DV).double(), None, {})
    evaluate.expect(call).check(
        evaluate.gradients(evaluate.Subject(None).attention, call), "after a transform"
    )
    assert torch.equal(attention(q, k, v), before)
