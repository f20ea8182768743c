"""Any mask expression gives the attention of the dense mask that defines it, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilefold import masks
from tilefold.masks import Mask
from tilefold.testing import evaluate, tolerance
from tilefold.testing.cases import MASKS, Call

EAGER = evaluate.Subject("eager")


def leaves() -> st.SearchStrategy[Mask]:
    bound = st.none() | st.integers(-30, 60)
    return st.one_of(
        st.just(masks.full()),
        st.just(masks.empty()),
        st.sampled_from([masks.causal(), masks.causal(align="top-left")]),
        st.builds(masks.window, bound, bound),
        st.builds(masks.prefix, st.integers(0, 50)),
        st.builds(masks.dilated, st.integers(1, 9), st.integers(1, 4)),
        st.builds(lambda length: masks.padding(torch.tensor([length, 3])), st.integers(0, 33)),
        st.builds(
            lambda cut: masks.documents(torch.tensor([0, cut, 33]), torch.tensor([0, 9, 33])),
            st.integers(0, 33),
        ),
        st.builds(lambda seed: masks.random_blocks(0.5, block=8, seed=seed), st.integers(0, 9)),
    )


def expressions() -> st.SearchStrategy[Mask]:
    return st.recursive(
        leaves(),
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
        ),
        max_leaves=4,
    )


def call_with(mask: Mask, *, Lq: int, Lk: int, dtype: torch.dtype = torch.float32, D: int = 16) -> Call:
    q, dout = (torch.randn(2, 2, Lq, D, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, 1, Lk, D, dtype=dtype) for _ in range(2))
    return Call(q, k, v, dout, torch.randn(2, 2, Lq), {"mask": mask})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mask=expressions(), seed=st.integers(0, 1000))
def test_any_expression_is_its_dense_definition(mask: Mask, seed: int) -> None:
    torch.manual_seed(seed)
    call = call_with(mask, Lq=33, Lk=33)
    evaluate.expect(call).check(evaluate.observe(EAGER, call), repr(mask))


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
@pytest.mark.parametrize("lengths", [(150, 150), (70, 190), (190, 70)])
def test_the_form_of_a_mask_does_not_matter(name: str, lengths: tuple[int, int]) -> None:
    """A mask, its built form and its dense tensor are one mask."""
    Lq, Lk = lengths
    mask = MASKS[name](2, 2, Lq, Lk, torch.Generator().manual_seed(1))
    assert mask is not None
    draws: dict[str, list[list[tolerance.Verdict]]] = {}
    for _ in range(4):
        call = call_with(mask, Lq=Lq, Lk=Lk)
        expected = evaluate.expect(call)
        forms = {"mask": mask, "built": mask.build(2, 2, Lq, Lk), "dense": masks.dense(call.visible())}
        for which, form in forms.items():
            results = evaluate.observe(EAGER, call.with_arguments(mask=form))
            draws.setdefault(which, []).append(expected.judge(results))
    for which, verdicts in draws.items():
        tolerance.assert_within(tolerance.pool(verdicts), which)


@pytest.mark.parametrize("name", ["causal", "documents_causal", "sinks_and_window", "columns4", "dense_each"])
def test_hiding_one_more_key_is_removing_it(name: str) -> None:
    mask = MASKS[name](2, 2, 80, 80, torch.Generator().manual_seed(2))
    assert mask is not None
    visible = mask.materialize(2, 2, 80, 80).clone()
    visible[..., 37] = False
    call = call_with(masks.dense(visible), Lq=80, Lk=80)
    others = torch.arange(80) != 37
    shorter = call.with_arguments(
        k=call.k[:, :, others],
        v=call.v[:, :, others],
        mask=masks.dense(visible[..., others]),
    )
    expected = evaluate.expect(shorter)
    results = evaluate.observe(EAGER, call)
    for x in ("grad k", "grad v"):
        assert not results[x][:, :, 37].any()
        results[x] = results[x][:, :, others]
    expected.check(results, name)
