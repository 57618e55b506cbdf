"""Find files and directories below a folder, and name them by their path below it: ``ink`` or ``style/ink``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

MAX_DEPTH: Final = 8


def find_below(folder: Path, is_match: Callable[[Path], bool]) -> dict[str, Path]:
    """Find what matches in ``folder`` and its subfolders, which may be links; hidden entries are skipped.

    A directory that matches is not searched. What cannot be read is skipped.

    Returns:
        The path of each match by its path below ``folder``, with slashes, in order.
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
    """Return which of ``names`` the name of a request means: the same one, or those whose last part it is."""
    candidates = list(names)
    return [name] if name in candidates else [path for path in candidates if path.rpartition("/")[2] == name]
