"""The grid of conformance cases: axes of options, and seeded selections which cover every pair of them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import masks
from . import inputs

DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

# Ranks and sizes of 1 of the additive bias: B, H, Q, K stand for the full size.
BIASES = ("QK", "1H1K", "B1QK", "BHQK", "BHQ1", "K", "HQK", "111K")


@dataclass(frozen=True)
class Case:
    """One call in metadata. `name` is the pytest id; everything else is an axis of the grid."""

    batch: int = 2
    heads: tuple[int, int] = (4, 2)  # query, key
    lengths: tuple[int, int] = (77, 77)  # query, key
    dims: tuple[int, int] = (64, 64)  # D, Dv
    dtype: str = "fp32"
    mask: str = "none"
    values: str = "gaussian"
    layout: str = "contiguous"
    loss: str = "out"  # which results carry a gradient: out, lse or both
    scale: float | None = None
    softcap: float | None = None
    alibi: str = ""  # "", "H" or "BH"
    bias: str = ""  # "" or one of BIASES
    sink: bool = False
    dropout_p: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """The axes, without those that are off."""
        parts = [
            self.dtype,
            self.mask,
            f"B{self.batch}",
            "H{}.{}".format(*self.heads),
            "L{}x{}".format(*self.lengths),
            "D{}.{}".format(*self.dims),
            self.values,
            self.layout,
            f"d{self.loss}",
            f"scale{self.scale:g}" if self.scale is not None else "",
            f"cap{self.softcap:g}" if self.softcap is not None else "",
            f"alibi{self.alibi}" if self.alibi else "",
            f"bias{self.bias}" if self.bias else "",
            "sink" if self.sink else "",
            f"drop{self.dropout_p:g}" if self.dropout_p else "",
        ]
        return "-".join(part for part in parts if part)

    @property
    def positional(self) -> bool:
        """Whether the numbers depend on where a key stands, so that keys cannot be permuted."""
        return self.mask != "none" or bool(self.alibi) or self.dropout_p > 0

    @property
    def empty(self) -> bool:
        return 0 in (self.batch, *self.lengths)


@dataclass
class Call:
    """The tensors of one case. `options` are keyword arguments of `tilefold.attention`, the mask included."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    dlse: Tensor | None
    options: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Every differentiable argument by name."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        found |= {
            name: self.options[name] for name in ("bias", "sink", "alibi_slopes") if name in self.options
        }
        return found

    def with_arguments(self, **tensors: Any) -> Call:
        """A copy of the call with some differentiable arguments, or the mask, replaced."""
        options = self.options | {name: x for name, x in tensors.items() if name not in ("q", "k", "v")}
        parts = {name: tensors[name] for name in ("q", "k", "v") if name in tensors}
        return dataclasses.replace(self, options=options, **parts)

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        """A copy with `function` applied to every differentiable argument and incoming gradient."""
        changed = self.with_arguments(**{name: function(x) for name, x in self.arguments.items()})
        dout, dlse = (function(x) if x is not None else None for x in (self.dout, self.dlse))
        return dataclasses.replace(changed, dout=dout, dlse=dlse)

    @property
    def mask(self) -> masks.Mask | None:
        return self.options.get("mask")

    def visible(self) -> Tensor:
        """bool `[B, Hq, Lq, Lk]`: who sees whom, by the definition."""
        (B, Hq, Lq, _), Lk = self.q.shape, self.k.shape[2]
        if self.mask is None:
            return torch.ones(B, Hq, Lq, Lk, dtype=torch.bool, device=self.q.device)
        return self.mask.materialize(B, Hq, Lq, Lk, self.q.device).expand(B, Hq, Lq, Lk)


def _offsets(length: int, count: int, draw: torch.Generator, slack: int = 0) -> Tensor:
    """int32 `[count + 1]`: non-decreasing offsets from 0 to `length - slack`; some documents may be empty."""
    last = max(length - slack, 0)
    cuts = torch.randint(0, last + 1, (count - 1,), generator=draw).sort().values
    return torch.cat([torch.tensor([0]), cuts, torch.tensor([last])]).to(torch.int32)


def _columns(B: int, H: int, Lq: int, Lk: int, draw: torch.Generator, bounds: int) -> Tensor:
    """int32 `[B, H, Lk, bounds]` of FlashMask, hidden query intervals in order."""
    return torch.randint(0, Lq + 1, (B, H, Lk, bounds), generator=draw).sort(-1).values.to(torch.int32)


def _bernoulli(shape: tuple[int, ...], draw: torch.Generator, hidden_row: int | None = None) -> Tensor:
    drawn = torch.rand(shape, generator=draw) < 0.6
    if hidden_row is not None and shape[-2] > hidden_row:
        drawn[..., hidden_row, :] = False
    return drawn


def _layout(H: int, Lq: int, Lk: int, block: int, draw: torch.Generator) -> Tensor:
    return torch.rand((H, -(-Lq // block), -(-Lk // block)), generator=draw) < 0.5


Build = Callable[[int, int, int, int, torch.Generator], "masks.Mask | None"]

#: Every form of mask, by name: `(B, Hq, Lq, Lk, draw) -> Mask`, tensors on the CPU.
MASKS: Mapping[str, Build] = {
    "none": lambda B, H, Lq, Lk, g: None,
    "full": lambda B, H, Lq, Lk, g: masks.full(),
    "empty": lambda B, H, Lq, Lk, g: masks.empty(),
    "causal": lambda B, H, Lq, Lk, g: masks.causal(),
    "causal_top_left": lambda B, H, Lq, Lk, g: masks.causal(align="top-left"),
    "window": lambda B, H, Lq, Lk, g: masks.window(17, 5),
    "window_negative": lambda B, H, Lq, Lk, g: masks.window(40, -3),
    "causal_window": lambda B, H, Lq, Lk, g: masks.causal() & masks.window(33, None),
    "dilated": lambda B, H, Lq, Lk, g: masks.dilated(9, 3),
    "strided": lambda B, H, Lq, Lk, g: masks.causal() & masks.strided(7),
    "prefix": lambda B, H, Lq, Lk, g: masks.prefix(11) | masks.causal(),
    "prefix_each": lambda B, H, Lq, Lk, g: (
        masks.prefix(torch.randint(0, Lk + 1, (B,), generator=g)) | masks.causal()
    ),
    "padding": lambda B, H, Lq, Lk, g: masks.padding(torch.randint(0, Lk + 1, (B,), generator=g)),
    "padding_left": lambda B, H, Lq, Lk, g: (
        masks.causal() & masks.padding(torch.randint(0, Lk + 1, (B,), generator=g), side="left")
    ),
    "documents": lambda B, H, Lq, Lk, g: masks.documents(_offsets(Lq, 4, g), _offsets(Lk, 4, g)),
    "documents_causal": lambda B, H, Lq, Lk, g: masks.documents(
        _offsets(Lq, 3, g, slack=2), _offsets(Lk, 3, g, slack=1), within=masks.causal()
    ),
    "documents_window": lambda B, H, Lq, Lk, g: masks.documents(
        _offsets(Lq, 5, g), _offsets(Lk, 5, g), within=masks.window(9, 2)
    ),
    "sinks_and_window": lambda B, H, Lq, Lk, g: masks.causal() & (masks.window(15, 0) | masks.prefix(3)),
    "global_tokens": lambda B, H, Lq, Lk, g: masks.global_tokens(2) | masks.window(8, 8),
    "columns2": lambda B, H, Lq, Lk, g: masks.columns(_columns(B, H, Lq, Lk, g, 2), causal=True),
    "columns1": lambda B, H, Lq, Lk, g: masks.columns(_columns(1, H, Lq, Lk, g, 1), causal=True),
    "columns_upper": lambda B, H, Lq, Lk, g: masks.columns(
        _columns(B, H, Lq, Lk, g, 2).flip(-1), causal=False
    ),
    "columns4": lambda B, H, Lq, Lk, g: masks.columns(_columns(B, 1, Lq, Lk, g, 4), causal=False),
    "random_blocks": lambda B, H, Lq, Lk, g: masks.random_blocks(0.4, block=16, seed=3),
    "bigbird": lambda B, H, Lq, Lk, g: masks.bigbird(window=1, global_blocks=1, random=2, block=8),
    "longformer": lambda B, H, Lq, Lk, g: masks.longformer(12, 2),
    "butterfly": lambda B, H, Lq, Lk, g: masks.butterfly(block=4),
    "block_sparse": lambda B, H, Lq, Lk, g: masks.block_sparse(_layout(H, Lq, Lk, 32, g), 32),
    "dense": lambda B, H, Lq, Lk, g: masks.dense(_bernoulli((Lq, Lk), g, hidden_row=1)),
    "dense_each": lambda B, H, Lq, Lk, g: masks.dense(_bernoulli((B, H, Lq, Lk), g, hidden_row=0)),
    "dense_keys": lambda B, H, Lq, Lk, g: masks.dense(_bernoulli((1, H, 1, Lk), g)),
    "predicate": lambda B, H, Lq, Lk, g: masks.predicate(lambda b, h, q, k: (q * 3 + k * 5 + h + b) % 4 != 0),
    "shift": lambda B, H, Lq, Lk, g: masks.shift(masks.causal(), 3, 5, Lq + 9, Lk + 11),
    "not_causal": lambda B, H, Lq, Lk, g: ~masks.causal(),
    "union": lambda B, H, Lq, Lk, g: masks.window(3, 0) | masks.window(20, -12) | masks.window(-8, 15),
}

_AXES: Mapping[str, Sequence[Any]] = {
    "batch": (1, 2, 3),
    "heads": ((4, 4), (4, 2), (6, 1), (1, 1)),
    "lengths": ((77, 77), (64, 128), (130, 61), (5, 200), (1, 131), (200, 7), (129, 257), (1, 1)),
    "dims": ((64, 64), (40, 40), (72, 72), (128, 128), (1, 1), (3, 3), (64, 32), (32, 96)),
    "dtype": ("fp32", "bf16", "fp16", "fp64"),
    "mask": tuple(MASKS),
    "values": ("gaussian", "large", "structured", "extremes"),
    "layout": tuple(inputs.LAYOUTS)[:-1],
    "loss": ("out", "both", "lse"),
    "scale": (None, 0.3),
    "softcap": (None, 15.0),
    "alibi": ("", "H", "BH"),
    "bias": ("", *BIASES),
    "sink": (False, True),
    "dropout_p": (0.0, 0.25),
}
_EMPTY_AXES: Mapping[str, Sequence[Any]] = {
    **_AXES,
    "batch": (2, 0),
    "lengths": ((5, 0), (0, 5), (0, 0), (5, 7)),
    "dims": ((32, 32), (16, 24)),
    "mask": ("none", "causal", "padding", "documents", "dense_each", "window", "random_blocks"),
    "values": ("gaussian",),
    "layout": ("contiguous", "transposed"),
}


def pairwise(axes: Mapping[str, Sequence[Any]], *, seed: int = 0, tries: int = 12) -> list[Case]:
    """A selection in which every pair of values of every two axes meets at least once.

    Greedy: each row starts from a pair not yet met and takes the best of `tries` random fillings. Options
    that are off come first in their axis and are drawn more often, so that a row combines few options, not
    all of them.
    """
    draw = random.Random(seed)
    names = list(axes)
    open_pairs = {
        (a, x, b, y)
        for (a, xs), (b, ys) in itertools.combinations(((n, range(len(axes[n]))) for n in names), 2)
        for x in xs
        for y in ys
    }
    chosen: list[Case] = []
    while open_pairs:
        a, x, b, y = min(open_pairs)
        best: dict[str, int] = {}
        met: set[tuple[str, int, str, int]] = set()
        for _ in range(tries):
            row = {n: _draw_index(n, len(axes[n]), draw) for n in names} | {a: x, b: y}
            pairs = {(m, row[m], n, row[n]) for m, n in itertools.combinations(names, 2)} & open_pairs
            if len(pairs) > len(met):
                best, met = row, pairs
        open_pairs -= met
        values = {n: axes[n][i] for n, i in best.items()}
        chosen.append(Case(**values, seed=len(chosen)))
    return chosen


def _draw_index(name: str, count: int, draw: random.Random) -> int:
    optional = name in ("scale", "softcap", "alibi", "bias", "sink", "dropout_p")
    return 0 if optional and draw.random() < 0.5 else draw.randrange(count)


def sample(axes: Mapping[str, Sequence[Any]], count: int, *, seed: int = 0) -> list[Case]:
    """`count` random points of the grid."""
    draw = random.Random(seed)
    return [
        Case(**{n: axes[n][_draw_index(n, len(axes[n]), draw)] for n in axes}, seed=1000 + i)
        for i in range(count)
    ]


# Long enough for several tiles in both directions, whatever the tile.
_LONG_OPTIONS: list[dict[str, Any]] = [
    {"mask": "none"},
    {"mask": "causal"},
    {"mask": "window", "sink": True},
    {"mask": "documents_causal", "dtype": "bf16"},
    {"mask": "columns4", "dropout_p": 0.25},
    {"mask": "random_blocks", "bias": "QK"},
    {"mask": "sinks_and_window", "alibi": "H", "softcap": 15.0},
    {"mask": "dense_each", "dtype": "fp64"},
]
_LONG = [
    Case(batch=1, heads=(2, 1), lengths=(520, 1100), dims=(32, 32), loss="both", seed=seed, **options)
    for seed, options in enumerate(_LONG_OPTIONS)
]
# Every option alone, in every dtype: where one of these fails, the option is what fails.
_OPTIONS: list[dict[str, Any]] = [
    {"sink": True},
    {"softcap": 15.0},
    {"scale": 0.3},
    {"dropout_p": 0.25},
    *({"alibi": x} for x in ("H", "BH")),
    *({"bias": x} for x in BIASES),
    *({"values": x} for x in inputs.VALUES),
]
_SINGLE = [Case(dtype=dtype, loss="both", **option) for dtype in DTYPES for option in _OPTIONS]


def grid(*, full: bool = False) -> list[Case]:
    """The cases: every option alone, long ones, empty ones, and every pair of options; `full` adds 3000
    random points.
    """
    found = [*_SINGLE, *_LONG, *pairwise(_EMPTY_AXES, seed=1), *pairwise(_AXES)]
    if full:
        found += sample(_AXES, 3000)
    return list({case.name: case for case in found}.values())


def _bias_shape(kind: str, B: int, H: int, Lq: int, Lk: int) -> tuple[int, ...]:
    sizes = {"B": B, "H": H, "Q": Lq, "K": Lk, "1": 1}
    return tuple(sizes[letter] for letter in kind)


def build(case: Case, device: torch.device | str = "cpu") -> Call:
    """The tensors of `case`, the same for the same case on every device."""
    (Hq, Hk), (Lq, Lk), (D, Dv), B = case.heads, case.lengths, case.dims, case.batch
    dtype = DTYPES[case.dtype]
    draw = inputs.generator(case.seed + 17)

    def place(x: Tensor) -> Tensor:
        return x.to(dtype).to(device)

    shapes = (B, Hq, Lq, D), (B, Hk, Lk, D), (B, Hk, Lk, Dv)
    layout = inputs.LAYOUTS[case.layout]
    q, k, v = (
        layout(x) for x in inputs.make(case.values, *shapes, dtype=dtype, device=device, seed=case.seed)
    )
    # Small enough for the largest values to stay within fp16 in the gradients.
    size = 2.0**-10 if case.values == "extremes" else 1.0
    dout = layout(place(inputs.normal((B, Hq, Lq, Dv), draw, size))) if case.loss in ("out", "both") else None
    dlse = inputs.normal((B, Hq, Lq), draw, size).to(device) if case.loss in ("lse", "both") else None
    if dlse is not None and case.dtype == "fp64":
        dlse = dlse.double()
    options: dict[str, Any] = {}
    mask = MASKS[case.mask](B, Hq, Lq, Lk, draw)
    if mask is not None:
        options["mask"] = mask.to(device)
    if case.scale is not None:
        options["scale"] = case.scale
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if case.alibi:
        shape = (Hq,) if case.alibi == "H" else (B, Hq)
        options["alibi_slopes"] = place(torch.rand(shape, generator=draw) * 0.2)
    if case.bias:
        options["bias"] = place(inputs.normal(_bias_shape(case.bias, B, Hq, Lq, Lk), draw))
    if case.sink:
        options["sink"] = place(inputs.normal((Hq,), draw) + 1.0)
    if case.dropout_p:
        options["dropout_p"] = case.dropout_p
        options["seed"] = case.seed * 7919 - 5
    return Call(q, k, v, dout, dlse, options)
