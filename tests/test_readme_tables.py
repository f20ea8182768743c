"""The README's tables are those of the results on file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks" / "readme_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_up_to_date(script: ModuleType) -> None:
    text = script.README.read_text()
    assert script.rewritten(text, script.tables(script.RESULTS.glob("*.json"))) == text


def test_a_table(script: ModuleType, tmp_path: Path) -> None:
    rows = [
        {"case": "causal, 4k", "measured": 0.98765, "floor": 0.97, "unit": "x"},
        {"case": "memory", "measured": 12345, "ceiling": 150_000, "unit": "kB"},
        {"case": "first call", "measured": 1.5, "unit": "ms"},
        {"case": "note", "measured": "skipped"},
    ]
    (tmp_path / "one_case.json").write_text(json.dumps({"machine": "2 cores", "rows": rows}))
    assert script.tables(tmp_path.glob("*.json")).splitlines() == [
        "**one case**, on 2 cores",
        "",
        "| case | measured | required |",
        "|---|---|---|",
        "| causal, 4k | 0.988 x | ≥ 0.97 x |",
        "| memory | 12,345 kB | ≤ 150,000 kB |",
        "| first call | 1.5 ms |  |",
        "| note | skipped |  |",
    ]
    assert script.table(rows[:1], "x") == script.table({"rows": rows[:1]}, "x")


def test_rows_of_a_group_share_a_line_with_the_worst_first(script: ModuleType) -> None:
    rows = [
        {"case": "speed a", "group": "speed", "measured": 0.99, "floor": 0.97, "unit": "x"},
        {"case": "speed b", "group": "speed", "measured": 1.5, "floor": 0.97, "unit": "x"},
        {"case": "share a", "group": "share", "measured": 0.1, "ceiling": 0.2},
        {"case": "share b", "group": "share", "measured": 0.15, "ceiling": 0.2},
        {"case": "alone", "group": "one", "measured": 3},
    ]
    assert script.table(rows, "x").splitlines()[4:] == [
        "| speed (2 measurements) | 0.99 x to 1.5 x | ≥ 0.97 x |",
        "| share (2 measurements) | 0.15 to 0.1 | ≤ 0.2 |",
        "| alone | 3 |  |",
    ]


def test_a_bench_document_has_a_line_per_case(script: ModuleType) -> None:
    def row(case: str, what: str, who: str, **more: object) -> dict[str, object]:
        return {"case": case, "pass": what, "contestant": who, "about": "long", "shape": "B 1", **more}

    document = {
        "title": "Cases", "machine": "2 cores", "contestants": {"tilefold": "", "sdpa": ""},
        "rows": [
            row("a", "forward", "tilefold", median=0.001), row("a", "forward", "sdpa", median=0.002),
            row("a", "forward + backward", "tilefold", median=0.0105, predicted_seconds=0.01),
            row("a", "forward + backward", "sdpa", median=0.25),
            row("b", "forward", "tilefold", median=0.001, predicted_seconds=0.002),
            row("b", "forward", "sdpa"),
        ],
    }  # fmt: skip
    assert script.table(document, "x").splitlines() == [
        "**Cases**, on 2 cores",
        "",
        "| case | tilefold | sdpa | predicted |",
        "|---|---|---|---|",
        "| a: long, forward + backward | 10.5 ms | 250 ms | 10 ms |",
        "| b: long, forward | 1 ms | – | 2 ms |",
    ]


def test_without_results_it_says_so(script: ModuleType) -> None:
    assert script.tables([]) == script.NOTHING


def test_missing_marks_are_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected the marks"):
        script.rewritten("no marks here", "table")
