"""Modules for transformers, built on the public API alone.

`GPT` is a whole decoder; its parts stand by themselves: `Attention` (grouped-query), `GatedMLP`, `RMSNorm`,
`Rotary` and the `Block` that joins them. `KVCache` holds the keys and values of tokens already seen, one per
attention layer.
"""

from __future__ import annotations

from .attention import Attend, Attention
from .cache import KVCache
from .gpt import GPT, Block, GPTConfig
from .mlp import GatedMLP
from .norm import RMSNorm
from .rotary import Rotary

__all__ = ["GPT", "Attend", "Attention", "Block", "GPTConfig", "GatedMLP", "KVCache", "RMSNorm", "Rotary"]
