"""Frames between two processes over a socket: the length in four bytes, then the message."""

from __future__ import annotations

import socket
import struct
from typing import Final

HEADER: Final = struct.Struct(">I")
READ_BYTES: Final = 1 << 20


def frame_of(body: bytes) -> bytes:
    """Return ``body`` with its length before it."""
    return HEADER.pack(len(body)) + body


def read_frame(connection: socket.socket) -> bytes | None:
    """Read the body of the next frame; ``None`` at the end of the stream.

    Raises:
        OSError: The connection failed; TimeoutError where it has a timeout.
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
