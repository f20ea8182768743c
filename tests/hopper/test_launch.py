"""What the host decides about a call of the Hopper kernel: who does what, in which variant, who declines."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilefold import attention, explain, masks
from tilefold.errors import BackendError
from tilefold.masks.band import Band
from tilefold.planning import tuned
from tilefold.planning.backend import Work
from tilefold.problem import Problem, is_aligned
from tilefold.scores import Scores

pytest.importorskip("triton", reason="Triton is not installed")
from tilefold.backends.hopper import backend, launch, lines, schedule
from tilefold.backends.hopper.sizes import WIDTHS, kind_of, sizes_of, width_of
from tilefold.backends.hopper.variant import LINES, Variant
from tilefold.backends.triton.arguments import of_mask

ASKED = Problem(2, 4, 2, 512, 640, 128, 128, torch.bfloat16, "cuda", backend="hopper")
BANDS = [
    Band(None, None), Band(None, 0), Band(0, None), Band(-100, 0), Band(-70, 9), Band(-9, 400),
    Band(None, -700), Band(-40, 40, 5),
]  # fmt: skip


def work(form: object = BANDS[0], **changes: object) -> Work:
    p = dataclasses.replace(ASKED, **changes)
    q = torch.empty(p.batch, p.q_heads, p.q_length, p.head_dim, dtype=p.dtype, device="meta")
    k = torch.empty(p.batch, p.k_heads, p.k_length, p.head_dim, dtype=p.dtype, device="meta")
    return Work(p, q, k, k, form, Scores(1.0))


# Who does what.


@pytest.mark.parametrize("costs", [[5.0, 4.0, 3.0, 2.0, 1.0], [1.0] * 5], ids=str)
@pytest.mark.parametrize("pairs, span, programs", [(6, 2, 7), (6, 6, 4), (1, 1, 5), (5, 3, 1)])
def test_every_place_is_somebody_s_and_nobody_is_idle(
    costs: list[float], pairs: int, span: int, programs: int
) -> None:
    found = schedule.assign(costs, pairs, span, programs, schedule.FIXED_COST / 128)
    assert sorted(itertools.chain(*found)) == list(range(5 * pairs))
    assert all(found)
    flat = schedule.of_costs(costs, 128, pairs, span, programs)
    # Lines that cost the same go round, which comes to the same.
    assert [own(flat, n) for n in range(programs)] == found


def test_very_many_pieces_of_work_go_round_the_longest_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_MANY", 1000)
    costs = [float(n) for n in range(1, 17)]
    found = schedule.of_costs(costs, 64, 1024, 64, 132)
    owned = [own(found, n) for n in range(132)]
    assert sorted(itertools.chain(*owned)) == list(range(16 * 1024))
    spent = [sum(costs[place % 16] for place in mine) for mine in owned]
    assert max(spent) <= 1.05 * sum(spent) / len(spent)
    # Section after section, in each the longest lines first.
    assert [place % 16 for place in owned[0]][:7] == sorted(
        (place % 16 for place in owned[0][:7]), reverse=True
    )


CPU = torch.device("cpu")


def own(order: schedule.Order, program: int) -> list[int]:
    return order.places[order.starts[program] : order.starts[program + 1]].tolist()


def test_the_longest_lines_of_a_section_come_first() -> None:
    (found,) = schedule.assign([1.0, 3.0, 2.0], 4, 2, 1, 1.0)
    assert [place % 3 for place in found] == [1, 1, 2, 2, 0, 0] * 2
    assert {place // 3 for place in found[:6]} == {0, 1}


def test_work_is_shared_out_evenly() -> None:
    costs = [float(n) for n in visits(Band(None, 0), 16384, 16384, Variant(128, 128, 128, 2, 2, 240))]
    found = schedule.assign(costs, 16, 4, 132, 2.5)
    spent = [sum(costs[place % 128] + 2.5 for place in own) for own in found]
    assert max(spent) <= 1.03 * sum(spent) / len(spent)


def test_lines_of_one_order_go_round_back_and_forth() -> None:
    jobs = schedule.of_ranks(5, 1, 1, 2, False, CPU)
    assert [own(jobs, 0), own(jobs, 1)] == [[0, 3, 4], [1, 2]]
    jobs = schedule.of_ranks(3, 3, 2, 1, True, CPU)
    # Sections of two pairs and of one; the last lines first.
    assert own(jobs, 0) == [2, 5, 1, 4, 0, 3, 8, 7, 6]


def lists(counts: list[int], pairs: int = 2, programs: int = 3) -> schedule.Order:
    tables = torch.zeros(pairs, dtype=torch.int64)
    return schedule.of_lines(torch.tensor([counts]) * 128, tables, programs)


def test_lines_are_shared_out_by_what_they_cost() -> None:
    counts = [1, 1, 1, 1, 40, 1, 1, 1, 1, 1]
    jobs = lists(counts, programs=4)
    found = [own(jobs, n) for n in range(4)]
    assert sorted(itertools.chain(*found)) == list(range(20))
    # The two long lines fill two programs; the others share the rest.
    assert found[2:] == [[4], [14]]
    assert {len(found[0]), len(found[1])} == {9}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("programs", [1, 7, 132])
def test_shares_take_equally_long(programs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 40 if seed % 2 else 4, (2000,), generator=generator)
    if seed > 5:
        costs[::500] = 900
    jobs = schedule.shared_out(costs, programs)
    found = [own(jobs, n) for n in range(programs)]
    assert sorted(itertools.chain(*found)) == list(range(2000))
    spent = [float(costs[places].sum()) for places in found]
    mean = sum(spent) / programs
    assert max(spent) <= max(1.05 * mean + 2.0, float(costs.max()) + 0.04 * mean)


def test_large_pieces_are_balanced_by_small_ones() -> None:
    """One in seven is ten times as large: in sections some programs would have a quarter more than others."""
    costs = torch.randint(2, 62, (2000,), generator=torch.Generator().manual_seed(0))
    costs[::7] *= 10
    jobs = schedule.shared_out(costs, 132)
    spent = [float(costs[own(jobs, n)].sum()) for n in range(132)]
    assert max(spent) <= 1.05 * sum(spent) / 132


def test_programs_are_at_about_the_same_place_at_any_time() -> None:
    """So that keys that one of them has read are still in the L2 cache when the next one wants them."""
    costs = torch.randint(1, 9, (1200,), generator=torch.Generator().manual_seed(0))
    jobs = schedule.shared_out(costs, 10)
    found = [own(jobs, n) for n in range(10)]
    assert all(mine == sorted(mine) for mine in found)
    times = [costs[mine].cumsum(0) for mine in found]
    for now in range(0, int(costs.sum() / 10) - 10, 10):
        at = [mine[int((time > now).int().argmax())] for mine, time in zip(found, times, strict=True)]
        assert max(at) - min(at) <= 2 * 1200 // 16


def test_programs_without_work_have_none() -> None:
    jobs = schedule.shared_out(torch.tensor([9, 1]), 2)
    assert [own(jobs, 0), own(jobs, 1)] == [[1], [0]]
    jobs = schedule.shared_out(torch.tensor([5, 5]), 1)
    assert own(jobs, 0) == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_every_line_of_lists_is_somebody_s(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 9, (1 + seed,), generator=generator).tolist()
    jobs = lists(counts, pairs=3, programs=1 + seed % 5)
    places = [own(jobs, program) for program in range(1 + seed % 5)]
    assert sorted(itertools.chain(*places)) == list(range(3 * len(counts)))


def test_programs_find_their_pieces_of_work() -> None:
    mask = of_mask(Band(None, 0), None)._replace(table_b=2, table_h=1)
    first = torch.tensor([[0, 128, 256], [-1, 0, 0], [5, 5, 5], [7, 7, 7]], dtype=torch.int32)
    about = lines.Lines(torch.zeros(4, 3, 2, 8, dtype=torch.int32), first)
    order = schedule.Order(torch.tensor([0, 5, 3, 11]), torch.tensor([0, 1, 1, 4]))
    made = schedule.scheduled(order, about, heads=2, group=2, mask=mask, rows=128)
    # Batch element, heads, line of all tables, first key, first row, table.
    assert made.work[:, :6].tolist() == [
        [0, 0, 0, 0, 0, 0], [0, 1, 5, 0, 256, 1], [0, 1, 3, -1, 0, 1], [1, 1, 11, 7, 256, 3]
    ]  # fmt: skip
    assert made.portions[:, 8:10].tolist() == [[0, 1], [1, 0], [1, 3]]
    # What a program without work looks at is somebody's.
    assert made.portions[:, :8].tolist() == made.work[[0, 1, 1]].tolist()
    heads = torch.tensor([(h // 3 << 16) | h for h in range(9)])
    about = lines.Lines(torch.zeros(1, 1, 2, 8, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32))
    order = schedule.Order(torch.arange(9), torch.tensor([0, 9]))
    flat = of_mask(Band(None, None), None)
    assert (schedule.scheduled(order, about, 9, 3, flat, 128).work[:, 1] == heads).all()


# What a line of tiles visits.


def sized(form: Band, **changes: object) -> Variant:
    given = {"D": 64, "DV": 64, "BN": 64, "STAGES": 2, "GROUPS": 3, "REGISTERS": 160, "MASKED": True}
    return Variant(**(given | {"BELOW": form.lo is not None, "STEPPED": form.step != 1} | changes))  # pyright: ignore[reportArgumentType]


def visits(form: Band, q_length: int, k_length: int, C: Variant) -> list[int]:
    found = lines.of_band(of_mask(form, None), q_length, k_length, C, CPU)
    return found.counts[0].tolist()


@pytest.mark.parametrize("lengths", [(512, 512), (300, 700), (700, 300), (1000, 1000)], ids=str)
@pytest.mark.parametrize("form", BANDS, ids=str)
def test_visits_are_those_of_the_tiles_that_a_band_shows(form: Band, lengths: tuple[int, int]) -> None:
    # Everything between the bounds.
    states = Band(form.lo, form.hi).tile_states(*lengths, 192, 128, "cpu")[0, 0]
    assert visits(form, *lengths, sized(form, BN=128)) == [int(n) for n in (states > 0).sum(-1)]


def places(words: list[int]) -> tuple[list[int], list[int]]:
    """Of a warp group's words: all tiles of the line in order, and those of its rows."""
    first, whole, masked, before, gap, to, own, after = words
    base = first - before

    def at(j: int) -> int:
        return base + (-1 - j if j < whole else j - whole if j < whole + masked else masked - 1 - j)

    every = [at(j) for j in range(before + own + after)]
    return every, [every[before + j] for j in range(own) if j < gap or j >= to]


@pytest.mark.parametrize("groups, keys", [(2, 64), (3, 64), (2, 128), (1, 64)])
@pytest.mark.parametrize("lengths", [(512, 512), (300, 700), (700, 300), (1000, 1000)], ids=str)
@pytest.mark.parametrize("form", BANDS, ids=str)
def test_warp_groups_take_the_tiles_that_their_rows_see(
    form: Band, lengths: tuple[int, int], groups: int, keys: int
) -> None:
    C = sized(form, GROUPS=groups, BN=keys)
    found = lines.of_band(of_mask(form, None), *lengths, C, CPU)
    dense = Band(form.lo, form.hi)
    shown = (dense.tile_states(*lengths, 64, keys, "cpu")[0, 0] > 0).tolist()
    inside = (torch.arange(-(-lengths[1] // keys)) + 1) * keys <= lengths[1]
    full = ((dense.tile_states(*lengths, 64 * groups, keys, "cpu")[0, 0] == 2) & inside).tolist()
    for line, words in enumerate(found.words[0].tolist()):
        for w in range(groups):
            every, own = places(words[w])
            rows = line * groups + w
            mine = [n for n, seen in enumerate(shown[rows]) if seen] if rows < len(shown) else []
            assert sorted(own) == mine
            assert len(set(every)) == len(every)
            # Those that all rows see come first; a dilated band has none.
            whole = words[w][1]
            wanted = 0 if form.step != 1 else sum(full[line])
            assert whole == wanted and all(full[line][n] for n in every[:whole])
        first = int(found.first[0, line])
        assert first == (every[0] * keys if every else -1)


# Variants.


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "kind", ["full", "short full", "band", "short band", "window", "rows", "cols", "bits", "bias"]
)
def test_tiles_fit_the_shared_memory_of_a_core(width: int, kind: str) -> None:
    sizes = sizes_of(width, kind)
    C = Variant(width, width, **sizes)
    rows = C.GROUPS * LINES * (C.SLOTS + (0.5 if C.HALVES else 1.0))
    assert 2 * width * (rows + 2 * C.STAGES * C.BN) + 1024 <= 227 << 10
    # One barrier for both frees keys only with values, of which one tile is always in use.
    assert sizes["STAGES"] >= (3 if sizes.get("JOINED") else 2)


def test_the_shipped_sizes_make_sense() -> None:
    sizes = {name: value for name, value in tuned.hopper_table().items() if name.startswith("hopper/")}
    assert {f"hopper/{width}" for width in WIDTHS} <= set(sizes)
    for name, value in sizes.items():
        assert tuned.makes_sense(name, value), name
        # Bits are read one granule of 64 keys at a time.
        assert value["BN"] == 64 or name.count("/") == 2


def test_the_user_s_sizes_go_before_those_that_are_shipped() -> None:
    mine = {"BN": 64, "STAGES": 3, "GROUPS": 2, "REGISTERS": 232}
    with tuned.trying("hopper/128/short full", mine):
        assert sizes_of(128, "short full") == mine
        assert launch.variant_of(work()).STAGES == 3
    assert sizes_of(128, "short full") == tuned.hopper_table()["hopper/128/short full"]


@pytest.mark.parametrize(
    "change",
    [
        {"BN": 96},
        {"STAGES": 1},
        {"GROUPS": 4},
        {"REGISTERS": 250},
        {"SLOW": True},
        {"HELD": "yes"},
        {"HELD": 5},
        {"SLOTS": 9},
        {"SLOTS": 0},
        {"JOINED": True, "STAGES": 2},
        {"BN": 128},
    ],
    ids=str,
)
def test_sizes_that_make_no_sense_are_not_read(change: dict[str, object]) -> None:
    assert not tuned.makes_sense("hopper/128", tuned.hopper_table()["hopper/128"] | change)
    assert not tuned.makes_sense("hopper/128", [128, 64, 4, 3])
    wide = tuned.hopper_table()["hopper/128"] | {"BN": 128, "STAGES": 2, "JOINED": False}
    # Bits are read one granule of 64 keys at a time, with a bias or without.
    assert tuned.makes_sense("hopper/128/bias", wide) and not tuned.makes_sense("hopper/128/bits", wide)
    bits = masks.lower(*masks.random_blocks(0.5, block=64).spec(), 1, 1, 256, 256, "cpu")
    assert [kind_of(form, 128, 256, True) for form in (bits, BANDS[1])] == ["bits", "bias"]


@pytest.mark.parametrize(
    "dims", [(1, 1), (40, 64), (64, 65), (96, 32), (128, 128), (192, 128), (256, 8)], ids=str
)
def test_heads_have_tiles_that_hold_them(dims: tuple[int, int]) -> None:
    assert width_of(*dims) >= max(dims)
    assert width_of(*dims) == min(width for width in WIDTHS if width >= max(dims))


def test_what_a_call_needs_is_compiled_in() -> None:
    full, causal, window = (launch.variant_of(work(form)) for form in BANDS[:2] + BANDS[3:4])
    assert (full.MASKED, full.CAREFUL, full.TURNS, full.FIXED) == (False, False, True, True)
    assert (causal.MASKED, causal.CAREFUL, causal.BELOW, causal.TURNS) == (True, True, False, False)
    assert window.BELOW
    # Keys beyond the last are hidden, but hold nothing.
    ragged = launch.variant_of(work(k_length=700))
    assert (ragged.MASKED, ragged.CAREFUL, ragged.TURNS) == (True, False, True)
    assert not launch.variant_of(work(dtype=torch.float16)).FIXED
    assert launch.variant_of(work(BANDS[7])).STEPPED


@pytest.mark.parametrize(
    "scores, plain",
    [
        (Scores(0.125), True),
        (Scores(0.0), False),
        (Scores(-1.0), False),
        (Scores(1.0, softcap=20.0), False),
        (Scores(1.0, alibi_slopes=torch.ones(4)), False),
        (Scores(1.0, bias=torch.ones(512, 640)), False),
    ],
)
def test_a_plain_score_goes_into_the_exponent(scores: Scores, plain: bool) -> None:
    C = launch.variant_of(dataclasses.replace(work(), scores=scores))
    assert plain == C.PLAIN
    assert (scores.softcap is not None, scores.alibi_slopes is not None) == (C.SOFTCAP, C.ALIBI)
    assert (scores.bias is not None) == C.BIAS == (not C.FIXED)


# Who declines.


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": torch.float32}, "bfloat16 and float16, and the inputs are float32"),
        ({"head_dim": 257}, "query and key heads of size 1 to 256, not 257"),
        ({"v_head_dim": 512}, "value heads of size 1 to 256, not 512"),
        ({"options": ("dropout",)}, "does not have dropout"),
        (
            {"q_heads": 1 << 16, "k_heads": 8, "head_dim": 64, "v_head_dim": 64},
            "room for 65535 query heads, not",
        ),
        ({"k_length": 0}, "no empty tensor"),
        ({"device": "cpu"}, "the tensors are on cpu"),
    ],
)
def test_what_the_kernel_does_not_have_is_declined(change: dict[str, object], reason: str) -> None:
    with tuned.assuming("sm90"):
        assert backend.why_not(ASKED, BANDS[0]) == []
        (found,) = backend.why_not(dataclasses.replace(ASKED, **change), BANDS[0])
    assert reason in found


def test_calls_that_ask_for_nobody_go_where_they_are_fast() -> None:
    whole, mixed = (
        masks.lower(*mask.build(1, 2, 512, 640, "cpu").spec(), 1, 2, 512, 640, "cpu")
        for mask in (masks.random_blocks(0.3, block=64), masks.random_blocks(0.3, block=16))
    )
    unasked = dataclasses.replace(ASKED, backend=None)
    narrow = dataclasses.replace(unasked, head_dim=64, v_head_dim=64)
    with tuned.assuming("sm90"):
        for problem, form in ((unasked, BANDS[0]), (unasked, whole), (unasked, mixed), (narrow, whole)):
            assert backend.why_not(problem, form) == []
        for problem, form, reason in (
            (dataclasses.replace(unasked, aligned=False), BANDS[0], "multiples of 16 bytes"),
            (narrow, mixed, "% of the mask's blocks of 64 x 64 show some of their elements only"),
            (dataclasses.replace(unasked, q_length=63), BANDS[0], "64 rows and more, this call 63"),
            (dataclasses.replace(unasked, head_dim=24, v_head_dim=16), BANDS[0], "fill less than half"),
            (dataclasses.replace(unasked, head_dim=100), BANDS[0], "multiples of 16 bytes"),
        ):
            (found,) = backend.why_not(problem, form)
            assert reason in found
            assert backend.why_not(dataclasses.replace(problem, backend="hopper"), form) == []


def test_triton_s_interpreter_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with tuned.assuming("sm90"):
        (found,) = backend.why_not(ASKED, BANDS[0])
    assert found.startswith("TRITON_INTERPRET is set")


@pytest.mark.parametrize("head_dim, as_wide", [(16, 64), (96, 128), (144, 256)])
def test_heads_take_the_time_of_the_tiles_that_hold_them(head_dim: int, as_wide: int) -> None:
    one, other = (
        explain(dataclasses.replace(ASKED, head_dim=D, v_head_dim=D), machine="H200").forward
        for D in (head_dim, as_wide)
    )
    assert one.seconds == pytest.approx(other.seconds, rel=0.1)


@pytest.mark.parametrize(
    "change, aligned",
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
        (lambda x: x[..., :48], True),
        (lambda x: x[:, :, ::2], True),
        (lambda x: x[..., :51].contiguous(), False),
        (lambda x: x.mT.contiguous().mT, False),
        (lambda x: x.expand(3, 2, 128, 64), True),
        (lambda x: x[..., 8:56], True),
        (lambda x: x[..., 4:52], False),
    ],
)
def test_what_lies_as_tma_takes_it_is_told(change: Callable[[Tensor], Tensor], aligned: bool) -> None:
    x = change(torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16))
    assert is_aligned(x) == aligned
    found = explain(x, x, x, machine="H200")
    assert found.backend == ("hopper" if aligned else "triton")
    assert aligned or "multiples of 16 bytes" in str(found)


@pytest.mark.parametrize("dims, aligned", [((64, 64), True), ((100, 64), False), ((64, 36), False)])
def test_a_call_without_tensors_lies_as_dense_ones_would(dims: tuple[int, int], aligned: bool) -> None:
    problem = dataclasses.replace(ASKED, head_dim=dims[0], v_head_dim=dims[1], backend=None)
    q, k, v = (torch.zeros(2, 4, 128, size, dtype=torch.bfloat16) for size in (dims[0], *dims))
    for found in (explain(problem, machine="H200"), explain(q, k, v, machine="H200")):
        assert found.backend == ("hopper" if aligned else "triton")


def test_a_capture_does_not_wait_for_what_began_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    origin, waited = launch.Origin(CPU), []

    class Stream:
        def wait_event(self, event: object) -> None:
            waited.append(event)

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 2, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    origin._event, origin._stream = "made", 1
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    origin.before()
    assert not waited
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    origin.before()
    assert waited == ["made"]
    origin._stream = 2
    origin.before()
    assert len(waited) == 1


def test_all_reasons_are_given_at_once() -> None:
    p = dataclasses.replace(ASKED, dtype=torch.float32, head_dim=300, options=("bias", "dropout"))
    with tuned.assuming("sm90"):
        assert len(backend.why_not(p, BANDS[0])) == 3


@pytest.mark.parametrize("arch", ["sm80", "sm100"])
def test_other_gpus_are_declined(arch: str) -> None:
    with tuned.assuming(arch):
        assert backend.why_not(ASKED, BANDS[0]) == [f"it runs on Hopper GPUs (sm90), and this one is {arch}"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert backend.why_not(ASKED, BANDS[0]) == ["it runs on Hopper GPUs, and there is no NVIDIA GPU here"]
    q = torch.zeros(1, 2, 16, 64)
    with pytest.raises(BackendError, match="the tensors are on cpu"):
        attention(q, q, q, mask=masks.causal(), backend="hopper")
