"""The tree in ``diffserve/HOUSE.md``, from the first sentence of every file: ``python3 tests/house.py`` writes it anew.

Standard library only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
HOUSE: Final = ROOT / "diffserve" / "HOUSE.md"
HEADING: Final = "## Files"
ROOMS: Final = ("schedulers", "diffserve", "ui", "benchmarks")
COLUMN: Final = 34
WIDTH: Final = 128


def tree() -> str:
    """Every Python file of the rooms with what it is for."""
    lines = [line for room in ROOMS for line in _lines(ROOT / room, depth=0)]
    return f"{HEADING}\n\nWritten by `python3 tests/house.py`.\n\n```text\n" + "\n".join(lines) + "\n```\n"


def whole() -> str:
    """The page, its tree written anew."""
    return HOUSE.read_text(encoding="utf-8").partition(HEADING)[0] + tree()


def phrase_of(file: Path) -> str:
    """The first sentence of its docstring, up to a colon or a full stop; ValueError where there is none."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{file.relative_to(ROOT)} has no docstring; say in its first sentence what it is for.")
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")


def _lines(folder: Path, depth: int) -> Iterator[str]:
    yield _line(f"{folder.name}/", folder / "__init__.py", depth)
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            yield _line(file.name, file, depth + 1)
    for room in sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file()):
        yield from _lines(room, depth + 1)


def _line(name: str, file: Path, depth: int) -> str:
    phrase = phrase_of(file) if file.is_file() else ""
    line = f"{'    ' * depth + name:<{COLUMN}} {phrase}".rstrip()
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 2].rpartition(' ')[0]} …"


if __name__ == "__main__":
    HOUSE.write_text(whole(), encoding="utf-8")
