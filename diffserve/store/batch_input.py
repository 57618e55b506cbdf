"""The file that a batch works through: a request a line, as OpenAI has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec

from diffserve.errors import InvalidRequest

MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = 8 << 20
MAX_CUSTOM_ID_CHARS: Final = 512


class BatchLine(msgspec.Struct, frozen=True):
    """A line: the body of a request for ``url``, and what its answer is to be called."""

    custom_id: str
    body: msgspec.Raw
    method: str = "POST"
    url: str = ""


def lines_of(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of every line that is not empty. Raises InvalidRequest for one that is too long."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            said = f"line {number} is longer than {MAX_LINE_BYTES} bytes."
            raise InvalidRequest(said, param="input_file_id", code="line_too_long")
        if stripped := line.strip():
            yield number, stripped


def read_line(line: bytes) -> BatchLine:
    """What ``line`` asks for. InvalidRequest where it is no request."""
    try:
        asked = msgspec.json.decode(line, type=BatchLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        said = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidRequest(f"it is no request: {said}.", code="invalid_line") from None
    if asked.method != "POST":
        raise InvalidRequest(f"the method is {asked.method[:16]!r}; it must be POST.", code="invalid_line")
    if not 0 < len(asked.custom_id) <= MAX_CUSTOM_ID_CHARS:
        said = f"custom_id has {len(asked.custom_id)} characters; it has 1 to {MAX_CUSTOM_ID_CHARS}."
        raise InvalidRequest(said, code="invalid_line")
    return asked


def check_input(file: BinaryIO, endpoint: str) -> int:
    """How many lines there are for ``endpoint``. InvalidRequest where the file as a whole is wrong: no line, too many,
    one that is for another endpoint, or two called the same. A line that is wrong by itself is not looked at here."""
    names: set[str] = set()
    num_lines = 0
    for number, line in lines_of(file):
        num_lines += 1
        if num_lines > MAX_LINES:
            raise _wrong(f"the file has more than {MAX_LINES} lines.", "too_many_lines")
        try:
            asked = read_line(line)
        except InvalidRequest:
            continue
        if path_of(asked.url or endpoint) != endpoint:
            raise _wrong(f"line {number} is for {asked.url[:80]!r}, and the batch for {endpoint}.", "mixed_endpoints")
        if asked.custom_id in names:
            said = f"line {number} is called {asked.custom_id[:80]!r}, as one before it; each has its own custom_id."
            raise _wrong(said, "duplicate_custom_id")
        names.add(asked.custom_id)
    if not num_lines:
        raise _wrong("the file has no line.", "empty_file")
    return num_lines


def path_of(url: str) -> str:
    """An address as it is written here: with /v1, without a slash at its end."""
    path = f"/{url.strip('/')}"
    return path if path.startswith("/v1/") else f"/v1{path}"


def _wrong(said: str, code: str) -> InvalidRequest:
    return InvalidRequest(said, param="input_file_id", code=code)
