"""Small facts kept on disk between two starts: measured costs, digests of files. Losing them costs time, nothing else.

One JSON file an entry, under ``<folder>/<kind>/<sha256 of the key>.json``, with its key inside. Files are written whole
or not at all, so processes may share a folder; one that cannot be read, or holds another key, counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

AUTO = "auto"
MOST_ENTRIES = 256
"""Of one kind; the longest unused go first."""

MOST_BYTES = 1 << 20
"""Of one entry."""

log = logging.getLogger("diffserve.cache")


class DiskCache:
    """Entries by kind and key. ``folder``: where they lie; ``None``: nothing is kept.

    No method raises for what the disk says: a full or read-only one is told once in the log, and nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._has_complained = False

    @classmethod
    def at(cls, setting: str) -> DiskCache:
        """As ``[engine] cache_dir`` says: a folder; ``"auto"``: the user's, ``~/.cache/diffserve``; ``""``: none."""
        if setting == AUTO:
            named = os.environ.get("XDG_CACHE_HOME", "")
            base = Path(named) if os.path.isabs(named) else Path("~/.cache").expanduser()
            return cls(base / "diffserve")
        return cls(Path(setting).expanduser() if setting else None)

    def read(self, kind: str, key: str) -> Any:
        """What was written for ``key``, or ``None``."""
        path = self._path(kind, key)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                entry = json.loads(file.read(MOST_BYTES + 1))
            if not isinstance(entry, dict) or entry.get("key") != key:
                return None
        except (OSError, ValueError, RecursionError):
            return None
        with contextlib.suppress(OSError):  # used: it is among the last to go
            os.utime(path)
        return entry.get("value")

    def write(self, kind: str, key: str, value: Any) -> None:
        """Keep ``value``, anything that JSON can say, for ``key``. ValueError beyond ``MOST_BYTES``."""
        data = json.dumps({"key": key, "value": value}, allow_nan=False).encode()
        if len(data) > MOST_BYTES:
            raise ValueError(f"an entry of {len(data)} bytes; at most {MOST_BYTES} are kept.")
        path = self._path(kind, key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_whole(path, data)
            _forget_oldest(path.parent)
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                log.warning("nothing is kept on disk", extra={"reason": f"{error.strerror}: {self.folder}"})

    def _path(self, kind: str, key: str) -> Path | None:
        name = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        return None if self.folder is None else self.folder / kind / f"{name}.json"


def _write_whole(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _forget_oldest(folder: Path) -> None:
    """Keep the ``MOST_ENTRIES`` last used; what another process removes meanwhile is gone all the same."""
    aged: list[tuple[float, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                aged.append((entry.stat().st_mtime, entry.path))
    for _, path in sorted(aged)[: max(0, len(aged) - MOST_ENTRIES)]:
        with contextlib.suppress(OSError):
            os.unlink(path)
