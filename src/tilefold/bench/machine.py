"""Which machine and which versions a result belongs to."""

from __future__ import annotations

import platform

import torch

import tilefold
from tilefold.cost.measure import description


def machine(device: torch.device | str = "cpu") -> str:
    """One line: the processor, its threads and vector unit; or the GPU and its memory."""
    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return description()


def versions() -> dict[str, str]:
    """Versions of everything that decides the figures."""
    return {
        "tilefold": tilefold.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
