"""`nn.Attention` and its rotary embedding against the same thing written out."""

from __future__ import annotations

import pytest
import torch

from tilefold import masks
from tilefold.nn import Attention, KVCache, Rotary


def written_out(layer: Attention, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """`layer(x)` with a whole score matrix and repeated key/value heads, without rotation."""
    q, k, v = layer._project(x)
    k, v = (t.repeat_interleave(layer.heads // layer.kv_heads, dim=1) for t in (k, v))
    scores = q @ k.mT / layer.head_dim**0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return layer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("kv_heads", [None, 1, 2, 4])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_attention_written_out(kv_heads: int | None, fused: bool, bias: bool) -> None:
    layer = Attention(24, 4, kv_heads, 8, fused=fused, bias=bias).double()
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    for mask in (None, masks.causal(), masks.window(3, 1)):
        visible = None if mask is None else mask.materialize(1, 1, 13, 13)
        torch.testing.assert_close(layer(x, mask), written_out(layer, x, visible))


def test_fused_and_separate_projections_are_the_same_function() -> None:
    fused, separate = Attention(16, 4, 2, fused=True), Attention(16, 4, 2, fused=False)
    with torch.no_grad():
        rows = [4 * 4, 2 * 4, 2 * 4]
        for part, weight in zip(
            (separate.q, separate.k, separate.v), fused.qkv.weight.split(rows), strict=True
        ):
            part.weight.copy_(weight)
        separate.out.weight.copy_(fused.out.weight)
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(fused(x, masks.causal()), separate(x, masks.causal()))


def test_every_parameter_gets_a_gradient() -> None:
    layer = Attention(16, 4, 2, bias=True, fused=False, rotary=Rotary(4))
    layer(torch.randn(1, 7, 16), masks.causal()).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters()
    )
    # A bias of all keys shifts each row's scores by one number, which rotation alone makes matter.
    assert all(
        parameter.grad.abs().sum() > 0 for parameter in layer.parameters() if parameter.grad is not None
    )


def test_dropout_acts_in_training_only() -> None:
    plain, dropping = Attention(64, 4), Attention(64, 4, dropout=0.5)
    dropping.load_state_dict(plain.state_dict())
    x = torch.randn(1, 32, 64)
    expected = plain(x)
    dropping.eval()
    assert torch.equal(dropping(x), expected)
    assert torch.equal(dropping(x), expected)
    dropping.train()
    first, second = dropping(x), dropping(x)
    assert not torch.allclose(first, expected)
    assert not torch.allclose(first, second)


def test_another_implementation_can_attend() -> None:
    seen = []

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: masks.Mask | None, dropout_p: float
    ):
        seen.append((tuple(q.shape), tuple(k.shape), mask, dropout_p))
        return torch.zeros_like(q)

    layer = Attention(16, 4, 2, dropout=0.25, attend=attend)
    assert torch.equal(layer(torch.randn(2, 5, 16), masks.causal()), torch.zeros(2, 5, 16))
    assert seen == [((2, 4, 5, 4), (2, 2, 5, 4), masks.causal(), 0.25)]


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [3, 1, 3]])
def test_with_a_cache_pieces_equal_the_whole(sizes: list[int]) -> None:
    layer = Attention(16, 4, 2, rotary=Rotary(4)).eval()
    x = torch.randn(2, 7, 16)
    cache = KVCache(2, 2, 7, 4)
    with torch.no_grad():
        pieces = [layer(piece, masks.causal(), cache=cache) for piece in x.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), layer(x, masks.causal()))
    assert cache.length == cache.capacity == 7


def test_a_full_cache_refuses_more() -> None:
    cache = KVCache(1, 2, 3, 4)
    cache.append(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4))
    with pytest.raises(ValueError, match=r"expected at most 3 tokens, got 2 \+ 2"):
        cache.append(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4))
    assert cache.length == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dim": 16, "heads": 4, "kv_heads": 3}, "kv_heads: expected a divisor of heads=4, got 3"),
        ({"dim": 16, "heads": 4, "kv_heads": 0}, "kv_heads: expected a divisor of heads=4, got 0"),
        ({"dim": 16, "heads": 0}, "kv_heads: expected a divisor of heads=0, got 0"),
        ({"dim": 18, "heads": 4}, "dim: expected a multiple of heads=4 or a head_dim, got 18"),
    ],
)
def test_refuses_sizes_that_do_not_fit(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(**arguments)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_makes_scores_depend_on_distance_alone(interleaved: bool) -> None:
    rotary = Rotary(8, interleaved=interleaved)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        return float((rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([j]))).sum())

    assert score(12, 5) == pytest.approx(score(7, 0), abs=1e-5)
    assert score(12, 5) != pytest.approx(score(5, 12), abs=1e-3)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_a_complex_product(interleaved: bool) -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 10, 1000])
    frequencies = 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turns = torch.polar(torch.ones(5, 4, dtype=torch.float64), positions[:, None] * frequencies)
    if interleaved:
        expected = torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous()) * turns
        ).flatten(-2)
    else:
        turned = torch.complex(x[..., :4], x[..., 4:]) * turns
        expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(Rotary(8, interleaved=interleaved)(x, positions), expected, atol=1e-3, rtol=0)


def test_positions_may_differ_per_batch_element() -> None:
    rotary = Rotary(8)
    x = torch.randn(2, 3, 5, 8)
    positions = torch.stack([torch.arange(5), torch.arange(5) + 7])
    rotated = rotary(x, positions)
    torch.testing.assert_close(rotated[0], rotary(x[:1])[0])
    torch.testing.assert_close(rotated[1], rotary(x[1:], torch.arange(7, 12))[0])
    assert rotary(x.bfloat16(), positions).dtype == torch.bfloat16


@pytest.mark.parametrize("head_dim", [0, 7, -2])
def test_rotation_needs_pairs(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim: expected a positive even number, got {head_dim}"):
        Rotary(head_dim)
