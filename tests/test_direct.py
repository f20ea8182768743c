"""Calls that run without PyTorch's dispatcher, and those that must not: nobody may notice the difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilefold import attention, masks
from tilefold.ops import kernels


def qkv(requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, generator=draw).requires_grad_(requires_grad) for _ in range(3))
    return q, k, v


class Seen(TorchDispatchMode):
    """Names of the ops that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapper(Tensor):
    """A tensor that holds another one, as distributed tensors do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapper) else x

        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_modes_see_the_ops(requires_grad: bool) -> None:
    q, k, v = qkv(requires_grad)
    with Seen() as seen:
        out = attention(q, k, v, mask=masks.causal())
    assert "tilefold.forward.default" in seen.names
    if requires_grad:
        with Seen() as seen:
            out.sum().backward()
        assert "tilefold.backward.default" in seen.names


@pytest.mark.parametrize("name", ["bias", "sink", "alibi_slopes"])
def test_tensors_of_another_kind_reach_the_op(name: str) -> None:
    q, k, v = qkv()
    value = torch.randn((9, 9) if name == "bias" else (2,), generator=torch.Generator().manual_seed(1)).abs()
    expected = attention(q, k, v, **{name: value})
    assert not kernels.unwatched(q, k, v, Wrapper(value))
    torch.testing.assert_close(attention(q, k, v, **{name: Wrapper(value)}), expected)


def test_gradients_of_another_kind_reach_the_op() -> None:
    q, k, v = qkv(requires_grad=True)
    out = attention(q, k, v)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    found = torch.autograd.grad(out, (q, k, v), Wrapper(dout))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_vmap_over_backward_passes_of_one_graph() -> None:
    q, k, v = qkv(requires_grad=True)
    out = attention(q, k, v, mask=masks.causal())
    douts = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(2))

    def pull(dout: Tensor) -> Tensor:
        return torch.autograd.grad(out, q, dout, retain_graph=True)[0]

    torch.testing.assert_close(torch.vmap(pull)(douts), torch.stack([pull(dout) for dout in douts]))


@pytest.mark.parametrize("heads_outside", [False, True])
def test_results_may_be_written_to(heads_outside: bool) -> None:
    q, k, v = qkv(requires_grad=True)
    if not heads_outside:
        q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out, lse = attention(q, k, v, mask=masks.causal(), return_lse=True)
    expected = out.detach() * 2.0
    assert torch.equal(out.mul_(2.0), expected)
    lse.add_(1.0)
