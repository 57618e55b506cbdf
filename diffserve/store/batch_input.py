"""The file that a batch works through: a request a line, as OpenAI has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec

from diffserve.api.errors import InvalidRequest

MAX_LINES: Final = 50_000
MAX_LINES_IN_FILE: Final = 2 * MAX_LINES
"""With the empty ones."""

SLICE_LINES: Final = 500
SLICE_BYTES: Final = 1 << 20
"""A slice of a check ends after so many lines or bytes, whichever come first."""

MAX_LINE_BYTES: Final = 8 << 20
MAX_CUSTOM_ID_CHARS: Final = 512
MAX_PROBLEMS: Final = 20
"""Lines that are no requests, of which a failed batch names so many."""


class BatchLine(msgspec.Struct, frozen=True):
    """A line: the body of a request for ``url``, and what its answer is to be called."""

    custom_id: str
    body: msgspec.Raw
    method: str = "POST"
    url: str = ""


class LineProblem(msgspec.Struct, frozen=True):
    """A reason for which a batch failed; ``line`` counts from 1 and is None where no line is to blame."""

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
            said = f"line {number} is longer than {MAX_LINE_BYTES} bytes."
            raise InvalidRequest(said, param="input_file_id", code="line_too_long")
        if number > MAX_LINES_IN_FILE:
            raise _wrong(
                f"the file has more than {MAX_LINES_IN_FILE} lines, the empty ones included.", "too_many_lines"
            )
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


class InputCheck:
    """Checks the input file of a batch for ``endpoint`` slice by slice, so that no slice takes long.

    The file as a whole is checked: no line, too many lines, a line for another endpoint, two lines of one name. Lines
    that are no requests make the batch fail. A line whose body is wrong is answered when the batch comes to it.

    Attributes:
        num_lines: Lines found so far that are not empty.
        problems: The first ``MAX_PROBLEMS`` lines that are no requests.
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
            InvalidRequest: The file as a whole is wrong.
        """
        end_bytes = self._file.tell() + SLICE_BYTES
        for _ in range(SLICE_LINES):
            entry = next(self._lines, None)
            if entry is None:
                if not self.num_lines:
                    raise _wrong("the file has no line.", "empty_file")
                return False
            self._check_line(*entry)
            if self._file.tell() >= end_bytes:
                break
        return True

    def _check_line(self, number: int, line: bytes) -> None:
        self.num_lines += 1
        if self.num_lines > MAX_LINES:
            raise _wrong(f"the file has more than {MAX_LINES} lines.", "too_many_lines")
        try:
            request = read_line(line)
        except InvalidRequest as error:
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(LineProblem("invalid_json_line", f"line {number}: {error.message}", number))
            return
        if path_of(request.url or self._endpoint) != self._endpoint:
            message = f"line {number} is for {request.url[:80]!r}, and the batch for {self._endpoint}."
            raise _wrong(message, "mixed_endpoints")
        if request.custom_id in self._names:
            name = request.custom_id[:80]
            raise _wrong(
                f"line {number} has the custom_id {name!r} of a line before it; each line needs its own.",
                "duplicate_custom_id",
            )
        self._names.add(request.custom_id)


def path_of(url: str) -> str:
    """An address as it is written here: with /v1, without a slash at its end."""
    path = f"/{url.strip('/')}"
    return path if path.startswith("/v1/") else f"/v1{path}"


def _wrong(said: str, code: str) -> InvalidRequest:
    return InvalidRequest(said, param="input_file_id", code=code)
