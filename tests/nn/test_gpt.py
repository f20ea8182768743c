"""`nn.GPT` as a whole, and the small layers it is made of."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tilefold import masks
from tilefold.nn import GPT, GatedMLP, GPTConfig, RMSNorm

SMALL = GPTConfig(vocab=17, dim=32, layers=2, heads=4, kv_heads=2)


@pytest.fixture
def model() -> GPT:
    return GPT(SMALL).eval()


def test_the_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.dim = 64  # type: ignore[misc]


def test_a_new_model_knows_nothing(model: GPT) -> None:
    tokens = torch.randint(17, (2, 64))
    assert model(tokens).shape == (2, 64, 17)
    # log 17 nats is what a uniform guess costs.
    loss = model.loss(tokens, torch.randint(17, (2, 64))).item()
    assert loss == pytest.approx(math.log(17), abs=1.0)


def test_the_future_does_not_matter(model: GPT) -> None:
    tokens = torch.randint(17, (1, 20))
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 17
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_packed_documents_equal_documents_alone(model: GPT) -> None:
    lengths = [5, 1, 9]
    documents = [torch.randint(17, (1, length)) for length in lengths]
    offsets = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = model(torch.cat(documents, dim=1), masks.documents(offsets, within=masks.causal()), positions)
    torch.testing.assert_close(packed, torch.cat([model(document) for document in documents], dim=1))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_if_asked(tied: bool) -> None:
    model = GPT(dataclasses.replace(SMALL, tied=tied))
    assert (model.head.weight is model.embedding.weight) == tied
    model.loss(torch.randint(17, (1, 8)), torch.randint(17, (1, 8))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_ignored_targets_do_not_count(model: GPT) -> None:
    tokens, targets = torch.randint(17, (1, 8)), torch.randint(17, (1, 8))
    hidden = targets.clone()
    hidden[:, 5:] = -100
    torch.testing.assert_close(model.loss(tokens, hidden), model.loss(tokens[:, :5], targets[:, :5]))


def test_learns_to_repeat() -> None:
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(17).repeat(3)[None]
    losses: list[float] = []
    for _ in range(40):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < losses[0]
    generated = model.eval().generate(tokens[:, :4], 20, temperature=0)
    assert generated.tolist() == [[(i % 17) for i in range(24)]]


def test_generation_equals_generation_without_a_cache(model: GPT) -> None:
    prompt = torch.randint(17, (3, 6))
    expected = prompt
    for _ in range(10):
        expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(prompt, 10, temperature=0), expected)
    assert torch.equal(model.generate(prompt, 10, top_k=1), expected)


def test_generation_is_repeatable_and_varies_with_the_seed(model: GPT) -> None:
    prompt = torch.randint(17, (2, 3))

    def draw(seed: int) -> torch.Tensor:
        return model.generate(prompt, 30, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(1)[:, :3], prompt)


def test_generating_nothing_returns_the_prompt(model: GPT) -> None:
    prompt = torch.randint(17, (2, 3))
    assert torch.equal(model.generate(prompt, 0), prompt)


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, r"prompt: expected \[B, L\] with L >= 1, got \[1, 0\]"),
        (torch.zeros(4, dtype=torch.long), {}, r"prompt: expected \[B, L\] with L >= 1, got \[4\]"),
        (
            torch.zeros(1, 2, dtype=torch.long),
            {"temperature": -1.0},
            "temperature: expected at least 0, got -1.0",
        ),
        (torch.zeros(1, 2, dtype=torch.long), {"top_k": 0}, "top_k: expected at least 1, got 0"),
    ],
)
def test_generation_refuses(
    model: GPT, prompt: torch.Tensor, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(prompt, 4, **options)


def test_rms_norm() -> None:
    norm = RMSNorm(6, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1.0, 7.0))
    x = 100 * torch.randn(3, 4, 6)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * torch.arange(1.0, 7.0)
    torch.testing.assert_close(norm(x), expected)
    assert norm(x.half()).dtype == torch.float16
    # 300 squared overflows float16: the mean has to be taken in float32.
    assert norm(torch.full((1, 6), 300.0, dtype=torch.float16)).isfinite().all()


def test_gated_mlp() -> None:
    mlp = GatedMLP(8, 12, bias=True)
    x = torch.randn(2, 5, 8)
    (wg, wu), (bg, bu) = mlp.gate_up.weight.split(12), mlp.gate_up.bias.split(12)
    gate, up = x @ wg.T + bg, x @ wu.T + bu
    torch.testing.assert_close(mlp(x), (gate * gate.sigmoid() * up) @ mlp.down.weight.T + mlp.down.bias)
    assert GatedMLP(96).down.in_features == 256
    assert GatedMLP(100).down.in_features == 288
