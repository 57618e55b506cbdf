"""UNet paths that a server has chosen, in a file of its data folder, so that seeds reproduce after a restart."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from diffserve.api.types import ServedModel, UNetPath

FILE: Final = "unet-paths.json"
MOST_PATHS: Final = 1024
"""Number of stored paths; the oldest are dropped first."""

log = logging.getLogger("diffserve.engine")


class UNetPathFile:
    """Stored UNet paths of ``folder``. If it is not writable, paths stay in memory and a warning is logged once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._in_memory: dict[tuple[str, int, int, int, int], UNetPath] = {}
        self._has_warned = False

    def exists(self) -> bool:
        """Whether a server has stored paths here."""
        return self._path.is_file()

    def paths(self) -> tuple[UNetPath, ...]:
        """Return every stored path, oldest first. An unreadable file counts as empty."""
        return tuple((self._in_memory | self._read()).values())

    def remember(self, models: Iterable[ServedModel]) -> None:
        """Store the paths of ``models`` whose calls have none yet."""
        self.store(path for model in models for path in model.unet_paths)

    def store(self, paths: Iterable[UNetPath], *, overwrite: bool = False) -> None:
        """Store ``paths``. A stored path of the same calls is kept unless ``overwrite`` is true."""
        new = {path.calls: path for path in paths}
        if not new or (not overwrite and new.keys() <= self._in_memory.keys()):
            return
        try:
            with self._path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                stored = self._read()
                merged = stored | new if overwrite else new | stored
                if merged != stored:
                    self._write(list(merged.values())[-MOST_PATHS:])
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("UNet paths cannot be stored", extra={"reason": f"{error.strerror}: {self._path}"})
        self._in_memory = self._in_memory | new if overwrite else new | self._in_memory

    def _read(self) -> dict[tuple[str, int, int, int, int], UNetPath]:
        try:
            paths = msgspec.json.decode(self._path.read_bytes(), type=list[UNetPath])
        except (OSError, msgspec.MsgspecError):
            return {}
        return {path.calls: path for path in paths}

    def _write(self, paths: list[UNetPath]) -> None:
        part = self._path.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(paths), indent=1))
        part.replace(self._path)
