"""The lines of a batch: a prompt each, or a whole request as JSON, with a name for its files."""

from __future__ import annotations

import base64
import codecs
import hashlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.api.types import MAX_IMAGES
from diffserve.cli.outputs import safe_stem
from diffserve.media.images import SUFFIXES

PICTURES: Final = ("image", "mask")
"""Fields that may name a file, beside the batch's own."""

FORMATS: Final[dict[str, str]] = {image_format: suffix for suffix, image_format in reversed(SUFFIXES.items())}
OURS: Final = {"stream": True, "response_format": "b64_json"}
"""What a line cannot choose: how its pictures come here."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file, counted from 1.

    id      what its files are called; its number where it says none
    digest  of all that it asks for: a line that was changed is painted again
    fields  of a request, or the ``error`` why they are none
    """

    number: int
    id: str
    digest: str = ""
    fields: dict[str, Any] = {}
    error: DiffserveError | None = None

    @property
    def prompt(self) -> str:
        """What is to be painted, where it says."""
        prompt = self.fields.get("prompt")
        return prompt if isinstance(prompt, str) else ""

    def names(self) -> list[str]:
        """Of its files: one takes the id, more take ID-1, ID-2, ..."""
        count, image_format = self.fields.get("n", 1), self.fields.get("output_format", "png")
        suffix = FORMATS.get(image_format if isinstance(image_format, str) else "", ".png")
        if not isinstance(count, int) or not 2 <= count <= MAX_IMAGES:
            return [f"{self.id}{suffix}"]
        return [f"{self.id}-{index + 1}{suffix}" for index in range(count)]


@contextmanager
def standard_input() -> Iterator[Path]:
    """Keep the lines of standard input in a temporary file for the length of the block, and return its path.

    It is named as text where its first line is neither an object nor a text in quotes.
    """
    data = sys.stdin.buffer.read()
    if not data.strip():
        raise InvalidRequest("standard input has no prompt; write one per line.", param="prompts")
    is_json = data.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b'"')
    with tempfile.TemporaryDirectory(prefix="diffserve-batch-") as folder:
        path = Path(folder) / ("standard-input.jsonl" if is_json else "standard-input.txt")
        path.write_bytes(data)
        yield path


def read_lines(path: Path, folder: Path | None = None) -> list[Line]:
    """Return all lines of ``path`` but empty ones: text for ``.txt``, JSON for any other.

    Args:
        path: The file.
        folder: The folder that the pictures of the lines are relative to; that of ``path`` where it is left out.

    Raises:
        InvalidRequest: The file cannot be read, or has no line. What is wrong with one line is its ``error``.
    """
    return [line for _, line in stream_lines(path, folder)]


def stream_lines(path: Path, folder: Path | None = None) -> Iterator[tuple[bytes, Line]]:
    """Yield each line of ``path`` as ``read_lines`` returns it, after its row of the file.

    Of a hundred thousand lines, two are in memory at a time.
    """
    width = len(str(max((number for number, _ in _rows(path)), default=0)))
    if width == 1 and next(_rows(path), None) is None:
        raise InvalidRequest(f"{str(path)!r} holds no prompt; write one a line.", param="prompts")
    taken: dict[str, int] = {}
    for number, row in _rows(path):
        own = f"{number:0{width}d}"
        try:
            line = line_of(row, number, own, path, folder)
            if twice := [file for file in line.names() if file in taken]:
                said = f"its file would be {twice[0]!r}, which line {taken[twice[0]]} is; give another id."
                raise InvalidRequest(said, param="id")
            taken |= dict.fromkeys(line.names(), number)
        except DiffserveError as error:
            line = Line(number=number, id=own, error=error)
        yield row, line


def line_of(row: bytes, number: int, own: str, path: Path, folder: Path | None = None) -> Line:
    """The line that ``row`` is, called ``own`` where it says no id. Raises DiffserveError for what is wrong with it."""
    fields = {"prompt": row.decode()} if path.suffix.lower() == ".txt" else _fields_in(row.decode())
    name = _name_in(fields) or own
    fields = {name: _picture(value, folder or path.parent, name) for name, value in fields.items()}
    digest = hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()[:16]
    return Line(number=number, id=name, digest=digest, fields=fields | OURS)


def _rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """What is not empty, by its number, without what surrounds it. InvalidRequest where it cannot be read."""
    at = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                at += len(raw)
                if text:
                    yield number, text.encode()
    except OSError as error:
        raise InvalidRequest(f"cannot read {str(path)!r}: {error.strerror}.", param="prompts") from None
    except UnicodeDecodeError as error:
        said = f"{str(path)!r} is not UTF-8 text ({error.reason} at byte {at + error.start})."
        raise InvalidRequest(said, param="prompts") from None


def _fields_in(row: str) -> dict[str, Any]:
    try:
        read = msgspec.json.decode(row)
    except (msgspec.DecodeError, RecursionError) as error:
        said = f"the line is no JSON ({error}); write an object with a prompt, or a text in double quotes."
        raise InvalidRequest(said, code="invalid_json") from None
    fields = {"prompt": read} if isinstance(read, str) else read
    if not isinstance(fields, dict):
        said = "the line is neither an object nor a text; write an object with a prompt."
        raise InvalidRequest(said, code="invalid_json")
    fields = {name: value for name, value in fields.items() if value is not None}
    if not {"image", "infotext"} & fields.keys() and not (
        isinstance(fields.get("prompt"), str) and fields["prompt"].strip()
    ):
        raise InvalidRequest("the line has no prompt; say what to paint.", param="prompt", code="empty_prompt")
    return fields


def _name_in(fields: dict[str, Any]) -> str | None:
    """The id, taken out of ``fields``, as the beginning of a file's name."""
    name = fields.pop("id", None)
    if name is None:
        return None
    safe = safe_stem(str(name)) if isinstance(name, str | int) and not isinstance(name, bool) else ""
    if not safe:
        said = f"the id is {str(name)[:40]!r}; give letters, digits and dashes."
        raise InvalidRequest(said, param="id")
    return safe


def _picture(value: Any, folder: Path, name: str) -> Any:
    """The file that ``value`` names, in base64; else as it is. InvalidRequest where it cannot be read."""
    is_file = name in PICTURES and isinstance(value, str) and Path(value).suffix.lower() in SUFFIXES
    if not is_file:
        return value
    try:
        return base64.b64encode((folder / value).read_bytes()).decode()
    except OSError as error:
        raise InvalidRequest(f"cannot read the {name} {value!r}: {error.strerror}.", param=name) from None
