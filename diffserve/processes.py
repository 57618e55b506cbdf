"""Processes: signals, message frames, the wait policy of their threads, and the arenas of their heaps."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
from collections.abc import MutableMapping
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a server after it has finished its work."""


def leave_stopping_to_parent() -> None:
    """Ignore the signals that end a server; the child exits when the server closes the connection."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


MALLOC_ARENAS: Final = 2
MALLOC_ARENA_MAX: Final = "MALLOC_ARENA_MAX"
M_ARENA_MAX: Final = -8
"""glibc's number of the option (malloc.h)."""


def limit_arenas(environment: MutableMapping[str, str]) -> None:
    """Limit the heap arenas of processes started with ``environment``, unless the user has set it.

    By default glibc makes up to eight arenas for each core, and each one fragments for itself.
    """
    environment.setdefault(MALLOC_ARENA_MAX, str(MALLOC_ARENAS))


def limit_own_arenas() -> None:
    """Limit the heap arenas of this process as ``limit_arenas`` does; do nothing without glibc."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and MALLOC_ARENA_MAX not in os.environ:
        set_option(M_ARENA_MAX, MALLOC_ARENAS)


HEADER: Final = struct.Struct(">I")
READ_BYTES: Final = 1 << 20


def frame_of(body: bytes) -> bytes:
    """Return ``body`` with its length in front."""
    return HEADER.pack(len(body)) + body


def read_frame(connection: socket.socket) -> bytes | None:
    """Read the body of the next frame.

    Returns:
        The body; ``None`` at the end of the stream.

    Raises:
        OSError: The connection failed; TimeoutError if its timeout passed.
    """
    header = _read(connection, HEADER.size)
    return None if header is None else _read(connection, HEADER.unpack(header)[0])


def _read(connection: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        part = connection.recv(min(num_bytes - len(received), READ_BYTES))
        if not part:
            return None
        received += part
    return bytes(received)


SPIN_COUNT: Final = "10000"
CHOSEN_BY_USER: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Limit the spin time of OpenMP threads in processes started with ``environment``, unless the user has set it.

    Call it before torch is loaded, because OpenMP reads the environment only once. By default GNU OpenMP spins for
    about 0.1 s, which is fast on an idle machine but slows down other processes; ``OMP_WAIT_POLICY=PASSIVE`` sleeps at
    once, which doubles the time of a call on an idle machine. A short spin is nearly as fast and yields the core soon
    (``benchmarks/bench_threads.py``). The engine also adapts its number of threads.
    """
    if not any(name in environment for name in CHOSEN_BY_USER):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
