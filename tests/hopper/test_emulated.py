"""The Hopper kernel's numbers and its protocol, on a CPU; see `emulator`."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tilefold import masks, reference
from tilefold.bench import tune_kernels
from tilefold.bench.entries import Scale
from tilefold.bench.hopper_entries import HopperEntry, as_sizes
from tilefold.cost import store
from tilefold.ops import prepare
from tilefold.planning import tuned
from tilefold.problem import Problem
from tilefold.testing import conformance
from tilefold.testing.cases import Case
from tilefold.testing.law import Law

pytest.importorskip("triton", reason="Triton is not installed")
import tilefold.backends.hopper as hopper_backend
from tilefold.backends import eager, triton
from tilefold.backends.hopper import launch, sizes
from tilefold.backends.hopper.schedule import Order
from tilefold.backends.triton import arguments

from . import emulator
from .calls import Tensors, agree, draw, hopper, resize, right, work_of

pytestmark = pytest.mark.usefixtures("emulated")

MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.window(100, 0),
    "wide window": masks.window(150, 140),
    "below": masks.window(None, -40),
    "dilated": masks.dilated(5, 7),
    "empty": masks.empty(),
    "documents": masks.documents(torch.tensor([0, 90, 131, 300], dtype=torch.int32), within=masks.causal()),
    "prefix": masks.prefix(40) | masks.causal(),
    "random": masks.random_blocks(0.3, block=64),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_mask(head_dim: int, name: str) -> None:
    lengths = (300, 300) if name == "documents" else (300, 333)
    agree(draw(lengths, head_dim=head_dim), MASKS[name])


@pytest.mark.parametrize(
    "lengths", [(64, 64), (128, 256), (192, 128), (1, 700), (700, 65), (257, 513)], ids=str
)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_every_length(lengths: tuple[int, int], mask: str) -> None:
    agree(draw(lengths), MASKS[mask])
    agree(draw(lengths, head_dim=128), MASKS[mask])


@pytest.mark.parametrize("lengths", [(256, 256), (256, 320), (64, 640)], ids=str)
def test_bits_of_whole_granules_have_no_words(lengths: tuple[int, int]) -> None:
    agree(draw(lengths), masks.random_blocks(0.3, block=64))


def test_columns() -> None:
    ends = torch.randint(1, 300, (1, 2, 300, 1), generator=torch.Generator().manual_seed(1)).sort(2).values
    agree(draw((300, 300)), masks.columns(ends.int(), causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [False, True])
def test_batches_groups_and_layouts(inside: bool, dtype: torch.dtype) -> None:
    x = draw((130, 140), heads=(4, 2), batch=2, inside=inside, dtype=dtype)
    out, lse = hopper(x, masks.causal())
    wanted = right(x, masks.causal())
    torch.testing.assert_close(out.float(), wanted[0], atol=0.03, rtol=0.03)
    torch.testing.assert_close(lse, wanted[1], atol=2e-3, rtol=2e-3)
    assert (out.stride(1) > out.stride(2)) != inside
    assert lse.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dims", [(40, 64), (96, 32), (24, 100), (1, 5)])
def test_heads_of_every_size(dims: tuple[int, int], inside: bool) -> None:
    q, k, v = draw((130, 140), head_dim=max(dims), inside=inside)
    agree((q[..., : dims[0]].contiguous(), k[..., : dims[0]].contiguous(), v[..., : dims[1]].contiguous()))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"alibi_slopes": torch.tensor([0.5, 0.1])},
        {"alibi_slopes": torch.tensor([[0.5, 0.1]]), "softcap": 5.0},
        {"sink": torch.tensor([0.5, -3.0])},
        {"scale": 0.0},
        {"scale": -0.3},
        {"bias": torch.randn(2, 200, 333, generator=torch.Generator().manual_seed(1)).bfloat16()},
        {"bias": torch.linspace(-2, 2, 333), "softcap": 5.0, "sink": torch.tensor([0.5, -3.0])},
        {"bias": torch.full((200, 1), torch.finfo(torch.float32).min), "sink": torch.tensor([0.5, 0.1])},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_options_of_the_score(mask: str, options: dict[str, Any]) -> None:
    agree(draw((200, 333)), MASKS[mask], **options)


def test_a_bias_may_hide_keys_and_whole_rows() -> None:
    bias = torch.zeros(200, 333)
    bias[:, 200:], bias[3], bias[64:128, 10] = -torch.inf, -torch.inf, torch.finfo(torch.float32).min
    agree(draw((200, 333)), bias=bias)


@pytest.mark.parametrize("mask", ["full", "causal", "far window", "random"])
@pytest.mark.parametrize("keys", [384, 640])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_bias_in_every_tile(head_dim: int, keys: int, mask: str) -> None:
    bias = torch.randn(2, 200, keys, generator=torch.Generator().manual_seed(1))
    which = masks.window(600, 0) if mask == "far window" else MASKS[mask]
    agree(draw((200, keys), head_dim=head_dim), which, bias=bias)


def test_programs_may_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(*arguments: Any) -> Order:
        """The first program and the last one have none."""
        order = of_lines(*arguments)
        order.starts[1], order.starts[-2] = 0, len(order.places)
        return order

    of_lines = launch.of_lines
    monkeypatch.setattr(launch, "of_lines", idle)
    monkeypatch.setattr(launch, "_cores", lambda device: 5)
    cuts = torch.tensor([0, 700, 716, 1024], dtype=torch.int32)
    x, mask = draw((1024, 1024), heads=(2, 1)), masks.documents(cuts, within=masks.causal())
    made = launch._make(work_of(x, mask), "", (True, 0))
    assert (made.schedule.portions[:, 9] == 0).tolist() == [True, False, False, False, True]
    agree(x, mask)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "dilated"])
@pytest.mark.parametrize("length", [1, 4, 32])
def test_query_heads_of_a_key_head_share_tiles_when_rows_are_few(
    length: int, mask: str, inside: bool, emulated: list[tuple[int, int]]
) -> None:
    x = draw((length, 333), heads=(12, 3), batch=2, inside=inside)
    assert bool(launch._period(work_of(x, MASKS[mask]))) == (length == 1 or not inside)
    agree(x, MASKS[mask])
    wide = draw((length, 333), heads=(12, 3), head_dim=128, batch=2)[0][..., ::2]
    assert not launch._period(work_of((wide, *x[1:]), MASKS[mask]))
    agree((wide, *x[1:]), MASKS[mask])
    x[2][1, 1, 5] = float("nan")
    out, _ = hopper(x, masks.window(40, 0))
    assert not out.isnan().any()
    assert not emulated
    # What is hidden but in a tile that is visited is met by the heads of its key head.
    x[2][1, 1, 5], x[2][0, 2, -45] = 0.0, float("nan")
    out, _ = hopper(x, masks.window(40, 0))
    assert not out[:, :, -1].isnan().any()
    assert set(emulated) == ({(0, 2)} if length == 1 or not inside else {(0, 8 + n) for n in range(4)})


# The fixed reference.


def rising(length: int, head_dim: int = 64) -> Tensors:
    """Scores that outgrow the reference of the first tiles in one head, and fall in the other."""
    q, k, v = draw((length, length), heads=(2, 2), head_dim=head_dim)
    steps = torch.linspace(30.0, 0.2, length)[:, None].bfloat16()
    return q.abs() + 1, (k.abs() + 1) * torch.stack([steps, steps.flip(0)]), v


@pytest.mark.parametrize("mask", ["full", "causal", "window", "prefix"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_that_outgrow_their_reference_are_computed_again(head_dim: int, mask: str) -> None:
    agree(rising(600, head_dim), MASKS[mask])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "long window"])
def test_long_lines_that_are_lost_are_given_up_early(
    mask: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 512 keys; all consumers have rows in all lines."""
    emulator.modules()
    kernel = emulator.part("attend")
    skip, given_up = kernel.skip, []

    def noted(w: int, s: Any, stage: Any, phase: Any, turn: Any, count: Any) -> Any:
        given_up.append(count)
        return skip(w, s, stage, phase, turn, count)

    monkeypatch.setattr(kernel, "skip", noted)
    monkeypatch.setattr(launch, "_LONG", 2048)
    q, k, v = rising(2688, head_dim)
    # The head whose scores rise along the way.
    x = tuple(t[:, :1].contiguous() for t in (q, k, v))
    form = masks.window(2500, 5) if mask == "long window" else MASKS[mask]
    agree(x, form)
    keys = launch.variant_of(work_of(x, form)).BN
    assert max(given_up) == (2688 - 512) // keys
    given_up.clear()
    agree(draw((384, 2688), head_dim=head_dim), MASKS["full"])
    assert max(given_up) == 0


def test_large_values_are_computed_again_where_their_weights_overflow() -> None:
    q, k, v = rising(300)
    # Weights stay below 2^64, the sums of values do not.
    k = k / 16
    out, lse = hopper((q, k, v * 1e30))
    wanted = right((q, k, v))
    torch.testing.assert_close(out.float() / 1e30, wanted[0], atol=0.03, rtol=0.03)
    torch.testing.assert_close(lse, wanted[1], atol=2e-3, rtol=2e-3)


HIDING = {
    "causal": masks.causal(),
    "window": masks.window(60, 20),
    "documents": masks.documents(torch.tensor([0, 90, 131, 300], dtype=torch.int32), within=masks.causal()),
    "columns": masks.columns((torch.arange(300) + 60).int().view(1, 1, 300, 1), causal=True),
    "random": masks.causal() & masks.random_blocks(0.6, block=16),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", HIDING)
@pytest.mark.parametrize("head_dim", [40, 128, 256])
def test_what_is_hidden_may_be_anything(
    head_dim: int, mask: str, dtype: torch.dtype, value: float, emulated: list[tuple[int, int]]
) -> None:
    """Rows see what they see: of a value that is not finite, and of no other."""
    q, k, v = draw((300, 300), heads=(2, 2), dtype=dtype, head_dim=head_dim)
    k[:, 0, 200:], v[:, 1, 200:, 3] = value, value
    out, lse = hopper((q, k, v), HIDING[mask])
    clean = (q, k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0))
    wanted = right(clean, HIDING[mask])
    probe = torch.eye(300)[None, None].expand(1, 2, -1, -1)
    seen = reference.attention(q.double(), q.double() * 0, probe.double(), mask=HIDING[mask])[0] > 0
    hit = seen[0, :, :, 200:].any(-1)
    # Keys that are no numbers: rows that see none of them.
    torch.testing.assert_close(out[0, 0, ~hit[0]].float(), wanted[0][0, 0, ~hit[0]], atol=0.03, rtol=0.03)
    torch.testing.assert_close(lse[0, 0, ~hit[0]], wanted[1][0, 0, ~hit[0]], atol=2e-3, rtol=2e-3)
    # Such values: the column alone, of rows that see one.
    torch.testing.assert_close(lse[:, 1], wanted[1][:, 1], atol=2e-3, rtol=2e-3)
    given = torch.full_like(wanted[0][0, 1, :, 3], value)
    wanted[0][0, 1, :, 3] = torch.where(hit[1], given, wanted[0][0, 1, :, 3])
    torch.testing.assert_close(out[:, 1].float(), wanted[0][:, 1], atol=0.03, rtol=0.03, equal_nan=True)
    assert (0, 1) in emulated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_keys_may_be_infinite(mask: str, dtype: torch.dtype) -> None:
    """Scores of minus infinity weigh nothing, in the first tiles that are visited, too."""
    q, k, v = draw((256, 256), dtype=dtype)
    q[..., 0], k[:, :, 128:, 0] = -1.0, float("inf")
    out, lse = hopper((q, k, v), MASKS[mask])
    clean = (q, k[:, :, :128].contiguous(), v[:, :, :128].contiguous())
    # Of the rows of a causal call, those that see one of them see all the others.
    wanted = right(clean) if mask == "full" else None
    rows = slice(None) if wanted is not None else slice(128, None)
    wanted = right(clean) if wanted is None else wanted
    torch.testing.assert_close(out[:, :, rows].float(), wanted[0][:, :, rows], atol=0.03, rtol=0.03)
    torch.testing.assert_close(lse[:, :, rows], wanted[1][:, :, rows], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("part", ["second pass", "third pass"])
def test_results_of_a_pass_are_there_before_the_next_one_writes(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that nobody waits for may arrive in any order: else the emulator shows old results."""
    monkeypatch.setattr(launch, "_cores", lambda device: 1)
    # The last rows are those of a first warp group, which computes all that come a third time.
    x = rising(300) if part == "second pass" else draw((420, 420), heads=(2, 2), dtype=torch.float16)
    assert 420 % (64 * sizes.sizes_of(64, "short band")["GROUPS"]) <= 64
    if part == "third pass":
        x[2][:, :, -10:] = float("nan")

    def wrong() -> int:
        out, _ = hopper(x, None if part == "second pass" else masks.causal())
        clean = (*x[:2], x[2].nan_to_num(0.0))
        wanted = right(clean, None if part == "second pass" else masks.causal())[0]
        off = (out[:, :, :-10].float() - wanted[:, :, :-10]).abs()
        return int((off.nan_to_num(9.0) > 0.05).any(-1).sum())

    assert wrong() == 0
    monkeypatch.setattr(emulator.modules(), "settle", lambda: None)
    assert wrong() > 0


def test_only_lines_that_met_such_values_are_computed_carefully(emulated: list[tuple[int, int]]) -> None:
    q, k, v = draw((256, 256), heads=(2, 2))
    # Keys are selected away at once.
    k[:, 0, 200:] = float("nan")
    out, lse = hopper((q, k, v), masks.causal())
    assert out[0, 0, :200].isfinite().all() and lse[0, 0, :200].isfinite().all()
    v[0, 1, 255] = float("nan")
    emulated.clear()
    assert hopper((q, k, v), masks.causal())[0][0, 1, :255].isfinite().all()
    assert (0, 1) in emulated


def test_only_lines_with_such_rows_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = emulator.modules()
    attend, again = kernel.attend, []

    def noted(w: int, s: Any, done: Any, *rest: Any) -> Any:
        if done >= s.items:
            again.append(w)
        return attend(w, s, done, *rest)

    monkeypatch.setattr(kernel, "attend", noted)
    x = rising(512, 128)
    # In head 0, rows 128 to 191 outgrow their reference, and no others.
    calm = torch.arange(512) // 64 != 2
    x[0][:, 0, calm] = 0.1 * draw((512, 512), head_dim=128)[0][:, 0, calm]
    x[0][:, 1] = 0.1 * x[0][:, 1]
    agree(x)
    # Both warp groups of its line.
    assert sorted(again) == [0, 1]


@pytest.mark.parametrize("mask", ["full", "causal", "documents"])
def test_lists_of_work_made_on_the_device_cover_everything(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As inside the capture of a graph."""
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    agree(draw((300, 300), heads=(4, 2)), MASKS[mask])
    assert not launch.kept._by_identity and not launch.kept._by_value


@pytest.mark.parametrize("mask", ["full", "causal", "documents"])
def test_a_graph_reads_what_was_made_before_its_capture_and_holds_it(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(draw((300, 300), heads=(4, 2)), MASKS[mask])
    made = launch._made_for(work, 0)
    held, theirs = len(launch._held_by_graphs), len(arguments._held_by_graphs)
    for module in (launch, arguments):
        monkeypatch.setattr(module, "capturing", lambda device: True)
    assert launch._made_for(work, 0) is made
    launch.kept.clear()
    assert launch._held_by_graphs[held:] == [made]
    assert len(arguments._held_by_graphs) == theirs + (mask == "documents")
    del launch._held_by_graphs[held:], arguments._held_by_graphs[theirs:]


# The protocol.


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "changes",
    [
        {"STAGES": 3},
        {"STAGES": 4},
        {"GROUPS": 3},
        {"GROUPS": 2},
        {"JOINED": True, "STAGES": 3},
        {"TURNS": True},
        {"TURNS": True, "GROUPS": 3, "HELD": True},
        {"BN": 64, "STAGES": 3},
        {"EARLY": True, "TURNS": False},
        {"EARLY": True, "TURNS": False, "BN": 64, "STAGES": 4},
        {"HALVES": True},
        {"SLOTS": 2, "HELD": False},
    ],
    ids=str,
)
def test_other_sizes(changes: dict[str, Any], head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resize(monkeypatch, changes)
    x = draw((400, 500), heads=(2, 2), head_dim=head_dim)
    agree(x)
    agree(x, masks.window(200, 30))


def test_a_ring_that_is_too_short_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """One barrier for keys and values, two stages: the emulator must see it."""
    resize(monkeypatch, {"JOINED": True, "STAGES": 2})
    monkeypatch.setattr(emulator, "PATIENCE", 1.0)
    with pytest.raises(AssertionError, match="deadlock"):
        hopper(draw((64, 600)))


def test_results_that_are_not_waited_for_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the results must have left its place before the other half comes there."""
    emulator.modules()
    kernel, wait, calls = emulator.part("finish"), emulator.copy_out_wait, []

    def impatient(left: int) -> None:
        calls.append(left)
        # Not between the halves of a piece of work.
        if len(calls) % 2 == 1:
            wait(left)

    monkeypatch.setattr(launch, "_cores", lambda device: 1)
    monkeypatch.setattr(kernel, "copy_out_wait", impatient)
    x = draw((64, 300), head_dim=256, heads=(1, 1), dtype=torch.float16)
    found, right_ones = hopper(x)[0].float(), right(x)[0]
    assert not torch.allclose(found, right_ones, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("early", ["k_full", "v_full", "q_full"])
def test_tiles_that_are_not_waited_for_show(early: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads a tile before it is there reads NaN, and who does not wait for q has not been told which rows
    these are: the emulator must see it.
    """
    copy_in, wait = emulator.copy_in, emulator.MBarrier.wait
    barriers: list[Any] = []

    def skipped(bar: Any) -> bool:
        return any(bar.held is own for own in barriers)

    def slow(desc: Any, at: Any, bar: Any, place: Any) -> None:
        # Copies of a GPU end in any order.
        threading.Timer(0.1 if skipped(bar) else 0.0, copy_in, (desc, at, bar, place)).start()

    def impatient(bar: Any, parity: Any, pred: Any = True) -> None:
        if not skipped(bar):
            wait(bar, parity, pred)

    kernel = emulator.modules()
    monkeypatch.setattr(kernel, "copy_in", slow)
    monkeypatch.setattr(emulator.MBarrier, "wait", staticmethod(impatient))
    shared = kernel.Shared

    def noted(*arguments: Any) -> Any:
        s = shared(*arguments)
        barriers.extend(getattr(s, early).held)
        return s

    monkeypatch.setattr(kernel, "Shared", noted)
    # In float16, since bfloat16 has a second look at what is not a number.
    x = draw((64, 300), dtype=torch.float16)
    if early == "q_full":
        with pytest.raises((RuntimeError, IndexError), match=r"size of tensor|out of bounds"):
            hopper(x)
    else:
        assert hopper(x)[0].isnan().any()


# The laws.


def law_cases() -> list[tuple[Law, Case]]:
    """Some of those that the kernel takes."""
    every = [
        (law, case)
        for law, case in conformance.parameters()
        if case.dtype in ("bf16", "fp16") and not case.dropout_p
    ]
    return random.Random(0).sample(every, 40)


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls on CPU tensors may ask for this backend; gradients by the fold in place of Triton's kernels."""
    fold, declines = eager.backend, triton.TritonBackend.why_not

    def on_cpu(self: Any, problem: Problem, form: Any) -> list[str]:
        return [reason for reason in declines(self, problem, form) if "it runs on GPUs" not in reason]

    monkeypatch.setattr(hopper_backend, "_refusal", lambda device: None)
    monkeypatch.setattr(triton.TritonBackend, "why_not", on_cpu)
    monkeypatch.setattr(
        hopper_backend.HopperBackend, "backward", lambda self, *arguments: fold.backward(*arguments)
    )
    clear_plans()
    yield
    clear_plans()
    tuned._table.cache_clear()


@pytest.mark.parametrize("law, case", law_cases(), ids=conformance.identify)
def test_it_obeys(law: Law, case: Case, asked_for: None) -> None:
    conformance.run(law, case, "hopper", "cpu")


def test_its_sizes_are_tuned(asked_for: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are checked, then timed, and the best ones are kept."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    monkeypatch.setattr(tune_kernels, "SECONDS", 0.0)
    monkeypatch.setattr(tune_kernels, "ROUNDS", 1)
    entry = HopperEntry(64, "full")
    fair = {"BN": 64, "STAGES": 3, "GROUPS": 2, "REGISTERS": 240}
    candidates = [as_sizes(fair), as_sizes(fair | {"SLOTS": 2, "TURNS": True})]
    scale = Scale(odd=(37, 45), length=32, tokens=64, channels=64)
    found = tune_kernels.tune_kernels("cpu", [entry], scale=scale, candidates=candidates)
    (one,) = found.entries
    assert [trial.status for trial in one.trials] == ["timed"] * 3, [t.reasons for t in one.trials]
    assert one.old == entry.current("cuda") or one.best != one.old
    kept = json.loads(Path(found.path).read_text())
    assert kept == {entry.name: dict(one.best)}


def clear_plans() -> None:
    """Forget who takes which call."""
    prepare._plan.cache_clear()
    prepare._prepared.clear()
