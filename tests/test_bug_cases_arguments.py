"""Bugs once reported against other attention libraries, kept out by their whole kind: sizes, offsets,
devices, installation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from tilefold import attention, attention_varlen, errors, masks

# Empty sizes.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "q_shape, k_shape",
    [
        ((0, 10, 39, 64), (0, 10, 16, 64)),
        ((2, 10, 0, 64), (2, 5, 16, 64)),
        ((2, 10, 39, 64), (2, 2, 0, 64)),
        ((0, 4, 0, 8), (0, 2, 0, 8)),
        ((2, 0, 39, 64), (2, 2, 16, 64)),
    ],
    ids=["no batch", "no queries", "no keys", "nothing", "no query heads"],
)
@pytest.mark.parametrize(
    "mask", [None, masks.causal(), masks.window(3, 3) & ~masks.prefix(2)], ids=["full", "causal", "mixed"]
)
def test_empty_sizes_give_empty_results(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: torch.dtype, mask: masks.Mask
) -> None:
    """Dao-AILab/flash-attention#1159: a batch of size 0 raised instead of returning an empty result."""
    q = torch.randn(q_shape, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(k_shape, dtype=dtype, requires_grad=True) for _ in range(2))
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:-1]
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    out.float().sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert not x.grad.any()


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0, 0]])
def test_packed_calls_may_hold_no_tokens_and_no_documents(offsets: list[int]) -> None:
    """Dao-AILab/flash-attention#1159, packed."""
    cu = torch.tensor(offsets, dtype=torch.int32)
    for tokens in (0, 4):
        q, k, v = (torch.randn(tokens, 2, 8, requires_grad=True) for _ in range(3))
        out, lse = attention_varlen(q, k, v, cu, cu, mask=masks.causal(), return_lse=True)
        assert out.shape == (tokens, 2, 8)
        assert lse.shape == (2, tokens)
        assert not out.any()
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


# Offsets that lie.


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "offsets, reason",
    [
        ([0, 256, 512, 768], "768"),
        ([0, 200, 100, 256], "100 after 200"),
        ([5, 100, 200, 256], "start at 0"),
        ([0, 300, 300, 300], "300"),
        ([-4, 0, 100, 256], "start at 0"),
    ],
    ids=["past the tensor", "decreasing", "not from 0", "one long document", "negative"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"dropout_p": 0.1, "seed": 1}, {"alibi_slopes": torch.ones(16)}],
    ids=["plain", "dropout", "alibi"],
)
def test_offsets_that_do_not_fit_are_refused_by_name(
    which: str, dtype: torch.dtype, offsets: list[int], reason: str, options: dict
) -> None:
    """Dao-AILab/flash-attention#2381: they caused illegal memory accesses far from the cause."""
    q, k, v = (torch.randn(256, 16, 32).bfloat16() for _ in range(3))
    right = torch.tensor([0, 100, 200, 256], dtype=dtype)
    cu = {"cu_seqlens_q": right, "cu_seqlens_k": right, which: torch.tensor(offsets, dtype=dtype)}
    with pytest.raises(
        ValueError, match=rf"{which}.*expected .*{re.escape(reason)}|{which}.*got .*{re.escape(reason)}"
    ):
        attention_varlen(q, k, v, **cu, **options)
    with pytest.raises(ValueError, match=which):
        attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)),
            mask=masks.documents(**cu),
            **options,
        )


def test_offsets_of_both_integer_types_are_one() -> None:
    """Dao-AILab/flash-attention#2381: int64 lengths were read as int32."""
    q, k, v = (torch.randn(64, 2, 8) for _ in range(3))
    offsets = [0, 20, 20, 64]
    narrow, wide = (torch.tensor(offsets, dtype=dtype) for dtype in (torch.int32, torch.int64))
    expected = attention_varlen(q, k, v, narrow, narrow, mask=masks.causal())
    assert torch.equal(attention_varlen(q, k, v, wide, wide, mask=masks.causal()), expected)
    assert torch.equal(attention_varlen(q, k, v, wide, narrow, mask=masks.causal()), expected)


# Head counts.


@pytest.mark.parametrize("heads, key_heads", [(3, 2), (33, 2), (2, 4), (1, 3)])
def test_head_counts_that_do_not_divide_are_refused_at_every_door(heads: int, key_heads: int) -> None:
    """fla-org/flash-linear-attention#1029: floor division left query heads unwritten."""
    q, k = torch.randn(1, heads, 64, 64).half(), torch.randn(1, key_heads, 64, 64).half()
    cu = torch.tensor([0, 64])
    for requires_grad in (False, True):
        q.requires_grad_(requires_grad)
        with pytest.raises(errors.ShapeError, match=rf"{key_heads} key heads.*got {heads}"):
            attention(q, k, k)
        with pytest.raises(errors.ShapeError, match=rf"{key_heads} key heads.*got {heads}"):
            attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, k)), cu, cu)
        with pytest.raises(errors.ShapeError, match=rf"{key_heads} key heads.*got {heads}"):
            attention(q[:, :, :1], k, k)


# Keys and values of different sizes.


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "v_shape",
    [(1, 1, 6, 8), (1, 1, 4, 8), (1, 2, 5, 8), (2, 1, 5, 8)],
    ids=["longer", "shorter", "heads", "batch"],
)
def test_keys_and_values_of_different_sizes_are_refused(v_shape: tuple[int, ...], device: str) -> None:
    """pytorch/pytorch#193728: one backend read past the end of the keys."""
    buffer = torch.zeros(1, 1, 6, 8, device=device)
    if device == "cpu":
        buffer[:, :, 5] = 7.0
    q, k, v = torch.randn(1, 1, 3, 8, device=device), buffer[:, :, :5], torch.randn(v_shape, device=device)
    with pytest.raises(errors.ShapeError, match=rf"v: expected .*{device}") as caught:
        attention(q, k, v)
    assert str(list(k.shape)) in str(caught.value)
    assert str(list(v_shape)) in str(caught.value)


def test_packed_keys_and_values_of_different_totals_are_refused() -> None:
    """pytorch/pytorch#193728, packed."""
    cu = torch.tensor([0, 5])
    with pytest.raises(errors.ShapeError, match="v: expected k's length 5, got 6"):
        attention_varlen(torch.randn(5, 1, 8), torch.randn(5, 1, 8), torch.randn(6, 1, 8), cu, cu)


def test_tensors_of_different_devices_are_refused_by_name() -> None:
    """Dao-AILab/flash-attention#54: with q on one device and k on another the output was silently wrong."""
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(errors.DeviceError, match="k: expected q's device cpu, got meta"):
        attention(q, q.to("meta"), q.to("meta"))
    with pytest.raises(errors.MaskError, match="expected a tensor on cpu, got one on meta"):
        attention(q, q, q, mask=masks.padding(torch.tensor([3])).to("meta"))


# Installation.


def test_the_library_imports_and_computes_without_gpu_compiler_or_triton() -> None:
    """Dao-AILab/flash-attention#246: installation and import needed what they do not need."""
    program = """
import sys
for name in ("triton", "numpy", "matplotlib", "rich", "typer"):
    sys.modules[name] = None
import torch, tilefold
q = torch.ones(1, 2, 8, 16, requires_grad=True)
tilefold.attention(q, q, q, mask=tilefold.masks.causal()).sum().backward()
assert q.grad is not None
loaded = {name.split(".")[0] for name, module in sys.modules.items() if module is not None}
assert not loaded & {"triton", "hypothesis", "pytest"}
print("done")
"""
    bare = {
        name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "LD_LIBRARY_PATH", "HOME")
    }
    environment = bare | {"PATH": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip() == "done", done.stderr
