"""A decoder-only transformer: pre-normalised blocks of grouped-query attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilefold import masks

from .attention import Attention
from .cache import KVCache
from .mlp import GatedMLP
from .norm import RMSNorm
from .rotary import Rotary


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a `GPT`.

    Attributes:
        vocab: number of tokens; 256 reads and writes bytes.
        dim: channels of the residual stream.
        layers: blocks.
        heads: query heads.
        kv_heads: key/value heads; None for as many as query heads.
        head_dim: channels per head; None for `dim // heads`.
        hidden: channels inside the MLP; None for 8/3 of `dim`, rounded up to a multiple of 32.
        rope_base: base of the rotary embedding.
        dropout: of attention probabilities, in training only.
        tied: the output projection is the embedding matrix.
    """

    vocab: int = 256
    dim: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    rope_base: float = 10_000.0
    dropout: float = 0.0
    tied: bool = True


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`. Shape: `[B, L, dim]` -> `[B, L, dim]`."""

    def __init__(self, config: GPTConfig, rotary: Rotary | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(
            config.dim, config.heads, config.kv_heads, config.head_dim, rotary=rotary, dropout=config.dropout
        )
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = GatedMLP(config.dim, config.hidden)

    def forward(
        self,
        x: Tensor,
        mask: masks.Mask | None = None,
        positions: Tensor | tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask, positions, cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A language model over tokens `0 .. vocab - 1`.

    Weights start from a normal distribution of standard deviation `dim ** -0.5`, those that write to the
    residual stream smaller by `sqrt(2 * layers)` (Radford et al. 2019, section 2.3).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        head_dim = config.dim // config.heads if config.head_dim is None else config.head_dim
        self.rotary = Rotary(head_dim, config.rope_base)
        self.blocks = nn.ModuleList(Block(config, self.rotary) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self._initialise()
        if config.tied:
            self.head.weight = self.embedding.weight

    def _initialise(self) -> None:
        std = self.config.dim**-0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_to_stream = name.endswith(("out.weight", "down.weight"))
                scale = (2 * self.config.layers) ** -0.5 if writes_to_stream else 1.0
                nn.init.normal_(parameter, std=std * scale)

    def attention_layers(self) -> Iterator[Attention]:
        """The attention of every block, first to last."""
        return (module for module in self.modules() if isinstance(module, Attention))

    def forward(
        self,
        tokens: Tensor,
        mask: masks.Mask | None = None,
        positions: Tensor | None = None,
        caches: list[KVCache] | None = None,
    ) -> Tensor:
        """Scores every token as the next one.

        Args:
            tokens: integers, `[B, L]`.
            mask: who may look at whom; default `masks.causal()`.
            positions: integers `[L]` or `[B, L]`; by default they count on from the caches.
            caches: one per block, to which the keys and values of `tokens` are added.

        Returns:
            logits, `[B, L, vocab]`.
        """
        if positions is None:
            start = caches[0].length if caches else 0
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        angles = self.rotary.angles(positions)
        mask = masks.causal() if mask is None else mask
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, mask, angles, caches[index] if caches else None)
        return self.head(self.norm(x))

    def loss(
        self, tokens: Tensor, targets: Tensor, mask: masks.Mask | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats per token, in float32 at least.

        Args:
            tokens, targets: integers `[B, L]`; a target of -100 does not count.
            mask, positions: as in `forward`.

        Returns:
            A tensor without dimensions.
        """
        logits = self(tokens, mask, positions).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())

    @torch.no_grad()
    def stream(
        self,
        prompt: Tensor,
        steps: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Continues `prompt` by `steps` tokens and yields each, `[B]`, as soon as it is drawn.

        Args:
            prompt: integers `[B, L]`, `L >= 1`.
            steps: tokens to draw.
            temperature: divides the logits; 0 always takes the likeliest token.
            top_k: draw among the `top_k` likeliest only.
            generator: source of randomness on the device of the model; torch's default if None.

        Raises:
            ValueError: an empty prompt, a negative temperature, or `top_k < 1`.
        """
        if prompt.dim() != 2 or prompt.shape[1] < 1:
            raise ValueError(f"prompt: expected [B, L] with L >= 1, got {list(prompt.shape)}")
        if temperature < 0:
            raise ValueError(f"temperature: expected at least 0, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k: expected at least 1, got {top_k}")
        caches = self._caches(prompt.shape[0], prompt.shape[1] + steps)
        tokens = prompt
        for _ in range(steps):
            logits = self(tokens, caches=caches)[:, -1].float()
            token = _draw(logits, temperature, top_k, generator)
            yield token
            tokens = token[:, None]

    def generate(
        self,
        prompt: Tensor,
        steps: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`prompt` `[B, L]` and its continuation, `[B, L + steps]`; arguments and errors as in `stream`."""
        drawn = self.stream(prompt, steps, temperature=temperature, top_k=top_k, generator=generator)
        return torch.cat([prompt, *(token[:, None] for token in drawn)], dim=1)

    def _caches(self, batch: int, capacity: int) -> list[KVCache]:
        weight = self.embedding.weight
        return [
            KVCache(batch, layer.kv_heads, capacity, layer.head_dim, dtype=weight.dtype, device=weight.device)
            for layer in self.attention_layers()
        ]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token per row of `logits` `[B, vocab]` -> int64 `[B]`."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k is not None and top_k < logits.shape[-1]:
        floor = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)[:, 0]
