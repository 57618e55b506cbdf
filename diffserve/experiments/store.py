"""Output folder of a sweep: permission checks, and the records and images from which a sweep resumes.

DIR/parts/setup.json                             setup of the sweep; another setup is rejected
DIR/parts/lock                                   locked by the running process until it ends
DIR/parts/<cell>-<digest>.jsonl                  one line per image, appended when it is measured
DIR/parts/<reference>-<digest>/<place>.npz       latents and pixels of converged images
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Self
from zipfile import BadZipFile

import msgspec
import numpy as np

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.plan import Cell, Place, PlannedImage, SweepPlan
from diffserve.experiments.records import FinishedImage, ImageRecord, StoredImage

PARTS = "parts"
SETUP, LOCK = "setup.json", "lock"
MEASURES = "measures"
"""Setup field with the digests of the weights of measures, absent without such measures."""

IN_USE = "folder_in_use"
"""Code of the error of a folder that another process writes to."""

DIGEST_DIGITS = 12
MAX_SHOWN_CHARS = 24
NAMES = {
    "is_deterministic": "deterministic mode",
    "is_checked": "checking of prompts",
    "num_seeds": "seeds per prompt",
    "first_seed": "first seed",
    "reference_steps": "reference steps",
    MEASURES: "measures",
}
"""Display names of setup fields for error messages."""


class Store:
    """Stored state of a sweep, as a context manager that locks the folder and closes the journals at exit.

    File names contain a digest of everything that results depend on: weights, dtype, prompts, seeds, the cell and
    versions. A sweep with more samplers or steps therefore continues a smaller one, and other results are never mixed
    in. Incomplete lines and temporary files of a killed process are ignored.

    Args:
        folder: Output folder of the sweep.
        setup: Everything except the cell that results depend on.
        results: Names of result files that must not exist in a folder without a sweep.
        setup_of: Returns the part of ``setup`` that the results of a cell depend on; by default all of it.
        image_cells: Cells whose images are stored in addition to the converged ones.

    Raises:
        InvalidRequest: The folder cannot be written, holds foreign results or another sweep, or is in use.
    """

    def __init__(
        self,
        folder: Path,
        setup: Mapping[str, Any],
        *,
        results: Iterable[str],
        setup_of: Callable[[Cell], Mapping[str, Any]] | None = None,
        image_cells: Iterable[Cell] = (),
    ) -> None:
        refuse_folder(folder, results)
        refuse_other_sweep(folder, {MEASURES: {}, **setup})
        self.folder = folder
        self.parts = folder / PARTS
        self._setup_of = setup_of or (lambda _: setup)
        self._image_cells = frozenset(image_cells)
        self._digests: dict[Cell, str] = {}
        self._records: dict[Cell, dict[Place, ImageRecord]] = {}
        self._journals: dict[Cell, IO[bytes]] = {}
        self._lock: IO[bytes] | None = None
        with guard(folder):
            self.parts.mkdir(parents=True, exist_ok=True)
        stored = self.read_json(SETUP) or {}
        if not setup.keys() <= stored.keys():
            self.write_json(SETUP, {**stored, **setup})

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
        content = {**self._setup_of(cell), "cell": cell, **(extra or {})}
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

    def missing(self, plan: SweepPlan) -> list[PlannedImage]:
        """Return the images of ``plan`` that are not recorded, or whose pixels are needed but not stored."""
        return [
            image
            for image in plan.images()
            if image.place not in self.records(image.cell)
            or (self._keeps(image.cell) and not self.has(image.cell, image.place))
        ]

    def save(self, finished: FinishedImage) -> None:
        """Store a converged image, or one of ``image_cells``, atomically."""
        if not self._keeps(finished.image.cell):
            return
        assert finished.latents is not None, "a sweep asks for latents"
        path = self._image_path(finished.image.cell, finished.image.place)
        path.parent.mkdir(exist_ok=True)
        file = BytesIO()
        np.savez(file, pixels=finished.pixels, latents=finished.latents)
        write_whole(path, file.getvalue())

    def has(self, cell: Cell, place: Place) -> bool:
        """Return whether an image is stored."""
        return self._image_path(cell, place).is_file()

    def load(self, cell: Cell, place: Place) -> StoredImage | None:
        """Return a stored image, or ``None`` if it is missing or cannot be read."""
        try:
            with self._image_path(cell, place).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return StoredImage(arrays["pixels"], arrays["latents"])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None

    def _keeps(self, cell: Cell) -> bool:
        return cell.is_reference or cell in self._image_cells

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

    def _image_path(self, cell: Cell, place: Place) -> Path:
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


def refuse_folder(folder: Path, results: Iterable[str]) -> None:
    """Check that a sweep can write to ``folder``, without creating anything.

    An existing folder must belong to a sweep or contain none of ``results``. For a folder that does not exist yet, the
    nearest existing parent must be writable.

    Raises:
        InvalidRequest: The folder cannot be used.
    """
    if folder.is_dir() and not (folder / PARTS).is_dir():
        for name in results:
            if (folder / name).exists():
                message = f"{str(folder)!r} has a {name} that was not written by a sweep; choose another folder."
                raise InvalidRequest(message, param="output")
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    with guard(folder), tempfile.TemporaryFile(dir=existing):
        pass


def refuse_other_sweep(folder: Path, setup: Mapping[str, Any]) -> None:
    """Check that ``folder`` does not hold a sweep with a different setup.

    Only fields that both setups have are compared, so that a partial setup can be checked early. Samplers, steps and
    guidance are not part of a setup: adding more of them continues the existing sweep.

    Raises:
        InvalidRequest: The folder holds another sweep.
    """
    parts = folder / PARTS
    try:
        stored = msgspec.json.decode((parts / SETUP).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        stored = {}
    except (OSError, msgspec.DecodeError):
        raise _other(folder, "that cannot be read") from None
    if not stored and any(parts.glob("*.jsonl")):
        raise _other(folder, "of another version")
    if stored:
        stored.setdefault(MEASURES, {})
    current = msgspec.json.decode(msgspec.json.encode(dict(setup)))
    for name in [name for name in current if name in stored and stored[name] != current[name]]:
        raise _other(folder, f"with other {_describe(name, stored[name], current[name])}")


def _other(folder: Path, which: str) -> InvalidRequest:
    return InvalidRequest(f"{str(folder)!r} has a sweep {which}; choose another folder.", param="output")


def _describe(name: str, stored: Any, current: Any) -> str:
    """Describe a different setup field by name, with both values if they are short; digests are abbreviated."""
    title, values = NAMES.get(name, name), [str(value) for value in (stored, current)]
    if name.startswith("weights"):
        values = [value[:DIGEST_DIGITS] for value in values]
    is_short = all(isinstance(value, str | int | float) for value in (stored, current))
    return f"{title} ({values[0]}, now {values[1]})" if is_short and max(map(len, values)) <= MAX_SHOWN_CHARS else title


def take_lock(folder: Path) -> IO[bytes]:
    """Lock ``folder`` for this process until the returned file is closed; without ``fcntl`` nothing is locked.

    Raises:
        InvalidRequest: Another process holds the lock.
    """
    file = (folder / PARTS / LOCK).open("ab")
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            message = f"another sweep is writing to {str(folder)!r} now; wait for it or choose another folder."
            raise InvalidRequest(message, param="output", code=IN_USE) from None
    return file


def write_whole(file: Path, data: bytes) -> None:
    """Write ``data`` atomically: readers see either the old file or the new one.

    Raises:
        InvalidRequest: The file cannot be written.
    """
    temporary = file.with_name(f".{file.name}.part")
    with guard(file):
        try:
            temporary.write_bytes(data)
            temporary.replace(file)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def guard(path: Path) -> Iterator[None]:
    """Convert an ``OSError`` of the block into an :class:`InvalidRequest` about ``path``."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"cannot write to {str(path)!r}: {error.strerror}.", param="output") from None
