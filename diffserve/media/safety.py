"""Messages between the server and the process of its safety filter: msgpack frames over a private socket, no pickle.

A filter is the object that a factory without arguments returns. It has some of the methods ``blocks_prompt(text)``,
``blocks_negative_prompt(text)`` and ``blocks_picture(pixels)``, pixels (height, width, 3) uint8; each returns whether
to block its argument. Without ``blocks_negative_prompt``, ``blocks_prompt`` judges negative prompts as well.
"""

from __future__ import annotations

import socket

import msgspec

from diffserve.api.types import Picture
from diffserve.processes.frames import frame_of, read_frame

OF_MODEL = "model"
"""As a setting: the filter that came with the model."""


class SafetyQuestion(msgspec.Struct, frozen=True, tag=True):
    """A text or a picture to judge; the answer is a Judgement."""

    subject: str | Picture
    is_negative: bool = False


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
    connection.sendall(encode(message))


def encode(message: Said) -> bytes:
    """Encode one message as a frame of msgpack."""
    return frame_of(msgspec.msgpack.encode(message))


def receive(connection: socket.socket) -> Said | None:
    """The next message; ``None`` at the end. OSError, TimeoutError where the socket has one."""
    body = read_frame(connection)
    return None if body is None else _decoder.decode(body)
