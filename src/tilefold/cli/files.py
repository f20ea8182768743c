"""Files that a command writes: refused before anything is computed, and in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilefold.errors import ArgumentError


def output(argument: str, name: str, suffix: str = "") -> Path:
    """The path of a file that can be written; what it holds stays as it is.

    Args:
        argument: the name of the option, for errors.
        name: as typed.
        suffix: how the name has to end, in small or capital letters, such as ".png".

    Raises:
        ArgumentError: an empty name, a folder, another suffix, or a file that cannot be written.
    """
    path = Path(name)
    if not name:
        raise ArgumentError(f"{argument}: expected the name of a file, got ''")
    with writing(argument, path):
        if path.is_dir():
            raise ArgumentError(f"{argument}: expected a file, got the folder {name}")
        if path.suffix.lower() != suffix and suffix:
            raise ArgumentError(f"{argument}: expected a name that ends in {suffix}, got {name}")
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise ArgumentError(f"{argument}: expected a file in a folder that exists, got {name}")
        _try(target)
    return path


@contextmanager
def writing(argument: str, path: Path) -> Iterator[None]:
    """Around whatever writes `path`.

    Raises:
        ArgumentError: instead of the errors of the operating system.
    """
    try:
        yield
    except OSError as error:
        raise ArgumentError(
            f"{argument}: expected a file that can be written, got {path} ({error.strerror or error})"
        ) from error


def _try(path: Path) -> None:
    """Raises the OSError that writing would raise. Permissions alone do not tell: the superuser has them all,
    and some file systems take no new files.
    """
    if path.is_file():
        path.open("ab").close()
    elif not path.exists():
        path.open("xb").close()
        path.unlink()
    elif not os.access(path, os.W_OK):
        # Pipes and devices: opening one has effects.
        raise PermissionError(None, "no permission")
