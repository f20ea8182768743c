"""Bugs once reported against other attention libraries, kept out by their whole kind: masks, diagonals,
windows, packed sequences.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilefold import attention, attention_varlen, masks
from tilefold.masks import Mask
from tilefold.testing import evaluate, tolerance
from tilefold.testing.cases import Call

SUBJECT = evaluate.Subject(None)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def visible_keys(Lq: int, Lk: int, mask: Mask | None) -> tuple[list[list[int]], Tensor]:
    """Which keys each row of a real call sees (flat scores and an identity as values), and its lse."""
    q, k = torch.zeros(1, 1, Lq, 8), torch.zeros(1, 1, Lk, 8)
    out, lse = attention(q, k, torch.eye(Lk)[None, None], mask=mask, return_lse=True)
    rows = [row.nonzero().flatten().tolist() for row in out[0, 0]]
    for row, keys in zip(out[0, 0], rows, strict=True):
        assert all(float(x) == pytest.approx(1 / len(keys)) for x in row[keys])
    return rows, lse[0, 0]


def counts(Lq: int, Lk: int, mask: Mask | None) -> list[int]:
    rows, lse = visible_keys(Lq, Lk, mask)
    assert [float(x) == -torch.inf for x in lse] == [not row for row in rows]
    return [len(row) for row in rows]


# Rows without keys.


@pytest.mark.parametrize(
    "dtype, D, Lq, Lk", [(torch.float32, 8, 8, 8), (torch.float16, 64, 8, 130), (torch.bfloat16, 64, 8, 130)]
)
def test_rows_without_keys_are_zero_not_nan(dtype: torch.dtype, D: int, Lq: int, Lk: int) -> None:
    """pytorch/pytorch#103963: boolean masks with rows that allow no key turned outputs and gradients into
    NaN.
    """
    q, k, v = (torch.rand(1, 1, length, D).to(dtype) for length in (Lq, Lk, Lk))
    allowed = torch.zeros(1, 1, Lq, Lk, dtype=torch.bool)
    allowed[..., :4, : Lk // 2] = True
    call = Call(
        q, k, v, torch.ones(1, 1, Lq, D, dtype=dtype), torch.ones(1, 1, Lq), {"mask": masks.dense(allowed)}
    )
    results = evaluate.observe(SUBJECT, call)
    evaluate.expect(call).check(results, "rows 4-7 empty")
    assert not results["out"][:, :, 4:].any()
    assert bool((results["lse"][:, :, 4:] == -torch.inf).all())
    assert not results["grad q"][:, :, 4:].any()
    assert not results["grad k"][:, :, Lk // 2 :].any()
    assert not results["grad v"][:, :, Lk // 2 :].any()


# NaN and inf behind a mask.

BEHIND: dict[str, Mask] = {
    "dense": masks.dense(torch.tensor([[True, False], [True, False]])),
    "causal, first row": masks.causal(),
    "window": masks.window(0, 0),
    "padding": masks.padding(torch.tensor([1])),
    "prefix": masks.prefix(1),
    "columns": masks.columns(
        torch.tensor([[2, 0], [2, 2]], dtype=torch.int32).reshape(1, 1, 2, 2), causal=False
    ),
}


@pytest.mark.parametrize("value", [float("nan"), torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("mask", BEHIND.values(), ids=BEHIND.keys())
def test_what_a_mask_hides_is_not_read(mask: Mask, where: str, value: float) -> None:
    """pytorch/pytorch#101967: NaN or inf in a forbidden key or value reached the output; a huge finite value
    did not.
    """
    base = torch.arange(8.0).reshape(1, 1, 2, 4)
    visible = mask.materialize(1, 1, 2, 2)[0, 0, :, 1]
    blind = ~visible
    assert blind.any()
    # The gradient of rows that see the value is legitimately spoiled, so only the others send one.
    dout = blind.float().reshape(1, 1, 2, 1).expand(1, 1, 2, 4)

    def with_value(x: float) -> dict[str, Tensor]:
        changed = {name: base.clone() for name in ("q", "k", "v")}
        changed[where][:, :, 1] = x
        rows = blind.nonzero().flatten()
        call = Call(changed["q"][:, :, rows], changed["k"], changed["v"], dout[:, :, rows], None, {})
        narrowed = masks.dense(mask.materialize(1, 1, 2, 2)[:, :, rows])
        whole = attention(changed["q"], changed["k"], changed["v"], mask=mask, return_lse=True)
        results = evaluate.observe(SUBJECT, call.with_arguments(mask=narrowed))
        return results | {"whole out": whole[0][:, :, rows], "whole lse": whole[1][:, :, rows]}

    spoiled, clean = with_value(value), with_value(7.0)
    for name, x in spoiled.items():
        torch.testing.assert_close(x, clean[name], rtol=1e-6, atol=1e-6)
    assert not spoiled["grad k"][:, :, 1].any()
    assert not spoiled["grad v"][:, :, 1].any()


# The diagonal when lengths differ.


@pytest.mark.parametrize(
    "lengths, bottom_right, top_left",
    [((2, 5), [4, 5], [1, 2]), ((5, 2), [0, 0, 0, 1, 2], [1, 2, 2, 2, 2]), ((3, 3), [1, 2, 3], [1, 2, 3])],
)
def test_causal_is_aligned_as_its_name_says(
    lengths: tuple[int, int], bottom_right: list[int], top_left: list[int]
) -> None:
    """pytorch/pytorch#108108: the causal flag meant top-left in one library and bottom-right in another."""
    assert counts(*lengths, masks.causal()) == bottom_right
    assert counts(*lengths, masks.causal(align="bottom-right")) == bottom_right
    assert counts(*lengths, masks.causal(align="top-left")) == top_left


def test_packed_documents_with_more_queries_than_keys_have_finite_gradients() -> None:
    """Dao-AILab/flash-attention#443: dq was NaN."""
    q = (torch.randn(256, 1, 32) * 3).half().requires_grad_()
    k, v = ((torch.randn(3, 1, 32) * 3).half().requires_grad_() for _ in range(2))
    cu_q, cu_k = torch.tensor([0, 76, 110, 256]), torch.tensor([0, 1, 2, 3])
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, mask=masks.causal(), return_lse=True)
    last = cu_q[1:] - 1
    others = torch.ones(256, dtype=torch.bool).index_fill(0, last, False)
    assert torch.equal(out[last], v)
    assert not out[others].any()
    assert bool((lse[:, others] == -torch.inf).all())
    out.backward(torch.ones_like(out))
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    # One visible key: its weight is 1 whatever the score, so the true gradients are 0 (up to the rounding of
    # equal terms).
    unit = float(
        torch.finfo(torch.float32).eps
        * (v.detach().float().abs().sum(-1) * k.detach().float().abs().amax()).max()
    )
    assert float(q.grad.abs().max()) <= unit
    assert float(k.grad.abs().max()) <= unit * 3
    assert torch.equal(v.grad, torch.ones_like(v))


# Windows.


def test_a_window_of_inclusive_offsets_holds_one_more_token_than_its_left_bound() -> None:
    """huggingface/transformers#39408: W tokens passed on as an inclusive offset showed W + 1 keys."""
    for mask in (masks.window(3, 0), masks.causal() & masks.window(3, None)):
        assert visible_keys(12, 12, mask)[0][11] == [8, 9, 10, 11]
        assert visible_keys(1, 12, mask)[0][0] == [8, 9, 10, 11]
    assert visible_keys(12, 12, masks.window(4, 0))[0][11] == [7, 8, 9, 10, 11]
    packed = attention_varlen(
        torch.zeros(12, 1, 8),
        torch.zeros(12, 1, 8),
        torch.eye(12)[:, None],
        torch.tensor([0, 12]),
        torch.tensor([0, 12]),
        mask=masks.window(3, 0),
    )
    assert packed[11, 0].nonzero().flatten().tolist() == [8, 9, 10, 11]
    assert torch.equal(packed[11, 0, 8:], torch.full((4,), 0.25))


@pytest.mark.parametrize("right", [9, 1000, 2**31 - 1])
def test_a_wide_right_window_drops_no_key(right: int) -> None:
    """Dao-AILab/flash-attention#895: a right bound larger than the keys was clamped to their number."""
    assert counts(10, 4, masks.window(None, right)) == [4] * 10
    q, k, v = (torch.randn(1, 2, n, 16) for n in (10, 4, 4))
    assert torch.equal(attention(q, k, v, mask=masks.window(None, right)), attention(q, k, v))


def test_a_narrow_or_negative_window_is_honoured_exactly() -> None:
    """Dao-AILab/flash-attention#895 (control) and #1116 (a negative bound meant unbounded)."""
    assert counts(10, 4, masks.window(None, 4)) == [0, 0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert counts(6, 6, masks.window(None, -3)) == [0, 0, 0, 1, 2, 3]
    assert counts(6, 6, masks.window(-1, None)) == [5, 4, 3, 2, 1, 0]
    assert counts(6, 6, masks.window(-2, 1)) == [0] * 6
    assert visible_keys(6, 6, masks.window(3, -2))[0] == [[], [], [0], [0, 1], [1, 2], [2, 3]]
    assert visible_keys(4, 6, masks.window(-1, 2))[0] == [[3, 4], [4, 5], [5], []]


# Several rules at once.


def test_no_rule_is_dropped_when_several_are_given() -> None:
    """pytorch/pytorch#187801: a mask and the causal flag together ran; one of them was ignored."""
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    zero = attention(q, k, v, bias=torch.zeros(8, 8), mask=masks.causal())
    tolerance.check(
        {"out": zero},
        {"out": attention(*(x.double() for x in (q, k, v)), mask=masks.causal())},
        {"out": attention(q, k, v, mask=masks.causal())},
    )
    allowed = torch.rand(8, 8) < 0.7
    documents = masks.documents(torch.tensor([0, 3, 8]))
    mask = masks.dense(allowed) & masks.causal() & masks.window(2, None) & documents
    i, j = torch.arange(8)[:, None], torch.arange(8)
    expected = allowed & (j <= i) & (j >= i - 2) & ((i < 3) == (j < 3))
    assert [row for row, _ in zip(visible_keys(8, 8, mask)[0], i, strict=True)] == [
        row.nonzero().flatten().tolist() for row in expected
    ]


# Packed sequences.


@pytest.mark.parametrize(
    "options",
    [{}, {"dropout_p": 0.2, "seed": 1}, {"alibi_slopes": torch.ones(8)}],
    ids=["plain", "dropout", "alibi"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_past_the_last_offset_are_defined(dtype: torch.dtype, options: dict[str, Tensor]) -> None:
    """Dao-AILab/flash-attention#1228: the tail of the output and of the gradients was uninitialised."""
    q, k, v, dout = (torch.randn(512, 8, 64).to(dtype) for _ in range(4))
    cu = torch.tensor([0, 160, 320, 480], dtype=torch.int32)
    for x in (q, k, v, dout):
        x[480:] = float("nan")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attention_varlen(*leaves, cu, cu, mask=masks.causal(), return_lse=True, **options)
    gradients = torch.autograd.grad(out, leaves, dout)
    for x in (out, *gradients):
        assert not x[480:].any()
        assert not x.isnan().any()
    assert bool((lse[:, 480:] == -torch.inf).all())

    def documents(x: Tensor) -> Tensor:
        return x[:480].unflatten(0, (3, 160)).transpose(1, 2)

    call = Call(
        documents(q), documents(k), documents(v), documents(dout), None, {"mask": masks.causal(), **options}
    )
    results = {name: documents(x) for name, x in zip(("grad q", "grad k", "grad v"), gradients, strict=True)}
    results |= {"out": documents(out.detach()), "lse": documents(lse.detach().transpose(0, 1))}
    evaluate.expect(call).check(results, "documents")


# Masks as objects.


def catalogue() -> dict[str, Mask]:
    return {
        "causal": masks.causal(),
        "packed causal": masks.documents(torch.tensor([0, 2, 4]), within=masks.causal()),
        "window and padding": masks.documents(torch.tensor([0, 2, 4]), within=masks.window(1, 0))
        & masks.padding(torch.tensor([3])),
        "negated": ~masks.window(1, 1) | masks.prefix(1),
        "columns": masks.columns(
            torch.tensor([1, 4, 2, 4, 3, 4, 4, 4], dtype=torch.int32).reshape(1, 1, 4, 2), causal=True
        ),
        "dense": masks.dense(torch.eye(4).bool()),
        "shifted": masks.shift(masks.causal(), 1, 0, 5, 4),
        "random": masks.random_blocks(0.5, block=1, seed=3),
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.device("cpu")),
        copy.deepcopy,
        copy.copy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: m.build(1, 1, 4, 4),
        lambda m: masks.parse(*m.spec()),
    ],
    ids=["to", "to device", "deepcopy", "copy", "pickle", "build", "parse"],
)
@pytest.mark.parametrize("name", catalogue())
def test_a_mask_keeps_its_rule_through_every_change(
    name: str, change: Callable[[Mask], Mask], request: pytest.FixtureRequest
) -> None:
    """facebookresearch/xformers#1185: a causal mask came back from .to() as its non-causal parent type."""
    mask = catalogue()[name]
    changed = change(mask)
    assert torch.equal(changed.materialize(1, 1, 4, 4), mask.materialize(1, 1, 4, 4))
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    assert torch.equal(attention(q, k, v, mask=changed), attention(q, k, v, mask=mask))
    if "build" not in request.node.name:
        assert type(changed) is type(mask)


def test_a_mask_is_good_for_any_length_it_was_not_built_for() -> None:
    """facebookresearch/xformers#1185, rebuilding: the rule stays, not the size."""
    mask = masks.causal() & masks.window(2, 0)
    assert counts(3, 3, mask) == [1, 2, 3]
    assert counts(6, 6, mask) == [1, 2, 3, 3, 3, 3]


def test_a_closure_says_that_it_cannot_be_pickled() -> None:
    """facebookresearch/xformers#1185: what cannot be saved must not lose its rule silently."""
    offset = 2
    mask = masks.predicate(lambda b, h, q, k: q >= k + offset)
    with pytest.raises(Exception, match=r"predicate.*(pickle|build)|(pickle|build).*predicate"):
        pickle.dumps(mask)
    assert torch.equal(
        pickle.loads(pickle.dumps(mask.build(1, 1, 4, 4))).materialize(1, 1, 4, 4),
        mask.materialize(1, 1, 4, 4),
    )


# Memory.


def extra_memory(script: str) -> int:
    """Bytes by which the peak memory of a fresh process grows while it runs `work()` of `script`."""
    program = f"""
import resource, torch
from tilefold import attention, masks
torch.set_num_threads(1)
{textwrap.dedent(script)}
warm()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
work()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize(
    "mask", ["masks.causal()", "masks.causal() & (masks.window(255, 0) | masks.prefix(16))"]
)
def test_a_mask_of_96000_tokens_takes_no_dense_memory(mask: str) -> None:
    """pytorch/pytorch#134756: building a block mask first materialised 9.2 GB."""
    used = extra_memory(f"""
        def warm(): build(500)
        def build(S):
            from tilefold.masks import lower
            spec, held = ({mask}).spec()
            form = lower(spec, held, 1, 1, S, S, torch.device("cpu"))
            return form, form.tile_states(S, S, 128, 128, torch.device("cpu"))
        def work(): build(96000)
    """)
    assert used < 64e6


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_attention_over_a_window_of_96000_tokens_takes_linear_memory() -> None:
    """pytorch/pytorch#134756, the attention itself, forward and backward."""
    used = extra_memory("""
        def warm(): run(300)
        def run(S):
            q, k, v = (torch.randn(1, 1, S, 16, requires_grad=True) for _ in range(3))
            attention(q, k, v, mask=masks.window(63, 0)).sum().backward()
        def work(): run(96000)
    """)
    tensor = 96000 * 16 * 4
    assert (
        used < 24 * tensor
    )  # q, k, v, out, their gradients, and as much again; one dense boolean mask would be 1500


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize("D, dtype", [(64, "float32"), (64, "bfloat16"), (512, "float32")])
def test_grouped_heads_take_no_quadratic_memory(D: int, dtype: str) -> None:
    """pytorch/pytorch#154363: the grouped-head flag fell back to the unfused path for float32 and for large
    heads.
    """
    S, Hq = (2048, 8) if D == 64 else (2048, 4)
    used = extra_memory(f"""
        def warm(): run(64)
        def run(S):
            q = torch.randn(1, {Hq}, S, {D}).to(torch.{dtype})
            k, v = (torch.randn(1, {Hq} // 2, S, {D}).to(torch.{dtype}) for _ in range(2))
            attention(q, k, v)
        def work(): run({S})
    """)
    scores = Hq * S * S * (4 if dtype == "float32" else 2)
    inputs = 4 * 2 * Hq * S * D * 4  # drawn in float32, then converted
    assert used < inputs + scores / 4
