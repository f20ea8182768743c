"""`explain` says what the next call will do, and what it costs, before it runs."""

from __future__ import annotations

import dataclasses
import json
import time
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tilefold import Problem, attention, explain, masks, ops
from tilefold.backends.eager import predict
from tilefold.cost import tiles
from tilefold.cost.hardware import MACHINES
from tilefold.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendError,
    DtypeError,
    MaskError,
    ShapeError,
)
from tilefold.ops import prepare
from tilefold.planning.backend import KNOWN_BACKENDS
from tilefold.planning.explain import count_tiles
from tilefold.planning.plan import Plan


def tensors(B: int = 1, H: int = 4, L: int = 256, D: int = 32, **kind: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(B, H, L, D, **kind) for _ in range(3))


def problem(**changes: Any) -> Problem:
    sizes = {
        "batch": 2, "q_heads": 8, "k_heads": 2, "q_length": 1024, "k_length": 1024, "head_dim": 64,
        "v_head_dim": 64, "dtype": torch.bfloat16, "device": "cuda",
    }  # fmt: skip
    return Problem(**(sizes | changes))


#: Without Triton, a call on a GPU is one for the fold.
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")

# The plan.


@pytest.mark.usefixtures("fixed_rates")
def test_it_holds_the_very_plan_of_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    explained = explain(q, k, v, mask=masks.causal(), softcap=20.0)
    plans: list[Plan] = []
    kept = prepare.plan_of

    def spy(*args: Any) -> Plan:
        plans.append(kept(*args))
        return plans[-1]

    monkeypatch.setattr(prepare, "plan_of", spy)
    prepare._prepared.clear()
    attention(q, k, v, mask=masks.causal(), softcap=20.0)
    assert len(plans) == 1
    assert plans[0] is explained.plan


@pytest.mark.usefixtures("fixed_rates")
def test_every_other_backend_states_its_reasons() -> None:
    q, k, v = tensors()
    found = explain(q, k, v)
    assert found.backend == "eager"
    assert {name for name, _ in found.refusals} == set(KNOWN_BACKENDS) - {"eager"}
    assert all(reasons and all(r.strip() for r in reasons) for _, reasons in found.refusals)


@pytest.mark.usefixtures("fixed_rates")
def test_a_willing_backend_behind_the_chosen_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, eager = ops.load, ops.load("eager")

    def load(name: str) -> Any:
        return eager if name == "triton" else kept(name)

    monkeypatch.setattr(ops, "load", load)
    monkeypatch.setattr(prepare, "load", load)
    prepare._plan.cache_clear()
    found = explain(*tensors())
    prepare._plan.cache_clear()
    assert found.backend == "triton"
    assert dict(found.refusals)["eager"] == ("it would run this call too, but triton comes first",)


@pytest.mark.usefixtures("fixed_rates")
def test_a_backend_that_declines_raises_as_the_call_would() -> None:
    q, k, v = tensors()
    with pytest.raises(BackendError) as expected:
        attention(q, k, v, backend="triton")
    with pytest.raises(BackendError) as got:
        explain(q, k, v, backend="triton")
    assert str(got.value) == str(expected.value)


# Without tensors, and on other machines.


@pytest.mark.parametrize("machine", list(MACHINES))
@pytest.mark.parametrize(
    "backend, products",
    # The fold multiplies in float32.
    [("eager", "float32"), pytest.param(None, "bfloat16", marks=needs_triton)],
)
def test_a_problem_is_explained_for_every_machine(machine: str, backend: str | None, products: str) -> None:
    found = explain(problem(backend=backend), mask=masks.causal(), machine=machine)
    hopper = MACHINES[machine].architecture == "sm90"
    assert (found.machine, found.backend) == (machine, backend or ("hopper" if hopper else "triton"))
    assert found.forward.seconds > found.forward.flops / MACHINES[machine].matmul_rate(products) > 0
    assert found.backward.seconds > found.forward.seconds
    assert found.backward.flops == pytest.approx(2.5 * found.forward.flops, rel=0.1)


@needs_triton
@pytest.mark.parametrize(
    "machine, parts",
    [
        (
            "A100",
            (
                "backend    triton: fused Triton kernel, forward in tiles of 128 x 64",
                "not hopper: it runs on Hopper GPUs (sm90), and this one is sm80",
                "not eager: it would run this call too, but triton comes first",
            ),
        ),
        (
            "H200",
            (
                "backend    hopper: fused Hopper kernel, forward in tiles of 192 x 64",
                "not triton: it would run this call too, but hopper comes first",
            ),
        ),
    ],
)
def test_what_is_printed_about_a_gpu_is_the_plan_of_its_kernels(machine: str, parts: tuple[str, ...]) -> None:
    found = explain(problem(), mask=masks.causal(), machine=machine)
    text = str(found)
    for part in parts:
        assert part in text
    assert found.advice == ()
    for one in (found.forward, found.backward):
        assert one.seconds > 0 < one.bytes
    assert found.forward.extra_bytes == 0
    assert 0 < found.backward.extra_bytes < found.backward.result_bytes


def test_shapes_without_data_give_what_a_problem_gives() -> None:
    q = torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 1024, 64, dtype=torch.bfloat16, device="meta")
    assert explain(q, k, k, machine="H200").to_dict() == explain(problem(), machine="H200").to_dict()


def test_tensors_are_explained_as_if_they_lay_on_the_named_machine() -> None:
    q, k, v = tensors(dtype=torch.bfloat16)
    found = explain(q, k, v, mask=masks.padding(torch.tensor([100])), machine="h100")
    assert (found.machine, found.form) == ("H100", "rows")
    assert "on cuda" in found.call
    folded = explain(q, k, v, backend="eager", machine="h100")
    assert "run on cpu, not on cuda" in folded.how


def test_options_of_a_problem_and_of_the_call_add_up() -> None:
    found = explain(problem(options=("softcap", "bias")), sink=torch.zeros(8), machine="H200")
    assert found.call.endswith("with softcap, bias [1, 8, 1024, 1024], sink")
    assert found.forward.traffic["bias"] > 0


@pytest.mark.parametrize(
    "backend, ratio", [("eager", 19.5 / 75), pytest.param("triton", 312 / 2250, marks=needs_triton)]
)
def test_machines_differ_by_their_figures(backend: str, ratio: float) -> None:
    call = problem(batch=8, q_length=8192, backend=backend)
    fast, slow = (explain(call, machine=m).forward for m in ("B200", "A100"))
    assert fast.flops == slow.flops
    assert fast.shares["matmul"] == pytest.approx(slow.shares["matmul"] * ratio)
    assert fast.shares["memory"] < slow.shares["memory"] / 3
    # The fold waits for the host, whatever the machine.
    assert fast.seconds < slow.seconds / 3 or backend == "eager"


@pytest.mark.parametrize(
    "backend, hopper, ampere",
    [("eager", 1024, 512), pytest.param("triton", 128, 64, marks=needs_triton)],
)
def test_tuned_tiles_are_those_of_the_named_architecture(backend: str, hopper: int, ampere: int) -> None:
    call = problem(head_dim=128, v_head_dim=128, backend=backend)
    assert [explain(call, machine=m).tiles.keys for m in ("H200", "A100")] == [hopper, ampere]


# What is counted.


@pytest.mark.usefixtures("fixed_rates")
@pytest.mark.parametrize("tile, options", [((256, 512), {}), ((256, 256), {"softcap": 9.0})])
def test_tiles_of_causal(tile: tuple[int, int], options: dict[str, Any]) -> None:
    q, k, v = tensors(H=8, L=1024, D=16)
    found = explain(q, k, v, mask=masks.causal(), **options).tiles
    rows, keys = tile
    visible = (
        torch.ones(1024, 1024, dtype=torch.bool).tril().unflatten(0, (-1, rows)).unflatten(2, (-1, keys))
    )
    some, every = visible.any(dim=3).any(dim=1), visible.all(dim=3).all(dim=1)
    assert (found.rows, found.keys) == tile
    assert (found.total, found.visited, found.full, found.partial) == tuple(
        8 * int(n) for n in (some.numel(), some.sum(), every.sum(), (some & ~every).sum())
    )
    assert found.share == int(some.sum()) / some.numel()


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=needs_triton)])
def test_flops_of_a_full_call_are_those_of_its_products(backend: str) -> None:
    found = explain(problem(k_heads=8, backend=backend), machine="H200")
    assert found.forward.flops == 4 * 2 * 8 * 1024**2 * 64
    assert found.backward.flops == 10 * 2 * 8 * 1024**2 * 64
    # The kernels multiply in bfloat16, and compute scores and their derivatives twice.
    computed = {"eager": 10, "triton": 14}[backend] * 2 * 8 * 1024**2 * 64
    rate = MACHINES["H200"].matmul_rate("bfloat16" if backend == "triton" else "float32")
    assert found.backward.shares["matmul"] == pytest.approx(computed / rate)


@pytest.mark.parametrize("lengths", [(1000, 1000), (300, 1000), (1000, 300), (64, 64)])
@pytest.mark.parametrize(
    "mask",
    [
        masks.full(), masks.empty(), masks.causal(), masks.window(100, 0), masks.window(-5, 90),
        masks.window(None, -200), masks.window(0, None), masks.window(None, 2000),
    ],
    ids=repr,
)  # fmt: skip
def test_tiles_of_bands_are_counted_as_they_are_classified(
    mask: masks.Mask, lengths: tuple[int, int]
) -> None:
    form = masks.lower(mask, (), 1, 1, *lengths, "cpu")
    call = problem(batch=1, q_heads=1, k_heads=1, q_length=lengths[0], k_length=lengths[1])
    for rows, keys in ((128, 64), (32, 48), (1024, 16)):
        found, states = count_tiles(call, form, rows, keys), tiles.states(form, *lengths, rows, keys)
        assert found.total == states.numel()
        assert (found.partial, found.full) == tuple(int((states == n).sum()) for n in (1, 2))
        sides = tiles.sides(lengths[0], rows)[:, None] * tiles.sides(lengths[1], keys)
        assert found.share == float(((states > 0) * sides).sum()) / (lengths[0] * lengths[1])


@needs_triton
def test_a_million_tokens_are_explained() -> None:
    found = explain(problem(batch=1, q_length=1 << 20, k_length=1 << 20), mask=masks.causal(), machine="A100")
    assert found.tiles.total == 8 * (1 << 20) ** 2 // (128 * 64)
    assert 0.5 < found.tiles.share < 0.501


def test_results_and_lse() -> None:
    found = explain(problem(), machine="H200")
    out, lse, keys = 2 * 8 * 1024 * 64 * 2, 2 * 8 * 1024 * 4, 2 * 2 * 1024 * 64 * 2
    assert (found.forward.result_bytes, found.lse_bytes) == (out + lse, lse)
    assert found.backward.result_bytes == out + 2 * keys
    assert found.step_extra_bytes >= found.backward.extra_bytes + lse


def test_the_bound_is_the_theorems_and_the_distance_to_it_is_stated() -> None:
    found = explain(problem(k_heads=8, q_length=8192, k_length=8192, dtype=torch.float32), machine="H100")
    fast = MACHINES["H100"].fast_bytes // 4
    # 64^2 <= M: the regime of FlashAttention, N^2 d^2 / M.
    assert found.bound_bytes == pytest.approx(2 * 8 * 4 * max(8192**2 * 64**2 / fast, 4 * 8192 * 64))
    assert found.distance == found.forward.bytes / found.bound_bytes > 1
    assert f"{found.distance:.3g} times as much" in str(found)
    # The keys of a group are read once.
    shared = explain(problem(q_length=64, k_length=64), machine="H100")
    assert shared.bound_bytes == 2 * 2 * (2 * 8 * 64 * 64 + 2 * 2 * 64 * 64)


@pytest.mark.parametrize(
    "mask", [masks.window(1023, 0), masks.empty(), masks.padding(torch.tensor([1])), masks.causal()], ids=repr
)
@pytest.mark.parametrize("keys", [1, 700])
@pytest.mark.usefixtures("fixed_rates")
def test_nothing_moves_less_than_the_bound(mask: masks.Mask, keys: int) -> None:
    q, k = torch.randn(1, 4, 700, 32), torch.randn(1, 4, keys, 32)
    for options in ({}, {"softcap": 9.0}):
        assert explain(q, k, k, mask=mask, **options).distance >= 1


@pytest.mark.usefixtures("fixed_rates")
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 9.0}, {"mask": masks.causal()}, {"mask": masks.bigbird()}]
)
def test_the_default_device_does_not_matter(options: dict[str, Any]) -> None:
    q, k, v = tensors()
    expected = explain(q, k, v, **options).to_dict()
    with torch.device("meta"):
        assert explain(q, k, v, **options).to_dict() == expected


def test_calls_of_too_many_tiles_are_refused() -> None:
    huge = problem(q_length=10**11, k_length=10**11)
    with pytest.raises(ArgumentError, match=r"q_length, k_length: expected at most 16,777,216 tiles of 512"):
        explain(huge, mask=masks.causal(), machine="A100")


def test_doubt_about_the_figures_is_shown(monkeypatch: pytest.MonkeyPatch, rate_names: set[str]) -> None:
    rates = dict.fromkeys(rate_names, 1e-9)
    busy = dataclasses.replace(MACHINES["A100"], name="toy", device="cpu", rates=rates, doubt="it was busy")
    monkeypatch.setattr("tilefold.cost.measure.this_cpu", lambda dtype, measure: busy)
    found = explain(*tensors())
    assert "toy (it was busy)" in str(found)
    assert found.to_dict()["doubt"] == "it was busy"


@pytest.mark.parametrize("lengths", [(0, 8), (8, 0), (0, 0)])
def test_empty_calls_cost_nothing_but_the_call(lengths: tuple[int, int]) -> None:
    found = explain(problem(q_length=lengths[0], k_length=lengths[1]), mask=masks.causal(), machine="H200")
    assert (found.tiles.total, found.forward.flops) == (0, 0.0)
    assert found.forward.seconds < 1e-3


# The text and the JSON.


@pytest.mark.usefixtures("fixed_rates")
def test_it_prints_everything_it_knows() -> None:
    q, k, v = tensors()
    found = explain(q, k, v, mask=masks.window(15, 0))
    text = str(found)
    for part in (found.call, found.mask, found.machine, found.how, *found.advice, "forward", "backward"):
        assert part in text
    for name, reasons in found.refusals:
        assert f"not {name}: {reasons[0]}" in text
    assert all(len(line) < 200 for line in text.splitlines())
    assert json.loads(json.dumps(found.to_dict()))["backend"] == "eager"


# Advice.


def advice(*args: Any, **options: Any) -> str:
    return "\n".join(explain(*args, **options).advice)


def test_advice_about_a_bias_that_is_most_of_what_moves() -> None:
    one = torch.randn(1, 1, 1024, 1024)
    q, k, v = tensors(H=8, L=1024, D=16)
    text = advice(q, k, v, bias=one.repeat(1, 8, 1, 1), machine="H200")
    assert "the bias is 33.6 MB of the" in text
    assert "moved forward; it is broadcastable over heads in all 1,024 places compared: pass it" in text
    assert "broadcastable over heads" in advice(q, k, v, bias=one.expand(1, 8, -1, -1), machine="H200")
    own = advice(q, k, v, bias=torch.randn(1, 8, 1024, 1024), machine="H200")
    assert "the bias is" in own
    assert "broadcastable" not in own
    assert "the bias" not in advice(q, k, v, bias=torch.randn(1, 1, 1, 1024), machine="H200")


def test_advice_about_a_bias_that_differs_in_one_place_in_eighty_does_not_promise() -> None:
    bias = torch.randn(1, 1, 512, 512).repeat(1, 4, 1, 1)
    bias[:, 2, ::20] = 1.0
    q, k, v = tensors(L=512, D=8)
    assert "broadcastable" not in advice(q, k, v, bias=bias, machine="H200")


@pytest.mark.usefixtures("fixed_rates")
def test_advice_about_the_option_that_costs_most() -> None:
    q, k, v = tensors(L=1024)
    text = advice(q, k, v, dropout_p=0.1, sink=torch.zeros(4))
    assert "dropout costs most: without it" in text
    assert "costs most" not in advice(q, k, v, sink=torch.zeros(4))


@pytest.mark.parametrize(
    "dense, name",
    [
        (torch.ones(512, 512, dtype=torch.bool).tril(), "causal()"),
        (torch.ones(512, 512, dtype=torch.bool), "full()"),
        (torch.ones(512, 512, dtype=torch.bool).tril().triu(-99), "window(99, 0)"),
        (torch.ones(512, 512, dtype=torch.bool).tril(7), "window(None, 7)"),
        (torch.ones(300, 512, dtype=torch.bool).tril(212), "causal()"),
    ],
)
def test_advice_about_dense_masks_that_have_a_name(dense: torch.Tensor, name: str) -> None:
    rows = dense.shape[0]
    given = problem(q_length=rows, k_length=512)
    assert f"the dense mask is {name}:" in advice(given, mask=masks.dense(dense), machine="H200")
    dense = dense.clone()
    dense[rows // 2, 3] ^= True
    assert "the dense mask is" not in advice(given, mask=masks.dense(dense), machine="H200")


def test_advice_about_scattered_masks() -> None:
    scattered = masks.predicate(lambda b, h, q, k: (q * 7 + k) % 40 == 0)
    assert "shows 2.5% of the score matrix, scattered over 100% of its 64 x 64 squares" in advice(
        problem(), mask=scattered, machine="H200"
    )
    for mask in (masks.causal(), masks.window(200, 0), masks.padding(torch.tensor([1024, 512]))):
        assert "scattered" not in advice(problem(), mask=mask, machine="H200")


def test_advice_about_gpus_without_kernels_and_about_copies() -> None:
    assert "no GPU kernel takes this call" in advice(problem(dtype=torch.float64), machine="H200")
    assert "no GPU kernel takes this call" in advice(problem(backend="eager"), machine="H200")
    q, k, v = tensors()
    text = advice(q.transpose(-1, -2).contiguous().transpose(-1, -2), k, v, machine="H200")
    assert "q: the last dimension is not contiguous" in text
    assert "not contiguous" not in advice(q, k, v, machine="H200")


@pytest.mark.usefixtures("fixed_rates")
def test_advice_about_head_sizes_that_differ() -> None:
    q, k, _ = tensors()
    assert "head sizes 32 of keys and 8 of values differ" in advice(q, k, torch.randn(1, 4, 256, 8))
    assert "differ" not in advice(q, k, k)


def test_no_advice_where_nothing_is_wrong(fixed_rates: None) -> None:
    assert advice(*tensors(L=2048), mask=masks.causal()) == ""


# Visible elements, which advice about scattered masks rests on.


@pytest.mark.parametrize(
    "mask",
    [
        masks.full(), masks.empty(), masks.causal(), masks.window(20, -3), masks.dilated(9, 3),
        masks.strided(7), masks.padding(torch.tensor([50, 77])), masks.prefix(11) | masks.causal(),
        masks.documents(torch.tensor([0, 20, 60]), within=masks.causal()),
        masks.columns(torch.randint(0, 70, (1, 1, 90, 2)).sort(-1).values.to(torch.int32), causal=True),
        masks.random_blocks(0.3, block=16), masks.bigbird(block=8),
        masks.dense(torch.rand(2, 4, 70, 90) < 0.3),
    ],
    ids=repr,
)  # fmt: skip
def test_visible_elements_are_counted_exactly(mask: masks.Mask) -> None:
    form = masks.lower(mask, (), 2, 4, 70, 90, "cpu")
    dense = mask.materialize(2, 4, 70, 90)
    assert form.visible_count(70, 90) == pytest.approx(float(dense.sum()) / 8)


# Errors.


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda q: explain(problem(), machine="V100"), ArgumentError, "machine: expected one of 'H200'"),
        (
            lambda q: explain(problem(), machine=3),
            ArgumentTypeError,
            "machine: expected a name or None, got int",
        ),
        (lambda q: explain(problem(), q, q), ArgumentTypeError, "k, v: expected nothing beside a Problem"),
        (lambda q: explain(problem(device="mps")), ArgumentError, "machine: expected a name for mps"),
        (lambda q: explain(q.to("meta"), q.to("meta"), q.to("meta")), ArgumentError, "a name for meta"),
        (lambda q: explain(problem(batch=-1), machine="H200"), ShapeError, "batch is at least 0, got -1"),
        (
            lambda q: explain(problem(head_dim=1.5), machine="H200"),
            ArgumentTypeError,
            "head_dim is an int, got float",
        ),
        (lambda q: explain(problem(k_heads=3), machine="H200"), ShapeError, "3 key heads divide"),
        (lambda q: explain(problem(dtype=torch.int8), machine="H200"), DtypeError, "got torch.int8"),
        (lambda q: explain(problem(options=("bais",)), machine="H200"), ArgumentError, r"got \['bais'\]"),
        (lambda q: explain(problem(device="gpu"), machine="H200"), ArgumentError, "a device kind, got 'gpu'"),
        (lambda q: explain(q, q), ArgumentTypeError, "v: expected a tensor, got NoneType"),
        (lambda q: explain(q, q, q, mask=masks.padding(torch.tensor([1, 2, 3]))), MaskError, "padding"),
        (
            lambda q: explain(problem(), mask=masks.padding(torch.tensor([1, 2, 3])), machine="H200"),
            MaskError,
            "padding",
        ),
        (lambda q: explain(q, q, q, backend="cuda"), BackendError, "backend: expected one of"),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(1, 2, 16, 8))


# Cost of the explanation itself.


@pytest.mark.usefixtures("fixed_rates")
@pytest.mark.parametrize(
    "mask",
    [None, masks.causal(), masks.documents(torch.arange(0, 8193, 1024), within=masks.causal())],
    ids=repr,
)
def test_it_takes_at_most_5_ms(mask: masks.Mask | None) -> None:
    q, k, v = tensors(H=8, L=8192, D=64)
    explain(q, k, v, mask=mask)
    times = []
    for _ in range(7):
        start = time.process_time()
        explain(q, k, v, mask=mask)
        times.append(time.process_time() - start)
    assert min(times) <= 0.005


@pytest.mark.slow
def test_every_rate_that_is_named_is_measured(rate_names: set[str]) -> None:
    """Else a prediction would fall back to rooflines without a word."""
    rates = predict.measure("float32")
    assert all(seconds >= 0 for seconds in rates.values())
    assert set(rates) == rate_names
