"""Runs the Hopper kernel with every kind of mask, on small odd shapes, with rows that outgrow their reference
and with hidden NaN, so that every pass of it does something.

`test_gpu.py` runs this file under `compute-sanitizer`, whose memory checker sees accesses outside of what was
allocated. PyTorch is to allocate each tensor by itself (`PYTORCH_NO_CUDA_MEMORY_CACHING=1`).
"""

from __future__ import annotations

import torch

from tilefold import attention, masks


def main() -> None:
    cuts = torch.tensor([0, 70, 75, 201], device="cuda")
    kinds = {
        "full": masks.full(),
        "band": masks.causal(),
        "window": masks.window(50, 3),
        "rows": masks.documents(cuts, within=masks.causal()),
        "cols": masks.columns(torch.full((1, 1, 201, 1), 150, device="cuda").int(), causal=True),
        "bits": masks.random_blocks(0.4, block=64),
    }
    for head_dim, (kind, mask) in [(D, item) for D in (64, 96, 256) for item in kinds.items()]:
        q, k, v = (torch.randn(2, 2, 201, head_dim, device="cuda").bfloat16() for _ in range(3))
        k[:, 1] = k[:, 1].abs() * torch.linspace(1, 60, 201, device="cuda").bfloat16()[:, None]
        v[:, :, 190:] = float("nan")
        out = attention(q.abs() + 1, k, v, mask=mask, backend="hopper")
        print(kind, head_dim, int(out.isnan().sum()))
        bias = torch.randn(2, 201, 201, device="cuda").bfloat16()
        attention(q, k, v, mask=mask, bias=bias, sink=torch.zeros(2, device="cuda"), backend="hopper")
    # Many short documents and a long one: some programs have nothing to do. Few rows: heads share a tile.
    cuts = torch.tensor([*range(0, 3072, 16), 3072, 4096], device="cuda")
    q, k, v = (torch.randn(1, 1, 4096, 64, device="cuda").bfloat16() for _ in range(3))
    attention(q, k, v, mask=masks.documents(cuts, within=masks.causal()), backend="hopper")
    for rows in (1, 8):
        few = torch.randn(1, 4, rows, 64, device="cuda").bfloat16()
        attention(few, k, v, mask=masks.causal(), backend="hopper")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
