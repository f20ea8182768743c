"""The Triton backend on a GPU, on the full grid of every law: some 23,000 cases, hours of compiling.

Not a part of the GPU suite; `pytest -m slow tests/triton/test_gpu_full_grid.py` runs it.
"""

from __future__ import annotations

import pytest
import torch

from tilefold.testing import conformance
from tilefold.testing.law import Law

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("law", conformance.laws(), ids=conformance.identify)
def test_triton_obeys_on_the_full_grid(law: Law) -> None:
    for case in conformance.cases(law, full=True):
        conformance.run(law, case, "triton", "cuda")
