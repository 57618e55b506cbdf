"""Output lines of a batch in OpenAI's format: a response or an error with the line's custom ID."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from diffserve.service.http.errors import reply_to
from diffserve.store.batch_input import lines_of
from diffserve.store.batches import LineDone


class LineAnswer(NamedTuple):
    """Response of an endpoint to one line."""

    status: int
    request_id: str
    body: bytes


def expired_lines(path: Path, done: set[int]) -> Sequence[LineDone]:
    """Return an error for each line of the input file at ``path`` whose number is not in ``done``."""
    error = {"code": "batch_expired", "message": "the batch was over before this line was done."}
    with path.open("rb") as file:
        return [
            LineDone(number, _encode_line(custom_id_of(line), None, error), is_error=True)
            for number, line in lines_of(file)
            if number not in done
        ]


def line_done(number: int, name: str | None, answer: LineAnswer) -> LineDone:
    """Format the output of line ``number`` with the custom ID ``name``."""
    body = answer.body if b"\n" not in answer.body else msgspec.json.encode(msgspec.json.decode(answer.body))
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(body)}
    return LineDone(number, _encode_line(name, response, None), is_error=answer.status >= 400)


def _encode_line(name: str | None, response: Any, error: Any) -> bytes:
    answer = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": name, "response": response, "error": error}
    return msgspec.json.encode(answer) + b"\n"


def error_answer(error: Exception, request_id: str) -> LineAnswer:
    """Return the response that an endpoint would give for ``error``."""
    reply = reply_to(error)
    return LineAnswer(reply.status, request_id, reply.body)


def custom_id_of(line: bytes) -> str | None:
    """Return the custom ID in a line, which may be an invalid request; None if it has none."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _MayStream(msgspec.Struct):
    stream: bool | None = None


def is_stream(body: msgspec.Raw) -> bool:
    """Return whether ``body`` requests a stream."""
    try:
        return bool(msgspec.json.decode(body, type=_MayStream).stream)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False  # the endpoint reports the error
