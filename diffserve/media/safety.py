"""Protocol between the server and the safety filter process: msgpack frames over a socket, no pickle.

A filter is the object that a factory without arguments returns. It has any of the methods ``blocks_prompt(text)``,
``blocks_negative_prompt(text)`` and ``blocks_picture(pixels)``, pixels (height, width, 3) uint8; each returns a bool.
Without ``blocks_negative_prompt``, ``blocks_prompt`` is also called for negative prompts.
"""

from __future__ import annotations

import socket

import msgspec

from diffserve.api.types import Picture
from diffserve.processes import frame_of, read_frame

OF_MODEL = "model"
"""Setting that selects the safety filter shipped with the model."""


class SafetyQuestion(msgspec.Struct, frozen=True, tag=True):
    """Request to judge a prompt or an image; the answer is a Judgement."""

    subject: str | Picture
    is_negative: bool = False


class FilterReady(msgspec.Struct, frozen=True, tag=True):
    """First message of the filter process: which inputs it judges."""

    judges_prompts: bool
    judges_pictures: bool


class Judgement(msgspec.Struct, frozen=True, tag=True):
    """Verdict of the filter on one prompt or image."""

    is_blocked: bool


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """Error message of the filter process: the reason why the filter cannot be used."""

    reason: str


SafetyMessage = SafetyQuestion | FilterReady | Judgement | Trouble
_decoder: msgspec.msgpack.Decoder[SafetyMessage] = msgspec.msgpack.Decoder(SafetyMessage)


def send(connection: socket.socket, message: SafetyMessage) -> None:
    """Send one message.

    Raises:
        OSError: The other process has closed the connection.
    """
    connection.sendall(encode(message))


def encode(message: SafetyMessage) -> bytes:
    """Encode one message as a msgpack frame."""
    return frame_of(msgspec.msgpack.encode(message))


def receive(connection: socket.socket) -> SafetyMessage | None:
    """Receive the next message; ``None`` when the other process has closed the connection.

    Raises:
        OSError: The connection is broken, or the timeout of the socket has passed (TimeoutError).
    """
    body = read_frame(connection)
    return None if body is None else _decoder.decode(body)
