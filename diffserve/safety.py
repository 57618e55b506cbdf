"""What is said to a safety filter, and what it says: msgpack frames over one private socket, no pickle.

A filter is what a factory without arguments gives: an object that has ``blocks_prompt(prompt)`` or
``blocks_picture(pixels)``, pixels (height, width, 3) uint8, or both, and answers whether nobody shall see that. It runs
in a process of its own, so that it may hang, crash, or load what it likes.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from diffserve.types import Picture

HEADER = struct.Struct(">I")
OF_MODEL = "model"
"""As a setting: the filter that came with the model."""


class SafetyQuestion(msgspec.Struct, frozen=True, tag=True):
    """Shall nobody see this? Answered by a Judgement."""

    subject: str | Picture


class FilterReady(msgspec.Struct, frozen=True, tag=True):
    """The filter's first word: what it judges."""

    judges_prompts: bool
    judges_pictures: bool


class Judgement(msgspec.Struct, frozen=True, tag=True):
    """Its answer."""

    is_blocked: bool


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """Its last word: why it cannot be used."""

    reason: str


Said = SafetyQuestion | FilterReady | Judgement | Trouble
_decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def send(connection: socket.socket, message: Said) -> None:
    """Write one message. OSError where the other side is gone."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(HEADER.pack(len(body)) + body)


def receive(connection: socket.socket) -> Said | None:
    """The next message; ``None`` at the end. OSError, TimeoutError where the socket has one."""
    header = _read(connection, HEADER.size)
    body = None if header is None else _read(connection, HEADER.unpack(header)[0])
    return None if body is None else _decoder.decode(body)


def _read(connection: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        part = connection.recv(min(num_bytes - len(received), 1 << 20))
        if not part:
            return None
        received += part
    return bytes(received)
