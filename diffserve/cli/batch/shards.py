"""A batch in shards: some hundred lines each, which are handed out, told of and gone on with as one.

What became of a shard's lines stands in ``shards/NUMBER.jsonl`` of the folder, written whole when all of them are over:
a shard that nobody finished is painted anew, to the same names and from the same seeds, so that two workers who paint
the same one do no harm. Pictures lie in the folder, or as WebDataset in ``shard-NUMBER.tar``, each beside a JSON.
"""

from __future__ import annotations

import hashlib
import io
import os
import socket
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.cli.batch.lines import Line, line_of, stream_lines
from diffserve.cli.batch.manifest import NAME, Outcome, read_outcomes
from diffserve.cli.batch.painters import PaintedFile
from diffserve.cli.outputs import write_output

FOLDER: Final = "shards"
LAYOUT: Final = "layout.json"
SEEN: Final = "seen-by-all"
"""A file by which workers know that their folder is the command's."""

SHARD_LINES: Final = 200


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a folder's batch is cut: it stays so for all runs of it.

    lines       in a shard
    webdataset  pictures go into a tar for each shard
    """

    lines: int = SHARD_LINES
    webdataset: bool = False


class ShardRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A line on its way to a worker: its ``row`` of the file, which is read there, or what is wrong with it."""

    number: int
    id: str
    digest: str = ""
    row: bytes = b""
    error: tuple[str, str | None, str | None] | None = None

    @classmethod
    def of(cls, row: bytes, line: Line) -> ShardRow:
        """The one of ``line``."""
        if line.error is None:
            return cls(number=line.number, id=line.id, digest=line.digest, row=row)
        error = line.error
        return cls(number=line.number, id=line.id, error=(error.message, error.param, error.code))

    def line(self, prompts: Path) -> Line:
        """As it was read from ``prompts``; a picture that it names is read here. A line without a seed, or that of
        its variation, gets one that is always the same."""
        if self.error is not None:
            message, param, code = self.error
            return Line(number=self.number, id=self.id, error=InvalidRequest(message, param=param, code=code))
        try:
            line = line_of(self.row, self.number, self.id, prompts)
        except DiffserveError as error:
            return Line(number=self.number, id=self.id, error=error)
        if line.digest != self.digest:
            said = f"line {self.number} names a picture that is another one on {socket.gethostname()!r}; share it."
            return Line(number=self.number, id=self.id, error=InvalidRequest(said, param="image"))
        digest = hashlib.sha256(f"{self.digest} {self.id}".encode()).digest()
        fields = {"seed": int.from_bytes(digest[:4]) >> 1, **line.fields}
        if fields.get("variation_strength") and fields.get("variation_seed") in (None, -1):
            fields["variation_seed"] = int.from_bytes(digest[4:8]) >> 1
        return msgspec.structs.replace(line, fields=fields)


class Shard(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Lines that follow each other, counted from 0."""

    number: int
    rows: tuple[ShardRow, ...]


class ShardFolder:
    """Where a batch in shards lies."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self.layout = layout
        self._shards = folder / FOLDER

    @classmethod
    def open(cls, folder: Path, *, lines: int | None, webdataset: bool) -> ShardFolder:
        """Made or gone on with. InvalidRequest where it was begun in another way, or cannot be written."""
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        path = folder / FOLDER / LAYOUT
        try:
            layout = msgspec.json.decode(path.read_bytes(), type=Layout)
        except FileNotFoundError:
            layout = Layout(lines=lines or SHARD_LINES, webdataset=webdataset)
            write_output(path, msgspec.json.encode(layout))
        except msgspec.MsgspecError as error:
            said = f"{str(path)!r} does not say how its batch was begun ({error}); give another folder."
            raise InvalidRequest(said, param="output") from None
        if lines not in (None, layout.lines) or webdataset != layout.webdataset:
            begun = f"--shard-lines {layout.lines}{' --webdataset' if layout.webdataset else ''}"
            said = f"the batch in {str(folder)!r} was begun with {begun}; go on with these, or give another folder."
            raise InvalidRequest(said, param="output")
        return cls(folder, layout)

    @property
    def seen(self) -> Path:
        """The file that tells workers that this folder is the one."""
        return self._shards / SEEN

    def outcomes_path(self, number: int) -> Path:
        """Of a shard whose lines are over."""
        return self._shards / f"{number:06d}.jsonl"

    def tar_path(self, number: int) -> Path:
        """Of a shard's pictures, as WebDataset."""
        return self.folder / f"shard-{number:06d}.tar"

    def part_path(self, number: int) -> Path:
        """Of a shard that this process paints."""
        return self._shards / f".{number:06d}-{socket.gethostname()}-{os.getpid()}.part"

    def parts(self, number: int | None = None) -> Iterator[Path]:
        """Of a shard that is being painted, or was by somebody who is gone; or of all."""
        return self._shards.glob(f".{'*' if number is None else f'{number:06d}'}-*[0-9].part")

    def clear(self) -> None:
        """Forget what nobody finished."""
        for path in self._shards.glob(".*part"):
            path.unlink(missing_ok=True)

    def shards(self, prompts: Path) -> Iterator[Shard]:
        """All of them, one by one. Raises InvalidRequest where ``prompts`` cannot be read, or holds none."""
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
        """By line, what is known of ``shard`` and still holds: pictures that are there, of lines that ask for the same;
        and mistakes of lines that cannot be read. ``files``: names in the folder, else each is looked for."""
        rows = {row.number: row for row in shard.rows}
        if self.layout.webdataset:
            files = self._in_tar(shard.number)
        held = {}
        for outcome in read_outcomes(self.outcomes_path(shard.number)):
            row = rows.get(outcome.line)
            if row is None or (row.id, row.digest) != (outcome.id, outcome.digest):
                continue
            if outcome.error is not None:
                is_held = row.error is not None and row.error[0] == outcome.error.get("message")
            else:
                is_held = bool(outcome.files) and all(self._is_there(name, files) for name in outcome.files)
            if is_held:
                held[outcome.line] = outcome
        return held

    def in_order(self, num_shards: int) -> Iterator[Outcome]:
        """What became of all lines, shard by shard."""
        for number in range(num_shards):
            yield from read_outcomes(self.outcomes_path(number))

    def write_results(self, num_shards: int) -> Iterator[Outcome]:
        """The same, each written to ``results.jsonl`` as it passes; the file is there when all have."""
        path = self.folder / NAME
        part = self._shards / f".{NAME}"
        try:
            with part.open("wb") as file:
                for outcome in self.in_order(num_shards):
                    file.write(msgspec.json.encode(outcome) + b"\n")
                    yield outcome
            part.replace(path)
        except OSError as error:
            raise InvalidRequest(f"cannot write {str(path)!r}: {error.strerror}.", param="output") from error

    def _is_there(self, name: str, files: frozenset[str] | None) -> bool:
        return (self.folder / name).is_file() if files is None else name in files

    def _in_tar(self, number: int) -> frozenset[str]:
        try:
            with tarfile.open(self.tar_path(number)) as tar:
                return frozenset(tar.getnames())
        except (OSError, tarfile.TarError):
            return frozenset()


class ShardWriter:
    """Writes what becomes of a shard's lines, in their order; with the block, all of it is there, or nothing."""

    def __init__(self, place: ShardFolder, number: int) -> None:
        self._place = place
        self._number = number
        self._part = place.part_path(number)
        self._tar_part = self._part.with_suffix(".tar.part")
        self._tar: tarfile.TarFile | None = None
        self._old: tarfile.TarFile | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> ShardWriter:
        with _said(self._part):
            self._file = self._part.open("wb")
            if self._place.layout.webdataset:
                self._tar = tarfile.open(self._tar_part, "w")  # closed in __exit__
                if self._place.tar_path(self._number).exists():
                    self._old = tarfile.open(self._place.tar_path(self._number))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with _said(self._part):
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
        """A line that was painted, or failed. Raises InvalidRequest where the disk refuses."""
        if self._tar is None:
            for name, picture in zip(outcome.files, pictures, strict=True):
                write_output(self._place.folder / name, picture.data)
        else:
            self._pack(outcome, [picture.data for picture in pictures])
        self._tell(outcome)

    def keep(self, outcome: Outcome) -> None:
        """A line that was over before."""
        if self._tar is not None and outcome.files:
            assert self._old is not None
            read = [self._old.extractfile(name) for name in outcome.files]
            self._pack(outcome, [file.read() for file in read if file is not None])
        self._tell(outcome)

    def _pack(self, outcome: Outcome, pictures: Iterable[bytes]) -> None:
        """Pictures, and beside each what is known of it: nothing in it depends on who painted when."""
        recipe = {name: value for name, value in outcome.recipe.items() if name != "id"}
        told = {"prompt": outcome.prompt, "line": outcome.line, "id": outcome.id, "recipe": recipe}
        varied_by = outcome.variation_seeds or (None,) * len(outcome.seeds)
        for name, data, seed, variation_seed in zip(outcome.files, pictures, outcome.seeds, varied_by, strict=True):
            own = {"seed": seed} if variation_seed is None else {"seed": seed, "variation_seed": variation_seed}
            self._put(name, data)
            self._put(f"{Path(name).stem}.json", msgspec.json.encode(told | own))

    def _put(self, name: str, data: bytes) -> None:
        assert self._tar is not None
        member = tarfile.TarInfo(name)
        member.size = len(data)
        with _said(self._tar_part):
            self._tar.addfile(member, io.BytesIO(data))

    def _tell(self, outcome: Outcome) -> None:
        assert self._file is not None
        with _said(self._part):
            self._file.write(msgspec.json.encode(outcome) + b"\n")
            self._file.flush()


class _said:  # noqa: N801 # used as a function
    """Within the block, a disk that refuses to write ``path`` is an InvalidRequest."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise InvalidRequest(f"cannot write {str(self._path)!r}: {error.strerror}.", param="output") from error
