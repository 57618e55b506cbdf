"""Temporary image files of the page: a size-limited folder that is removed at exit.

Files with an owner's note survive the process if their page is open or the process was killed. The next process takes
them over within ``LEFT_S`` seconds, so that a reloaded page has its images again.
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
"""How long an upload is stored if no event reads it."""

UPLOADS_SHARE: Final = 8
"""Uploads may use one part in this many of the limit, so that they do not displace images."""

MAX_NAME_CHARS: Final = 48
LEFT_S: Final = 3600.0
"""How long files wait for the next process to take them over."""

NOTE: Final = "note.json"
_OWN_NAME: Final = re.compile(r"[0-9a-f]{32}")


class _Kept(NamedTuple):
    folder: Path
    num_bytes: int


class _Upload(NamedTuple):
    changed_s: float
    place: Path
    files: tuple[Path, ...]
    num_bytes: int


class PageFiles:
    """Temporary folder that holds at most ``max_bytes`` and removes the oldest files first. Thread-safe.

    Gradio stores uploads in the same folder; ``sweep`` counts them.

    Attributes:
        folder: The folder, readable by this user only. Each file is in a subfolder whose name cannot be guessed.
        left: Subfolders that were taken over from earlier processes, the oldest first.
        stays: Returns the owners whose files are not removed at exit; see ``note``.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._folder_lock = contextlib.ExitStack()
        self._lock_folder()
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
        """Store ``data`` and return its path.

        Args:
            data: The contents of the file.
            name: The file name; unsafe characters are replaced.

        Raises:
            OSError: The disk is full.
        """
        folder = self.new_folder()
        path = folder / safe_name(name)
        path.write_bytes(data)
        self.keep(folder)
        return path

    def new_folder(self) -> Path:
        """Create an empty subfolder; pass it to ``keep`` after writing into it."""
        if not self.folder.is_dir():  # the system may clean temporary folders
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._lock_folder()
        folder = self.folder / secrets.token_hex(16)
        folder.mkdir(mode=0o700)
        return folder

    def grant(self, file: Path, key_id: str) -> None:
        """Allow the API key with ``key_id`` to read ``file`` and everything else in its folder."""
        if (place := self._place_of(file)) is not None:
            with self._lock:
                self._granted.setdefault(place, set()).add(key_id)

    def is_granted(self, file: Path, key_id: str) -> bool:
        """Return whether the API key with ``key_id`` may read ``file``."""
        return key_id in self._granted.get(self._place_of(file) or self.folder, ())

    def discard(self, file: Path) -> None:
        """Remove ``file`` and everything else in its folder."""
        if (place := self._place_of(file)) is not None:
            with self._lock:
                entry = next((each for each in self._kept if each.folder == place), None)
                if entry is not None:
                    self._kept.remove(entry)
                    self._num_bytes -= entry.num_bytes
                self._granted.pop(place, None)
            shutil.rmtree(place, ignore_errors=True)

    def contains(self, file: Path) -> bool:
        """Return whether ``file`` exists below the folder."""
        return self._place_of(file) is not None and file.is_file()

    def _place_of(self, file: Path) -> Path | None:
        """Return the subfolder of ``file``, or None if it is outside the folder."""
        if ".." in file.parts or not file.is_relative_to(self.folder) or file == self.folder:
            return None
        return self.folder / file.relative_to(self.folder).parts[0]

    def _lock_folder(self) -> None:
        """Lock the folder, so that other processes know that it is in use."""
        handle = os.open(self.folder, os.O_RDONLY)
        self._folder_lock.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)

    def keep(self, folder: Path) -> None:
        """Count the files in ``folder`` (from ``new_folder``), and remove old files if the limit is exceeded."""
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        with self._lock:
            self._kept.append(_Kept(folder, num_bytes))
            self._num_bytes += num_bytes
            self._make_room()

    def sweep(self) -> list[Path]:
        """Count uploads, and remove those that are too old or exceed the share of uploads.

        Returns:
            The removed files.
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
        """Yield the uploads in the folder; those that disappear meanwhile are skipped."""
        for place in self.folder.iterdir() if self.folder.is_dir() else ():
            if _OWN_NAME.fullmatch(place.name):
                continue
            with contextlib.suppress(OSError):
                files = tuple(place.iterdir()) if place.is_dir() else (place,)
                num_bytes = sum(file.stat().st_size for file in files)
                yield _Upload(place.stat().st_mtime, place, files, num_bytes)

    def note(self, file: Path, owner: str, data: bytes) -> None:
        """Store ``data`` about ``file`` in its folder, under the file-name-safe name ``owner``."""
        (file.parent / f"{owner}.{NOTE}").write_bytes(data)

    def settle(self) -> None:
        """Decide which files stay, because the process is about to exit."""
        if self._settled is None:
            self._settled = frozenset(self.stays())

    def remove(self) -> None:
        """Remove the folder and all files whose owner is not in ``stays``."""
        if os.getpid() != self._owner:
            return
        self._folder_lock.close()
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
    """Move recent noted files of exited processes into ``place``, and remove their other files."""
    moved_folders = []
    for orphan in _orphans():
        if orphan == place:
            continue
        for folder in orphan.glob("*/"):
            with contextlib.suppress(OSError):
                if any(folder.glob(f"*.{NOTE}")) and time.time() - folder.stat().st_mtime < LEFT_S:
                    moved_folders.append(folder.rename(place / folder.name))
        shutil.rmtree(orphan, ignore_errors=True)
    return sorted(moved_folders, key=lambda folder: folder.stat().st_mtime)


def owner_of(note: Path) -> str:
    """Return the owner in the file name of ``note``."""
    return note.name.removesuffix(f".{NOTE}")


def _remove(place: Path) -> None:
    """Remove a file or folder; errors are ignored."""
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            place.unlink()


def _orphans() -> Iterator[Path]:
    """Yield folders that no running process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/"):
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
            finally:
                os.close(handle)


def safe_name(text: str) -> str:
    """Convert ``text`` to a file name of ASCII letters, digits and dashes; its extension stays."""
    stem, dot, ending = text.rpartition(".")
    if not dot or not re.fullmatch(r"[A-Za-z0-9]{1,5}", ending):
        stem, ending = text, ""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:MAX_NAME_CHARS].strip("-").lower() or "picture"
    return f"{stem}.{ending.lower()}" if ending else stem
