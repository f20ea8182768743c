"""Masks: values that say who may look at whom, with an algebra, and the four forms to which they lower.

`Mask` and its constructors are public. Backends use `lower`, `parse` and the forms `Band`, `Rows`, `Cols`,
`Bits`.
"""

from .band import Band
from .base import Mask
from .bits import Bits
from .cols import Cols
from .library import (
    bigbird,
    block_sparse,
    butterfly,
    causal,
    columns,
    dense,
    dilated,
    documents,
    empty,
    full,
    global_tokens,
    longformer,
    padding,
    predicate,
    prefix,
    random_blocks,
    shift,
    strided,
    window,
)
from .lower import Form as Form
from .lower import lower as lower
from .rows import Rows
from .spec import parse as parse

FORMS = (Band, Rows, Cols, Bits)

__all__ = [
    "Mask",
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
