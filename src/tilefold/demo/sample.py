"""Text from the model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilefold.nn import GPT

from .corpus import BORDER

PROMPT = b"import "


def sample(
    model: GPT,
    count: int,
    device: torch.device,
    prompt: bytes = PROMPT,
    temperature: float = 0.6,
    seed: int = 0,
) -> Iterator[str]:
    """Yields the characters of a new file that begins with `prompt`; `?` stands for other bytes."""
    yield prompt.decode()
    start = torch.tensor([list(BORDER + prompt)], device=device)
    draw = torch.Generator(device).manual_seed(seed)
    for token in model.eval().stream(start, count, temperature=temperature, generator=draw):
        byte = int(token)
        if byte == BORDER[0]:
            return
        yield chr(byte) if byte in b"\n\t" or 32 <= byte < 127 else "?"
