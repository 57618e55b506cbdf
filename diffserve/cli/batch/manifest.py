"""The results of a batch, as JSON lines in ``results.jsonl`` next to the images.

The file is appended line by line, so that the next run can continue after any interruption.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.cli.batch.lines import Line
from diffserve.cli.outputs import write_output

NAME: Final = "results.jsonl"
LOCK: Final = ".diffserve-batch"


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


@contextlib.contextmanager
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
    @contextlib.contextmanager
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
                with contextlib.suppress(InvalidRequest):  # a full disk was reported before
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
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for row in file:
            with contextlib.suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(row, type=Outcome)
