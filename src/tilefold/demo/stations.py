"""The four stations: each says in a sentence what it does, does it, shows it, and returns plain data."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from tilefold.nn import GPT, GPTConfig

from .corpus import Corpus
from .sample import sample
from .scaling import plain_causal, scaling
from .show import Show
from .train import faster_dtype, train
from .verify import verify

# The proof runs in float64 with whole score matrices kept by every layer, hence on a shorter piece.
VERIFIED_BYTES = 2048
PLAIN_LENGTH = 8192


class Demonstration:
    """One run; the stations are to be called in the order `train`, `verify`, `scale`, `sample`.

    Attributes:
        proven: whether every comparison with standard attention so far held.
    """

    def __init__(self, options: argparse.Namespace, show: Show) -> None:
        self.options, self.show = options, show
        self.device = torch.device(options.device)
        self.proven = True
        self.corpus = Corpus.load()
        torch.manual_seed(0)
        config = GPTConfig(dim=options.dim, layers=options.layers, heads=4, kv_heads=2)
        self.model = GPT(config).to(self.device)

    def train(self) -> dict[str, Any]:
        options = self.options
        dtype = faster_dtype(self.model, self.corpus.window(0, options.context, self.device))
        precision = str(dtype).removeprefix("torch.")
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.show.station(
            1,
            "Train",
            f"A GPT of {parameters / 1e6:.2f} million parameters learns to write Python, byte by byte, from "
            f"the {self.corpus.files} smaller files of the standard library: {options.context:,} bytes per "
            f"step, packed files that do not see each other, matrix products in {precision}.",
        )
        with self.show.training() as bar:
            training = train(
                self.model,
                self.corpus,
                context=options.context,
                steps=options.steps,
                seconds=options.seconds,
                dtype=dtype,
                device=self.device,
                report=bar,
            )
        self.show.trained(training)
        return {"parameters": parameters, "dtype": precision, **asdict(training)}

    def verify(self) -> list[dict[str, Any]]:
        self.show.station(
            2,
            "Verify",
            "Exact means exact: loss and gradients of the trained model, once with tilefold and once with "
            "the whole score matrix, a softmax and a product. In float64 they agree to the last digits; "
            "float32 shows how far rounding alone moves each of three implementations.",
        )
        length = min(VERIFIED_BYTES, self.options.context)
        comparisons = verify(self.model, self.corpus.window(0, length, self.device))
        self.show.comparisons(comparisons, len(list(self.model.parameters())))
        self.proven &= all(comparison.holds for comparison in comparisons)
        return [{**asdict(comparison), "holds": comparison.holds} for comparison in comparisons]

    def scale(self) -> dict[str, Any]:
        budget = self.options.budget_mb * 2**20
        self.show.station(
            3,
            "Scale",
            "Time and peak memory of one attention layer, forward and backward, with 2 heads of 64 channels "
            "and causal documents of 1,024 tokens: standard attention, PyTorch's fused SDPA with a dense "
            f"mask, and tilefold, as long as they fit into {self.options.budget_mb:,} MiB.",
        )
        rows = self.show.scaling(scaling(self.options.max_context, budget, self.device), budget)
        length = min(PLAIN_LENGTH, self.options.max_context)
        causal = plain_causal(length, self.device)
        self.show.plain_causal(length, causal)
        return {
            "rows": [asdict(row) for row in rows],
            "plain_causal": {name: asdict(cost) for name, cost in causal.items()},
        }

    def sample(self) -> str:
        self.show.station(4, "Sample", "What the model writes when asked for a new file.")
        return self.show.text(sample(self.model, self.options.sample, self.device))
