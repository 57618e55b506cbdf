"""Input file of a batch: one request per line, as in OpenAI's Batch API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec

from diffserve.api.errors import InvalidRequest

MAX_LINES: Final = 50_000
MAX_LINES_IN_FILE: Final = 2 * MAX_LINES
"""Includes empty lines."""

SLICE_LINES: Final = 500
SLICE_BYTES: Final = 1 << 20
"""A slice of a check ends after this many lines or bytes, whichever comes first."""

MAX_LINE_BYTES: Final = 8 << 20
MAX_CUSTOM_ID_CHARS: Final = 512
MAX_PROBLEMS: Final = 20
"""How many invalid lines a failed batch reports."""


class BatchLine(msgspec.Struct, frozen=True):
    """Line of an input file: the body of a request for ``url``, and the ``custom_id`` of its answer."""

    custom_id: str
    body: msgspec.Raw
    method: str = "POST"
    url: str = ""


class LineProblem(msgspec.Struct, frozen=True):
    """Reason for which a batch failed; ``line`` counts from 1 and is None if the whole file is invalid."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def lines_of(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Read every line that is not empty, with its number from 1.

    Raises:
        InvalidRequest: A line is too long, or there are more than ``MAX_LINES_IN_FILE`` lines.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            message = f"line {number} is longer than {MAX_LINE_BYTES} bytes."
            raise InvalidRequest(message, param="input_file_id", code="line_too_long")
        if number > MAX_LINES_IN_FILE:
            raise _file_error(
                f"the file has more than {MAX_LINES_IN_FILE} lines, including empty ones.", "too_many_lines"
            )
        if stripped := line.strip():
            yield number, stripped


def read_line(line: bytes) -> BatchLine:
    """Parse a line of an input file.

    Raises:
        InvalidRequest: The line is not a valid request.
    """
    try:
        request = msgspec.json.decode(line, type=BatchLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidRequest(f"not a valid request: {problem}.", code="invalid_line") from None
    except RecursionError:
        raise InvalidRequest("not a valid request: it is nested too deeply.", code="invalid_line") from None
    if request.method != "POST":
        raise InvalidRequest(f"method must be POST, got {request.method[:16]!r}.", code="invalid_line")
    if not 0 < len(request.custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters, got {len(request.custom_id)}."
        raise InvalidRequest(message, code="invalid_line")
    return request


class InputCheck:
    """Check of a batch's input file for ``endpoint``, in slices so that no slice takes long.

    An empty file, too many lines, a line for another endpoint and a duplicate ``custom_id`` are errors of the whole
    file. Lines that are not valid requests are collected and make the batch fail. Bodies are only checked when the
    batch runs.

    Attributes:
        num_lines: Lines read so far that are not empty.
        problems: The first ``MAX_PROBLEMS`` lines that are not valid requests.
    """

    def __init__(self, file: BinaryIO, endpoint: str) -> None:
        self.num_lines = 0
        self.problems: list[LineProblem] = []
        self._file = file
        self._endpoint = endpoint
        self._lines = lines_of(file)
        self._names: set[str] = set()

    def check_slice(self) -> bool:
        """Check the next lines; return whether more are left.

        Raises:
            InvalidRequest: The whole file is invalid.
        """
        end_bytes = self._file.tell() + SLICE_BYTES
        for _ in range(SLICE_LINES):
            entry = next(self._lines, None)
            if entry is None:
                if not self.num_lines:
                    raise _file_error("the file has no lines; give one request per line.", "empty_file")
                return False
            self._check_line(*entry)
            if self._file.tell() >= end_bytes:
                break
        return True

    def _check_line(self, number: int, line: bytes) -> None:
        self.num_lines += 1
        if self.num_lines > MAX_LINES:
            raise _file_error(f"the file has more than {MAX_LINES} lines.", "too_many_lines")
        try:
            request = read_line(line)
        except InvalidRequest as error:
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(LineProblem("invalid_json_line", f"line {number}: {error.message}", number))
            return
        if path_of(request.url or self._endpoint) != self._endpoint:
            message = f"line {number} is for {request.url[:80]!r}, but the batch is for {self._endpoint}."
            raise _file_error(message, "mixed_endpoints")
        if request.custom_id in self._names:
            name = request.custom_id[:80]
            raise _file_error(
                f"line {number} has the custom_id {name!r} of an earlier line; make it unique.",
                "duplicate_custom_id",
            )
        self._names.add(request.custom_id)


def path_of(url: str) -> str:
    """Return the normalized path of ``url``: with ``/v1``, without a trailing slash."""
    path = f"/{url.strip('/')}"
    return path if path.startswith("/v1/") else f"/v1{path}"


def _file_error(message: str, code: str) -> InvalidRequest:
    return InvalidRequest(message, param="input_file_id", code=code)
