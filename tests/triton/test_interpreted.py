"""The Triton kernels under Triton's interpreter, on the CPU: every law and every form of mask on small
shapes, with tiles of 32 x 32 and with those of the shipped table, and no access outside of a tensor.
"""

from __future__ import annotations

import dataclasses
import random
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tilefold import attention, masks, ops, philox
from tilefold.masks import lower
from tilefold.masks.band import Band
from tilefold.planning import tuned
from tilefold.problem import Positions, Problem
from tilefold.scores import Scores
from tilefold.testing import conformance
from tilefold.testing.bounds import Accesses, memory_checked
from tilefold.testing.cases import BIASES, MASKS, Case, sample
from tilefold.testing.inputs import LAYOUTS, VALUES
from tilefold.testing.law import LAWS, Law

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from tilefold.backends.triton import arguments, backward, bias, delta, forward, lists, sizes
from tilefold.backends.triton import keys as keys_file
from tilefold.backends.triton import queries as queries_file
from tilefold.backends.triton import variant as v
from tilefold.backends.triton.arguments import Kept
from tilefold.backends.triton.kernel import Launch
from tilefold.backends.triton.tile import place, tanh
from tilefold.backends.triton.variant import Variant

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def accesses() -> Iterator[Accesses]:
    """Every kernel of every test here stays inside its tensors."""
    with memory_checked() as seen:
        yield seen


# -- the conformance suite, on a sample ----------------------------------------------------------------------

_AXES: dict[str, Any] = {
    "batch": (1, 2),
    "heads": ((2, 1), (2, 2)),
    "lengths": ((33, 33), (40, 70), (70, 37), (5, 66)),
    "dims": ((16, 16), (24, 24), (32, 48), (3, 3)),
    "dtype": ("fp32", "bf16", "fp16"),
    "mask": tuple(MASKS),
    "values": tuple(VALUES),
    "layout": tuple(LAYOUTS)[:-1],
    "loss": ("out", "both", "lse"),
    "scale": (None, 0.3),
    "softcap": (None, 15.0),
    "alibi": ("", "H", "BH"),
    "bias": ("", *BIASES),
    "sink": (False, True),
    "dropout_p": (0.0, 0.25),
}
_POOL = sample(_AXES, 6000, seed=0)
MATCHES = LAWS["matches_the_reference"]


def _one_per_mask() -> list[Case]:
    """Each form of mask once, the dtypes in turn."""
    dtypes = _AXES["dtype"]
    return [
        next(case for case in _POOL if case.mask == name and case.dtype == dtypes[i % len(dtypes)])
        for i, name in enumerate(MASKS)
    ]


def _per_law(count: int) -> list[tuple[Law, Case]]:
    """Every other law on `count` cases, the dtypes in turn."""
    found = []
    for i, law in enumerate(law for law in conformance.laws() if law is not MATCHES):
        for n in range(count):
            dtype = _AXES["dtype"][(i + n) % 3]
            fit = [case for case in _POOL if case.dtype == dtype and law.applies(case)]
            found.append((law, random.Random(f"{law.name} {n}").choice(fit)))
    return found


@pytest.mark.parametrize("case", _one_per_mask(), ids=conformance.identify)
def test_every_mask_matches_the_reference(case: Case, accesses: Accesses) -> None:
    conformance.run(MATCHES, case, "triton")
    assert accesses.loads > 0
    assert accesses.stores > 0


@pytest.mark.parametrize("law, case", _per_law(2), ids=conformance.identify)
def test_every_law_is_obeyed(law: Law, case: Case) -> None:
    conformance.run(law, case, "triton")


@pytest.fixture
def tiles_of_sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tile sizes that a Hopper GPU would take."""
    monkeypatch.setattr(sizes, "interpreted", lambda: False)
    for module in (forward, backward, bias):
        # What was worked out for tiles of 32 x 32 does not count.
        monkeypatch.setattr(module, "_kept", Kept(module._make))
    with tuned.assuming("sm90"):
        yield


_LARGE_TILES = [
    Case(mask="causal", dtype="bf16", lengths=(200, 200), dims=(128, 128), loss="both"),
    Case(mask="documents_causal", dtype="fp16", lengths=(130, 150), dims=(64, 64), dropout_p=0.25),
    Case(mask="columns4", dtype="bf16", lengths=(150, 130), dims=(64, 64), softcap=15.0),
    Case(mask="random_blocks", dtype="bf16", lengths=(129, 257), dims=(96, 96), alibi="BH", bias="QK"),
    Case(mask="window", dtype="fp32", lengths=(77, 130), dims=(64, 32), bias="BHQK", sink=True),
    Case(mask="dense_each", dtype="fp16", lengths=(70, 70), dims=(192, 128)),
    Case(mask="dilated", dtype="fp16", lengths=(65, 100), dims=(256, 256), batch=1, heads=(2, 1)),
    Case(mask="causal", dtype="bf16", lengths=(40, 65), dims=(576, 512), batch=1, heads=(2, 1)),
]


@pytest.mark.usefixtures("tiles_of_sm90")
@pytest.mark.parametrize("case", _LARGE_TILES, ids=conformance.identify)
def test_tiles_of_the_shipped_table_match_the_reference(case: Case) -> None:
    conformance.run(MATCHES, case, "triton")


@pytest.mark.usefixtures("tiles_of_sm90")
@pytest.mark.parametrize("law", ["hidden_keys_change_nothing", "a_row_feels_only_the_keys_it_sees"])
def test_tiles_of_the_shipped_table_select(law: str) -> None:
    case = Case(mask="causal_window", dtype="bf16", batch=1, heads=(2, 1), lengths=(66, 80))
    conformance.run(LAWS[law], case, "triton")


# -- long lines in parts -------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {"batch": 1, "heads": (2, 1), "mask": "random_blocks"}
_IN_PARTS = [
    (1, Case(dtype="fp16", lengths=(70, 130), dims=(24, 72), loss="both", sink=True, **_SMALL)),
    (2, Case(dtype="bf16", lengths=(130, 70), dims=(96, 96), dropout_p=0.3, **_SMALL)),
    (1, Case(dtype="fp16", lengths=(64, 128), dims=(64, 32), bias="BHQK", **_SMALL | {"mask": "dense_each"})),
]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lines of more than two tiles go to several programs; how many of them each call's lists have."""
    found: list[int] = []
    real = lists._split

    def split(made: lists.Lists) -> lists.Lists:
        made = real(made)
        found.append(0 if made.split is None else made.split.slots)
        return made

    monkeypatch.setattr(lists, "_kept", weakref.WeakKeyDictionary())
    monkeypatch.setattr(lists, "_split", split)
    monkeypatch.setattr(lists, "part_size", lambda counts: 2)
    return found


@pytest.mark.parametrize("loops, case", _IN_PARTS)
def test_lines_in_parts_match_the_reference(
    loops: int, case: Case, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (forward, backward):
        monkeypatch.setattr(module, "_kept", Kept(module._make))
        monkeypatch.setattr(module, "needed", lambda *_: sizes.Sizes(32, 32, 4, 1, loops))
    conformance.run(MATCHES, case, "triton")
    assert max(parts) >= 3


@pytest.mark.parametrize("law", ["hidden_keys_change_nothing", "a_row_feels_only_the_keys_it_sees"])
def test_lines_in_parts_select(law: str, parts: list[int]) -> None:
    conformance.run(LAWS[law], Case(dtype="bf16", lengths=(70, 140), dims=(32, 32), **_SMALL), "triton")
    assert max(parts) >= 3


# -- rows past the end of a tile -----------------------------------------------------------------------------

# Masks of 33 rows and 40 keys that hide key 36 from every row, and by form what they say of rows behind them.
_AWAY = torch.arange(40).ne(36)
_BEYOND = {
    "band": masks.causal(align="top-left"),
    "rows": masks.padding(torch.tensor([36])),
    "cols": masks.columns(
        torch.stack([torch.full((40,), 33), torch.where(_AWAY, 0, 33)], -1).int()[None, None], causal=False
    ),
    "bits": masks.dense(_AWAY & (torch.arange(33)[:, None] % 2 == 0) & (torch.arange(40) % 3 > 0)),
}


@pytest.mark.parametrize("kind", _BEYOND)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_past_the_end_see_no_key(kind: str, value: float) -> None:
    """They would meet a NaN in a key that nobody sees, and carry it into that key's gradient."""
    mask = _BEYOND[kind]
    spec, held = mask.spec()
    assert lower(spec, held, 1, 1, 33, 40, torch.device("cpu")).kind == kind
    assert not bool(mask.materialize(1, 1, 33, 40)[..., 36].any())
    q, k, v = (torch.randn(1, 1, length, 16) for length in (33, 40, 40))
    k[:, :, 36], v[:, :, 36] = value, value
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*tensors, mask=mask, backend="triton")
    found = torch.autograd.grad(out, tensors, torch.randn_like(out))
    assert all(bool(x.isfinite().all()) for x in (out, *found))
    assert not found[1][:, :, 36].any()
    assert not found[2][:, :, 36].any()


@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32")])
@pytest.mark.parametrize("whole", [False, True])
def test_the_least_number_may_stand_for_a_mask(dtypes: tuple[str, str], whole: bool) -> None:
    """Masks made of `torch.finfo(dtype).min`, as a bias, where rows begin with whole tiles of it: it is
    finite, so that a row which it hides altogether weighs all of its keys alike.
    """
    kind, of_bias = (
        {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[x] for x in dtypes
    )
    least, mask = torch.finfo(of_bias).min, masks.full() if whole else masks.causal()
    bias = torch.zeros(1, 1, 96 if whole else 1, 96, dtype=of_bias)
    bias[..., :40] = least
    if whole:
        above = torch.ones(96, 96, dtype=torch.bool).triu(1)
        bias = bias.masked_fill(above, least)
        bias[:, :, 70] = least
    tensors = [torch.randn(1, 2, 96, 16).to(kind) for _ in range(4)]
    *given, dout = tensors
    found = []
    for backend in ("triton", "eager"):
        leaves = [x.clone().requires_grad_() for x in (*given, bias)]
        out = attention(*leaves[:3], bias=leaves[3], mask=mask, backend=backend)
        found.append((out, *torch.autograd.grad(out, leaves, dout)))
    for x, y in zip(*found, strict=True):
        assert bool(x.isfinite().all())
        error, size = (x - y).detach().double().norm(), y.detach().double().norm()
        assert float(error) < {"bf16": 2e-2, "fp16": 3e-3, "fp32": 1e-5}[dtypes[0]] * float(size)


# -- chains --------------------------------------------------------------------------------------------------


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The kernels that run and their places in chains, as on a GPU that chains them, and what is settled
    between them. The interpreter itself runs one after the other.
    """
    events: list[tuple[str, int]] = []
    launch, settle = Launch.__call__, backward._settle

    def note(self: Launch, programs: int, arguments: list[Any], device: torch.device) -> None:
        if programs > 0:
            events.append((self.kernel.name.removesuffix("_kernel"), self.variant.CHAIN))
        own, self.variant = self.variant, dataclasses.replace(self.variant, CHAIN=v.APART)
        launch(self, programs, arguments, device)
        self.variant = own

    def settled(device: torch.device) -> None:
        events.append(("settle", v.APART))
        settle(device)

    for module in (arguments, backward, delta):
        monkeypatch.setattr(module, "chains", lambda device: True)
    for module in (backward, bias, delta):
        module._kept.clear()
    monkeypatch.setattr(Launch, "__call__", note)
    monkeypatch.setattr(backward, "_settle", settled)
    return events


_LISTING = ("corners", "along", "across", "order")
_START = [("forward", v.APART), ("delta", v.HEAD), ("queries", v.AFTER)]


def _of_call(
    events: list[tuple[str, int]], mask: masks.Mask, shape: tuple[int, ...] = (1, 2, 64, 16), **more: Any
):
    """Events of one call, forward and backward, without those that make lists."""
    events.clear()
    Lq = more.pop("Lq", shape[2])
    q, dout = torch.randn(*shape[:2], Lq, shape[3]), torch.randn(*shape[:2], Lq, shape[3])
    leaves = [q, *(torch.randn(shape) for _ in range(2)), *more.values()]
    leaves = [x.requires_grad_() for x in leaves]
    out = attention(*leaves[:3], mask=mask, backend="triton", **more)
    torch.autograd.grad(out, leaves, dout)
    return [event for event in events if event[0] not in _LISTING]


def test_a_kernel_goes_beside_another_only_if_nothing_is_between_them(chained: list[tuple[str, int]]) -> None:
    assert _of_call(chained, masks.causal()) == [*_START, ("keys", v.BESIDE)]
    shared = torch.randn(1, 2, 64, 64)
    apart = [*_START, ("keys", v.BESIDE), ("bias", v.BESIDE)]
    assert _of_call(chained, masks.full(), (2, 2, 64, 16), bias=shared) == apart
    # The gradient of a bias is filled with zeros first where not every tile is visited.
    filled = [*_START, ("keys", v.BESIDE), ("bias", v.AFTER)]
    assert _of_call(chained, masks.causal(), (2, 2, 64, 16), bias=shared) == filled
    # Sums of the slopes' gradient are added up between the kernels.
    assert _of_call(chained, masks.causal(), alibi_slopes=torch.rand(2)) == [*_START, ("keys", v.AFTER)]
    # No rows: the kernel that would go beside another one is the first of all.
    assert _of_call(chained, masks.full(), Lq=0) == [("keys", v.AFTER)]


def test_lists_are_settled_before_a_kernel_that_does_not_wait(chained: list[tuple[str, int]]) -> None:
    mask = masks.documents(torch.tensor([0, 20, 64]), within=masks.causal())
    settle = ("settle", v.APART)
    first = [*_START[:2], settle, _START[2], settle, ("keys", v.BESIDE)]
    assert _of_call(chained, mask) == first
    assert _of_call(chained, mask) in ([*_START, ("keys", v.BESIDE)], first)


def test_results_of_parts_are_joined_before_the_next_kernel(
    chained: list[tuple[str, int]], parts: list[int]
) -> None:
    found = _of_call(chained, masks.random_blocks(0.8, block=16), (1, 1, 200, 16))
    assert max(parts) >= 3
    assert [event for event in found if event[0] != "settle"] == [
        ("forward", v.APART), ("join", v.APART), ("delta", v.HEAD), ("queries", v.AFTER), ("join", v.APART),
        ("keys", v.AFTER), ("join", v.APART), ("join", v.APART),
    ]  # fmt: skip


# -- pieces --------------------------------------------------------------------------------------------------


@triton.jit
def _place_kernel(
    out, lines: tl.int32, pairs: tl.int32, span: tl.int32, reverse: tl.int32, heads: tl.int32,
    C: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    line, pair = place(pid, lines, pairs, span, reverse, heads, C)
    tl.store(out + 2 * pid, line)
    tl.store(out + 2 * pid + 1, pair)


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize(
    "lines, pairs, span", [(1, 1, 1), (5, 6, 2), (5, 7, 3), (3, 4, 100), (1, 9, 4), (7, 1, 1)]
)
def test_programs_share_the_work_once_and_in_sections(
    lines: int, pairs: int, span: int, reverse: int
) -> None:
    out = torch.full((lines * pairs, 2), -1, dtype=torch.int32)
    _place_kernel[(lines * pairs,)](out, lines, pairs, span, reverse, 1, Variant(16, 16, 16, 16))
    visited = [tuple(place) for place in out.tolist()]
    assert sorted(visited) == [(line, pair) for line in range(lines) for pair in range(pairs)]
    # One section of heads after the other; within one, the lines in order.
    order = [(pair // span, -line if reverse else line) for line, pair in visited]
    assert order == sorted(order)


def test_the_longest_lines_of_a_causal_mask_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows see most keys; the first keys are seen by most rows."""
    found: dict[str, int] = {}
    launch = Launch.__call__

    def note(self: Launch, programs: int, arguments: list[Any], device: torch.device) -> None:
        names = self.kernel.jitted.arg_names
        if "reverse" in names:
            found[self.kernel.name] = arguments[names.index("reverse")]
        launch(self, programs, arguments, device)

    monkeypatch.setattr(Launch, "__call__", note)
    _forward_and_backward(masks.causal(), None)
    assert found == {"forward_kernel": 1, "queries_kernel": 1, "keys_kernel": 0}


def test_programs_that_share_a_bias_are_neighbours() -> None:
    """Of two batch elements with three heads: those of one head come one after the other."""
    out = torch.full((12, 2), -1, dtype=torch.int32)
    _place_kernel[(12,)](out, 2, 6, 4, 0, 3, Variant(16, 16, 16, 16, BATCHES_FIRST=True))
    assert [pair for _, pair in out.tolist()] == [0, 3, 1, 4, 0, 3, 1, 4, 2, 5, 2, 5]


@triton.jit
def _tanh_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tanh(tl.load(x + at)))


def test_tanh_is_right_to_a_few_units() -> None:
    near = torch.linspace(-0.7, 0.7, 4096)
    around = torch.nextafter(torch.tensor([0.625, -0.625]), torch.tensor(0.0))
    large = torch.tensor([10.0, 20.0, 88.0, 1e4, 3e38, float("inf"), 0.0, 1e-30, 1e-40, 0.625])
    x = torch.cat([near, torch.linspace(-12, 12, 4096 - 22), around, large, -large])
    y = torch.empty_like(x)
    _tanh_kernel[(1,)](x, y, x.numel())
    truth = x.double().tanh()
    error = (y.double() - truth).abs()
    # The smallest subnormal is allowed for where the result itself has no more digits.
    assert bool((error <= 2.0 * torch.finfo(torch.float32).eps * truth.abs() + 2.0**-149).all())
    assert bool((y.signbit() == x.signbit()).logical_or(x == 0).all())


def _launched(function: Any) -> list[tuple[str, Any]]:
    """Names and variants of the launches that `function` makes."""
    from triton.runtime.interpreter import GridExecutor

    launch, found = GridExecutor.__call__, []

    def observed(grid: Any, *arguments: Any, **options: Any) -> None:
        launch(grid, *arguments, **options)
        found.append((grid.fn.__name__, dict(zip(grid.arg_names, arguments, strict=True))["C"]))

    with mock.patch.object(GridExecutor, "__call__", observed):
        function()
    return found


def _forward_and_backward(mask: masks.Mask, spoil: int | None) -> None:
    q, k, v = (torch.randn(1, 1, 64, 16) for _ in range(3))
    if spoil is not None:
        v[:, :, spoil] = float("nan")
    tensors = [x.requires_grad_() for x in (q, k, v)]
    attention(*tensors, mask=mask, backend="triton").sum().backward()


def test_a_call_is_one_launch_per_kernel() -> None:
    names = ["forward_kernel", "delta_kernel", "queries_kernel", "keys_kernel"]
    for mask in (masks.full(), masks.causal()):
        launches = _launched(lambda mask=mask: _forward_and_backward(mask, 3))
        assert [name for name, _ in launches] == names
        careful = [name for name, C in launches if C.CAREFUL]
        assert careful == ([name for name in names if name != "delta_kernel"] if mask != masks.full() else [])


def test_what_is_dropped_is_hidden_under_every_mask() -> None:
    """Its weight is zero, which must not meet an infinity behind it, under a full mask either."""
    q, k, v = (torch.randn(1, 1, length, 16) for length in (33, 64, 64))
    v[:, :, 5], dout = float("inf"), torch.randn(1, 1, 33, 16)
    dout[:, :, 7] = float("inf")
    for mask in (masks.full(), masks.prefix(40)):
        found = []
        for backend in ("triton", "eager"):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = attention(*leaves, mask=mask, dropout_p=0.5, seed=1, backend=backend)
            found.append((out, *torch.autograd.grad(out, leaves, dout)))
        assert bool(found[0][0].isinf().any())
        for x, y in zip(*found, strict=True):
            assert torch.equal(x.isnan(), y.isnan())
            torch.testing.assert_close(x, y, equal_nan=True)


def test_programs_repair_what_met_a_nan_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of rows, causal, NaN in value 40: the first tile does not visit it, the second does, and its
    rows reach both tiles of keys.
    """
    repairs: list[str] = []
    for module, name in ((forward, "forward"), (keys_file, "keys"), (queries_file, "queries")):
        real = getattr(module, f"{name}_again")

        def again(*arguments: Any, real: Any = real, name: str = name) -> None:
            assert arguments[-1].REPAIR and not arguments[-1].CAREFUL
            repairs.append(name)
            real(*arguments)

        monkeypatch.setattr(module, f"{name}_again", again)
    _forward_and_backward(masks.causal(), None)
    assert repairs == []
    _forward_and_backward(masks.full(), 40)
    assert repairs == []
    _forward_and_backward(masks.causal(), 40)
    assert sorted(repairs) == ["forward", "keys", "keys", "queries"]


# -- dropout -------------------------------------------------------------------------------------------------

_PLACES = {
    "aligned": Positions(k_origin=1000, q_origin=7, batch_origin=3, head_origin=5),
    "unaligned": Positions(k_origin=1003, q_origin=7, batch_origin=3, head_origin=5),
    "strided": Positions(k_origin=2, k_step=3, q_origin=1, q_step=2),
}


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("seed", [0, (1 << 40) + 5, -3])
def test_dropout_draws_what_philox_draws(place: str, seed: int) -> None:
    """Under equal scores and values of the unit matrix, `out` shows which probabilities were kept, and so
    does dv under an incoming gradient of the unit matrix.
    """
    (B, H, L), rate, at = (2, 2, 40), 0.3, _PLACES[place]
    q, k = torch.zeros(B, H, L, 16), torch.zeros(B, H, L, 16)
    unit = torch.eye(L).expand(B, H, L, L)
    scores = Scores(1.0, dropout_p=rate, seed=torch.tensor(seed))
    problem = Problem(
        B, H, H, L, L, 16, L, torch.float32, positions=at, options=scores.flags, backend="triton"
    )
    part = ops.forward(problem, q, k, unit, Band(None, None), scores)
    b, h, i, j = (torch.arange(n) for n in (B, H, L, L))
    kept = philox.keep(
        torch.tensor(seed),
        rate,
        (b + at.batch_origin)[:, None, None],
        (h + at.head_origin)[:, None],
        i * at.q_step + at.q_origin,
        j * at.k_step + at.k_origin,
    )
    assert torch.equal(part.out > 0, kept)
    dout = unit.contiguous()
    found = ops.backward(problem, q, k, unit, Band(None, None), scores, dout, part.out, part.lse)
    assert found.v is not None
    assert torch.equal(found.v.transpose(2, 3) > 0, kept)


# -- the checker itself --------------------------------------------------------------------------------------


@triton.jit
def _copy_kernel(x, y, loaded: tl.int32, stored: tl.int32, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at, mask=at < loaded, other=0.0), mask=at < stored)


def test_the_checker_counts_what_is_inside(accesses: Accesses) -> None:
    x, y = torch.randn(16), torch.empty(16)
    _copy_kernel[(1,)](x, y, 16, 12, 16)
    assert (accesses.launches, accesses.loads, accesses.stores) == (1, 16, 12)
    assert torch.equal(y[:12], x[:12])


@pytest.mark.parametrize(
    "loaded, stored, said",
    [
        (16, 12, r"_copy_kernel: load outside .* at 3 of 16 addresses; .* 1 bytes from x, the nearest"),
        (13, 14, r"_copy_kernel: store outside .* at 2 of 14 addresses; .* 1 bytes from y, the nearest"),
    ],
)
def test_the_checker_finds_accesses_outside(loaded: int, stored: int, said: str) -> None:
    x, y = torch.randn(64)[:13], torch.empty(64)[:12]
    with pytest.raises(AssertionError, match=said):
        _copy_kernel[(1,)](x, y, loaded, stored, 16)


def test_the_checker_goes_as_it_came() -> None:
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    before = GridExecutor.__call__, vars(InterpreterBuilder).copy()
    with memory_checked():
        assert GridExecutor.__call__ is not before[0]
    assert (GridExecutor.__call__, vars(InterpreterBuilder).copy()) == before
