"""Tests marked `interpreter` run Triton's kernels on the CPU, one numpy operation after the other.

Triton decides at its first import whether it interprets, so they have a process of their own, with
`TRITON_INTERPRET=1`.
"""

from __future__ import annotations

import os

import pytest

_SKIP = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 in the environment")
#: What the interpreter's numpy says where a GPU is silent: infinities and NaN in tiles, which are the point
#: of many cases; and a conversion of its own that numpy will not take much longer.
_SILENT = (
    "ignore::RuntimeWarning:triton.runtime.interpreter",
    "ignore::RuntimeWarning:numpy._core",
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning:triton.runtime.interpreter",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("interpreter"):
            for line in _SILENT:
                item.add_marker(pytest.mark.filterwarnings(line))
            if os.environ.get("TRITON_INTERPRET") != "1":
                item.add_marker(_SKIP)
