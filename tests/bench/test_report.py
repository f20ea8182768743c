"""What results become: text for a terminal, a picture, one page."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from rich.console import Console

from tilefold.bench import report
from tilefold.bench.page import page
from tilefold.bench.picture import png
from tilefold.errors import ArgumentError


def printed(document: dict[str, Any], width: int = 80) -> str:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(report.table(document))
    return capture.get()


@pytest.mark.parametrize(
    "value, words",
    [
        (1.234, "1.23 s"),
        (0.99996, "1.00 s"),
        (0.0456, "45.6 ms"),
        (123e-6, "123 µs"),
        (4e-9, "0.00 µs"),
        (75.0, "75.0 s"),
    ],
)
def test_seconds(value: float, words: str) -> None:
    assert report.seconds(value) == words


@pytest.mark.parametrize(
    "value, words",
    [(0, "0 B"), (512, "512 B"), (1536, "1.50 KiB"), (5 << 20, "5.00 MiB"), (300 << 30, "300 GiB")],
)
def test_size(value: int, words: str) -> None:
    assert report.size(value) == words


def test_rate_and_ratio() -> None:
    assert [report.rate(x) for x in (2.5e12, 99e9, 3e6)] == ["2.50 TFLOP/s", "99.0 GFLOP/s", "3.00 MFLOP/s"]
    assert [report.ratio(x) for x in (0.5, 12.34, 1234.0)] == ["0.50×", "12.3×", "1,234×"]


def test_the_table_holds_times_ratios_memory_and_predictions(document: dict[str, Any]) -> None:
    text = printed(document)
    first = next(line for line in text.splitlines() if "case-0-of-many" in line)
    expected = "case-0-of-many fwd 1.00 ms 2.00× 4.00× 30% 1.02 MiB 1.50×"
    assert " ".join(first.split()) == expected
    assert text.count("case-3-of-many") == 3  # two passes and the note
    assert "sdpa refused (case-3-of-many): it has no soft cap" in text
    assert "sdpa wrong (case-11-of-many): OVER out" in text
    assert "2026-01-02" in text and "torch 2.11.0" in " ".join(text.split())
    assert "…" not in text


def test_a_run_that_was_refused_says_so(document: dict[str, Any]) -> None:
    document["exact"] = False
    document["rows"] = [
        {key: row[key] for key in ("case", "pass", "contestant")}
        | {"status": "not timed", "reasons": ["why"]}
        for row in document["rows"]
    ]
    assert "tilefold failed a check: nothing was timed." in printed(document)
    html = page([document])
    assert 'class="banner"' in html and "<table>" not in html and "<svg" not in html
    with pytest.raises(ArgumentError, match="got none that was timed"):
        png(document, Path("never-written.png"))


def test_a_file_is_read_back(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document))
    assert report.load(path) == document


BARE = {"case": "x", "pass": "forward", "contestant": "y", "status": "ok", "reasons": []}
DEEP = 20000


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", "null", '"rows"', "{}", '{"rows": 1}', '{"rows": []}', '{"rows": {}}',
        '{"rows": [3]}', '{"rows": [{"case": "x"}]}', json.dumps({"rows": [BARE]}), "[" * DEEP,
        "[" * DEEP + "]" * DEEP, '{"rows": ' * DEEP + "1" + "}" * DEEP, "\ufeff{}", "1" * 9000,
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"FILE: expected results of `tilefold bench`.*results\.json: "):
        report.load(path)


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(b"\x89PNG\xff\x00")
    for other in (path, tmp_path, tmp_path / "missing.json"):
        with pytest.raises(ArgumentError, match=r"FILE: expected results of `tilefold bench`, got .*: "):
            report.load(other)


NO_TEXT = (None, 3, True, [1], ["x"], {}, "\ud800")
NO_TEXTS = (None, 3, "x", {}, [1], [None], [["x"]])
NO_NAMED_TEXTS = (None, 3, "x", ["x"], {"x": 1}, {"x": None}, {"x": ["y"]}, {"\udfff": "x"})
NO_NUMBER = ("abc", "1", True, False, [1.0], {}, math.inf, -math.inf, math.nan, 10**400, 1e31)
NOT_POSITIVE = (*NO_NUMBER, 0, 0.0, -1.0, 1e-31)
NEGATIVE = (*NO_NUMBER, -1, -1e-3, 1e-31)
# What no field of a document, and of a row of somebody who was timed, may hold.
WRONG_IN_DOCUMENT = {
    "rows": (None, 3, "x", [], {}, {"x": 1}),
    **dict.fromkeys(("title", "machine", "device", "date", "note"), NO_TEXT),
    **dict.fromkeys(("versions", "contestants"), NO_NAMED_TEXTS),
    "seconds": (None, *NEGATIVE),
    "exact": (None, 1, "yes", []),
}
WRONG_IN_ROW = {
    **dict.fromkeys(("case", "contestant", "about", "shape"), NO_TEXT),
    **dict.fromkeys(("pass", "status"), (*NO_TEXT, "", "OK", "backward")),
    "reasons": NO_TEXTS,
    **dict.fromkeys(("median", "low", "high"), (None, *NOT_POSITIVE)),
    **dict.fromkeys(("best", "turns", "predicted_seconds", "predicted_over_measured"), NOT_POSITIVE),
    "extra_bytes": (*NO_NUMBER, -1e31),
    **dict.fromkeys(
        (
            "error_over_budget", "flops", "flops_per_second", "predicted_bytes", "predicted_extra_bytes",
            "predicted_over_measured_extra",
        ),
        NEGATIVE,
    ),
}  # fmt: skip
REQUIRED = ("case", "pass", "contestant", "status", "reasons", "median", "low", "high")


def refusal(document: Any, folder: Path) -> str:
    path = folder / "results.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ArgumentError) as found:
        report.load(path)
    text = str(found.value)
    assert text.startswith(f"FILE: expected results of `tilefold bench`, got {path}: ")
    assert "\n" not in text
    return text.partition("results.json: ")[2]


@pytest.mark.parametrize("field", WRONG_IN_DOCUMENT)
def test_a_wrong_field_of_a_document_is_named(field: str, document: dict[str, Any], tmp_path: Path) -> None:
    for value in WRONG_IN_DOCUMENT[field]:
        words = refusal(document | {field: value}, tmp_path)
        assert re.match(rf"the document, {field}: expected .*, got .", words), value


@pytest.mark.parametrize("field", WRONG_IN_ROW)
def test_a_wrong_field_of_a_row_is_named(field: str, document: dict[str, Any], tmp_path: Path) -> None:
    good = document["rows"][6]
    for value in WRONG_IN_ROW[field]:
        document["rows"][6] = good | {field: value}
        assert re.match(rf"row 7, {field}: expected .*, got .", refusal(document, tmp_path)), value


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_of_a_row_is_named(field: str, document: dict[str, Any], tmp_path: Path) -> None:
    del document["rows"][6][field]
    assert re.match(rf"row 7, {field}: expected .*, got nothing", refusal(document, tmp_path))


@pytest.mark.parametrize("value", [None, 3, "x", [], [1]])
def test_what_is_no_row_is_named(value: Any, document: dict[str, Any], tmp_path: Path) -> None:
    document["rows"][6] = value
    assert refusal(document, tmp_path).startswith("row 7: expected an object, got ")


def rendered(document: dict[str, Any], folder: Path) -> str:
    """The table, after a page and a picture were made of `document` too."""
    path = folder / "results.json"
    path.write_text(json.dumps(document))
    read = report.load(path)
    assert page([read])
    png(read, folder / "results.png")
    return printed(read, 200)


OPTIONAL = sorted(
    {name for name, values in (WRONG_IN_ROW | {"about": (), "shape": ()}).items() if name not in REQUIRED}
)
NULLABLE = [name for name in OPTIONAL if name not in ("about", "shape")]


@pytest.mark.parametrize("fields", [*([name] for name in OPTIONAL), OPTIONAL], ids="+".join)
@pytest.mark.parametrize("how", ["null", "missing"])
def test_a_report_does_without_optional_figures(
    fields: list[str], how: str, document: dict[str, Any], tmp_path: Path
) -> None:
    for row in document["rows"]:
        for field in fields:
            row.pop(field, None)
            if how == "null" and field in NULLABLE:
                row[field] = None
    text = rendered(document, tmp_path)
    (line, *_) = (" ".join(line.split()) for line in text.splitlines() if "case-0-of-many" in line)
    assert ("MiB" in line) == ("extra_bytes" not in fields)
    assert line.endswith("1.50×") == ("predicted_over_measured" not in fields)
    assert "None" not in page([document])


def test_a_report_does_without_what_describes_a_run(document: dict[str, Any], tmp_path: Path) -> None:
    assert "case-0-of-many" in rendered({"rows": document["rows"]}, tmp_path)


@pytest.mark.parametrize("value", [1e-30, 1e30, 1, -5])
def test_a_report_holds_extreme_figures(value: float, document: dict[str, Any], tmp_path: Path) -> None:
    changed = {"extra_bytes": value}
    if value > 0:
        changed |= dict.fromkeys(("median", "low", "high", "predicted_seconds"), value)
    document["rows"][0] |= changed
    assert "case-0-of-many" in rendered(document, tmp_path)


def test_rows_of_who_was_not_timed_need_no_figures(document: dict[str, Any], tmp_path: Path) -> None:
    document["rows"][0] = {key: document["rows"][0][key] for key in ("case", "pass", "contestant")} | {
        "status": "wrong", "reasons": ["OVER"], "error_over_budget": math.inf,
        "predicted_over_measured": "abc",
    }  # fmt: skip
    assert "tilefold wrong (case-0-of-many): OVER" in rendered(document, tmp_path)


def test_formulas_in_texts_are_not_set_as_formulas(document: dict[str, Any], tmp_path: Path) -> None:
    document["title"] = "costs $x_ and $"
    for row in document["rows"]:
        row |= {"case": row["case"] + " $^$", "contestant": row["contestant"] + "$_$"}
    png(document, tmp_path / "results.png")


@pytest.mark.parametrize("name", ["bench_cpu.json", "bench_h200.json"])
def test_results_of_this_repository_are_documents(name: str, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / name
    read = json.loads(path.read_text(encoding="utf-8"))
    assert read["rows"][0]["case"] in rendered(read, tmp_path)


def test_a_picture(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "results.png"
    png(document, path)
    pixels = matplotlib.image.imread(path)
    colours = {tuple(colour) for colour in (pixels[..., :3].reshape(-1, 3) * 255).astype(int).tolist()}
    for bar in ((37, 99, 235), (217, 119, 6), (100, 116, 139)):
        assert bar in colours
    assert pixels.shape[1] > 1200


class Reader(HTMLParser):
    """Collects tags, attributes that load things, and text; notices tags that are closed wrongly."""

    VOID = ("meta", "input", "line", "rect", "circle", "br")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "data", "action")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_is_whole_and_loads_nothing(document: dict[str, Any]) -> None:
    html = page([document])
    reader = Reader()
    reader.feed(html)
    assert reader.open == [] and reader.loads == []
    assert not re.search(r"https?://|//[a-z]|@import|url\(", html)
    # 72 rows, of which two refused and one wrong; a row of headings.
    assert reader.tags.count("tr") == 1 + 72 - 3
    assert reader.tags.count("rect") == 2 * (72 - 3)
    assert reader.tags.count("circle") == 2 * 24
    assert reader.tags.count("script") == 1


def test_text_of_results_is_escaped(document: dict[str, Any]) -> None:
    document["rows"][0]["case"] = document["rows"][0]["about"] = "<b onload=evil>"
    document["title"] = "</title><script>1</script>"
    html = page([document])
    assert "alert('x')" not in html and "onload=evil" not in html.replace("&lt;b onload=evil&gt;", "")
    reader = Reader()
    reader.feed(html)
    assert reader.tags.count("script") == 1
    assert "<script>alert('x')</script> & \"quotes\"" in reader.text


def test_a_page_says_what_was_not_timed_and_how_it_was_measured(document: dict[str, Any]) -> None:
    reader = Reader()
    reader.feed(page([document]))
    for words in (
        "it has no soft cap",
        "case-3-of-many",
        "What was not timed",
        "How it was measured",
        "wall time",
    ):
        assert words in reader.text
    document["device"] = "cuda"
    reader.feed(page([document]))
    assert "L2 cache" in reader.text


def test_several_files_on_one_page(document: dict[str, Any]) -> None:
    html = page([document, document | {"title": "another"}])
    assert html.count("<section>") == 2
    assert "<title>tilefold bench and another</title>" in html


def test_results_without_memory_have_no_chart_of_it(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        row |= {"extra_bytes": 0, "predicted_extra_bytes": 0}
    html = page([document])
    assert "Time, forward" in html and "Extra memory, forward" not in html
