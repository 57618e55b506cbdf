"""Write ``docs/configuration-reference.md`` from the built-in configuration: ``python tests/config_reference.py``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "configuration-reference.md"
TABLES: Final = {
    "model": ("embedded", "the image model; defaults are those of the embedded model"),
    "engine": ("embedded", "scheduling, memory and compiled calls"),
    "text": ("embedded", "the language model"),
    "serve": ("serve", "the HTTP server"),
}
"""Table -> the file in ``configs/`` that has all of its keys, and what the table is about."""

HEAD: Final = """\
# Configuration reference

Generated from `configs/` by `python tests/config_reference.py`. [Configuration](configuration.md) says how files,
environment variables (`DIFFSERVE_<TABLE>_<KEY>`) and options are combined. `diffserve doctor` prints the values in use
with their origin.
"""


def comments(text: str) -> dict[str, str]:
    """Return the comment of each key in a TOML file, continuation lines joined."""
    comments_by_key: dict[str, str] = {}
    key = None
    for line in text.splitlines():
        if match := re.match(r"(\w+) = (?:\"[^\"]*\"|[^#\"])*(?:#\s*)?", line):
            key = match[1]
            comments_by_key[key] = line[match.end() :].strip(" #")
        elif key and re.match(r"\s{8,}#", line):
            comments_by_key[key] += f" {line.strip(' #')}"
        else:
            key = None
    return comments_by_key


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for table, (name, about) in TABLES.items():
        text = (ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8")
        section = re.split(rf"^\[{table}\]$", text, flags=re.MULTILINE)[1].split("\n[")[0]
        described = comments(section)
        parts.append(f"## [{table}]\n\n{about[0].upper()}{about[1:]}.\n\n| key | default | meaning |\n|---|---|---|")
        for key, value in tomllib.loads(text)[table].items():
            meaning = described.get(key, "").replace("|", "\\|")
            parts.append(f"| `{key}` | `{_toml(value)}` | {meaning} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}" if value >= 100_000 else str(value)
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
