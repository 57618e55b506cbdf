"""Docstrings, comments and documentation use the field's words.

The list holds words that earlier versions of this project used in senses of their own.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
LIMIT_PER_1000_LINES: Final = 1.0
DIALECT: Final = re.compile(
    r"\b(some|no|every|any)body\b|\bwho(ever|m|mever)\b|\bwho (asks|waits|paints|comes|is|has|fills|wants)\b"
    r"|\b(is|are|was|were|be|been|being) (told|said|asked|let in|put away|thought of|foreseen|begun)\b"
    r"|\b(lest|thereof|wherein|whereof|foresee|foretell\w*|reckon\w*|anew|beside|hitherto|thus far|tidings|luggage)\b"
    r"|\b(of ours|ours|theirs|what there is|what it takes|what became of|to be had)\b",
    re.IGNORECASE,
)
"""Personified clients, passive riddles, literary words and pronouns without a noun."""

PACKAGES: Final = ("benchmarks", "diffserve", "schedulers", "tests", "ui")


def prose_of(path: Path) -> list[str]:
    """Return the comments and docstrings of a Python file, or the lines of a Markdown file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"`[^`]*`", "", text).splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        token.string
        for token in tokens
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""'))
    ]


def findings(paths: list[Path]) -> list[str]:
    """Return the dialect words of some files, each with its place."""
    return [
        f"{path.relative_to(ROOT)}: {match[0]!r} in {prose.strip()[:80]!r}"
        for path in paths
        for prose in prose_of(path)
        for match in DIALECT.finditer(prose)
    ]


def tracked(pattern: str) -> list[Path]:
    """Return the tracked files that match a pattern of git, or the files of an unpacked archive."""
    command = ["git", "ls-files", "-z", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\0")
    names = [name for name in listed if name]
    paths = [ROOT / name for name in names] or list(ROOT.rglob(pattern))
    return [path for path in paths if path.is_file() and path.name != Path(__file__).name]


@pytest.mark.parametrize("package", PACKAGES)
def test_code_uses_the_words_of_the_field(package: str) -> None:
    paths = tracked(f"{package}/*.py")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    places = findings(paths)
    assert 1000 * len(places) / lines <= LIMIT_PER_1000_LINES, "\n".join(places)


def test_documentation_uses_the_words_of_the_field() -> None:
    assert not findings([path for path in tracked("*.md") if "results" not in path.parts])
