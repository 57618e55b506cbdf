"""Every error as OpenAI's object ``{"error": {"message", "type", "param", "code"}}``, with its status and headers.

The official clients retry 408, 409, 429 and every 5xx; ``Retry-After`` says when, ``x-should-retry: false`` says that
the same request would fail again.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from typing import Any, Final, NamedTuple

import msgspec
from starlette.responses import Response

from diffserve.api.errors import (
    ANSWER_TYPES,
    DeadlineExceeded,
    DeadlineUnreachable,
    DiffserveError,
    EngineUnavailable,
    InsufficientMemory,
    InvalidRequest,
    ModelLoadError,
    ModerationBlocked,
    QueueFull,
    QuotaExceeded,
)
from diffserve.api.types import Failed, ImageFailed
from diffserve.service.http.bodies import show
from diffserve.store.errors import StoreError

MAX_RETRY_AFTER_S = 60
ENGINE_RETRY_AFTER_S = 2.0
DATABASE_RETRY_S = 5.0

A1111: Final = "/sdapi/v1"
CONTROLNET: Final = "/controlnet"
A1111_PATHS: Final = (f"{A1111}/", f"{CONTROLNET}/")
"""Prefixes of the paths whose errors have A1111's form: its API and its ControlNet extension."""

OUR_MISTAKE: Final = "internal server error; the server's log has the request id of this response."

ABOUT_SERVER: Final[dict[str, type[DiffserveError]]] = {
    kind.default_code: kind for kind in (EngineUnavailable, ModelLoadError, InsufficientMemory)
}
"""Errors about the state of the server rather than the request, by code."""

BLOCKED: Final = ModerationBlocked.answer_type


class HttpError(DiffserveError):
    """Request that is invalid at the HTTP level.

    Attributes:
        status: HTTP status.
        allow: Value of the Allow header.
        is_last: Whether the connection is closed because nothing after this request can be trusted.
        retry_after_s: When to try again, in seconds; None for errors that do not pass.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        allow: str | None = None,
        is_last: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s
        self.status = status
        self.allow = allow
        self.is_last = is_last


class ErrorReply(NamedTuple):
    """Status, body and headers of an error response."""

    status: int
    body: bytes
    headers: dict[str, str]

    def in_a1111s_words(self) -> ErrorReply:
        """Return this reply with a body in A1111's form."""
        error = msgspec.json.decode(self.body)["error"]
        body = {"error": "HTTPException", "detail": error["message"], "body": "", "errors": error["message"]}
        body |= {"code": error["code"] or error["type"]}  # an extension of A1111's form
        return self._replace(body=msgspec.json.encode(body))

    @property
    def response(self) -> Response:
        """The reply as a response."""
        return Response(self.body, self.status, self.headers, media_type="application/json")


def reply_to(error: Exception) -> ErrorReply:
    """Return the response to ``error``. Unexpected errors become a 500 without internal details."""
    error = expected_error(error) or DiffserveError(OUR_MISTAKE)
    status = error.status
    headers: dict[str, str] = {}
    if isinstance(error, QueueFull | DeadlineUnreachable | HttpError) and error.retry_after_s is not None:
        headers |= _retry_after_headers(error.retry_after_s)
    elif isinstance(error, QuotaExceeded):
        headers["x-should-retry"] = "false"
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))  # hours: not bounded, as others are
    elif isinstance(error, EngineUnavailable):
        headers |= _retry_after_headers(ENGINE_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s)
    elif status >= 500 or isinstance(error, DeadlineUnreachable):
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HttpError) and error.allow is not None:
        headers["Allow"] = error.allow
    if isinstance(error, HttpError) and error.is_last:
        headers["Connection"] = "close"
    body: dict[str, Any] = {
        "message": error.message,
        "type": error.answer_type
        or ANSWER_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "param": error.param,
        "code": error.code,
    }
    if isinstance(error, DeadlineUnreachable) and error.predicted_s is not None:
        body["predicted_s"] = round(error.predicted_s, 3)
    return ErrorReply(status, msgspec.json.encode({"error": body}), headers)


def expected_error(error: Exception) -> DiffserveError | None:
    """Return the error to answer instead of ``error``, or None if ``error`` is a defect of the server."""
    if isinstance(error, DiffserveError):
        return error
    if _is_sick_disk(error):
        message = "the server cannot read or write its disk; its log has the reason."
        return HttpError(507, message, code="disk_error")
    if _is_disk_full(error):
        return HttpError(507, "the server's disk is full.", code="no_room")
    if isinstance(error, StoreError) and error.reason == "unreachable":
        message = "the server's database cannot be reached; try again later."
        return HttpError(503, message, code="database_unreachable", retry_after_s=DATABASE_RETRY_S)
    return None


def log_failure(log: logging.Logger, event: str, error: Exception, **facts: object) -> None:
    """Log ``error`` in one line: with its traceback if it is a defect, else with its code and reason.

    The reason is the system's own text or the database's name of the error; it never contains a path or anything that
    a client sent.
    """
    expected = expected_error(error)
    if expected is None:
        log.error(event, exc_info=error, extra=facts)
        return
    reason = type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        reason = os.strerror(error.errno)
    elif isinstance(error, StoreError):
        reason = error.name
    log.error(event, extra={**facts, "code": expected.code, "reason": reason})


def routing_error(status: int, method: str, path: str, *, allow: str | None = None) -> HttpError:
    """Return the error for an address or a method that no route serves; ``allow`` names the methods that it has."""
    where = f"{method[:16]} {show(path)}"
    if status == 405:
        return HttpError(
            status,
            f"{show(path)} does not support {method[:16]}; use {allow or 'another method'}.",
            code="method_not_allowed",
            allow=allow,
        )
    if status == 404:
        return HttpError(status, f"{where} does not exist.", code="unknown_url")
    return HttpError(status, "the request could not be read.", code="bad_request")


def _is_sick_disk(error: Exception) -> bool:
    """Return whether a read or write failed for another reason than a full disk."""
    if isinstance(error, StoreError):
        return error.reason == "unwritable"
    return isinstance(error, OSError) and error.errno in (errno.EIO, errno.EROFS)


def _is_disk_full(error: Exception) -> bool:
    if isinstance(error, StoreError):
        return error.reason == "full"
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reply_for(path: str, error: Exception) -> ErrorReply:
    """Return the response to ``error`` in the form that clients of ``path`` expect."""
    reply = reply_to(error)
    return reply.in_a1111s_words() if path.startswith(A1111_PATHS) else reply


def error_of(event: Failed) -> DiffserveError:
    """Return the error that a Failed event stands for."""
    if event.code == DeadlineExceeded.default_code:
        return DeadlineExceeded(event.message)
    if event.code == DeadlineUnreachable.default_code:
        return DeadlineUnreachable(event.message)
    if event.code in ABOUT_SERVER:
        return ABOUT_SERVER[event.code](event.message)
    if event.param is not None:
        return InvalidRequest(event.message, param=event.param, code=event.code)
    return DiffserveError(failure_message(event), code=event.code)


def failure_message(event: Failed | ImageFailed) -> str:
    """Return the message of a failure, without details of internal errors."""
    return OUR_MISTAKE if event.code == DiffserveError.default_code else event.message


def _retry_after_headers(after_s: float) -> dict[str, str]:
    seconds = min(max(after_s, 0.05), float(MAX_RETRY_AFTER_S))
    return {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
