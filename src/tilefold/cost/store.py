"""Where measurements of this machine are kept between runs: small JSON files in the user's cache."""

from __future__ import annotations

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
    """What was written as `name`; empty if nothing was, or if it is not a JSON object."""
    path = folder() / f"{name}.json"
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        # Half-written or foreign files count as nothing: what they held is measured anew.
        return {}
    return found if isinstance(found, dict) else {}


def remove(name: str) -> None:
    """Forget what was written as `name`, if anything was."""
    (folder() / f"{name}.json").unlink(missing_ok=True)


def write(name: str, content: dict[str, Any]) -> Path | None:
    """Keep `content` as `name`, all of it or nothing; None where the folder cannot be written."""
    path = folder() / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".json")
    except OSError:
        # A read-only home only means that the next process measures again.
        return None
    with os.fdopen(handle, "w") as file:
        json.dump(content, file, indent=1)
    os.replace(draft, path)
    return path
