"""What can go wrong between a client and its server, as exceptions that say the server's own sentence.

DiffserveError            what the server says, under its own code
  InvalidRequest, ModelNotFound, QueueFull, EngineUnavailable, DeadlineExceeded, DeadlineUnreachable
                          as in diffserve.api.errors
  RequestCancelled        somebody cancelled it by its id
  ServerUnreachable       nobody answers at that address
  ServerLost              the connection ended before the answer did
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

import httpx
import msgspec

from diffserve.api.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    DiffserveError,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
)


class ServerUnreachable(DiffserveError):  # noqa: N818 # named after what happened, as in diffserve.api.errors
    """Nobody answers at the server's address."""

    default_code = "server_unreachable"


class ServerLost(DiffserveError):  # noqa: N818 # named after what happened, as in diffserve.api.errors
    """The connection ended, or fell silent, before the answer was whole."""

    default_code = "server_lost"


class RequestCancelled(DiffserveError):  # noqa: N818 # named after what happened, as in diffserve.api.errors
    """The request was cancelled by its id."""

    default_code = "cancelled"


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    predicted_s: float | None = None


class _Body(msgspec.Struct, frozen=True):
    error: ErrorObject


_OF_CODE: Final[dict[str, type[DiffserveError]]] = {
    kind.default_code: kind for kind in (DeadlineExceeded, ModelNotFound, RequestCancelled, DiffserveError)
}


def error_of(said: ErrorObject, headers: Mapping[str, str] | None = None) -> DiffserveError:
    """The exception for what a server ``said``; with an answer's ``headers``, when to come back."""
    code = said.code or DiffserveError.default_code
    if code == QueueFull.default_code:
        return QueueFull(said.message, retry_after_s=_retry_after_s(headers or {}))
    if code == EngineUnavailable.default_code:
        return EngineUnavailable(said.message, retry_after_s=_retry_after_s(headers or {}))
    if code == DeadlineUnreachable.default_code:
        after_s = _retry_after_s(headers) if headers and "retry-after-ms" in headers else None
        return DeadlineUnreachable(said.message, predicted_s=said.predicted_s, retry_after_s=after_s)
    kind = _OF_CODE.get(code)
    if kind is None:
        kind = InvalidRequest if said.type == "invalid_request_error" else DiffserveError
    return kind(said.message, param=said.param, code=code)


def error_of_answer(url: str, response: httpx.Response) -> DiffserveError:
    """The exception for an answer that is no success; its body has been read."""
    try:
        said = msgspec.json.decode(response.content, type=_Body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return unexpected(url)
    return error_of(said, response.headers)


def unexpected(url: str) -> DiffserveError:
    """The error for an answer that makes no sense."""
    return DiffserveError(
        f"what {url} answers is no answer of a diffserve server; is it one?", code="unexpected_answer"
    )


def raise_for_transport(url: str, error: Exception) -> NoReturn:
    """Say in one sentence what a failed connection means. Raises ServerUnreachable or ServerLost."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        raise ServerUnreachable(f"no server answers at {url}; start one with: diffserve serve") from error
    if isinstance(error, httpx.TimeoutException):
        raise ServerLost(f"the server at {url} has been silent for too long; is it still at work?") from error
    raise ServerLost(f"the connection to {url} ended before the answer did; is the server still running?") from error


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return float(headers["retry-after-ms"]) / 1000
    except (KeyError, ValueError):
        return 1.0
