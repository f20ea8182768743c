"""The page in a real browser: its script runs, nothing is blank, nothing is wider than a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from tilefold.bench.page import page

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is installed"
)

DESKTOP, PHONE = (1200, 900), (500, 900)
# Headless windows have a least width of 500 pixels; the frame makes the page as narrow as a phone's.
PHONE_WIDTH = 360


def browse(url: str, folder: Path, size: tuple[int, int], *options: str) -> str:
    """What the browser prints."""
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={size[0]},{size[1]}",
        *options,
        url,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return run.stdout


@pytest.fixture
def url(document: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "report.html"
    path.write_text(page([document]), encoding="utf-8")
    return path.as_uri()


def test_the_script_counts_and_sorts(url: str, tmp_path: Path) -> None:
    dom = browse(f"{url}#sort=3", tmp_path, DESKTOP, "--dump-dom")
    assert 'data-ready="yes"' in dom
    assert "69 of 69 rows" in dom
    assert re.search(r'<th[^>]*aria-sort="ascending"[^>]*><button[^>]*>time', dom)
    rows = re.findall(r"<tr[^>]*data-case.*?</tr>", dom, re.DOTALL)
    times = [float(re.findall(r'data-v="([^"]*)"', row)[3]) for row in rows]
    assert len(times) == 69
    assert times == sorted(times)


@pytest.mark.parametrize("scheme, bright", [(1, True), (0, False)])
def test_the_page_is_drawn_light_and_dark(url: str, tmp_path: Path, scheme: int, bright: bool) -> None:
    target = tmp_path / "page.png"
    options = (f"--screenshot={target}", f"--blink-settings=preferredColorScheme={scheme}")
    browse(url, tmp_path, DESKTOP, *options)
    pixels = (matplotlib.image.imread(target)[..., :3] * 255).astype(np.uint8)
    assert pixels.shape[:2] == (DESKTOP[1], DESKTOP[0])
    colours = np.unique(pixels.reshape(-1, 3), axis=0)
    assert len(colours) > 100
    assert (float(np.median(pixels)) > 200) is bright


@pytest.mark.parametrize("width", [PHONE_WIDTH, 1200])
def test_nothing_is_wider_than_the_screen(url: str, tmp_path: Path, width: int) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="{url}#measure" width="{width}" height="800" style="border:0" onload="'
        'document.body.dataset.width = this.contentDocument.documentElement.dataset.width"></iframe>'
    )
    dom = browse(frame.as_uri(), tmp_path, (1300, 900), "--dump-dom")
    found = re.search(r'<body data-width="(\d+)"', dom)
    assert found is not None, dom[:500]
    assert int(found[1]) == width
