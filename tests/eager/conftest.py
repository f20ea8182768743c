"""Set-up for the tests of the eager routes."""

from __future__ import annotations

import pytest

from tilefold.backends.eager import pieces, rects, views


@pytest.fixture(params=["usual sizes", "small sizes"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With small sizes, short sequences are cut the way long ones usually are."""
    if request.param == "small sizes":
        monkeypatch.setattr(pieces, "STRIPE", 16)
        for name, value in (("STRIPE", 16), ("CAUSAL_ROWS", 24), ("MASK_ELEMENTS", 700), ("WIDE_STRIPE", 20)):
            monkeypatch.setattr(rects, name, value)
        monkeypatch.setattr(rects, "STRIPES", (4, 16))
        monkeypatch.setattr(views, "BATCH_BYTES", 1 << 14)
        monkeypatch.setattr(views, "SUM_BYTES", 1 << 12)
    return request.param
