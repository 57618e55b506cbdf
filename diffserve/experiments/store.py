"""Resumable on-disk state of a sweep: a journal per cell, and the converged images.

DIR/parts/setup.json                             setup of the sweep; another setup is rejected
DIR/parts/<cell>-<digest>.jsonl                  one line per image, appended when it is measured
DIR/parts/<reference>-<digest>/<place>.npz       latents and pixels of converged images
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
    """Stored state of a sweep, as a context manager that locks the folder and closes the journals at exit.

    File names contain a digest of everything that results depend on: weights, dtype, prompts, seeds, the cell and
    versions. A sweep with more samplers or steps therefore continues a smaller one, and other results are never mixed
    in. Incomplete lines and temporary files of a killed process are ignored.

    Args:
        folder: Output folder of the sweep.
        setup: Everything except the cell that results depend on.
        results: Names of result files that must not exist in a folder without a sweep.

    Raises:
        InvalidRequest: The folder cannot be written, holds foreign results or another sweep, or is in use.
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

    def digest(self, cell: Cell, extra: Mapping[str, Any] | None = None) -> str:
        """Return a digest of 12 hexadecimal digits over the setup, the cell and ``extra``."""
        content = {**self._setup, "cell": cell, **(extra or {})}
        text = msgspec.json.encode(content, order="sorted")
        return hashlib.sha256(text).hexdigest()[:DIGEST_DIGITS]

    def records(self, cell: Cell) -> dict[Place, ImageRecord]:
        """Return a cell's records by place; they are read once and updated by :meth:`add`."""
        if cell not in self._records:
            self._records[cell] = _read_journal(self._journal_path(cell))
        return self._records[cell]

    def add(self, cell: Cell, record: ImageRecord) -> None:
        """Append a record to the journal; it survives a kill of this process after the call returns."""
        records = self.records(cell)
        if cell not in self._journals:
            self._journals[cell] = _open_journal(self._journal_path(cell))
        self._journals[cell].write(msgspec.json.encode(record) + b"\n")
        records[record.place] = record

    def save(self, finished: FinishedImage, *, always: bool = False) -> None:
        """Store a converged image atomically; other images are stored only if ``always`` is set."""
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
        """Return whether an image is stored."""
        return self._picture_path(cell, place).is_file()

    def load(self, cell: Cell, place: Place) -> StoredImage | None:
        """Return a stored image, or ``None`` if it is missing or cannot be read."""
        try:
            with self._picture_path(cell, place).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return StoredImage(arrays["pixels"], arrays["latents"])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None

    def write_json(self, name: str, document: Any) -> None:
        """Replace ``parts/<name>`` atomically."""
        write_whole(self.parts / name, msgspec.json.format(msgspec.json.encode(document), indent=1))

    def read_json(self, name: str) -> Any:
        """Read ``parts/<name>``, or return ``None`` if it is missing or invalid."""
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
    """Read the records of a journal, ignoring lines that cannot be decoded."""
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
    """Open a journal for appending and truncate an incomplete last line."""
    journal = path.open("ab", buffering=0)
    data = path.read_bytes()
    journal.truncate(data.rfind(b"\n") + 1)
    return journal
