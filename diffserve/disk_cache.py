"""Cache of small facts on disk, such as measured costs and file digests. Losing entries costs only time.

Each entry is a JSON file ``<folder>/<kind>/<sha256 of the key>.json`` that contains its key. Files are replaced
atomically, so processes may share a folder. An unreadable file, or one with another key, counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

AUTO = "auto"
MOST_ENTRIES = 256
"""Maximum number of entries of one kind; the least recently used are deleted first."""

MOST_BYTES = 1 << 20
"""Maximum size of an entry."""

log = logging.getLogger("diffserve.cache")

ValueT = TypeVar("ValueT")


class DiskCache:
    """Entries by kind and key in ``folder``; ``None``: nothing is stored.

    Disk errors are never raised: a full or read-only disk is logged once, and nothing is stored.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._has_warned = False

    @classmethod
    def at(cls, setting: str) -> DiskCache:
        """Create the cache for a value of ``[engine] cache_dir``.

        Args:
            setting: A folder; ``"auto"``: the user's, ``~/.cache/diffserve``; ``""``: none.
        """
        if setting == AUTO:
            cache_home = os.environ.get("XDG_CACHE_HOME", "")
            base = Path(cache_home) if os.path.isabs(cache_home) else Path("~/.cache").expanduser()
            return cls(base / "diffserve")
        return cls(Path(setting).expanduser() if setting else None)

    def read(self, kind: str, key: str) -> Any:
        """Return the value stored for ``key``, or ``None``."""
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
        with contextlib.suppress(OSError):  # mark as recently used
            os.utime(path)
        return entry.get("value")

    def read_or_compute(self, kind: str, key: str, value_type: type[ValueT], compute: Callable[[], ValueT]) -> ValueT:
        """Return the value stored for ``key``; if there is none of ``value_type``, compute and store it.

        Raises:
            ValueError: The entry is larger than ``MOST_BYTES``.
        """
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(self.read(kind, key), value_type)
        value = compute()
        self.write(kind, key, msgspec.to_builtins(value))
        return value

    def write(self, kind: str, key: str, value: Any) -> None:
        """Store ``value``, which must be serializable as JSON, for ``key``.

        Raises:
            ValueError: The entry is larger than ``MOST_BYTES``.
        """
        data = json.dumps({"key": key, "value": value}, allow_nan=False).encode()
        if len(data) > MOST_BYTES:
            raise ValueError(f"the entry has {len(data)} bytes; at most {MOST_BYTES} are allowed.")
        path = self._path(kind, key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_atomically(path, data)
            _delete_oldest(path.parent)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("the disk cache cannot be written", extra={"reason": f"{error.strerror}: {self.folder}"})

    def _path(self, kind: str, key: str) -> Path | None:
        name = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        return None if self.folder is None else self.folder / kind / f"{name}.json"


def _write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _delete_oldest(folder: Path) -> None:
    """Delete all but the ``MOST_ENTRIES`` last used files; another process may delete files at the same time."""
    aged: list[tuple[float, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                aged.append((entry.stat().st_mtime, entry.path))
    for _, path in sorted(aged)[: max(0, len(aged) - MOST_ENTRIES)]:
        with contextlib.suppress(OSError):
            os.unlink(path)
