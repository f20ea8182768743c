"""Which machine and which versions a result belongs to."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import tilefold


def machine(device: torch.device | str = "cpu") -> str:
    """One line: the processor, its threads and vector unit; or the GPU and its memory."""
    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}, {capability}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of everything that decides the figures."""
    return {
        "tilefold": tilefold.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
