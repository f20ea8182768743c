"""The Triton backend on GPUs: the whole conformance suite, and what no small case shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold import attention, attention_varlen, masks, reference
from tilefold.testing import conformance
from tilefold.testing.cases import Case
from tilefold.testing.law import LAWS, Law

pytest.importorskip("triton", reason="Triton is not installed")

from tilefold.backends.triton import lists

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("law, case", conformance.parameters(), ids=conformance.identify)
def test_triton_obeys_on_a_gpu(law: Law, case: Case) -> None:
    conformance.run(law, case, "triton", "cuda")


def _randn(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device)


def _gradients(out: Tensor, tensors: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, tensors, dout)


@pytest.fixture
def memory() -> Iterator[None]:
    """Gives the memory of a large test back."""
    yield
    torch.cuda.empty_cache()


#: With pytest-xdist these run in one process, so that none finds the memory taken by another.
large = pytest.mark.xdist_group("large")


def _needs(gibibytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory; there are {free >> 30}")


# -- heads of every size -------------------------------------------------------------------------------------

MATCHES = LAWS["matches_the_reference"]


@pytest.mark.parametrize("mask", ["none", "causal", "documents_causal", "columns4", "random_blocks"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("dims", [(192, 128), (512, 512), (256, 256), (96, 96), (1, 1)])
def test_wide_and_uneven_heads_match_the_reference(dims: tuple[int, int], dtype: str, mask: str) -> None:
    case = Case(dims=dims, dtype=dtype, mask=mask, lengths=(300, 333), heads=(4, 2), loss="both")
    conformance.run(MATCHES, case, "triton", "cuda")


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("lengths", [(256, 384), (128, 1024), (300, 333)], ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("dims", [(40, 64), (64, 64), (96, 96), (128, 128), (256, 256)], ids=str)
def test_calls_without_a_mask_match_the_reference(
    dims: tuple[int, int], dtype: str, lengths: tuple[int, int], dropout: float
) -> None:
    """Whole tiles have kernels of their own where nothing is dropped."""
    sizes: dict[str, Any] = {"dims": dims, "lengths": lengths, "heads": (4, 2)}
    case = Case(**sizes, dtype=dtype, mask="none", loss="both", dropout_p=dropout)
    conformance.run(MATCHES, case, "triton", "cuda")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("Lq", [1, 200])
def test_absorbed_mla_matches_float64(dtype: str, Lq: int) -> None:
    """One key head of 576, whose first 512 channels are the value; 16 query heads share it."""
    found: torch.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    latent = _randn(2, 1, 700, 576, dtype=found)
    q, v = _randn(2, 16, Lq, 576, dtype=found), latent[..., :512]
    options: dict[str, Any] = {"mask": masks.causal(), "scale": 192**-0.5}
    out, lse = attention(q, latent, v, backend="triton", return_lse=True, **options)
    truth, truth_lse = reference.attention(q.double(), latent.double(), v.double(), **options)
    plain, plain_lse = reference.attention(q, latent, v, **options)
    for value, exact, baseline in ((out, truth, plain), (lse, truth_lse, plain_lse)):
        unit = torch.finfo(value.dtype).eps * float(exact.abs().max())
        error = float((value.double() - exact).abs().max())
        assert error <= 2.0 * float((baseline.double() - exact).abs().max()) + unit


# -- large offsets -------------------------------------------------------------------------------------------


@large
@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("heads_inside", [False, True])
def test_offsets_beyond_32_bits(heads_inside: bool) -> None:
    """q, out and dq of more than 2^31 elements; the last heads of the last batch element, whose offsets do
    not fit 32 bits, are what the eager backend makes of them alone.
    """
    _needs(60)
    B, H, L, D = 3, 96, 65536, 128
    shape = (B, L, H, D) if heads_inside else (B, H, L, D)
    q = _randn(*shape)
    q = q.transpose(1, 2) if heads_inside else q
    assert q.numel() > 2**31
    assert q[-1, -1, -1, -1].data_ptr() - q.data_ptr() > 2**32
    k, v = _randn(B, H, 300, D), _randn(B, H, 300, D)
    mask = masks.padding(torch.tensor([300, 200, 250], device="cuda"))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*tensors, mask=mask, backend="triton")
    dout = torch.empty_like(out)
    dout.normal_()
    dq, dk, dv = _gradients(out, tensors, dout)
    part = (slice(-1, None), slice(-2, None))
    small = [x[part].detach().float().requires_grad_() for x in (q, k, v)]
    only = masks.padding(torch.tensor([250], device="cuda"))
    expected = attention(*small, mask=only, backend="eager")
    found = _gradients(expected, small, dout[part].float())
    # The values are sums of 250 terms in bfloat16; a wrong address gives another random number altogether.
    for value, exact in zip((out, dq, dk, dv), (expected, *found), strict=True):
        error = (value[part].float() - exact).detach().abs().max()
        assert float(error) <= 2.0**-6 * float(exact.detach().abs().max())


@large
@pytest.mark.usefixtures("memory")
def test_bits_of_more_than_32_bits() -> None:
    """A mask of 70,000 x 70,000, every granule of which is mixed, has more than 2^32 elements: the last rows
    are those of a small call with the last rows of the mask.
    """
    _needs(60)
    L, D, last = 70_000, 64, 96
    assert L * L > 2**32
    q, k, v = (_randn(1, 2, L, D) for _ in range(3))
    pattern = masks.predicate(_pattern)
    mask = pattern.build(1, 2, L, L, torch.device("cuda"))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*tensors, mask=mask, backend="triton")
    dout = torch.zeros_like(out)
    dout[:, :, -last:].normal_()
    dq, dk, dv = _gradients(out, tensors, dout)
    rows = torch.arange(L - last, L, device="cuda")[:, None]
    keys = torch.arange(L, device="cuda")
    heads = torch.arange(2, device="cuda")[None, :, None, None]
    seen = _pattern(torch.zeros_like(heads), heads, rows, keys)
    small = [x.detach().float().requires_grad_() for x in (q[:, :, -last:], k, v)]
    expected = attention(*small, mask=masks.dense(seen), backend="eager")
    found = _gradients(expected, small, dout[:, :, -last:].float())
    values = (out[:, :, -last:], dq[:, :, -last:], dk, dv)
    for value, exact in zip(values, (expected, *found), strict=True):
        error = (value.float() - exact).detach().abs().max()
        assert float(error) <= 2.0**-6 * float(exact.detach().abs().max())


def _pattern(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q * 7 + k * 13 + h * 3 + b) % 11 < 4


def test_the_memory_checker_finds_nothing_in_any_kernel(check_memory: Callable[..., None]) -> None:
    check_memory(Path(__file__).parent / "every_kernel.py", "cuda")


# -- devices, streams, graphs, compilation -------------------------------------------------------------------


@pytest.mark.multi_gpu
def test_kernels_run_on_the_device_of_their_tensors() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    here = [_randn(2, 4, 200, 64) for _ in range(4)]
    results = []
    for device in ("cuda:0", "cuda:1", "cuda:1"):
        *tensors, dout = (x.to(device) for x in here)
        tensors = [x.requires_grad_() for x in tensors]
        mask = masks.documents(torch.tensor([0, 50, 200], device=device), within=masks.causal())
        out = attention(*tensors, mask=mask, dropout_p=0.2, seed=3, backend="triton")
        assert out.device == torch.device(device)
        results.append([x.cpu() for x in (out, *_gradients(out, tensors, dout))])
    assert torch.cuda.current_device() == 0
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_a_side_stream_is_respected() -> None:
    """The inputs come out of a long wait on that stream, so that a launch on any other reads what was there
    before.
    """
    stream = torch.cuda.Stream()
    fresh = [_randn(1, 4, 512, 64) for _ in range(3)]
    expected = attention(*fresh, mask=masks.causal(), backend="triton")
    late = [torch.zeros_like(x) for x in fresh]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for x, value in zip(late, fresh, strict=True):
            x.copy_(value)
        out = attention(*late, mask=masks.causal(), backend="triton")
    stream.synchronize()
    assert torch.equal(out, expected)


# Gradients are asked for on a side stream, of leaves that were made on the default one.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_replays_of_a_graph_draw_with_the_seed_of_the_moment() -> None:
    tensors = [_randn(2, 4, 256, 64).requires_grad_() for _ in range(3)]
    dout, seed = _randn(2, 4, 256, 64), torch.tensor(11, device="cuda")
    mask = masks.documents(torch.tensor([0, 100, 256], device="cuda"), within=masks.causal())

    def run() -> tuple[Tensor, ...]:
        out = attention(*tensors, mask=mask, dropout_p=0.4, seed=seed, backend="triton")
        return (out, *_gradients(out, tensors, dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    seen = []
    for value in (11, 12, 11):
        seed.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        seen.append([x.clone() for x in captured])
        assert all(torch.equal(x, y) for x, y in zip(seen[-1], run(), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(seen[0], seen[2], strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(seen[0], seen[1], strict=True))


def test_compiles_whole() -> None:
    tensors = [_randn(2, 4, 200, 64).requires_grad_() for _ in range(3)]
    slopes = torch.rand(4, device="cuda").requires_grad_()
    dout = _randn(2, 4, 200, 64)

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        out = attention(
            q * 1.5, k, v, mask=masks.window(70, 0), alibi_slopes=slopes, softcap=20.0, backend="triton"
        )
        return out + 1.0

    leaves = [*tensors, slopes]
    plain = run(*leaves)
    expected = (plain, *_gradients(plain, leaves, dout))
    whole = torch.compile(run, fullgraph=True)(*leaves)
    # The multiplication may be fused, which moves q by one rounding at most.
    for x, y in zip((whole, *_gradients(whole, leaves, dout)), expected, strict=True):
        assert float((x - y).detach().abs().max()) <= 2.0**-6 * float(y.detach().abs().max())


def test_long_lines_of_bits_are_several_programs_and_in_a_graph_too() -> None:
    """Global rows and keys see all of 8k positions, the others some hundreds."""
    tensors = [_randn(1, 2, 8192, 64) for _ in range(3)]
    dout = _randn(1, 2, 8192, 64)
    mask = masks.bigbird(window=3, global_blocks=1, random=3, block=64)

    def run(backend: str = "triton") -> tuple[Tensor, ...]:
        # Leaves of its own: those of an earlier stream would make a capture wait for that one.
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attention(*leaves, mask=mask, backend=backend)
        return (out, *_gradients(out, leaves, dout))

    found, expected = run(), run("eager")
    spec, held = mask.spec()
    form = masks.lower(spec, held, 1, 2, 8192, 8192, tensors[0].device)
    assert any(kept.split is not None for kept in lists._kept[form].values())
    for x, y in zip(found, expected, strict=True):
        # The fold sums in float32; results of both are rounded to bfloat16.
        assert float((x - y).detach().float().norm()) < 0.02 * float(y.detach().float().norm())
    assert all(torch.equal(x, y) for x, y in zip(found, run(), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, found, strict=True))


# PyTorch says so of the switch itself.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_packed_documents_do_not_wait_for_the_device() -> None:
    """Neither the first call with these documents, whose lists are made, nor the backward pass."""
    tensors = [_randn(1000, 4, 64).requires_grad_() for _ in range(3)]
    dout = _randn(1000, 4, 64)

    def run(*cuts: int) -> tuple[Tensor, ...]:
        offsets = torch.tensor([0, *cuts, 1000], device="cuda")
        try:
            torch.cuda.set_sync_debug_mode("error")
            out = attention_varlen(*tensors, offsets, offsets, mask=masks.causal(), backend="triton")
            return (out, *_gradients(out, tensors, dout))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    run(10, 300)
    for x in run(200, 210):
        assert bool(x.isfinite().all())


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_what_is_hidden_may_be_nan(head_dim: int, dtype: str) -> None:
    """With large tiles, whose programs repair what met a NaN."""
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    tensors = [_randn(2, 2, 700, head_dim, dtype=kind) for _ in range(3)]
    q, k, v = tensors
    k[:, :, 360], v[:, :, 361], v[:, :, 600], q[:, :, 410] = (
        float("nan"),
        float("inf"),
        float("nan"),
        float("nan"),
    )
    cuts = torch.tensor([0, 130, 420, 700], device="cuda")
    for mask in (
        masks.causal(),
        masks.documents(cuts, within=masks.causal()),
        masks.window(50, 0),
        masks.random_blocks(0.3, block=16),
    ):
        found = []
        for backend in ("triton", "eager"):
            leaves = [x.clone().requires_grad_() for x in tensors]
            out = attention(*leaves, mask=mask, backend=backend)
            found.append((out, *_gradients(out, leaves, torch.ones_like(out))))
        for x, y in zip(*found, strict=True):
            assert torch.equal(x.isnan(), y.isnan())
            both = x.isfinite() & y.isfinite()
            assert torch.equal(both, x.isfinite())
            error, size = ((x - y)[both]).detach().float().norm(), y[both].detach().float().norm()
            assert float(error) <= (1e-5 if kind == torch.float32 else 0.02) * float(size)


@pytest.mark.parametrize("whole", [False, True])
def test_the_least_number_may_stand_for_a_mask(whole: bool) -> None:
    """Left padding of `torch.finfo(dtype).min`, as a bias, with large tiles: it is finite, so that a row that
    it hides altogether weighs all of its keys alike.
    """
    least, mask = torch.finfo(torch.bfloat16).min, masks.full() if whole else masks.causal()
    bias = torch.zeros(1, 1, 700 if whole else 1, 700, dtype=torch.bfloat16, device="cuda")
    bias[..., :300] = least
    if whole:
        bias[:, :, 500] = least
    given, dout, found = [_randn(1, 2, 700, 128) for _ in range(3)], _randn(1, 2, 700, 128), []
    for backend in ("triton", "eager"):
        leaves = [x.clone().requires_grad_() for x in (*given, bias)]
        out = attention(*leaves[:3], bias=leaves[3], mask=mask, backend=backend)
        found.append((out, *_gradients(out, leaves, dout)))
    for x, y in zip(*found, strict=True):
        assert bool(x.isfinite().all())
        assert float((x - y).detach().float().norm()) < 0.02 * float(y.detach().float().norm())


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [(1, 1, 500, 600), (2, 4, 500, 600), (1, 4, 1, 600), (2, 1, 500, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_gradient_is_bit_stable(bias: tuple[int, ...], deterministic: bool) -> None:
    """Nothing here uses atomic operations, so that all calls are deterministic, asked for or not."""
    q, k, v = _randn(2, 4, 500, 64), _randn(2, 2, 600, 64), _randn(2, 2, 600, 64)
    options = {
        "bias": _randn(*bias),
        "sink": torch.randn(4, device="cuda"),
        "alibi_slopes": torch.rand(2, 4, device="cuda"),
    }
    leaves = [x.requires_grad_() for x in (q, k, v, *options.values())]
    dout, dlse = _randn(2, 4, 500, 64), torch.randn(2, 4, 500, device="cuda")
    mask = masks.causal() & masks.padding(torch.tensor([600, 450], device="cuda"))

    def run() -> tuple[Tensor, ...]:
        out, lse = attention(
            q, k, v, mask=mask, dropout_p=0.1, seed=5, deterministic=deterministic, return_lse=True,
            backend="triton", **options,
        )  # fmt: skip
        return (out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse)))

    first = run()
    assert all(bool(x.isfinite().all()) for x in first)
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(first, run(), strict=True))


@pytest.mark.parametrize("mask", [masks.full(), masks.padding(torch.tensor([1000]))], ids=["full", "padding"])
def test_maxima_that_rise_from_tile_to_tile_lose_nothing(mask: masks.Mask) -> None:
    """Scores of half a million, exact in float32: whatever is rounded on the way from one maximum to the next
    would be lost once per tile. One unit of lse is 1/16.
    """
    q, k = torch.zeros(1, 1, 70, 64), torch.zeros(1, 1, 1000, 64)
    q[..., 0], k[..., 0], q[..., 1] = 2040.0, 2000.0, 1.0
    k[..., 1] = torch.arange(1000) // 16
    v = torch.randn(1, 1, 1000, 64)
    q, k, v = (x.to("cuda", torch.float16) for x in (q, k, v))
    out, lse = attention(q, k, v, mask=mask.to("cuda"), return_lse=True, backend="triton")
    truth, exact = reference.attention(q.double(), k.double(), v.double())
    assert float((lse.double() - exact).abs().max()) <= 2.0**-4
    assert float((out.double() - truth).norm()) <= 2.0**-9 * float(truth.norm())


@pytest.fixture
def tf32() -> Iterator[Any]:
    """PyTorch's switch, which is put back."""
    switch = torch.backends.cuda.matmul
    before = switch.allow_tf32
    yield switch
    switch.allow_tf32 = before


def test_tf32_is_a_choice(tf32: Any) -> None:
    """Products of float32 are exact to float32 unless PyTorch's own switch says otherwise."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs matrix units for TF32")
    q, k, v = (_randn(1, 2, 256, 64, dtype=torch.float32) for _ in range(3))
    truth, _ = reference.attention(q.double(), k.double(), v.double())
    errors = {}
    for allowed in (False, True, False):
        tf32.allow_tf32 = allowed
        out = attention(q, k, v, backend="triton")
        errors[allowed] = float((out.double() - truth).abs().max())
    # Ten bits of mantissa against 23.
    assert errors[False] < 1e-5
    assert 10.0 * errors[False] < errors[True] < 1e-2
