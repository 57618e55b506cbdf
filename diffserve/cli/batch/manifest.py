"""What became of every line, as JSON lines beside the pictures: ``results.jsonl``. It grows line by line, so that
whatever ends a batch, the next run knows what there is."""

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
    """What became of a line.

    files  in the folder, in order; none where it failed, with the ``error`` as the API tells one
    seeds  of the pictures, and ``variation_seeds`` where they are varied
    recipe how they were painted, every default resolved, as the API tells it
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
    """For the length of the block no other batch works in ``folder``, which is made. Raises InvalidRequest where one
    does, and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            said = f"another batch is at work in {str(folder)!r}; wait for it, or give another folder."
            raise InvalidRequest(said, param="output") from None
        yield
    finally:
        os.close(lock)


class Manifest:
    """The outcomes in ``folder``, which is this process's alone while it is ``open``.

    painted  by line number: what need not be painted again
    """

    def __init__(self, folder: Path, lines: Sequence[Line], found: dict[str, Outcome]) -> None:
        self._folder = folder
        self._lines = lines
        self._outcomes = {line.number: found[line.id] for line in lines if _is_painted(line, found, folder)}
        self.painted = dict(self._outcomes)
        self._rewrite()

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path, lines: Sequence[Line]) -> Iterator[Manifest]:
        """Made or gone on with; in the end its outcomes stand in the order of ``lines``. Raises InvalidRequest where
        another batch is at work there, and OSError."""
        with alone_in(folder):
            manifest = cls(folder, lines, _found(folder / NAME))
            try:
                yield manifest
            finally:
                with contextlib.suppress(InvalidRequest):  # a full disk has been told of
                    manifest._rewrite()

    @property
    def outcomes(self) -> list[Outcome]:
        """In the order of the lines."""
        return [self._outcomes[line.number] for line in self._lines if line.number in self._outcomes]

    def add(self, outcome: Outcome) -> None:
        """Write down what became of a line. OSError where the disk is full."""
        self._outcomes[outcome.line] = outcome
        with (self._folder / NAME).open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")

    def _rewrite(self) -> None:
        whole = b"".join(msgspec.json.encode(outcome) + b"\n" for outcome in self.outcomes)
        write_output(self._folder / NAME, whole)


def _is_painted(line: Line, found: dict[str, Outcome], folder: Path) -> bool:
    outcome = found.get(line.id)
    if line.error is not None or outcome is None or outcome.digest != line.digest or not outcome.files:
        return False
    return all((folder / name).is_file() for name in outcome.files)


def _found(path: Path) -> dict[str, Outcome]:
    """What was painted, the latest of each id."""
    return {outcome.id: outcome for outcome in read_outcomes(path) if outcome.files}


def read_outcomes(path: Path) -> Iterator[Outcome]:
    """What stands in ``path``, where there is such a file; a line that is cut off, or not ours, counts for nothing."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for row in file:
            with contextlib.suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(row, type=Outcome)
