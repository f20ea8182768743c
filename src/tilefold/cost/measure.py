"""This CPU, measured: general figures once, a backend's own rates once per dtype, both kept on disk."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from . import store
from .hardware import KIB, MIB, Hardware

#: Changes when measurements change their meaning, so that old files are not believed.
_EDITION = 5
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SOURCE = "measured on this machine, {date}"
#: How much one matrix product may differ before and after a measurement.
_STEADY = 1.15
#: Seconds after which a measurement on a slow or busy machine makes do with the turns that it has.
_PATIENCE = 3.0
_DOUBT = "measured while it was busy with something else: believe it less"
Name = TypeVar("Name", bound=Hashable)
_lock = threading.Lock()


def seconds_of(
    runs: Mapping[Name, Callable[[], object]], least: float = 0.01, turns: int = 5
) -> dict[Name, float]:
    """Seconds of each run: the fastest of `turns` turns of at least `least` seconds each, since other work on
    the machine can only add. Runs take turns, so that a slow moment does not hit one of them alone. After
    `_PATIENCE` seconds no further turn begins.
    """
    began, counts = time.perf_counter(), {}
    for name, run in runs.items():
        run()
        start = time.perf_counter()
        run()
        counts[name] = max(1, int(least / max(time.perf_counter() - start, 1e-7)))
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(turns):
        if turn and time.perf_counter() - began > _PATIENCE:
            break
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                run()
            best[name] = min(best[name], (time.perf_counter() - start) / counts[name])
    return best


def this_cpu(dtype: str, measure: Callable[[str], dict[str, float]]) -> Hardware:
    """The CPU that runs this process, with the rates of `dtype` ("float32", ...).

    The first call on a machine measures for a few seconds; later ones, of other processes too, read a file.

    Args:
        dtype: which rates are needed.
        measure: measures a backend's rates for a dtype; seconds per unit by name.
    """
    name = f"cpu-{fingerprint()}"
    return _this_cpu(name, str(store.folder()), dtype, measure)


@functools.lru_cache(maxsize=16)
def _this_cpu(name: str, folder: str, dtype: str, measure: Callable[[str], dict[str, float]]) -> Hardware:
    with _lock:
        known = store.read(name)
        steady = True
        if "figures" not in known:
            known |= {"machine": description(), "date": time.strftime("%Y-%m-%d"), "figures": _figures()}
        rates = known.setdefault("rates", {})
        if dtype not in rates:
            before, others = _matmul_rate(torch.float32), _others_at_work()
            rates[dtype] = measure(dtype)
            # A machine that is busy with something else is measured again by the next process.
            steady = 1 / _STEADY < before / _matmul_rate(torch.float32) < _STEADY
            steady = steady and not (others and _others_at_work())
            if steady:
                store.write(name, known)
    figures = known["figures"]
    source = _SOURCE.format(date=known["date"])
    return Hardware(
        name="this CPU",
        device="cpu",
        architecture="cpu",
        bandwidth=figures["bandwidth"],
        matmul=figures["matmul"],
        exps=figures["exps"],
        passes=figures["passes"],
        launch=figures["launch"],
        fast_bytes=_l2_bytes(),
        cores=torch.get_num_threads(),
        memory_bytes=_memory_bytes(),
        sources={
            **dict.fromkeys(("bandwidth", "matmul", "exps", "passes", "launch"), source),
            "fast_bytes": "the operating system: L2 of one core",
            "cores": "PyTorch's threads",
            "memory_bytes": "the operating system",
        },
        rates=rates[dtype],
        doubt="" if steady else _DOUBT,
    )


def _others_at_work() -> bool:
    """Whether so much else wants to run that PyTorch's threads have to share their cores; only Linux says."""
    if not Path("/proc/loadavg").exists():
        return False
    others = min(_others_running() for _ in range(5))
    return others + torch.get_num_threads() > (os.cpu_count() or 1)


def _others_running() -> int:
    """Tasks of other processes that run or want to, at one moment."""
    # Idle threads of PyTorch's pool spin for a while.
    time.sleep(0.02)
    running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    return running - len([path for path in Path("/proc/self/task").iterdir() if _runs(path)])


def _runs(task: Path) -> bool:
    """Whether a thread of this process is running; one that has ended meanwhile is not."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except (FileNotFoundError, ProcessLookupError):
        return False


def forget() -> None:
    """Measure this CPU anew at the next question, here and in later processes."""
    store.remove(f"cpu-{fingerprint()}")
    _this_cpu.cache_clear()


def fingerprint() -> str:
    """Equal on equal machines with equal software: model, threads, versions."""
    parts = (_EDITION, description(), torch.get_num_threads(), torch.__version__, platform.python_version())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def description() -> str:
    """The CPU in words: its model, PyTorch's threads and instruction set."""
    threads = torch.get_num_threads()
    return f"{model()}, {threads} thread{'s' * (threads != 1)}, {torch.backends.cpu.get_cpu_capability()}"


def model() -> str:
    """The model of the CPU."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@torch.no_grad()
def _figures() -> dict[str, object]:
    """Bandwidths, matrix products, exponentials and the cost of one operation."""
    large, tile, tiny = (torch.ones(n, device="cpu") for n in (64 * MIB // 4, 2 * MIB // 4, 4))
    copy = torch.empty_like(large)
    found = seconds_of(
        {
            "bandwidth": lambda: copy.copy_(large),
            "passes": lambda: tile + tile,
            "exps": tile.exp,
            "launch": lambda: tiny + tiny,
        }
    )
    return {
        "bandwidth": 2 * 64 * MIB / found["bandwidth"],
        "passes": 3 * 2 * MIB / found["passes"],
        "exps": tile.numel() / found["exps"],
        "launch": found["launch"],
        "matmul": {str(dtype).removeprefix("torch."): _matmul_rate(dtype) for dtype in _DTYPES},
    }


def _matmul_rate(dtype: torch.dtype) -> float:
    size = 768 if dtype in (torch.float32, torch.bfloat16) else 384
    a, b = (torch.ones(size, size, dtype=dtype, device="cpu") for _ in range(2))
    return 2 * size**3 / seconds_of({"matmul": lambda: a @ b}, turns=3)["matmul"]


def _l2_bytes() -> int:
    """L2 of one core; 1 MiB where the operating system does not say."""
    text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    if text.exists():
        value = text.read_text().strip()
        if value.endswith("K"):
            return int(value[:-1]) * KIB
        if value.endswith("M"):
            return int(value[:-1]) * MIB
    return MIB


def _memory_bytes() -> int:
    """Main memory; 0 where the operating system does not say."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0
