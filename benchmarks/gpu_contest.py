"""What `gpu_kernels.py` is made of: medians between CUDA events, errors by rows, inputs, masks and
contestants, and the file of results.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilefold import attention, masks
from tilefold.problem import Problem

#: What stands for an error that is no number.
WRONG = 1e9
#: Seconds for which contestants take turns, and how many turns that may be.
SECONDS, TURNS = 0.25, (7, 50)
#: Cycles of the GPU for which it sleeps before a turn.
ASLEEP = 2_000_000
#: Calls per turn of the host's clock, and turns.
CALLS, HOST_TURNS = 300, 7
Row = dict[str, Any]
Call = Callable[[], Any]
Mod = Callable[[Any, Any, Any, Any], Any]
#: The cases of a part: a name, and what measures it.
Named = Iterator[tuple[str, Callable[[], list[Row]]]]
ours = partial(attention, backend="triton")


class Case(NamedTuple):
    """A mask by name, head size and length. There are 16k rows or one batch element, and 2048 / D heads."""

    label: str
    D: int
    L: int

    def __str__(self) -> str:
        return f"{self.label}, D {self.D}, L {self.L}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return max(16384 // self.L, 1), 2048 // self.D, self.L, self.D


# Measuring.


def medians(contestants: Sequence[Call], seconds: float = SECONDS) -> list[float]:
    """Median seconds of each contestant on the GPU. They take turns, and the GPU sleeps while the calls of a
    turn are queued, so that what the host does is hidden. Who comes first in a turn changes: behind the sleep
    a call takes some microseconds longer.
    """
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for run in contestants:
            run()
        torch.cuda.synchronize()
        took = time.perf_counter() - start
    count = len(contestants)
    events: list[list[Any]] = [[] for _ in contestants]
    for turn in range(min(max(int(seconds / took), TURNS[0]), TURNS[1])):
        torch.cuda._sleep(ASLEEP)
        for n in range(turn, turn + count):
            own = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[n % count].append(own)
            own[0].record()
            contestants[n % count]()
            own[1].record()
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) / 1e3 for start, end in own) for own in events]


def contest(
    contestants: Sequence[tuple[Call, tuple[Tensor, ...]]], dout: Tensor
) -> list[tuple[float, float]]:
    """Median seconds of forward and of backward of each contestant, given as a call and what it is
    differentiated by.
    """
    with torch.no_grad():
        forward = medians([call for call, _ in contestants])
    backward = medians(
        [partial(torch.autograd.grad, call(), x, dout, retain_graph=True) for call, x in contestants]
    )
    return list(zip(forward, backward, strict=True))


def step(call: Call, wanted: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward."""
    out = call()
    return (out.detach(), *torch.autograd.grad(out, wanted, dout))


def host(runs: Sequence[Call], calls: int = CALLS, turns: int = HOST_TURNS) -> list[float]:
    """Microseconds in which the host issues a call: the median of turns of `calls` calls."""
    found: list[list[float]] = [[] for _ in runs]
    for run in runs:
        for _ in range(calls):
            run()
    for _ in range(turns):
        for times, run in zip(found, runs, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(times) for times in found]


def worst_row(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest error of a row of the last dimension, beside its length or the median row's."""
    length_of = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
    worst = 0.0
    for mine, theirs in zip(got, wanted, strict=True):
        length = length_of(theirs)
        error = length_of(mine - theirs) / torch.maximum(length, length.median())
        worst = max(worst, float(error.nan_to_num(WRONG, WRONG, WRONG).max()))
    return worst


def over(theirs: tuple[float, float], mine: tuple[float, float]) -> list[float]:
    return [a / b for a, b in zip(theirs, mine, strict=True)]


# Inputs and contestants.


def inputs(
    B: int, H: int, L: int, D: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """q, k, v that want gradients, and an upstream gradient."""
    q, k, v, dout = (torch.randn(B, H, L, D, device=device, dtype=dtype) for _ in range(4))
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), dout


def offsets(length: int) -> Tensor:
    """Offsets of documents, int32 on the CPU; their lengths are log-uniform from 128 to 4096."""
    generator, cuts = torch.Generator().manual_seed(3), [0]
    while cuts[-1] < length:
        size = int(2 ** (7 + 5 * torch.rand(1, generator=generator).item()))
        cuts.append(min(length, cuts[-1] + size))
    return torch.tensor(cuts, dtype=torch.int32)


def masked(label: str, L: int, device: str = "cuda") -> tuple[masks.Mask | None, Mod | None]:
    """A mask by name, and FlexAttention's function for it."""
    cuts = offsets(L).to(device)
    document = torch.searchsorted(cuts[1:], torch.arange(L, device=device, dtype=torch.int32), right=True)
    ends = cuts[1:][document].contiguous()
    if label == "full":
        return None, None
    if label == "causal":
        return masks.causal(), lambda b, h, i, j: i >= j
    if label.startswith("window"):
        return masks.causal() & masks.window(1023, 0), lambda b, h, i, j: (i >= j) & (i - j <= 1023)
    if label == "causal documents":
        mask = masks.documents(cuts, within=masks.causal())
        return mask, lambda b, h, i, j: (i >= j) & (document[i] == document[j])
    if label == "columns":
        mask = masks.columns(ends.view(1, 1, L, 1), causal=True)
        return mask, lambda b, h, i, j: (i >= j) & (i < ends[j])
    mask = masks.bigbird(window=3, global_blocks=1, random=3, block=64)
    layout = masks.lower(mask, (), 1, 1, L, L, device).tile_states(L, L, 64, 64, device)[0, 0] > 0
    return mask, lambda b, h, i, j: layout[i // 64, j // 64]


def dense_mask(mask: masks.Mask, L: int, device: str = "cuda", rows: int = 1024) -> Tensor:
    """The mask as a tensor, bool `[1, 1, L, L]`, from its definition, some rows at a time."""
    stripes = [
        masks.shift(mask, start, 0, L, L).materialize(1, 1, min(rows, L - start), L, device)
        for start in range(0, L, rows)
    ]
    return torch.cat(stripes, dim=2)


def sdpa(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """SDPA by one of its kernels."""
    with sdpa_kernel(kind):
        return F.scaled_dot_product_attention(q, k, v, **options)


def flexed(q: Tensor, k: Tensor, v: Tensor, mod: Mod | None) -> Call:
    """Compiled FlexAttention."""
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Else its backward pass could run only once per forward pass.
    config.donated_buffer = False
    torch._dynamo.reset()
    L = q.shape[2]
    blocks = None if mod is None else create_block_mask(mod, None, None, L, L, device=q.device)
    return partial(torch.compile(flex_attention, dynamic=False), q, k, v, block_mask=blocks)


def visited_share(mask: masks.Mask, case: Case, device: str = "cuda") -> float:
    """The share of the forward plan's tiles in which some query sees some key."""
    from tilefold.backends.triton.sizes import kind_of, needed

    B, H, L, D = case.shape
    form = masks.lower(mask, (), B, H, L, L, device)
    problem = Problem(B, H, H, L, L, D, D, torch.bfloat16, device)
    sizes = needed("forward", problem, kind_of(problem, form))
    return float((form.tile_states(L, L, sizes.rows, sizes.keys, device) > 0).float().mean())


# Rows.


def row(group: str, what: str, measured: float, unit: str = "x", **more: Any) -> Row:
    return {"case": f"{group}: {what}", "group": group, "measured": measured, "unit": unit, **more}


def per_pass(group: str, what: str, ratios: Sequence[float], **more: Any) -> list[Row]:
    """A row for forward and one for backward."""
    return [
        row(group, f"{what}, {name}", x, **more)
        for name, x in zip(("forward", "backward"), ratios, strict=True)
    ]


def in_milliseconds(names: Sequence[str], times: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Forward and backward of each contestant, as a results file has them; names of absent ones are left."""
    return {name: [1e3 * x for x in pair] for name, pair in zip(names, times, strict=False)}


def verdict(x: Row) -> bool:
    return x.get("floor", -float("inf")) <= x["measured"] <= x.get("ceiling", float("inf"))


def line(x: Row) -> str:
    """A row as it is printed; one without a bound is information."""
    bounds = [f"{sign} {x[key]:.3g}" for key, sign in (("floor", ">="), ("ceiling", "<=")) if key in x]
    mark = ("ok" if verdict(x) else "MISS") if bounds else "info"
    required = f"(required {', '.join(bounds)})" if bounds else ""
    return f"{mark:4} {x['measured']:9.3f} {x['unit']:2} {required:27}  {x['case']}"


class Results:
    """A file of results, written anew with every case."""

    def __init__(self, path: Path | None, about: dict[str, Any], parts: Sequence[str]) -> None:
        """Takes over the rows that are there.

        Args:
            path: None keeps them in memory.
            about: title, machine, date and versions.
            parts: of which there are rows, in their order.

        Raises:
            ValueError: they are of another machine or of other versions.
        """
        self.path, self.about, self.parts = path, about, list(parts)
        self.rows: list[Row] = []
        if path is not None and path.exists():
            old = json.loads(path.read_text())
            for key in ("title", "machine", "versions"):
                if old[key] != about[key]:
                    raise ValueError(f"{path}: its {key} is {old[key]}, and here it is {about[key]}")
            self.rows = old["rows"]

    def begin(self, part: str) -> None:
        """Forgets the part's earlier rows."""
        self.rows = [old for old in self.rows if old["part"] != part]

    def add(self, part: str, rows: Iterable[Row]) -> None:
        self.rows += [{**new, "part": part} for new in rows]
        self.rows.sort(key=lambda x: self.parts.index(x["part"]))
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.path.with_suffix(".part")
            scratch.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n")
            scratch.replace(self.path)


# The run.


def run(parts: Mapping[str, Callable[[], Named]], deadline: float, results: Results) -> bool:
    """Measures part after part until the deadline; whether everything ran and kept its bounds."""
    well = True
    for part, cases in parts.items():
        results.begin(part)
        for name, measure in cases():
            if time.monotonic() >= deadline:
                print(f"the limit is reached; left out from: {part}, {name}", file=sys.stderr)
                return False
            try:
                rows = measure()
            except Exception:
                # The other cases are still worth their time; this one shows in the exit code.
                print(f"FAILED  {part}, {name}", file=sys.stderr)
                traceback.print_exc()
                well = False
                continue
            results.add(part, rows)
            well &= all(map(verdict, rows))
            print(*map(line, rows), sep="\n", flush=True)
            torch.cuda.empty_cache()
    return well


def refusal() -> str | None:
    """Why nothing can be measured here, if so."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set: Triton would interpret the kernels on the CPU. Unset it first."
    if not torch.cuda.is_available():
        return "This benchmark needs a CUDA device, and this PyTorch sees none."
    return None
