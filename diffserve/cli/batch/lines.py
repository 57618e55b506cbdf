"""Files of a batch: the batch file, whose lines are prompts or JSON requests, and the results in ``results.jsonl``.

The results are appended line by line, so that the next run can continue after any interruption.
"""

from __future__ import annotations

import base64
import codecs
import fcntl
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.api.types import MAX_IMAGES
from diffserve.cli.outputs import safe_stem, write_output
from diffserve.media.images import SUFFIXES

NAME: Final = "results.jsonl"
LOCK: Final = ".diffserve-batch"
IMAGE_FIELDS: Final = ("image", "mask")
"""Fields that can name an image file, relative to the folder of the batch file."""

FORMATS: Final[dict[str, str]] = {image_format: suffix for suffix, image_format in reversed(SUFFIXES.items())}
TRANSPORT_FIELDS: Final = {"stream": True, "response_format": "b64_json"}
"""Fields that a line cannot choose, because they control how images are received."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a batch file.

    Attributes:
        number: Line number, starting at 1.
        id: Base name of the output files; the line number if the line has no id.
        digest: Hash of the request fields, so that a changed line is generated again.
        fields: Request fields of the API; empty if the line is invalid.
        error: Why the line is invalid.
    """

    number: int
    id: str
    digest: str = ""
    fields: dict[str, Any] = {}
    error: DiffserveError | None = None

    @property
    def prompt(self) -> str:
        """The prompt, or an empty string."""
        prompt = self.fields.get("prompt")
        return prompt if isinstance(prompt, str) else ""

    def names(self) -> list[str]:
        """Return the output file names: ID for one image, ID-1, ID-2, ... for several."""
        count, image_format = self.fields.get("n", 1), self.fields.get("output_format", "png")
        suffix = FORMATS.get(image_format if isinstance(image_format, str) else "", ".png")
        if not isinstance(count, int) or not 2 <= count <= MAX_IMAGES:
            return [f"{self.id}{suffix}"]
        return [f"{self.id}-{index + 1}{suffix}" for index in range(count)]


@contextmanager
def standard_input() -> Iterator[Path]:
    """Copy standard input to a temporary file and yield its path; the file is deleted afterwards.

    The suffix is ``.jsonl`` if the first line is an object or a quoted string, otherwise ``.txt``.

    Raises:
        InvalidRequest: Standard input is empty.
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
    """Return all non-empty lines of ``path``. Lines of ``.txt`` files are prompts, lines of other files are JSON.

    Args:
        path: The batch file.
        folder: Folder that image paths are relative to. None: the folder of ``path``.

    Raises:
        InvalidRequest: The file cannot be read or is empty. Problems of a single line are in its ``error``.
    """
    return [line for _, line in stream_lines(path, folder)]


def stream_lines(path: Path, folder: Path | None = None) -> Iterator[tuple[bytes, Line]]:
    """Yield the raw bytes and the parsed line of each non-empty line of ``path``.

    The file is streamed, so memory does not grow with its length. Arguments and errors are as in ``read_lines``.
    """
    width = len(str(max((number for number, _ in _rows(path)), default=0)))
    if width == 1 and next(_rows(path), None) is None:
        raise InvalidRequest(f"{str(path)!r} has no prompt; write one per line.", param="prompts")
    taken: dict[str, int] = {}
    for number, row in _rows(path):
        default_id = f"{number:0{width}d}"
        try:
            line = parse_line(row, number, default_id, path, folder)
            names = [line.id, *line.names()]
            if duplicates := [name for name in names if name in taken]:
                what = "id" if duplicates[0] == line.id else "output file"
                message = (
                    f"its {what} {duplicates[0]!r} is already used by line {taken[duplicates[0]]}; give another id."
                )
                raise InvalidRequest(message, param="id")
            taken |= dict.fromkeys(names, number)
        except DiffserveError as error:
            line = Line(number=number, id=default_id, error=error)
        yield row, line


def parse_line(row: bytes, number: int, default_id: str, path: Path, folder: Path | None = None) -> Line:
    """Parse one line of a batch file.

    Args:
        row: The line, as UTF-8 without surrounding white space.
        number: Line number, starting at 1.
        default_id: The id if the line has none.
        path: The batch file; its suffix determines the format.
        folder: Folder that image paths are relative to. None: the folder of ``path``.

    Raises:
        DiffserveError: The line is invalid, or an image cannot be read.
    """
    fields = {"prompt": row.decode()} if path.suffix.lower() == ".txt" else _fields_in(row.decode())
    name = _pop_id(fields) or default_id
    fields = {name: _read_image(value, folder or path.parent, name) for name, value in fields.items()}
    digest = hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()[:16]
    return Line(number=number, id=name, digest=digest, fields=fields | TRANSPORT_FIELDS)


def _rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and text of each non-empty line of ``path``.

    Raises:
        InvalidRequest: The file cannot be read, or is not UTF-8.
    """
    offset = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                offset += len(raw)
                if text:
                    yield number, text.encode()
    except OSError as error:
        raise InvalidRequest(f"cannot read {str(path)!r}: {error.strerror}.", param="prompts") from None
    except UnicodeDecodeError as error:
        message = f"{str(path)!r} is not UTF-8 text ({error.reason} at byte {offset + error.start})."
        raise InvalidRequest(message, param="prompts") from None


def _fields_in(row: str) -> dict[str, Any]:
    try:
        read = msgspec.json.decode(row)
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"the line is not JSON ({error}); write an object with a prompt, or a prompt in double quotes."
        raise InvalidRequest(message, code="invalid_json") from None
    fields = {"prompt": read} if isinstance(read, str) else read
    if not isinstance(fields, dict):
        message = "the line is neither an object nor a string; write an object with a prompt."
        raise InvalidRequest(message, code="invalid_json")
    fields = {name: value for name, value in fields.items() if value is not None}
    if not {"image", "infotext"} & fields.keys() and not (
        isinstance(fields.get("prompt"), str) and fields["prompt"].strip()
    ):
        raise InvalidRequest("the line has no prompt; add one.", param="prompt", code="empty_prompt")
    return fields


def _pop_id(fields: dict[str, Any]) -> str | None:
    """Remove the id from ``fields`` and return it in a form that is safe in file names.

    Raises:
        InvalidRequest: The id has no letters or digits.
    """
    name = fields.pop("id", None)
    if name is None:
        return None
    safe = safe_stem(str(name)) if isinstance(name, str | int) and not isinstance(name, bool) else ""
    if not safe:
        message = f"the id is {str(name)[:40]!r}; give letters, digits and dashes."
        raise InvalidRequest(message, param="id")
    return safe


def _read_image(value: Any, folder: Path, name: str) -> Any:
    """Return the image file that ``value`` names, in base64; other values are returned unchanged.

    Raises:
        InvalidRequest: The file cannot be read.
    """
    is_file = name in IMAGE_FIELDS and isinstance(value, str) and Path(value).suffix.lower() in SUFFIXES
    if not is_file:
        return value
    try:
        return base64.b64encode((folder / value).read_bytes()).decode()
    except OSError as error:
        raise InvalidRequest(f"cannot read the {name} {value!r}: {error.strerror}.", param=name) from None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one line: its images, or why it failed.

    Attributes:
        files: Names of the images in the folder, in order; empty if the line failed.
        seeds: Seed of each image.
        variation_seeds: Variation seed of each image; empty without variations.
        recipe: Generation parameters with all defaults resolved, as in API responses.
        error: Why the line failed, as in API responses.
    """

    line: int
    id: str
    digest: str
    prompt: str
    files: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    variation_seeds: tuple[int, ...] = ()
    seconds: float = 0.0
    recipe: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    error: dict[str, str | None] | None = None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which is created if needed.

    Raises:
        InvalidRequest: Another batch holds the lock.
        OSError: The folder cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"another batch uses {str(folder)!r}; wait for it, or give another folder."
            raise InvalidRequest(message, param="output") from None
        yield
    finally:
        os.close(lock)


class Manifest:
    """The results in ``folder``, which is locked while the manifest is open.

    Attributes:
        painted: Results of earlier runs that are still valid, by line number.
    """

    def __init__(self, folder: Path, lines: Sequence[Line], earlier: dict[str, Outcome]) -> None:
        self._folder = folder
        self._lines = lines
        self._outcomes = {line.number: earlier[line.id] for line in lines if _is_painted(line, earlier, folder)}
        self.painted = dict(self._outcomes)
        self._rewrite()

    @classmethod
    @contextmanager
    def open(cls, folder: Path, lines: Sequence[Line]) -> Iterator[Manifest]:
        """Create or continue a manifest. On exit the results are sorted in the order of ``lines``.

        Raises:
            InvalidRequest: Another batch uses the folder.
            OSError: The folder cannot be created.
        """
        with alone_in(folder):
            manifest = cls(folder, lines, _read_painted(folder / NAME))
            try:
                yield manifest
            finally:
                with suppress(InvalidRequest):  # a full disk was reported before
                    manifest._rewrite()

    @property
    def outcomes(self) -> list[Outcome]:
        """Results in the order of the lines."""
        return [self._outcomes[line.number] for line in self._lines if line.number in self._outcomes]

    def add(self, outcome: Outcome) -> None:
        """Append the result of a line.

        Raises:
            OSError: The file cannot be written, such as on a full disk.
        """
        self._outcomes[outcome.line] = outcome
        with (self._folder / NAME).open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")

    def _rewrite(self) -> None:
        data = b"".join(msgspec.json.encode(outcome) + b"\n" for outcome in self.outcomes)
        write_output(self._folder / NAME, data)


def _is_painted(line: Line, earlier: dict[str, Outcome], folder: Path) -> bool:
    outcome = earlier.get(line.id)
    if line.error is not None or outcome is None or outcome.digest != line.digest or not outcome.files:
        return False
    return all((folder / name).is_file() for name in outcome.files)


def _read_painted(path: Path) -> dict[str, Outcome]:
    """Return the latest successful result of each id."""
    return {outcome.id: outcome for outcome in read_outcomes(path) if outcome.files}


def read_outcomes(path: Path) -> Iterator[Outcome]:
    """Yield the results in ``path``, if it exists. Incomplete and invalid lines are skipped."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for row in file:
            with suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(row, type=Outcome)
