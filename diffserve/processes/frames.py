"""Message frames between two processes over a socket: a length of four bytes, then the body."""

from __future__ import annotations

import socket
import struct
from typing import Final

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
