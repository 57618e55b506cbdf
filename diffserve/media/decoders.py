"""Reads image files of clients in processes that can be killed: a few places, and one for each client.

Decoders in C can take seconds for small files, can crash, and cannot be stopped within a process. Work that decodes is
run with a :class:`Decoder`, which has the functions of :mod:`diffserve.media.images` that read files. A request has
``CPU_S`` for all its files; what it holds is free as soon as it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.media.decoder_process import FUNCTIONS, Answer, Question, Refusal
from diffserve.media.images import MaskConvention
from diffserve.media.provenance import Provenance
from diffserve.processes.client_places import ClientPlaces
from diffserve.processes.frames import frame_of, read_frame

COMMAND: Final[tuple[str, ...]] = ("-m", "diffserve.media.decoder_process")
CPU_S: Final = 10.0
"""CPU time for all files of one request: several times what the largest images need."""

WALL_S: Final = 60.0
"""A process that does not answer for so long is killed, however little CPU time it gets."""

MOST_PROCESSES: Final = 4
KEPT_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")
"""No key and no other secret of the server reaches a process that may be taken over."""

T = TypeVar("T")

log = logging.getLogger("diffserve.media.decoders")


class ImageReader(Protocol):
    """The functions that read image files: in this process (:mod:`diffserve.media.images`) or in another."""

    def decode_image(self, data: bytes, *, name: str = ...) -> Picture:
        """See :func:`diffserve.media.images.decode_image`."""

    def decode_mask(self, data: bytes, *, name: str = ..., convention: MaskConvention = ...) -> Picture:
        """See :func:`diffserve.media.images.decode_mask`."""

    def decode_with_mask(self, data: bytes, *, name: str = ...) -> tuple[Picture, Picture | None]:
        """See :func:`diffserve.media.images.decode_with_mask`."""

    def read_infotext(self, data: bytes, *, may_shorten: bool = ...) -> str | None:
        """See :func:`diffserve.media.images.read_infotext`."""


class Decoder:
    """One process, started with the first file. Its functions block: call them in a thread.

    Every function raises InvalidRequest for a file that is refused, takes too long, or crashes the process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._left_s = CPU_S
        self._is_cancelled = False

    def decode_image(self, data: bytes, *, name: str = "image") -> Picture:
        """See :func:`diffserve.media.images.decode_image`."""
        image: Picture = self._call("decode_image", data, name=name)
        return image

    def decode_mask(self, data: bytes, *, name: str = "mask", convention: MaskConvention = "openai") -> Picture:
        """See :func:`diffserve.media.images.decode_mask`."""
        mask: Picture = self._call("decode_mask", data, name=name, convention=convention)
        return mask

    def decode_with_mask(self, data: bytes, *, name: str = "image") -> tuple[Picture, Picture | None]:
        """See :func:`diffserve.media.images.decode_with_mask`."""
        images: tuple[Picture, Picture | None] = self._call("decode_with_mask", data, name=name)
        return images

    def read_infotext(self, data: bytes, *, may_shorten: bool = False) -> str | None:
        """See :func:`diffserve.media.images.read_infotext`."""
        text: str | None = self._call("read_infotext", data, may_shorten=may_shorten)
        return text

    def examine(self, data: bytes, *, name: str = "image") -> Provenance:
        """See :func:`diffserve.media.provenance.examine`."""
        provenance: Provenance = self._call("examine", data, name=name)
        return provenance

    def begin(self) -> None:
        """Give the next request its CPU time."""
        self._left_s, self._is_cancelled = CPU_S, False

    def cancel(self) -> None:
        """End the running request from another thread; its function raises."""
        self._is_cancelled = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _call(self, function: str, data: bytes, **options: Any) -> Any:
        name = str(options.get("name", "image"))
        if self._left_s <= 0.0:
            raise _too_complex(name)
        question = Question(function, data, options, self._left_s)
        try:
            connection = self._connected()
            connection.settimeout(WALL_S)
            connection.sendall(frame_of(msgspec.msgpack.encode(question)))
            frame = read_frame(connection)
        except OSError:  # also TimeoutError, and the pipe of a process that was killed
            frame = None
        if frame is None:
            raise self._failure(name)
        answer = msgspec.msgpack.decode(frame, type=Answer | Refusal)
        self._left_s -= answer.cpu_s
        if isinstance(answer, Refusal):
            raise InvalidRequest(answer.message, param=answer.param, code=answer.code)
        return msgspec.msgpack.decode(answer.value, type=FUNCTIONS[function].answer)

    def _connected(self) -> socket.socket:
        if self._is_cancelled:
            raise ConnectionAbortedError
        if self._connection is None or self._process is None or self._process.poll() is not None:
            self.close()
            self._begin()
        if self._is_cancelled:  # in the meantime
            raise ConnectionAbortedError
        assert self._connection is not None
        return self._connection

    def _begin(self) -> None:
        parent_end, child_end = socket.socketpair()
        environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, *COMMAND, "--fd", str(child_end.fileno())],
                pass_fds=(child_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        self._connection = parent_end

    def _failure(self, name: str) -> InvalidRequest:
        """End the process that gave no answer; return the error that says why."""
        process, code = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.2)
        self.close()
        if self._is_cancelled:
            return _too_complex(name)  # its caller is cancelled, too
        is_slow = code in (None, -signal.SIGPROF)
        reason = "too much time" if is_slow else f"exit code {code}"
        log.warning("an image could not be decoded", extra={"reason": reason})
        return _too_complex(name) if is_slow else _unreadable(name)


class Decoders:
    """A few :class:`Decoder` processes for all clients; a client uses one at a time."""

    def __init__(self, num_processes: int | None = None) -> None:
        """Make places; ``num_processes``: by default as many as there are cores, but 2 at least."""
        count = num_processes or min(MOST_PROCESSES, max(2, os.cpu_count() or 1))
        self._places = ClientPlaces(count)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="decoders")
        self._idle: list[Decoder] = []

    async def run(self, client: str, read: Callable[[Decoder], T]) -> T:
        """Return ``read(decoder)``, called in a thread when it is the turn of ``client``.

        Where this is cancelled the decoder's process is killed, so that the place is free at once.
        """
        async with self._places.taken(client):
            decoder = self._idle.pop() if self._idle else Decoder()
            decoder.begin()
            reading = asyncio.get_running_loop().run_in_executor(self._threads, read, decoder)
            try:
                return await asyncio.shield(reading)
            except asyncio.CancelledError:
                decoder.cancel()
                await asyncio.wait({reading})
                if not reading.cancelled():
                    reading.exception()
                raise
            finally:
                self._idle.append(decoder)

    def close(self) -> None:
        """End the processes that are idle; those that work end with this process."""
        while self._idle:
            self._idle.pop().close()


@functools.cache
def shared_decoders() -> Decoders:
    """Return the decoders of this process, for the API and the page."""
    return Decoders()


def _too_complex(name: str) -> InvalidRequest:
    message = f"{name} takes more than {CPU_S:g} s to be read; send it in a simpler encoding, such as a plain PNG."
    return InvalidRequest(message, param=name, code="image_too_complex")


def _unreadable(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is damaged and cannot be read.", param=name, code="invalid_image")
