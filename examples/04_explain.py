"""What a call costs before it runs: on this machine, or on one that is only named.

Run: python examples/04_explain.py
"""

from __future__ import annotations

import torch

from tilefold import Problem, explain, masks


def main() -> None:
    # A call that nobody makes: 32 query heads on 8 key heads, 16k tokens, on a GPU that need not be here.
    llama = Problem(
        batch=1, q_heads=32, k_heads=8, q_length=16384, k_length=16384, head_dim=128, v_head_dim=128,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    print(explain(llama, mask=masks.causal() & masks.window(4095, 0), machine="H200"))

    # The same on every machine of the table. Peaks of data sheets give lower bounds.
    print()
    for machine in ("H200", "H100", "A100", "L40S", "RTX 4090", "MI300X", "B200"):
        found = explain(llama, mask=masks.causal(), machine=machine).forward
        alone = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in found.shares.items())
        print(f"{machine:9} bound by {found.wall}; alone: {alone}")

    # A bias that every head shares, given once for each: three quarters of it need not exist.
    q, k, v = (torch.randn(1, 4, 512, 64) for _ in range(3))
    bias = torch.randn(1, 1, 512, 512).repeat(1, 4, 1, 1)
    print()
    for sentence in explain(q, k, v, bias=bias, machine="A100").advice:
        print("advice:", sentence)


if __name__ == "__main__":
    main()
