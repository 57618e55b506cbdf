"""Pictures on disk for as long as a visitor may want them: a folder of this process, bounded, removed at its end."""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

PREFIX: Final = "diffserve-page-"
MAX_BYTES: Final = 1_000_000_000
MAX_NAME_CHARS: Final = 48


class _Kept(NamedTuple):
    folder: Path
    num_bytes: int


class Files:
    """A temporary folder for at most ``max_bytes``; the oldest files go first. Safe to share between threads.

    folder   readable by this user alone; every file has a folder of its own with a name that cannot be guessed
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        remove_orphans()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: deque[_Kept] = deque()
        self._lock = threading.Lock()
        self._owner = os.getpid()
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
        folder = self.folder / secrets.token_hex(16)
        folder.mkdir(mode=0o700)
        return folder

    def keep(self, folder: Path) -> None:
        """Count what lies in ``folder`` (from ``new_folder``), and make room for it."""
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        with self._lock:
            self._kept.append(_Kept(folder, num_bytes))
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes and len(self._kept) > 1:
                oldest = self._kept.popleft()
                self._num_bytes -= oldest.num_bytes
                shutil.rmtree(oldest.folder, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        if os.getpid() == self._owner:
            shutil.rmtree(self.folder, ignore_errors=True)


def remove_orphans() -> None:
    """Remove what processes left behind that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def safe_name(text: str) -> str:
    """``text`` as a file name: ASCII letters, digits and dashes, with the ending it has."""
    stem, dot, ending = text.rpartition(".")
    if not dot or not re.fullmatch(r"[A-Za-z0-9]{1,5}", ending):
        stem, ending = text, ""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:MAX_NAME_CHARS].strip("-").lower() or "picture"
    return f"{stem}.{ending.lower()}" if ending else stem


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
