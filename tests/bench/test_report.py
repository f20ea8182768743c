"""What results become: text for a terminal, a picture, one page."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"rows": 1}', '{"rows": [{"case": "x"}]}', json.dumps({"rows": [BARE]})]
)
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"FILE: expected results of `tilefold bench`.*results\.json"):
        report.load(path)
    with pytest.raises(ArgumentError, match=r"missing\.json"):
        report.load(tmp_path / "missing.json")


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
