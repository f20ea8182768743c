"""Masks are values: they combine, they print as what they are, and they never become matrices.

Run: python examples/02_masks.py
"""

from __future__ import annotations

import torch

from tilefold import attention, masks

torch.manual_seed(0)


def picture(mask: masks.Mask, length: int = 16) -> list[str]:
    """One line per query: the keys that it sees. `materialize` is the definition of a mask, for looking and
    for tests.
    """
    visible = mask.materialize(1, 1, length, length)[0, 0]
    return ["".join("█" if seen else "·" for seen in row) for row in visible.tolist()]


def main() -> None:
    offsets = torch.tensor([0, 5, 11, 16], dtype=torch.int32)
    gallery = {
        "causal()": masks.causal(),
        "window(3, 0)": masks.window(3, 0),
        "prefix(4) | causal()": masks.prefix(4) | masks.causal(),
        "documents": masks.documents(offsets, within=masks.causal()),
        "global | window": masks.global_tokens(2) | masks.window(2, 2),
        "dilated(6, 2)": masks.dilated(6, 2),
        "~causal()": ~masks.causal(),
        "predicate": masks.predicate(lambda b, h, q, k: (q * k) % 3 == 0),
    }
    titles = list(gallery)
    for start in range(0, len(titles), 4):
        row = titles[start : start + 4]
        print("   ".join(title.ljust(16)[:20].ljust(20) for title in row))
        for lines in zip(*(picture(gallery[title]) for title in row), strict=True):
            print("   ".join(line.ljust(20) for line in lines))
        print()

    # A mask without tensors is rebuilt by its own text, compares by value, and serves any length.
    mask = masks.causal() & masks.window(1023, 0)
    rebuilt = eval(repr(mask), {"masks": masks})
    print(f"{mask!r} == its repr, evaluated: {rebuilt == mask}")

    # Packed documents: each query sees its own document only, as if every document had been a call of its
    # own.
    q, k, v = (torch.randn(1, 4, 16, 32) for _ in range(3))
    packed = attention(q, k, v, mask=masks.documents(offsets, within=masks.causal()))
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        piece = (x[:, :, start:stop] for x in (q, k, v))
        difference = (packed[:, :, start:stop] - attention(*piece, mask=masks.causal())).abs().max()
        print(f"document {start:2}:{stop:2}, largest difference {difference:.1e}")

    # A query that sees nothing gets zeros, not NaN.
    nothing = attention(q, k, v, mask=masks.empty())
    print(f"an empty mask gives zeros: {bool((nothing == 0).all())}")


if __name__ == "__main__":
    main()
