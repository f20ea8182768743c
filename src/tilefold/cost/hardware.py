"""Machines: what they can move and compute per second, each figure with its source.

GPU figures are the makers' peaks (dense, without sparsity): predictions from them are floors, but for kernels
that say which share of a peak they reach. "This CPU" is measured, see `measure.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tilefold.errors import ArgumentError, ArgumentTypeError

KIB, MIB = 1 << 10, 1 << 20
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine.

    Attributes:
        name: how users call it.
        device: PyTorch's device kind, "cuda" (ROCm too) or "cpu".
        architecture: which table of tuned sizes it has, such as "sm90" or "cpu".
        bandwidth: bytes per second between slow and fast memory.
        matmul: FLOP/s of matrix products, by dtype ("bfloat16", "float32", ...).
        exps: exponentials per second.
        passes: bytes per second that elementwise operations move while their data stays in the last cache.
        launch: seconds that the host needs to issue one PyTorch operation.
        fast_bytes: fast memory of one core (shared memory, or L2 of a CPU core), in bytes.
        cores: streaming multiprocessors, compute units or threads.
        memory_bytes: slow memory.
        sources: where each figure comes from, by field name.
        rates: seconds per unit of a backend's own steps, for machines that were measured; see `steps.Step`.
        doubt: why the figures should be believed less; "" if nothing is known against them.
        cache_bytes: the cache between slow memory and the cores that all of them share; 0 where none counts.
    """

    name: str
    device: str
    architecture: str
    bandwidth: float
    matmul: Mapping[str, float]
    exps: float
    passes: float
    launch: float
    fast_bytes: int
    cores: int
    memory_bytes: int
    sources: Mapping[str, str]
    rates: Mapping[str, float] = field(default_factory=dict)
    doubt: str = ""
    cache_bytes: int = 0

    @property
    def instructions(self) -> float:
        """Elementwise float32 instructions per second: a multiply-add of the peak is two FLOP."""
        return self.matmul["float32"] / 2

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of products in `dtype`; that of float32 for a dtype without a figure."""
        return self.matmul.get(dtype) or self.matmul["float32"]


class Sheet(NamedTuple):
    """A data sheet: TB/s, dense TFLOP/s by precision, boost clock in GHz, cores, GB of memory, MiB of L2."""

    bandwidth: float
    half: float
    fp8: float | None
    fp32: float
    fp64: float
    clock: float
    cores: int
    memory: float
    cache: int


#: Special functions per clock and core: 16 on every architecture of the table.
_EXPS = 16
_LAUNCH = 7e-6
_LAUNCH_SOURCE = "host time of a sum of four numbers, measured beside an H200 with PyTorch 2.11"
#: Share of the bandwidth that elementwise operations reach.
_ACHIEVED = 0.8
_HOPPER = "NVIDIA H100 architecture white paper (L2); the H200 is the same chip with other memory"
_CUDA_GUIDE = "CUDA C++ Programming Guide, table of technical specifications per compute capability"


def _gpu(
    name: str,
    architecture: str,
    source: str,
    sheet: Sheet,
    *,
    fast_kib: int,
    fast_source: str = _CUDA_GUIDE,
    cache_source: str,
) -> Hardware:
    """A GPU from its data sheet, with KiB of fast memory per core."""
    matmul = dict.fromkeys(("bfloat16", "float16"), sheet.half * TERA)
    matmul |= {"float32": sheet.fp32 * TERA, "float64": sheet.fp64 * TERA}
    if sheet.fp8 is not None:
        matmul["float8_e4m3fn"] = sheet.fp8 * TERA
    return Hardware(
        name,
        "cuda",
        architecture,
        bandwidth=sheet.bandwidth * TERA,
        matmul=matmul,
        exps=sheet.cores * _EXPS * sheet.clock * 1e9,
        passes=sheet.bandwidth * TERA * _ACHIEVED,
        launch=_LAUNCH,
        fast_bytes=fast_kib * KIB,
        cores=sheet.cores,
        memory_bytes=int(sheet.memory * 1e9),
        cache_bytes=sheet.cache * MIB,
        sources={
            **dict.fromkeys(("bandwidth", "cores", "memory_bytes"), source),
            "matmul": f"{source}; dense peaks of matrix units, float32 without TF32",
            "exps": f"{source} (cores, boost clock) and {_EXPS} special functions per clock and core",
            "passes": f"{_ACHIEVED:g} times the bandwidth, as sums of 16 to 64 MB reach on an H200",
            "launch": _LAUNCH_SOURCE,
            "fast_bytes": fast_source,
            "cache_bytes": cache_source,
        },
    )


_ALL = (
    _gpu(
        "H200",
        "sm90",
        "NVIDIA H200 Tensor Core GPU data sheet (SXM)",
        Sheet(
            bandwidth=4.8,
            half=989.4,
            fp8=1978.9,
            fp32=66.9,
            fp64=66.9,
            clock=1.83,
            cores=132,
            memory=141,
            cache=50,
        ),
        fast_kib=227,
        cache_source=_HOPPER,
    ),
    _gpu(
        "H100",
        "sm90",
        "NVIDIA H100 Tensor Core GPU data sheet (SXM5)",
        Sheet(
            bandwidth=3.35,
            half=989.4,
            fp8=1978.9,
            fp32=66.9,
            fp64=66.9,
            clock=1.83,
            cores=132,
            memory=80,
            cache=50,
        ),
        fast_kib=227,
        cache_source=_HOPPER,
    ),
    _gpu(
        "A100",
        "sm80",
        "NVIDIA A100 Tensor Core GPU data sheet (80 GB SXM)",
        Sheet(
            bandwidth=2.039,
            half=312.0,
            fp8=None,
            fp32=19.5,
            fp64=19.5,
            clock=1.41,
            cores=108,
            memory=80,
            cache=40,
        ),
        fast_kib=163,
        cache_source="NVIDIA A100 architecture white paper (L2)",
    ),
    _gpu(
        "L40S",
        "sm89",
        "NVIDIA L40S data sheet",
        Sheet(
            bandwidth=0.864,
            half=362.05,
            fp8=733.0,
            fp32=91.6,
            fp64=1.43,
            clock=2.52,
            cores=142,
            memory=48,
            cache=96,
        ),
        fast_kib=99,
        cache_source="NVIDIA Ada GPU architecture white paper, AD102 (L2)",
    ),
    _gpu(
        "RTX 4090",
        "sm89",
        "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090 (float32 accumulation)",
        Sheet(
            bandwidth=1.008,
            half=165.2,
            fp8=330.3,
            fp32=82.6,
            fp64=1.29,
            clock=2.52,
            cores=128,
            memory=24,
            cache=72,
        ),
        fast_kib=99,
        cache_source="NVIDIA Ada GPU architecture white paper, GeForce RTX 4090 (L2)",
    ),
    _gpu(
        "MI300X",
        "gfx942",
        "AMD Instinct MI300X data sheet",
        Sheet(
            bandwidth=5.3,
            half=1307.4,
            fp8=2614.9,
            fp32=163.4,
            fp64=163.4,
            clock=2.1,
            cores=304,
            memory=192,
            cache=4,
        ),
        fast_kib=64,
        fast_source="AMD CDNA 3 architecture white paper (local data share)",
        cache_source="AMD CDNA 3 architecture white paper (L2 of one of eight dies, as drivers report it)",
    ),
    _gpu(
        "B200",
        "sm100",
        "NVIDIA Blackwell data sheet (HGX B200, one GPU)",
        Sheet(
            bandwidth=8.0,
            half=2250.0,
            fp8=4500.0,
            fp32=75.0,
            fp64=37.0,
            clock=1.965,
            cores=148,
            memory=180,
            cache=126,
        ),
        fast_kib=227,
        cache_source="NVIDIA Blackwell data sheet and drivers (L2 of both dies)",
    ),
)

#: Known machines by name.
MACHINES: dict[str, Hardware] = {machine.name: machine for machine in _ALL}


def find(name: str) -> Hardware:
    """The machine called `name`; capitals, blanks and hyphens do not matter.

    Raises:
        ArgumentError: an unknown machine.
        ArgumentTypeError: not a name.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"machine: expected a name or None, got {type(name).__name__}")
    wanted = _plain(name)
    for machine in _ALL:
        if _plain(machine.name) == wanted:
            return machine
    known = ", ".join(repr(machine) for machine in MACHINES)
    raise ArgumentError(f"machine: expected one of {known} or None, got {name!r}")


#: What drivers call the machines of the table. Relatives with other figures (PCIe and NVL boards, 40 GB,
#: laptops, superchips, slices of a GPU) do not match: whoever has one has to name what is nearest.
_DRIVERS = {
    "H200": r"NVIDIA H200",
    "H100": r"NVIDIA H100 (80GB HBM3|SXM5?)( 80GB)?",
    "A100": r"NVIDIA A100-SXM4-80GB",
    "L40S": r"NVIDIA L40S",
    "RTX 4090": r"NVIDIA GeForce RTX 4090",
    "MI300X": r"AMD Instinct MI300X( OAM)?",
    "B200": r"NVIDIA B200",
}


def recognised(device_name: str) -> Hardware | None:
    """The machine that a driver calls `device_name` ("NVIDIA H100 80GB HBM3"), or None."""
    for name, pattern in _DRIVERS.items():
        if re.fullmatch(pattern, device_name.strip()):
            return MACHINES[name]
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
