"""What is written of a batch's lines, as OpenAI has it: an answer or an error, under the line's own name."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from diffserve.service.http.errors import reply_to
from diffserve.store.batch_input import lines_of
from diffserve.store.batches import LineDone


class LineAnswer(NamedTuple):
    """An endpoint's answer."""

    status: int
    request_id: str
    body: bytes


def expired_lines(path: Path, done: set[int]) -> Sequence[LineDone]:
    """What is said of every line of the file at ``path`` that is not ``done``."""
    error = {"code": "batch_expired", "message": "the batch was over before this line was done."}
    found = []
    with path.open("rb") as file:
        lines: Iterator[tuple[int, bytes]] = lines_of(file)
        for number, line in lines:
            if number not in done:
                found.append(LineDone(number, _written(name_in(line), None, error), is_error=True))
    return found


def line_done(number: int, name: str | None, told: LineAnswer) -> LineDone:
    """What is written of line ``number``, which is called ``name``."""
    body = told.body if b"\n" not in told.body else msgspec.json.encode(msgspec.json.decode(told.body))
    response = {"status_code": told.status, "request_id": told.request_id, "body": msgspec.Raw(body)}
    return LineDone(number, _written(name, response, None), is_error=told.status >= 400)


def _written(name: str | None, response: Any, error: Any) -> bytes:
    told = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": name, "response": response, "error": error}
    return msgspec.json.encode(told) + b"\n"


def told_of(error: Exception, request_id: str) -> LineAnswer:
    """``error`` as an endpoint would have answered."""
    reply = reply_to(error)
    return LineAnswer(reply.status, request_id, reply.body)


def name_in(line: bytes) -> str | None:
    """What a line is called that may be no request."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _MayStream(msgspec.Struct):
    stream: bool | None = None


def is_stream(body: msgspec.Raw) -> bool:
    """Whether ``body`` asks to be answered piece by piece."""
    try:
        return bool(msgspec.json.decode(body, type=_MayStream).stream)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False  # the endpoint says what is wrong
