"""Standard output and standard error of an engine process, passed on to the log of this process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Final, Self

import msgspec

from diffserve.logs import Lines, pass_on

MAX_LINE_BYTES: Final = 256 * 1024

log = logging.getLogger("engine")


class EngineOutput:
    """A pipe whose ``end`` is the process's standard output and standard error.

    Log records, which are JSON lines, pass unchanged; other output (of C libraries, of a crash) is logged line by line.
    """

    def __init__(self) -> None:
        self._read_end, self.end = os.pipe()
        self._lines = Lines(sys.stderr, log)
        self._reading = asyncio.create_task(self._read(), name="engine output")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close this process's copy of ``end``."""
        os.close(self.end)

    async def wait_until_read(self, patience_s: float = 1.0) -> None:
        """Wait until the output of an ended process is read; a grandchild may keep the pipe open for longer."""
        await asyncio.wait({self._reading}, timeout=patience_s)
        self._reading.cancel()

    async def _read(self) -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._read_end, "rb", buffering=0)
        )
        try:
            while True:
                try:
                    line = await reader.readuntil(b"\n")
                except asyncio.IncompleteReadError as error:
                    self._log_line(error.partial)
                    return
                except asyncio.LimitOverrunError as overrun:
                    line = await reader.readexactly(overrun.consumed)
                self._log_line(line)
        finally:
            transport.close()

    def _log_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r\n")
        if _is_record(line):
            pass_on(text, log)
        elif text.strip():
            self._lines.write(f"{text}\n")


def _is_record(line: bytes) -> bool:
    """Return whether ``line`` is a record that ``logs`` wrote."""
    if not line.startswith(b'{"ts":'):
        return False
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except msgspec.MsgspecError:
        return False
