"""Modules for transformers, built on the public API alone.

`GPT` is a whole decoder; its parts stand by themselves: `Attention` (grouped-query), `GatedMLP`, `RMSNorm`, `Rotary` and the
`Block` that joins them. `KVCache` holds the keys and values of tokens already seen, one per attention layer.
"""

from __future__ import annotations

from tilefold.nn.attention import Attention, Attend
from tilefold.nn.cache import KVCache
from tilefold.nn.gpt import GPT, Block, GPTConfig
from tilefold.nn.mlp import GatedMLP
from tilefold.nn.norm import RMSNorm
from tilefold.nn.rotary import Rotary

__all__ = ["GPT", "Attend", "Attention", "Block", "GPTConfig", "GatedMLP", "KVCache", "RMSNorm", "Rotary"]
