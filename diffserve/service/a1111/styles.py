"""Styles: prompts to be added to a prompt, by name, from ``styles.csv`` in the server's folder, as A1111 writes it."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from diffserve.errors import InvalidRequest
from diffserve.service.http.bodies import show

FILE: Final = "styles.csv"
MAX_BYTES: Final = 1 << 20
PLACE: Final = "{prompt}"


class PromptStyle(NamedTuple):
    """What is added under a name."""

    name: str
    prompt: str
    negative_prompt: str


def read_styles(folder: Path) -> list[PromptStyle]:
    """Those in ``folder``; none where there is no file, or it cannot be read."""
    file = folder / FILE
    try:
        if file.stat().st_size > MAX_BYTES:
            return []
        with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, csv.Error):
        return []
    return [
        PromptStyle(row["name"], row.get("prompt") or "", row.get("negative_prompt") or "")
        for row in rows
        if row.get("name")
    ]


def with_styles(prompt: str, negative: str, names: Iterable[str], styles: Sequence[PromptStyle]) -> tuple[str, str]:
    """Both prompts with what ``names`` add: in the place of ``{prompt}``, or after a comma. Raises InvalidRequest."""
    known = {style.name: style for style in styles}
    for name in names:
        if name in ("", "None"):
            continue
        if name not in known:
            there = f"there are {', '.join(known)}" if known else f"there are none: put them into {FILE}"
            raise InvalidRequest(f"there is no style {show(name)}; {there[:200]}.", param="styles")
        prompt, negative = _added(known[name].prompt, prompt), _added(known[name].negative_prompt, negative)
    return prompt, negative


def _added(style: str, prompt: str) -> str:
    if PLACE in style:
        return style.replace(PLACE, prompt)
    return ", ".join(part for part in (prompt, style) if part.strip())
