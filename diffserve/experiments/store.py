"""What a sweep has done so far, on disk: a journal for each cell, and the converged pictures.

    DIR/parts/setup.json                             what the sweep was begun with; another one is refused
    DIR/parts/<cell>-<digest>.jsonl                  one line a picture, appended when it is measured
    DIR/parts/<reference>-<digest>/<place>.npz       latents and pixels that others are held against

The digest is over everything that the numbers depend on (weights, dtype, prompts, seeds, the cell itself, versions).
So a sweep of more samplers or steps continues that of fewer, and nothing else is ever mixed in. A process that is
killed in mid-write leaves a line without an end or a temporary file; both are dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Self
from zipfile import BadZipFile

import msgspec
import numpy as np

from diffserve.experiments.folder import (
    DIGEST_DIGITS,
    PARTS,
    SETUP,
    guard,
    refuse_folder,
    refuse_other_sweep,
    take_lock,
    write_whole,
)
from diffserve.experiments.painter import FinishedImage
from diffserve.experiments.plan import Cell, Place
from diffserve.experiments.records import ImageRecord, StoredImage


class Store:
    """The folder of a sweep. ``setup`` holds, by name, everything but the cell that its numbers depend on.

    A context that keeps other processes out; leaving it closes the journals. Raises :class:`InvalidRequest` where the
    folder cannot be written, holds results that no sweep wrote or a sweep of another setup, or is in use.
    """

    def __init__(self, folder: Path, setup: Mapping[str, Any], *, results: Iterable[str]) -> None:
        refuse_folder(folder, results)
        refuse_other_sweep(folder, setup)
        self.folder = folder
        self.parts = folder / PARTS
        self._setup = dict(setup)
        self._digests: dict[Cell, str] = {}
        self._records: dict[Cell, dict[Place, ImageRecord]] = {}
        self._journals: dict[Cell, IO[bytes]] = {}
        self._lock: IO[bytes] | None = None
        with guard(folder):
            self.parts.mkdir(parents=True, exist_ok=True)
        if not (self.parts / SETUP).exists():
            self.write_json(SETUP, self._setup)

    def __enter__(self) -> Self:
        self._lock = take_lock(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()
        if self._lock is not None:
            self._lock.close()

    def digest(self, cell: Cell, more: Mapping[str, Any] | None = None) -> str:
        """What tells this cell of this setup from every other, 12 hexadecimal digits."""
        said = {**self._setup, "cell": cell, **(more or {})}
        text = msgspec.json.encode(said, order="sorted")
        return hashlib.sha256(text).hexdigest()[:DIGEST_DIGITS]

    def records(self, cell: Cell) -> dict[Place, ImageRecord]:
        """What is known of a cell's pictures, by place; read once, kept up to date by :meth:`add`."""
        if cell not in self._records:
            self._records[cell] = _read_journal(self._journal_path(cell))
        return self._records[cell]

    def add(self, cell: Cell, record: ImageRecord) -> None:
        """Append one picture; it is safe from a kill of this process once this returns."""
        known = self.records(cell)
        if cell not in self._journals:
            self._journals[cell] = _open_journal(self._journal_path(cell))
        self._journals[cell].write(msgspec.json.encode(record) + b"\n")
        known[record.place] = record

    def save(self, finished: FinishedImage, *, always: bool = False) -> None:
        """Keep a reference picture, whole or not at all; others are kept only with ``always``."""
        if not (always or finished.image.cell.is_reference):
            return
        assert finished.latents is not None, "a sweep asks for latents"
        path = self._picture_path(finished.image.cell, finished.image.place)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".part")
        with temporary.open("wb") as file:
            np.savez(file, pixels=finished.pixels, latents=finished.latents)
        temporary.replace(path)

    def has(self, cell: Cell, place: Place) -> bool:
        """Whether a picture is kept."""
        return self._picture_path(cell, place).is_file()

    def load(self, cell: Cell, place: Place) -> StoredImage | None:
        """A picture that is kept, or ``None`` where it is not or cannot be read."""
        try:
            with self._picture_path(cell, place).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return StoredImage(arrays["pixels"], arrays["latents"])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None

    def write_json(self, name: str, document: Any) -> None:
        """Replace ``parts/<name>``, whole or not at all."""
        write_whole(self.parts / name, msgspec.json.format(msgspec.json.encode(document), indent=1))

    def read_json(self, name: str) -> Any:
        """What :meth:`write_json` wrote, or ``None``."""
        try:
            return msgspec.json.decode((self.parts / name).read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def _journal_path(self, cell: Cell) -> Path:
        return self.parts / f"{self._name(cell)}.jsonl"

    def _picture_path(self, cell: Cell, place: Place) -> Path:
        return self.parts / self._name(cell) / f"{place[0]}-{place[1]}.npz"

    def _name(self, cell: Cell) -> str:
        if cell not in self._digests:
            self._digests[cell] = self.digest(cell)
        return f"{cell.slug}-{self._digests[cell]}"


def _read_journal(path: Path) -> dict[Place, ImageRecord]:
    """The records of a journal; what cannot be read is as if it had not been written."""
    decoder = msgspec.json.Decoder(ImageRecord)
    records: dict[Place, ImageRecord] = {}
    try:
        data = path.read_bytes()
    except OSError:
        return records
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError:
            continue
        records.setdefault(record.place, record)
    return records


def _open_journal(path: Path) -> IO[bytes]:
    """Open for appending whole lines, after cutting off a line that a kill has left without its end."""
    journal = path.open("ab", buffering=0)
    data = path.read_bytes()
    journal.truncate(data.rfind(b"\n") + 1)
    return journal
