"""What the host decides about a call of the Hopper kernel: who does what, in which variant, who declines."""

import dataclasses
import itertools

import pytest
import torch

from tilefold import attention, masks
from tilefold.errors import BackendError
from tilefold.masks.band import Band
from tilefold.planning import tuned
from tilefold.planning.backend import Work
from tilefold.problem import Problem
from tilefold.scores import Scores

pytest.importorskip("triton", reason="Triton is not installed")
from tilefold.backends.hopper import backend, launch, schedule
from tilefold.backends.hopper.sizes import WIDTHS, shipped, sizes_of, width_of
from tilefold.backends.hopper.variant import LINES, Variant

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
    found = schedule.assign(costs, pairs, span, programs)
    assert sorted(itertools.chain(*found)) == list(range(5 * pairs))
    assert all(found)
    flat = schedule.of_costs(costs, 128, pairs, span, programs, CPU)
    assert [own(flat, n) for n in range(programs)] == found


CPU = torch.device("cpu")


def own(jobs: schedule.Schedule, program: int) -> list[int]:
    begin, count, first = jobs.portions[program].tolist()
    places = jobs.work[begin : begin + count].tolist()
    assert first == (places[0] if places else first)
    return places


def test_the_longest_lines_of_a_section_come_first() -> None:
    (found,) = schedule.assign([1.0, 3.0, 2.0], 4, 2, 1)
    assert [place % 3 for place in found] == [1, 1, 2, 2, 0, 0] * 2
    assert {place // 3 for place in found[:6]} == {0, 1}


def test_work_is_shared_out_evenly() -> None:
    costs = [float(n) for n in schedule.visits(Band(None, 0), 16384, 16384, 128, 128)]
    found = schedule.assign(costs, 16, 4, 132)
    spent = [sum(costs[place % 128] + 2.5 for place in own) for own in found]
    assert max(spent) <= 1.03 * sum(spent) / len(spent)


def test_lines_of_one_order_go_round_back_and_forth() -> None:
    jobs = schedule.of_ranks(5, 1, 1, 2, False, CPU)
    assert [own(jobs, 0), own(jobs, 1)] == [[0, 3, 4], [1, 2]]
    jobs = schedule.of_ranks(3, 3, 2, 1, True, CPU)
    # Sections of two pairs and of one; the last lines first.
    assert own(jobs, 0) == [2, 5, 1, 4, 0, 3, 8, 7, 6]


def lists(counts: list[int], k_tiles: int, pairs: int = 2, programs: int = 3) -> schedule.Schedule:
    table = torch.tensor([[[n, 0] for n in counts]], dtype=torch.int32)
    order = torch.tensor(counts).argsort(descending=True, stable=True)[None].int()
    tables = torch.zeros(pairs, dtype=torch.int64)
    return schedule.of_lists(table, order, tables, 128 * k_tiles, 128, pairs, programs)


def test_lines_that_show_little_are_shared_out_by_what_they_cost() -> None:
    counts = [1, 1, 1, 1, 40, 1, 1, 1, 1, 1]
    jobs = lists(counts, k_tiles=200, programs=4)
    found = [own(jobs, n) for n in range(4)]
    # Neighbours, all of them, and a long line leaves room for few others.
    assert list(itertools.chain(*found)) == list(range(20))
    spent = [sum(counts[place % 10] + 2.5 for place in places) for places in found]
    assert max(spent) <= sum(spent) / 4 + 0.5 * 42.5


def test_lines_that_show_much_go_round_longest_first() -> None:
    jobs = lists([1, 3, 2], k_tiles=4)
    assert [own(jobs, n) for n in range(3)] == [[1, 3], [4, 0], [2, 5]]


@pytest.mark.parametrize("seed", range(20))
def test_every_line_of_lists_is_somebody_s(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 9, (1 + seed,), generator=generator).tolist()
    jobs = lists(counts, k_tiles=9 if seed % 2 else 90, pairs=3, programs=1 + seed % 5)
    places = [own(jobs, program) for program in range(1 + seed % 5)]
    assert sorted(itertools.chain(*places)) == list(range(3 * len(counts)))
    # What a program without work looks at is a place, too.
    assert ((jobs.portions[:, 2] >= 0) & (jobs.portions[:, 2] < 3 * len(counts))).all()


@pytest.mark.parametrize("lengths", [(512, 512), (300, 700), (700, 300), (1000, 1000)], ids=str)
@pytest.mark.parametrize("form", BANDS, ids=str)
def test_visits_are_those_of_the_tiles_that_a_band_shows(form: Band, lengths: tuple[int, int]) -> None:
    rows, keys = 192, 128
    # Everything between the bounds.
    states = Band(form.lo, form.hi).tile_states(*lengths, rows, keys, "cpu")[0, 0]
    assert schedule.visits(form, *lengths, rows, keys) == [int(n) for n in (states > 0).sum(-1)]


# Variants.


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "kind", ["full", "band", "short band", "long band", "window", "rows", "cols", "bits", "bias"]
)
def test_tiles_fit_the_shared_memory_of_a_core(width: int, kind: str) -> None:
    sizes = sizes_of(width, kind)
    C = Variant(width, width, **sizes)
    rows = C.GROUPS * LINES * (C.SLOTS + (0.5 if C.HALVES else 1.0))
    assert 2 * width * (rows + 2 * C.STAGES * C.BN) + 1024 <= 227 << 10
    # One barrier for both frees keys only with values, of which one tile is always in use.
    assert sizes["STAGES"] >= (3 if sizes.get("JOINED") else 2)


def test_the_shipped_sizes_make_sense() -> None:
    sizes = {name: value for name, value in shipped().items() if name.startswith("hopper/")}
    assert {f"hopper/{width}" for width in WIDTHS} <= set(sizes)
    for name, value in sizes.items():
        assert tuned._makes_sense(name, value), name
        # Bits are read one granule of 64 keys at a time.
        assert value["BN"] == 64 or name.count("/") == 2


def test_the_user_s_sizes_go_before_those_that_are_shipped() -> None:
    mine = {"BN": 64, "STAGES": 3, "GROUPS": 2, "REGISTERS": 232}
    with tuned.trying("hopper/128/full", mine):
        assert sizes_of(128, "full") == mine
        assert launch.variant_of(work()).STAGES == 3
    assert sizes_of(128, "full") == shipped()["hopper/128/full"]


@pytest.mark.parametrize(
    "change",
    [{"BN": 96}, {"STAGES": 1}, {"GROUPS": 4}, {"REGISTERS": 250}, {"SLOW": True}, {"HELD": "yes"}],
    ids=str,
)
def test_sizes_that_make_no_sense_are_not_read(change: dict[str, object]) -> None:
    assert not tuned._makes_sense("hopper/128", shipped()["hopper/128"] | change)
    assert not tuned._makes_sense("hopper/128", [128, 64, 4, 3])


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
        ({"k_length": 0}, "no empty tensor"),
        ({"backend": None}, "when they are asked for by name"),
        ({"device": "cpu"}, "the tensors are on cpu"),
    ],
)
def test_what_the_kernel_does_not_have_is_declined(change: dict[str, object], reason: str) -> None:
    with tuned.assuming("sm90"):
        assert backend.why_not(ASKED, BANDS[0]) == []
        (found,) = backend.why_not(dataclasses.replace(ASKED, **change), BANDS[0])
    assert reason in found


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
