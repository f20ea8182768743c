"""The text: source files of Python's standard library as bytes, packed one after the other."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilefold import masks

# Tests are missing on some systems, and the other three are data or examples rather than library code.
LEFT_OUT = frozenset({"encodings", "idlelib", "lib2to3", "site-packages", "dist-packages", "test", "tests"})
# Small files, so that a context holds several documents.
LARGEST = 8192
# Stands before every file: the model is given it to begin a file and predicts it to end one. No source file
# holds it.
BORDER = b"\0"


@dataclass(frozen=True)
class Window:
    """One context of packed files.

    Attributes:
        tokens, targets: int64 `[1, L]`; the target of a byte is the one after it.
        offsets: int32 `[documents + 1]`, where the files in the context begin, and `L`.
        positions: int64 `[L]`, counted from the beginning of each file.
    """

    tokens: Tensor
    targets: Tensor
    offsets: Tensor
    positions: Tensor

    @property
    def mask(self) -> masks.Mask:
        """Every byte sees the bytes before it in its own file."""
        return masks.documents(self.offsets, within=masks.causal())


@dataclass(frozen=True)
class Corpus:
    """All files in one line, uint8 `[T]`, and how many there are."""

    stream: Tensor
    files: int

    @classmethod
    def load(cls, root: Path | None = None, seed: int = 0) -> Corpus:
        """Reads the standard library of the running interpreter, or the Python files below `root`.

        Raises:
            FileNotFoundError: there is no source file, as in an interpreter that ships compiled files only.
        """
        root = Path(sysconfig.get_path("stdlib")) if root is None else root
        paths = sorted(
            path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts)
        )
        texts = [path.read_bytes() for path in paths if 0 < path.stat().st_size <= LARGEST]
        texts = [text for text in texts if BORDER not in text]
        if not texts:
            raise FileNotFoundError(f"no Python source file of at most {LARGEST} bytes below {root}")
        random.Random(seed).shuffle(texts)
        packed = bytearray(b"".join(BORDER + text for text in texts) + BORDER)
        return cls(torch.frombuffer(packed, dtype=torch.uint8), len(texts))

    def windows(self, length: int) -> int:
        """How many separate contexts of `length` bytes there are.

        Raises:
            ValueError: not even one.
        """
        count = (len(self.stream) - 1) // length
        if count < 1:
            raise ValueError(
                f"context: expected fewer than the {len(self.stream)} bytes of the corpus, got {length}"
            )
        return count

    def window(self, index: int, length: int, device: torch.device) -> Window:
        """The context number `index`, modulo their count, of `length` bytes."""
        start = index % self.windows(length) * length
        piece = self.stream[start : start + length + 1].long()
        borders = torch.nonzero(piece[1:length] == BORDER[0])[:, 0] + 1
        offsets = torch.cat([torch.tensor([0]), borders, torch.tensor([length])])
        position = torch.arange(length)
        document = torch.searchsorted(offsets, position, right=True) - 1
        parts = (piece[None, :-1], piece[None, 1:], offsets.to(torch.int32), position - offsets[document])
        return Window(*(part.contiguous().to(device) for part in parts))
