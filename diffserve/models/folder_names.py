"""Search for files and directories below a folder, named by their relative path: ``ink`` or ``style/ink``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

MAX_DEPTH: Final = 8


def find_below(folder: Path, is_match: Callable[[Path], bool]) -> dict[str, Path]:
    """Find matching files and directories in ``folder`` and its subfolders, including symbolic links.

    Hidden and unreadable entries are skipped. Matching directories are not searched.

    Returns:
        The path of each match by its relative path below ``folder``, with slashes, sorted.
    """
    matches: dict[str, Path] = {}
    _search(folder, "", is_match, set(), matches)
    return dict(sorted(matches.items()))


def _search(
    folder: Path, prefix: str, is_match: Callable[[Path], bool], visited: set[tuple[int, int]], matches: dict[str, Path]
) -> None:
    try:
        status = folder.stat()
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return
    if (status.st_dev, status.st_ino) in visited or prefix.count("/") > MAX_DEPTH:
        return
    visited.add((status.st_dev, status.st_ino))
    for name in names:
        path = folder / name
        if is_match(path):
            matches[f"{prefix}{name}"] = path
        elif os.path.isdir(path):
            _search(path, f"{prefix}{name}/", is_match, visited, matches)


def names_for(name: str, names: Iterable[str]) -> list[str]:
    """Return the matches for ``name`` in ``names``: an equal name, or else all paths whose last part is ``name``."""
    candidates = list(names)
    return [name] if name in candidates else [path for path in candidates if path.rpartition("/")[2] == name]
