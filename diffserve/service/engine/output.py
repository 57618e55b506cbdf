"""What an engine process says on its standard output and standard error, taken into the log of this one."""

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

    JSON lines, as the process itself writes them, pass as they are; the rest (what a library in C prints, the last
    words of a crash) is told line by line.
    """

    def __init__(self) -> None:
        self._ours, self.end = os.pipe()
        self._lines = Lines(sys.stderr, log)
        self._reading = asyncio.create_task(self._read(), name="engine output")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The process has its ``end``, or there is none: this one needs it no more."""
        os.close(self.end)

    async def wait_until_read(self, patience_s: float = 1.0) -> None:
        """Until the last words of a process that is gone are told; a grandchild may keep the pipe open for longer."""
        await asyncio.wait({self._reading}, timeout=patience_s)
        self._reading.cancel()

    async def _read(self) -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._ours, "rb", buffering=0)
        )
        try:
            while True:
                try:
                    line = await reader.readuntil(b"\n")
                except asyncio.IncompleteReadError as last:
                    self._tell(last.partial)
                    return
                except asyncio.LimitOverrunError as overrun:
                    line = await reader.readexactly(overrun.consumed)
                self._tell(line)
        finally:
            transport.close()

    def _tell(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r\n")
        if _is_record(line):
            pass_on(text, log)
        elif text.strip():
            self._lines.write(f"{text}\n")


def _is_record(line: bytes) -> bool:
    """Whether ``line`` is a record as ``logs`` writes it."""
    if not line.startswith(b'{"ts":'):
        return False
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except msgspec.MsgspecError:
        return False
