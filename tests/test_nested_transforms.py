"""Nested derivatives, in any order of modes, beside the definition; masks hide NaN from all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from tilefold import attention, attention_varlen, errors, masks, reference

SHAPE = (1, 1, 3, 2)


def drawn(*shape: int, count: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(*shape, dtype=dtype) for _ in range(count)]


K, V, T, U = (
    torch.randn(*SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in range(4)
)


def mine(q: Tensor) -> Tensor:
    return attention(q, K, V, mask=masks.causal(), softcap=2.0)


def definition(q: Tensor) -> Tensor:
    return reference.attention(q, K, V, mask=masks.causal(), softcap=2.0)[0]


def square(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda q: f(q).square().sum()


def along(f: Callable[[Tensor], Tensor], direction: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda q: jvp(f, (q,), (direction,))[1]


NESTED: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "forward over forward": lambda f: along(along(f, T), U),
    "all of forward over forward": lambda f: jacfwd(jacfwd(f)),
    "forward over reverse": lambda f: jacfwd(jacrev(f)),
    "reverse over forward": lambda f: jacrev(jacfwd(f)),
    "reverse over forward of a scalar": lambda f: jacrev(jacfwd(square(f))),
    "reverse over reverse": lambda f: jacrev(jacrev(f)),
    "grad of grad": lambda f: grad(square(grad(square(f)))),
    "third order: forward twice over grad": lambda f: along(along(grad(square(f)), T), U),
    "third order: grad over forward twice": lambda f: grad(along(along(square(f), T), U)),
    "third order: grad three times": lambda f: grad(square(grad(square(grad(square(f)))))),
}


@pytest.mark.parametrize("name", NESTED)
def test_any_nesting_is_that_of_the_definition(name: str) -> None:
    (q,) = drawn(*SHAPE)
    torch.testing.assert_close(NESTED[name](mine)(q), NESTED[name](definition)(q))


@pytest.mark.parametrize("options", [{}, {"mask": masks.causal()}, {"softcap": 2.0}])
def test_a_mapped_call_has_an_ordinary_gradient(options: dict[str, Any]) -> None:
    q, (k, v) = (
        torch.randn(3, 1, 2, 8, 4, requires_grad=True),
        drawn(1, 2, 8, 4, count=2, dtype=torch.float32),
    )
    got, want = (
        torch.autograd.grad(outs.square().sum(), q)[0]
        for outs in (
            torch.vmap(lambda x: attention(x, k, v, **options))(q),
            torch.stack([attention(x, k, v, **options) for x in q]),
        )
    )
    torch.testing.assert_close(got, want)


def test_mapped_masks_have_gradients() -> None:
    q, k, v = drawn(1, 2, 8, 4, count=3)
    tables = torch.rand(3, 8, 8) < 0.9

    def loss(q: Tensor, table: Tensor) -> Tensor:
        return attention(q, k, v, mask=masks.dense(table)).square().sum()

    each = torch.stack([grad(loss)(q, table) for table in tables])
    torch.testing.assert_close(vmap(grad(loss), (None, 0))(q, tables), each)


def test_mapped_offsets_have_gradients() -> None:
    (x,), offsets = drawn(8, 2, 4), torch.tensor([[0, 3, 8], [0, 5, 8]])

    def loss(x: Tensor, cu: Tensor) -> Tensor:
        return attention_varlen(x, x, x, cu, cu, mask=masks.causal()).square().sum()

    together = grad(lambda x: vmap(loss, (None, 0))(x, offsets).sum())(x)
    torch.testing.assert_close(together, sum(grad(loss)(x, cu) for cu in offsets))


def test_mapped_masks_under_forward_mode_are_refused() -> None:
    q, k, v = drawn(1, 2, 8, 4, count=3)
    tables = torch.rand(3, 8, 8) < 0.9
    with pytest.raises(errors.DerivativeError, match=r"^mask: expected one whose tensors are not mapped"):
        vmap(lambda m: jvp(lambda q: attention(q, k, v, mask=masks.dense(m)), (q,), (q,))[1])(tables)


def every_derivative(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask) -> list[Tensor]:
    """Tangents of out and lse, second-order gradients, and forward over reverse."""
    torch.manual_seed(3)
    directions = tuple(drawn(*q.shape, count=3))
    found = list(jvp(lambda *x: attention(*x, mask=mask, return_lse=True), (q, k, v), directions)[1])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    first = torch.autograd.grad(attention(*leaves, mask=mask).square().sum(), leaves, create_graph=True)
    found += torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), leaves)
    loss = square(lambda q: attention(q, k, v, mask=mask, softcap=2.0))
    found.append(jvp(grad(loss), (q,), directions[:1])[1])
    return found


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf])
def test_nan_behind_a_mask_changes_no_higher_derivative(junk: float) -> None:
    q, k, v = drawn(1, 2, 8, 4, count=3)
    mask = masks.padding(torch.tensor([5]))
    clean = every_derivative(q, k, v, mask)
    k[:, :, 5:], v[:, :, 5:] = junk, -junk
    for got, want in zip(every_derivative(q, k, v, mask), clean, strict=True):
        torch.testing.assert_close(got, want)


def test_nan_in_a_row_that_sees_nothing_changes_no_higher_derivative() -> None:
    q, k, v = drawn(1, 2, 8, 4, count=3)
    mask = masks.window(-2, None)  # the last two rows see nothing
    clean = every_derivative(q, k, v, mask)
    q[:, :, -2:] = torch.nan
    for got, want in zip(every_derivative(q, k, v, mask), clean, strict=True):
        torch.testing.assert_close(got, want)


def test_a_gradient_of_lse_that_float16_cannot_hold_is_still_right() -> None:
    """A loss scale of 65536 on a log-sum-exp penalty is such a one."""
    q, k, v = (x.half().requires_grad_() for x in drawn(1, 1, 512, 32, count=3))
    _, lse = attention(q, k, v, return_lse=True)
    got = torch.autograd.grad(lse, (q, k), torch.full_like(lse, 7e4))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(reference.attention(*exact)[1].sum() * 7e4, exact[:2])
    for mine_, truth in zip(got, want, strict=True):
        assert (mine_ - truth).abs().max() <= 2e-3 * truth.abs().max()


def test_a_compiled_functional_gradient_is_the_same() -> None:
    torch._dynamo.reset()
    q, k, v = drawn(1, 2, 8, 4, count=3, dtype=torch.float32)
    gradient = grad(square(lambda q: attention(q, k, v, mask=masks.causal())))
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), gradient(q))


@pytest.mark.parametrize("shape", [(1, 8, 256, 64), (1, 2, 8, 4)])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"mask": masks.window(5, 0)}])
def test_a_result_may_be_written_into(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    q = torch.randn(*shape, requires_grad=True)
    out = attention(q, q, q, **options)
    before = out.detach().clone()
    out.add_(1.0)
    torch.testing.assert_close(out, before + 1.0)


@pytest.mark.parametrize("sizes", [(3, 0), (0, 3), (0, 0), (3, 4)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_second_order_of_calls_without_rows_or_keys(sizes: tuple[int, int], with_sink: bool) -> None:
    rows, keys = sizes
    q, (k, v) = drawn(2, 2, rows, 3)[0], drawn(2, 2, keys, 3, count=2)
    leaves = [x.requires_grad_() for x in (q, k, v, *(drawn(2) if with_sink else ()))]

    def derive(call: Callable[..., Any]) -> list[Tensor]:
        out, lse = call(*leaves[:3], sink=leaves[3] if with_sink else None)
        loss = out.square().sum() + torch.where(lse.isinf(), 0.0, lse).square().sum()
        first = torch.autograd.grad(
            loss, leaves, create_graph=True, allow_unused=True, materialize_grads=True
        )
        total = sum((g.square().sum() for g in first), torch.zeros(()))
        second = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return [*first, *second]

    got = derive(lambda q, k, v, sink: attention(q, k, v, sink=sink, return_lse=True))
    for mine_, truth in zip(got, derive(reference.attention), strict=True):
        torch.testing.assert_close(mine_, truth)
