"""The masks that ship, one file per idea."""

from .bigbird import bigbird
from .block_sparse import block_sparse
from .butterfly import butterfly
from .causal import causal
from .columns import columns
from .constant import empty, full
from .dense import dense
from .dilated import dilated
from .documents import documents
from .global_tokens import global_tokens
from .longformer import longformer
from .padding import padding
from .predicate import predicate
from .prefix import prefix
from .random_blocks import random_blocks
from .shift import shift
from .strided import strided
from .window import window

__all__ = [
    "bigbird",
    "block_sparse",
    "butterfly",
    "causal",
    "columns",
    "dense",
    "dilated",
    "documents",
    "empty",
    "full",
    "global_tokens",
    "longformer",
    "padding",
    "predicate",
    "prefix",
    "random_blocks",
    "shift",
    "strided",
    "window",
]
