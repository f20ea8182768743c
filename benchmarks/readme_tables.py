"""Writes the tables of the README from the files in `benchmarks/results`.

    python benchmarks/readme_tables.py            # rewrites README.md
    python benchmarks/readme_tables.py --check    # exit code 1 if README.md is out of date

A results file is what `tilefold bench --json` writes: one line per case, the median of each contestant's
forward and backward passes. Or it is JSON: `{"title": ..., "machine": ..., "rows": [...]}`, or the list of
rows alone. A row names at least its `case` and what was `measured`, a number or a text; `floor` (or
`ceiling`) is what it has to reach and `unit` what it is counted in. Rows of one `group` share a line, which
shows the worst and the best of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- tables:begin -->", "<!-- tables:end -->"
NOTHING = "No results are on file yet."


def tables(paths: Iterable[Path]) -> str:
    """One table per results file, in the order of their names."""
    return "\n\n".join(table(json.loads(path.read_text()), path.stem) for path in sorted(paths)) or NOTHING


def table(results: dict[str, Any] | list[dict[str, Any]], name: str) -> str:
    """A heading, the machine, and a row per measurement."""
    if isinstance(results, list):
        results = {"rows": results}
    if "contestants" in results:
        return contest(results)
    heading = f"**{results.get('title', name.replace('_', ' '))}**"
    machine = results.get("machine")
    if isinstance(machine, dict):
        machine = ", ".join(str(value) for value in machine.values())
    lines = [
        f"{heading}, on {machine}" if machine else heading,
        "",
        "| case | measured | required |",
        "|---|---|---|",
    ]
    for row in grouped(results["rows"]):
        unit = row.get("unit", "")
        required = " / ".join(
            f"{sign} {quantity(row[key], unit)}"
            for key, sign in (("floor", "≥"), ("ceiling", "≤"))
            if row.get(key) is not None
        )
        best = f" to {quantity(row['best'], unit)}" if "best" in row else ""
        lines.append(f"| {row['case']} | {quantity(row['measured'], unit)}{best} | {required} |")
    return "\n".join(lines)


def contest(document: dict[str, Any]) -> str:
    """A heading, the machine, and a row per case: the last pass of each, every contestant's median, and the
    prediction of tilefold's.
    """
    names = list(document["contestants"])
    lines = [
        f"**{document['title']}**, on {document['machine']}",
        "",
        f"| case | {' | '.join(names)} | predicted |",
        f"|---|{'---|' * (len(names) + 1)}",
    ]
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        passes = cases.setdefault(row["case"], {})
        if row["contestant"] == "tilefold":
            # Rows of a later pass take the place of the earlier one's.
            passes.clear()
        passes[row["contestant"]] = row
    for case, rows in cases.items():
        ours = rows["tilefold"]
        cells = [duration(rows[name].get("median")) for name in names]
        about = f"{case}: {ours['about']}, {ours['pass']}"
        lines.append(f"| {about} | {' | '.join(cells)} | {duration(ours.get('predicted_seconds'))} |")
    return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """Milliseconds with three digits; a dash where there is nothing."""
    return "–" if seconds is None else quantity(seconds * 1e3, "ms")


def grouped(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one group as one row: worst in `measured`, best in `best`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row.get("group", row["case"]), []).append(row)
    result = []
    for name, members in found.items():
        if len(members) == 1:
            result.append(members[0])
            continue
        ordered = sorted(members, key=lambda row: row["measured"], reverse="floor" not in members[0])
        worst, best = ordered[0], ordered[-1]
        counted = f"{name} ({len(members)} measurements)"
        result.append({**worst, "case": counted, "best": best["measured"]})
    return result


def quantity(value: Any, unit: str) -> str:
    """Three significant digits and the unit; texts as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def rewritten(text: str, body: str) -> str:
    """`text` with `body` between the two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md: expected the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; say whether the README is up to date"
    )
    options = parser.parse_args()
    text = README.read_text()
    new = rewritten(text, tables(RESULTS.glob("*.json")))
    if options.check:
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
