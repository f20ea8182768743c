"""Where measurements of this machine are kept between runs: small JSON files in the user's cache."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

#: Names another folder than the user's cache.
VARIABLE = "TILEFOLD_CACHE"


def folder() -> Path:
    """`$TILEFOLD_CACHE`, or `tilefold` in `$XDG_CACHE_HOME` or `~/.cache`. It need not exist yet."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilefold"


def read(name: str) -> dict[str, Any]:
    """What was written as `name`; empty if nothing was, or if it cannot be read as a JSON object."""
    path = folder() / f"{name}.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        # Files that are missing, foreign, half-written or out of reach count as nothing: no call may die of
        # a cache, and what they held is measured anew.
        return {}
    return found if isinstance(found, dict) else {}


def remove(name: str) -> None:
    """Forget what was written as `name`, if anything was."""
    with contextlib.suppress(OSError):
        (folder() / f"{name}.json").unlink()


def write(name: str, content: dict[str, Any]) -> Path | None:
    """Keep `content` as `name`, all of it or nothing; None where it cannot be written."""
    path, draft = folder() / f"{name}.json", ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".draft")
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(draft, path)
    except OSError:
        # A read-only home or a full disk only means that the next process measures again.
        if draft:
            with contextlib.suppress(OSError):
                os.unlink(draft)
        return None
    return path
