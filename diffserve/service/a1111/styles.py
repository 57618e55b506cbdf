"""Styles: texts that a request adds to its prompts by name, from ``styles.csv`` in the server's data folder.

The file is read as A1111 writes it and as spreadsheets save it: in UTF-8, UTF-16 or Windows' cp1252, separated by
commas, semicolons or tabs. A file that cannot be used, and how a foreign one was read, is logged once.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import show

FILE: Final = "styles.csv"
MAX_BYTES: Final = 1 << 20
PLACE: Final = "{prompt}"
DELIMITERS: Final = (",", ";", "\t")
PROMPT_COLUMNS: Final = ("prompt", "text")
"""Names of the prompt column; files of A1111 before 2023 call it "text" and have no negative prompts."""

log = logging.getLogger("diffserve.styles")


class PromptStyle(NamedTuple):
    """Texts that a style adds to the prompts."""

    name: str
    prompt: str
    negative_prompt: str


def read_styles(folder: Path) -> list[PromptStyle]:
    """Return the styles in ``folder``; empty if there is no file or it cannot be read."""
    file = folder / FILE
    try:
        status = file.stat()
    except OSError:
        return []
    return list(_read_file(file, status.st_size, status.st_mtime_ns))


@lru_cache(4)
def _read_file(file: Path, num_bytes: int, _changed_ns: int) -> tuple[PromptStyle, ...]:
    """Read ``file``; the result is cached until its size or modification time changes."""
    try:
        if num_bytes > MAX_BYTES:
            raise ValueError(f"it has {num_bytes} bytes; at most {MAX_BYTES} are allowed")
        return _parse(_decode(file.read_bytes(), file))
    except (OSError, csv.Error, ValueError) as error:
        log.warning("%s is not used", file, extra={"reason": str(error)})
        return ()


def _decode(data: bytes, file: Path) -> str:
    """Return the text of ``data`` by its byte order mark, else as UTF-8, else as cp1252."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        log.warning("%s is not UTF-8 and was read as cp1252; save it as UTF-8 if names are wrong", file)
        return data.decode("cp1252", "replace")


def _parse(text: str) -> tuple[PromptStyle, ...]:
    """Return the styles of a table with a line of column names. Raises ValueError, csv.Error."""
    lines = list(io.StringIO(text, newline=""))
    if lines and lines[0].lower().startswith("sep="):  # for Excel
        del lines[0]
    for delimiter in DELIMITERS:
        names = next(csv.reader(lines, delimiter=delimiter), [])
        columns = {name.strip().lower(): place for place, name in enumerate(names)}
        prompt = next((name for name in PROMPT_COLUMNS if name in columns), None)
        if "name" in columns and prompt is not None:
            break
    else:
        raise ValueError(f"its first line is {''.join(lines[:1])[:80]!r}; name the columns name,prompt,negative_prompt")
    rows = list(csv.reader(lines, delimiter=delimiter))[1:]
    names = ["name", prompt, "negative_prompt"]
    cells = ([_cell(row, columns.get(column)) for column in names] for row in rows)
    return tuple(PromptStyle(*row) for row in cells if row[0])


def _cell(row: Sequence[str], place: int | None) -> str:
    return row[place] if place is not None and place < len(row) else ""


def with_styles(prompt: str, negative: str, names: Iterable[str], styles: Sequence[PromptStyle]) -> tuple[str, str]:
    """Return both prompts with the texts of the styles ``names``: around ``{prompt}``, or after a comma.

    Raises:
        InvalidRequest: A style does not exist.
    """
    by_name = {style.name: style for style in styles}
    for name in names:
        if name in ("", "None"):
            continue
        if name not in by_name:
            there = f"the known ones are {', '.join(by_name)}" if by_name else f"there are none: add it to {FILE}"
            raise InvalidRequest(f"there is no style {show(name)}; {there[:200]}.", param="styles")
        prompt, negative = _add_style(by_name[name].prompt, prompt), _add_style(by_name[name].negative_prompt, negative)
    return prompt, negative


def _add_style(style: str, prompt: str) -> str:
    if PLACE in style:
        return style.replace(PLACE, prompt)
    return ", ".join(part for part in (prompt, style) if part.strip())
