"""Captured states of the images of a job, in files from which the images continue after a restart of the server."""

from __future__ import annotations

import asyncio
import logging
import os
from itertools import count
from pathlib import Path

from diffserve.faults import reach
from diffserve.service.threads import FILES

log = logging.getLogger("diffserve.jobs")


class CaptureFile:
    """File with the latest state of the images of one engine request.

    A damaged or outdated file is harmless: the engine refuses it and starts at the first step, so nothing is flushed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        self._pending: bytes | None = None
        self._writing: asyncio.Task[None] | None = None

    async def read(self) -> bytes | None:
        """Return the stored state; None if there is none."""
        try:
            data = await FILES.run(self._path.read_bytes)
        except OSError:
            return None
        reach("capture_read")
        return data

    def keep(self, data: bytes) -> None:
        """Write ``data`` in the background; states that arrive during a write replace each other."""
        self._pending = data
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write(), name="captured state")

    async def settle(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write(self) -> None:
        while self._pending is not None:
            data, self._pending = self._pending, None
            try:
                await FILES.run(self._replace, data)
            except OSError as error:
                log.warning("the state of an image could not be stored", extra={"reason": error.strerror})

    def _replace(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        reach("capture_written")
        self._part.replace(self._path)
        reach("capture_renamed")

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)
        self._part.unlink(missing_ok=True)


class CaptureFiles:
    """Files of one job: one for each of its engine requests, which are the same in every attempt and in the same order.

    Args:
        folder: The folder of the files.
        prefix: The beginning of their names.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._numbers = count()
        self._files: list[CaptureFile] = []

    def next(self) -> CaptureFile:
        """Return the file of the next engine request of the job."""
        file = CaptureFile(self._folder / f"{self._prefix}{next(self._numbers)}")
        self._files.append(file)
        return file

    async def settle(self) -> None:
        """Wait until nothing is being written."""
        await asyncio.gather(*(file.settle() for file in self._files))

    async def remove(self) -> None:
        """Delete the files of this attempt, with what earlier ones have left of them."""
        await self.settle()
        for file in self._files:
            await FILES.run(file.remove)
        reach("captures_removed")
