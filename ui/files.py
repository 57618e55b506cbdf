"""Pictures on disk for as long as a visitor may want them: a folder of this process, bounded, removed at its end.

What has a note of whose it is outlives the process where that page is open, or where the process was killed: the next
one takes it over within ``LEFT_S``, so that the page finds its pictures again.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

PREFIX: Final = "diffserve-page-"
MAX_BYTES: Final = 1_000_000_000
UPLOAD_S: Final = 300.0
"""For so long an upload stays that nobody reads."""

UPLOADS_SHARE: Final = 8
"""All uploads together take at most this part of the bound, so that they drive nobody's pictures out."""

MAX_NAME_CHARS: Final = 48
LEFT_S: Final = 3600.0
"""For so long pictures wait for the next process, and the page for them."""

NOTE: Final = "note.json"
_OURS: Final = re.compile(r"[0-9a-f]{32}")


class _Kept(NamedTuple):
    folder: Path
    num_bytes: int


class _Upload(NamedTuple):
    changed_s: float
    place: Path
    files: tuple[Path, ...]
    num_bytes: int


class PageFiles:
    """A temporary folder for at most ``max_bytes``; the oldest files go first. Safe to share between threads. Gradio
    lays uploads beside them, which are counted as of ``sweep``.

    folder   readable by this user alone; every file has a folder of its own with a name that cannot be guessed
    left     folders of noted files, the oldest first, that another process has left
    stays    whose noted files stay when the process ends; see ``note``
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._hold = contextlib.ExitStack()
        self._take_hold()
        self.stays: Callable[[], Collection[str]] = tuple
        self._settled: frozenset[str] | None = None
        self._max_bytes = max_bytes
        self._num_bytes = self._upload_bytes = 0
        self._kept: deque[_Kept] = deque()
        self._granted: dict[Path, set[str]] = {}
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.left = take_over(self.folder)
        for folder in self.left:
            self.keep(folder)
        atexit.register(self.remove)

    def write(self, data: bytes, name: str) -> Path:
        """Keep ``data`` under ``name``, made harmless; the file's path. OSError where the disk is full."""
        folder = self.new_folder()
        path = folder / safe_name(name)
        path.write_bytes(data)
        self.keep(folder)
        return path

    def new_folder(self) -> Path:
        """A fresh folder to write into, then to be handed to ``keep``."""
        if not self.folder.is_dir():  # somebody cleans temporary folders
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._take_hold()
        folder = self.folder / secrets.token_hex(16)
        folder.mkdir(mode=0o700)
        return folder

    def grant(self, file: Path, key_id: str) -> None:
        """Let the API key with ``key_id`` read ``file`` and everything else in its folder."""
        if (place := self._place_of(file)) is not None:
            with self._lock:
                self._granted.setdefault(place, set()).add(key_id)

    def is_granted(self, file: Path, key_id: str) -> bool:
        """Return whether the API key with ``key_id`` may read ``file``."""
        return key_id in self._granted.get(self._place_of(file) or self.folder, ())

    def _place_of(self, file: Path) -> Path | None:
        """Return the folder of ``file``; ``None`` where it is not below the folder of all files."""
        if ".." in file.parts or not file.is_relative_to(self.folder) or file == self.folder:
            return None
        return self.folder / file.relative_to(self.folder).parts[0]

    def _take_hold(self) -> None:
        """Have the system know, for as long as this process lives, that the folder is in use."""
        handle = os.open(self.folder, os.O_RDONLY)
        self._hold.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)

    def keep(self, folder: Path) -> None:
        """Count what lies in ``folder`` (from ``new_folder``), and make room for it."""
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        with self._lock:
            self._kept.append(_Kept(folder, num_bytes))
            self._num_bytes += num_bytes
            self._make_room()

    def sweep(self) -> list[Path]:
        """Count uploads, and remove those older than ``UPLOAD_S`` and, where all take more than their share, the
        oldest but the last; the files that are gone.
        """
        removed: list[Path] = []
        with self._lock:
            uploads = deque(sorted(self._uploads()))
            self._upload_bytes = sum(upload.num_bytes for upload in uploads)
            while uploads and (
                time.time() - uploads[0].changed_s > UPLOAD_S
                or (self._upload_bytes > self._max_bytes // UPLOADS_SHARE and len(uploads) > 1)
            ):
                oldest = uploads.popleft()
                self._upload_bytes -= oldest.num_bytes
                removed += oldest.files
                self._granted.pop(oldest.place, None)
                _remove(oldest.place)
            self._make_room()
        return removed

    def _make_room(self) -> None:
        while self._num_bytes + self._upload_bytes > self._max_bytes and len(self._kept) > 1:
            oldest = self._kept.popleft()
            self._num_bytes -= oldest.num_bytes
            self._granted.pop(oldest.folder, None)
            shutil.rmtree(oldest.folder, ignore_errors=True)

    def _uploads(self) -> Iterator[_Upload]:
        """What is not ours, but for what goes meanwhile."""
        for place in self.folder.iterdir() if self.folder.is_dir() else ():
            if _OURS.fullmatch(place.name):
                continue
            with contextlib.suppress(OSError):
                files = tuple(place.iterdir()) if place.is_dir() else (place,)
                num_bytes = sum(file.stat().st_size for file in files)
                yield _Upload(place.stat().st_mtime, place, files, num_bytes)

    def note(self, file: Path, owner: str, data: bytes) -> None:
        """Keep ``data`` about ``file`` beside it: it is ``owner``'s, a name that is safe in a path."""
        (file.parent / f"{owner}.{NOTE}").write_bytes(data)

    def settle(self) -> None:
        """Whose files stay is decided now: the process is about to end."""
        if self._settled is None:
            self._settled = frozenset(self.stays())

    def remove(self) -> None:
        """Remove the folder with everything in it but what ``stays``."""
        if os.getpid() != self._owner:
            return
        self._hold.close()
        if not self.folder.is_dir():
            return
        self.settle()
        stays = self._settled or ()
        for folder in self.folder.iterdir():
            if not any(owner_of(note) in stays for note in folder.glob(f"*.{NOTE}")):
                _remove(folder)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def take_over(place: Path) -> list[Path]:
    """Move into ``place`` what processes that are gone have left and somebody may still want; remove the rest."""
    taken = []
    for orphan in _orphans():
        if orphan == place:
            continue
        for folder in orphan.glob("*/"):
            with contextlib.suppress(OSError):
                if any(folder.glob(f"*.{NOTE}")) and time.time() - folder.stat().st_mtime < LEFT_S:
                    taken.append(folder.rename(place / folder.name))
        shutil.rmtree(orphan, ignore_errors=True)
    return sorted(taken, key=lambda folder: folder.stat().st_mtime)


def owner_of(note: Path) -> str:
    """Whose file it is about."""
    return note.name.removesuffix(f".{NOTE}")


def _remove(place: Path) -> None:
    """A file, or a folder with everything in it, as far as that may be."""
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            place.unlink()


def _orphans() -> Iterator[Path]:
    """Folders that no living process holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/"):
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
            finally:
                os.close(handle)


def safe_name(text: str) -> str:
    """``text`` as a file name: ASCII letters, digits and dashes, with the ending it has."""
    stem, dot, ending = text.rpartition(".")
    if not dot or not re.fullmatch(r"[A-Za-z0-9]{1,5}", ending):
        stem, ending = text, ""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:MAX_NAME_CHARS].strip("-").lower() or "picture"
    return f"{stem}.{ending.lower()}" if ending else stem
