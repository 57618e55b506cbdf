"""A TCP proxy that can be interrupted, for tests of a page whose server is unreachable."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

HOST = "127.0.0.1"
CHUNK_BYTES = 65536


class Cable:
    """A proxy from ``url`` to ``target_port`` of this machine, which may change, while it is plugged in."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._port = 0
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cable", daemon=True)
        self._thread.start()
        self.plug_in()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def plug_in(self) -> None:
        """Accept connections, on the same port as before."""
        self._do(self._listen())

    def pull_out(self) -> None:
        """Break every connection and refuse new ones."""
        self._do(self._hang_up())

    def close(self) -> None:
        """Disconnect permanently."""
        self.pull_out()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._forward, HOST, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _hang_up(self) -> None:
        if self._server is not None:
            self._server.close()
        for end in tuple(self._ends):
            end.transport.abort()
        while self._ends:
            await asyncio.sleep(0.01)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(HOST, self.target_port)
        except OSError:
            return writer.transport.abort()
        self._ends |= {writer, back}
        try:
            await asyncio.gather(_pump(reader, back), _pump(there, writer))
        finally:
            self._ends -= {writer, back}


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Forward everything from ``source`` until one side disconnects, then disconnect the other side."""
    try:
        while chunk := await source.read(CHUNK_BYTES):
            target.write(chunk)
            await target.drain()
    except ConnectionError:
        pass
    finally:
        target.close()


@contextmanager
def cable_to(target_port: int) -> Iterator[Cable]:
    """Yield a plugged-in cable, and close it afterwards."""
    cable = Cable(target_port)
    try:
        yield cable
    finally:
        cable.close()
