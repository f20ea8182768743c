"""Runs every Triton kernel at least once, on small odd shapes; fails if one did not run.

`test_gpu.py` runs this file under `compute-sanitizer`, whose memory checker sees accesses outside of what was
allocated. PyTorch is to allocate each tensor by itself (`PYTORCH_NO_CUDA_MEMORY_CACHING=1`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tilefold import attention, masks
from tilefold.backends.triton.kernel import Kernel, first_call_seconds


def _run(mask: masks.Mask, L: int, D: int, batch: int = 1, bias: bool = False, **options: Any) -> None:
    device = sys.argv[1]
    draw = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(batch, 2, L, D, generator=draw).to(device, torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    if bias:
        options["bias"] = torch.randn(2, L, L, generator=draw).to(device, torch.bfloat16).requires_grad_()
        leaves.append(options["bias"])
    out, lse = attention(*leaves[:3], mask=mask, return_lse=True, backend="triton", **options)
    torch.autograd.grad(out.sum() + lse.sum(), leaves)


def main() -> None:
    cuts = torch.tensor([0, 70, 75, 201], device=sys.argv[1])
    _run(masks.full(), 201, 96)
    _run(masks.window(50, 0), 128, 64)
    _run(masks.causal(), 130, 256)
    _run(masks.full(), 133, 64, batch=3, bias=True)
    _run(masks.documents(cuts, within=masks.causal()), 201, 64, dropout_p=0.3, seed=1)
    # Some keys see all rows: their lines go to several programs.
    _run(masks.bigbird(window=3, global_blocks=1, random=3, block=64), 8192, 64)


def kernels() -> set[str]:
    """Names of all kernels of the backend."""
    modules = [module for name, module in sys.modules.items() if name.startswith("tilefold.backends.triton.")]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Kernel)]
    return {kernel.name for kernel in found}


if __name__ == "__main__":
    main()
    torch.cuda.synchronize()
    missing = kernels() - {name for name, _, _ in first_call_seconds}
    sys.exit(f"never ran: {missing}" if missing else 0)
