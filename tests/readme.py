"""Commands and snippets of the README and the documentation. Standard library only.

``python3 tests/readme.py paint`` prints the first command and ``... test`` the second, as a shell would run them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
COMMANDS = {"paint": 0, "test": 1}


class Block(NamedTuple):
    """A fenced block: its language and its text."""

    language: str
    text: str


def blocks(language: str | None = None, file: Path = README) -> list[Block]:
    """Return the fenced blocks of ``file`` in order, of one language or of all. Continued lines are joined."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [Block(name, re.sub(r"\\\n\s*", "", text)) for name, text in blocks if language in (None, name)]


def command(name: str) -> str:
    """Return the README's command ``paint`` or ``test``: one line each, the first two shell blocks."""
    line = blocks("sh")[COMMANDS[name]].text.strip()
    if "\n" in line:
        raise ValueError(f"the {name} command of the README is not one line: {line!r}")
    return line


if __name__ == "__main__":
    print(command(sys.argv[1]))
