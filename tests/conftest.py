"""Set-up for all tests: fresh memory is poisoned, draws are seeded, hypothesis has no deadline."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tilefold.testing.poison import Poisoned, poison

hypothesis.settings.register_profile("tilefold", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tilefold")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[Poisoned]:
    """Every `torch.empty` of every test returns NaN."""
    with poison() as count:
        yield count


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tests that draw from the default generator draw the same in any order."""
    torch.manual_seed(0)
