"""Shards of a batch: a few hundred lines each, which one worker generates, records and resumes as a unit.

The results of a shard are written atomically to ``shards/NUMBER.jsonl`` when all its lines are done. Unfinished shards
are generated again with the same names and seeds, so two workers on one shard do no harm. Images are files in the
folder, or a WebDataset ``shard-NUMBER.tar`` with a JSON file per image.
"""

from __future__ import annotations

import hashlib
import io
import os
import socket
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.cli.batch.lines import NAME, Line, Outcome, parse_line, read_outcomes, stream_lines
from diffserve.cli.batch.painters import PaintedFile
from diffserve.cli.outputs import write_output

FOLDER: Final = "shards"
LAYOUT: Final = "layout.json"
TOKEN_FILE: Final = "seen-by-all"
"""Name of the file by which workers check that they see the folder of the command."""

SHARD_LINES: Final = 200


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the batch of a folder is split. All runs of the batch use the same layout.

    Attributes:
        lines: Lines per shard.
        webdataset: Whether images are written to a tar per shard.
    """

    lines: int = SHARD_LINES
    webdataset: bool = False


class ShardRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A line in the form that is sent to a worker: its raw ``row``, which the worker parses, or its error."""

    number: int
    id: str
    digest: str = ""
    row: bytes = b""
    error: tuple[str, str | None, str | None] | None = None

    @classmethod
    def of(cls, row: bytes, line: Line) -> ShardRow:
        """Create the row to send for ``line``."""
        if line.error is None:
            return cls(number=line.number, id=line.id, digest=line.digest, row=row)
        error = line.error
        return cls(number=line.number, id=line.id, error=(error.message, error.param, error.code))

    def line(self, prompts: Path) -> Line:
        """Parse the row on the worker, and read the images that it names.

        A missing seed or variation seed is derived from the digest, so that every attempt generates the same images.
        """
        if self.error is not None:
            message, param, code = self.error
            return Line(number=self.number, id=self.id, error=InvalidRequest(message, param=param, code=code))
        try:
            line = parse_line(self.row, self.number, self.id, prompts)
        except DiffserveError as error:
            return Line(number=self.number, id=self.id, error=error)
        if line.digest != self.digest:
            message = (
                f"line {self.number} names an image that differs on {socket.gethostname()!r}; put it on shared storage."
            )
            return Line(number=self.number, id=self.id, error=InvalidRequest(message, param="image"))
        digest = hashlib.sha256(f"{self.digest} {self.id}".encode()).digest()
        fields = {"seed": int.from_bytes(digest[:4]) >> 1, **line.fields}
        if fields.get("variation_strength") and fields.get("variation_seed") in (None, -1):
            fields["variation_seed"] = int.from_bytes(digest[4:8]) >> 1
        return msgspec.structs.replace(line, fields=fields)


class Shard(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Consecutive lines of a batch. Shard numbers start at 0."""

    number: int
    rows: tuple[ShardRow, ...]


class ShardFolder:
    """The output folder of a sharded batch."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self.layout = layout
        self._shards = folder / FOLDER

    @classmethod
    def open(cls, folder: Path, *, lines: int | None, webdataset: bool) -> ShardFolder:
        """Create or continue the batch in ``folder``.

        Args:
            folder: The output folder.
            lines: Lines per shard. None: as in the existing batch, or the default.
            webdataset: Whether to write a tar per shard.

        Raises:
            InvalidRequest: The existing batch has another layout, or the folder cannot be written.
        """
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        path = folder / FOLDER / LAYOUT
        try:
            layout = msgspec.json.decode(path.read_bytes(), type=Layout)
        except FileNotFoundError:
            layout = Layout(lines=lines or SHARD_LINES, webdataset=webdataset)
            write_output(path, msgspec.json.encode(layout))
        except msgspec.MsgspecError as error:
            message = f"{str(path)!r} is not a valid batch layout ({error}); give another folder."
            raise InvalidRequest(message, param="output") from None
        if lines not in (None, layout.lines) or webdataset != layout.webdataset:
            options = f"--shard-lines {layout.lines}{' --webdataset' if layout.webdataset else ''}"
            message = f"the batch in {str(folder)!r} was started with {options}; use these options, or another folder."
            raise InvalidRequest(message, param="output")
        return cls(folder, layout)

    @property
    def token_path(self) -> Path:
        """The file by which workers recognize the folder of the command."""
        return self._shards / TOKEN_FILE

    def outcomes_path(self, number: int) -> Path:
        """Return the path of the results of a finished shard."""
        return self._shards / f"{number:06d}.jsonl"

    def tar_path(self, number: int) -> Path:
        """Return the path of the WebDataset tar of a shard."""
        return self.folder / f"shard-{number:06d}.tar"

    def part_path(self, number: int) -> Path:
        """Return the path of the unfinished results that this process writes for a shard."""
        return self._shards / f".{number:06d}-{socket.gethostname()}-{os.getpid()}.part"

    def parts(self, number: int | None = None) -> Iterator[Path]:
        """Yield unfinished results, including those of lost workers, of one shard or of all (None)."""
        return self._shards.glob(f".{'*' if number is None else f'{number:06d}'}-*[0-9].part")

    def clear(self) -> None:
        """Delete all unfinished results."""
        for path in self._shards.glob(".*part"):
            path.unlink(missing_ok=True)

    def shards(self, prompts: Path) -> Iterator[Shard]:
        """Yield the shards of the batch file ``prompts``.

        Raises:
            InvalidRequest: The file cannot be read or is empty.
        """
        rows: list[ShardRow] = []
        number = 0
        for row, line in stream_lines(prompts):
            rows.append(ShardRow.of(row, line))
            if len(rows) == self.layout.lines:
                yield Shard(number=number, rows=tuple(rows))
                rows, number = [], number + 1
        if rows:
            yield Shard(number=number, rows=tuple(rows))

    def outcomes(self, shard: Shard, files: frozenset[str] | None = None) -> dict[int, Outcome]:
        """Return the recorded results of ``shard`` that are still valid, by line number.

        A success is valid if the line is unchanged and its images exist; an error is valid if the line still has it.

        Args:
            shard: The shard.
            files: Names of all files in the folder. None: look up each file.
        """
        rows = {row.number: row for row in shard.rows}
        if self.layout.webdataset:
            files = self._in_tar(shard.number)
        valid = {}
        for outcome in read_outcomes(self.outcomes_path(shard.number)):
            row = rows.get(outcome.line)
            if row is None or (row.id, row.digest) != (outcome.id, outcome.digest):
                continue
            if outcome.error is not None:
                is_valid = row.error is not None and row.error[0] == outcome.error.get("message")
            else:
                is_valid = bool(outcome.files) and all(self._is_there(name, files) for name in outcome.files)
            if is_valid:
                valid[outcome.line] = outcome
        return valid

    def in_order(self, num_shards: int) -> Iterator[Outcome]:
        """Yield the results of the first ``num_shards`` shards in order."""
        for number in range(num_shards):
            yield from read_outcomes(self.outcomes_path(number))

    def write_results(self, num_shards: int) -> Iterator[Outcome]:
        """Yield the results of all shards, and write them to ``results.jsonl``, which appears at the end.

        Raises:
            InvalidRequest: The file cannot be written.
        """
        path = self.folder / NAME
        part = self._shards / f".{NAME}"
        with _write_errors(path):
            with part.open("wb") as file:
                for outcome in self.in_order(num_shards):
                    file.write(msgspec.json.encode(outcome) + b"\n")
                    yield outcome
            part.replace(path)

    def _is_there(self, name: str, files: frozenset[str] | None) -> bool:
        return (self.folder / name).is_file() if files is None else name in files

    def _in_tar(self, number: int) -> frozenset[str]:
        try:
            with tarfile.open(self.tar_path(number)) as tar:
                return frozenset(tar.getnames())
        except (OSError, tarfile.TarError):
            return frozenset()


class ShardWriter:
    """Context manager that writes the results of a shard in line order, all of them or none."""

    def __init__(self, place: ShardFolder, number: int) -> None:
        self._place = place
        self._number = number
        self._part = place.part_path(number)
        self._tar_part = self._part.with_suffix(".tar.part")
        self._tar: tarfile.TarFile | None = None
        self._old: tarfile.TarFile | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> ShardWriter:
        with _write_errors(self._part):
            self._file = self._part.open("wb")
            if self._place.layout.webdataset:
                self._tar = tarfile.open(self._tar_part, "w")  # closed in __exit__
                if self._place.tar_path(self._number).exists():
                    self._old = tarfile.open(self._place.tar_path(self._number))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with _write_errors(self._part):
                for file in (self._tar, self._old, self._file):
                    if file is not None:
                        file.close()
                if kind is None:
                    if self._tar is not None:
                        self._tar_part.replace(self._place.tar_path(self._number))
                    self._part.replace(self._place.outcomes_path(self._number))
        finally:
            self._part.unlink(missing_ok=True)
            self._tar_part.unlink(missing_ok=True)

    def add(self, outcome: Outcome, pictures: Sequence[PaintedFile]) -> None:
        """Write the result and the images of a line.

        Raises:
            InvalidRequest: A file cannot be written.
        """
        if self._tar is None:
            for name, picture in zip(outcome.files, pictures, strict=True):
                write_output(self._place.folder / name, picture.data)
        else:
            self._pack(outcome, [picture.data for picture in pictures])
        self._write_result(outcome)

    def keep(self, outcome: Outcome) -> None:
        """Copy the result of a line that an earlier run finished."""
        if self._tar is not None and outcome.files:
            assert self._old is not None
            read = [self._old.extractfile(name) for name in outcome.files]
            self._pack(outcome, [file.read() for file in read if file is not None])
        self._write_result(outcome)

    def _pack(self, outcome: Outcome, pictures: Iterable[bytes]) -> None:
        """Write images to the tar, each with a JSON file that is the same for every attempt."""
        recipe = {name: value for name, value in outcome.recipe.items() if name != "id"}
        metadata = {"prompt": outcome.prompt, "line": outcome.line, "id": outcome.id, "recipe": recipe}
        varied_by = outcome.variation_seeds or (None,) * len(outcome.seeds)
        for name, data, seed, variation_seed in zip(outcome.files, pictures, outcome.seeds, varied_by, strict=True):
            seeds = {"seed": seed} if variation_seed is None else {"seed": seed, "variation_seed": variation_seed}
            self._put(name, data)
            self._put(f"{Path(name).stem}.json", msgspec.json.encode(metadata | seeds))

    def _put(self, name: str, data: bytes) -> None:
        assert self._tar is not None
        member = tarfile.TarInfo(name)
        member.size = len(data)
        with _write_errors(self._tar_part):
            self._tar.addfile(member, io.BytesIO(data))

    def _write_result(self, outcome: Outcome) -> None:
        assert self._file is not None
        with _write_errors(self._part):
            self._file.write(msgspec.json.encode(outcome) + b"\n")
            self._file.flush()


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError to an InvalidRequest which names ``path``."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"cannot write {str(path)!r}: {error.strerror}.", param="output") from error
