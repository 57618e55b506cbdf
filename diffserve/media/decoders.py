"""Pool of image decoder processes that can be killed; each client uses at most one at a time.

C decoders can take seconds for small files, can crash, and cannot be stopped within a process. An
:class:`ImageDecoder` runs the reading functions of :mod:`diffserve.media.images` in a separate process. The CPU time of
a request, for all its files, is limited to ``CPU_S``.
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
from diffserve.media.client_slots import ClientSlots
from diffserve.media.decoder_process import FUNCTIONS, Answer, DecodeRequest, Refusal
from diffserve.media.images import MaskConvention
from diffserve.media.provenance import ProvenanceReport
from diffserve.processes import frame_of, read_frame

COMMAND: Final[tuple[str, ...]] = ("-m", "diffserve.media.decoder_process")
CPU_S: Final = 10.0
"""CPU time for all files of one request, several times what the largest images need."""

WALL_S: Final = 60.0
"""Wall-clock time after which a process that has not answered is killed."""

MAX_PROCESSES: Final = 4
INHERITED_VARIABLES: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")
"""Environment variables that decoder processes inherit. Malformed files may compromise a decoder, so no secrets."""

T = TypeVar("T")

log = logging.getLogger("diffserve.media.decoders")


class ImageReader(Protocol):
    """Functions that read image files, in this process (:mod:`diffserve.media.images`) or in another one."""

    def decode_image(self, data: bytes, *, name: str = ...) -> Picture:
        """See :func:`diffserve.media.images.decode_image`."""

    def decode_mask(self, data: bytes, *, name: str = ..., convention: MaskConvention = ...) -> Picture:
        """See :func:`diffserve.media.images.decode_mask`."""

    def decode_with_mask(self, data: bytes, *, name: str = ...) -> tuple[Picture, Picture | None]:
        """See :func:`diffserve.media.images.decode_with_mask`."""

    def read_infotext(self, data: bytes, *, may_shorten: bool = ...) -> str | None:
        """See :func:`diffserve.media.images.read_infotext`."""


class ImageDecoder:
    """Decoder process, started on the first call. Its methods block: call them in a thread.

    Every reading method raises InvalidRequest for a file that is refused, takes too long, or crashes the process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._cpu_left_s = CPU_S
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

    def has_transparency(self, data: bytes, *, name: str = "image") -> bool:
        """See :func:`diffserve.media.images.has_transparency`."""
        is_transparent: bool = self._call("has_transparency", data, name=name)
        return is_transparent

    def read_infotext(self, data: bytes, *, may_shorten: bool = False) -> str | None:
        """See :func:`diffserve.media.images.read_infotext`."""
        text: str | None = self._call("read_infotext", data, may_shorten=may_shorten)
        return text

    def examine(self, data: bytes, *, name: str = "image") -> ProvenanceReport:
        """See :func:`diffserve.media.provenance.examine`."""
        provenance: ProvenanceReport = self._call("examine", data, name=name)
        return provenance

    def begin(self) -> None:
        """Reset the CPU time and the cancellation for the next request."""
        self._cpu_left_s, self._is_cancelled = CPU_S, False

    def cancel(self) -> None:
        """Kill the process from another thread, so that the running call raises."""
        self._is_cancelled = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process and close the connection."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _call(self, function: str, data: bytes, **options: Any) -> Any:
        name = str(options.get("name", "image"))
        if self._cpu_left_s <= 0.0:
            raise _too_complex(name)
        question = DecodeRequest(function, data, options, self._cpu_left_s)
        try:
            connection = self._ensure_connected()
            connection.settimeout(WALL_S)
            connection.sendall(frame_of(msgspec.msgpack.encode(question)))
            frame = read_frame(connection)
        except OSError:  # including TimeoutError and a broken connection to a killed process
            frame = None
        if frame is None:
            raise self._failure(name)
        answer = msgspec.msgpack.decode(frame, type=Answer | Refusal)
        self._cpu_left_s -= answer.cpu_s
        if isinstance(answer, Refusal):
            raise InvalidRequest(answer.message, param=answer.param, code=answer.code)
        return msgspec.msgpack.decode(answer.value, type=FUNCTIONS[function].answer)

    def _ensure_connected(self) -> socket.socket:
        if self._is_cancelled:
            raise ConnectionAbortedError
        if self._connection is None or self._process is None or self._process.poll() is not None:
            self.close()
            self._start_process()
        if self._is_cancelled:  # while the process was starting
            raise ConnectionAbortedError
        assert self._connection is not None
        return self._connection

    def _start_process(self) -> None:
        parent_end, child_end = socket.socketpair()
        environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
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
        """Kill the process that did not answer and return the error to raise."""
        process, code = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.2)
        self.close()
        if self._is_cancelled:
            return _too_complex(name)  # the caller was cancelled as well and discards this error
        is_slow = code in (None, -signal.SIGPROF)
        reason = "too much time" if is_slow else f"exit code {code}"
        log.warning("an image could not be decoded", extra={"reason": reason})
        return _too_complex(name) if is_slow else _unreadable(name)


class Decoders:
    """Pool of :class:`ImageDecoder` processes; each client uses at most one at a time."""

    def __init__(self, num_processes: int | None = None) -> None:
        """Create the pool.

        Args:
            num_processes: Size of the pool; by default the number of cores, limited to 2 .. ``MAX_PROCESSES``.
        """
        count = num_processes or min(MAX_PROCESSES, max(2, os.cpu_count() or 1))
        self._places = ClientSlots(count)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="decoders")
        self._idle: list[ImageDecoder] = []

    async def run(self, client: str, read: Callable[[ImageDecoder], T]) -> T:
        """Call ``read(decoder)`` in a thread when a decoder is free for ``client``, and return its result.

        If the call is cancelled, the decoder process is killed, so that the next request does not wait for it.
        """
        async with self._places.taken(client):
            decoder = self._idle.pop() if self._idle else ImageDecoder()
            decoder.begin()
            reading = asyncio.get_running_loop().run_in_executor(self._threads, read, decoder)
            try:
                return await asyncio.shield(reading)
            except asyncio.CancelledError:
                decoder.cancel()
                while not reading.done():  # the thread uses the decoder until it ends
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait({reading})
                if not reading.cancelled():
                    reading.exception()
                raise
            finally:
                self._idle.append(decoder)

    def close(self) -> None:
        """End the idle processes; busy ones end with this process."""
        while self._idle:
            self._idle.pop().close()


@functools.cache
def shared_decoders() -> Decoders:
    """Return the decoder pool that the API and the web page of this process share."""
    return Decoders()


def _too_complex(name: str) -> InvalidRequest:
    message = f"{name} takes more than {CPU_S:g} s to be read; send it in a simpler encoding, such as a plain PNG."
    return InvalidRequest(message, param=name, code="image_too_complex")


def _unreadable(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is damaged and cannot be read.", param=name, code="invalid_image")
