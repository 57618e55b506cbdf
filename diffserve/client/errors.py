"""Exceptions of the client, and their construction from HTTP answers and transport errors.

Errors that the server reports become exceptions of ``diffserve.api.errors`` with the server's message and code.
``RequestCancelled``, ``ServerUnreachable`` and ``ServerLost`` are defined here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

import httpx
import msgspec

from diffserve.api.errors import (
    ERRORS_BY_CODE,
    DeadlineUnreachable,
    DiffserveError,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
    QuotaExceeded,
)


class ServerUnreachable(DiffserveError):  # noqa: N818 # named after what happened, as in diffserve.api.errors
    """No server answers at the given address."""

    default_code = "server_unreachable"


class ServerLost(DiffserveError):  # noqa: N818 # named after what happened, as in diffserve.api.errors
    """The connection ended or timed out before the answer was complete."""

    default_code = "server_lost"


class RequestCancelled(DiffserveError):  # noqa: N818 # named after what happened, as in diffserve.api.errors
    """The request was cancelled with its ID."""

    default_code = "cancelled"


PASSING_CODES: Final = frozenset(
    {
        *(kind.default_code for kind in (EngineUnavailable, QueueFull, ServerLost, ServerUnreachable)),
        *("database_unreachable", "rate_limit_exceeded", "server_full"),
    }
)
"""Codes of errors that pass: the server restarts, has too much to do, or cannot reach its database."""


class ErrorObject(msgspec.Struct, frozen=True):
    """Error object of an answer, in the format of OpenAI's API."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    predicted_s: float | None = None


class _Body(msgspec.Struct, frozen=True):
    error: ErrorObject


_ERRORS_BY_CODE: Final[dict[str, type[DiffserveError]]] = {
    **ERRORS_BY_CODE,
    RequestCancelled.default_code: RequestCancelled,
}


def error_of(error: ErrorObject, headers: Mapping[str, str] | None = None) -> DiffserveError:
    """Return the exception for an error that the server reported.

    Args:
        error: The error object.
        headers: The headers of the answer, which may say when to retry.
    """
    code = error.code or DiffserveError.default_code
    if code == QueueFull.default_code:
        return QueueFull(error.message, retry_after_s=_retry_after_s(headers or {}))
    if code == QuotaExceeded.default_code:
        return QuotaExceeded(error.message, retry_after_s=_renewal_s(headers or {}))
    if code == EngineUnavailable.default_code:
        return EngineUnavailable(error.message, retry_after_s=_retry_after_s(headers or {}))
    if code == DeadlineUnreachable.default_code:
        after_s = _retry_after_s(headers) if headers and "retry-after-ms" in headers else None
        return DeadlineUnreachable(error.message, predicted_s=error.predicted_s, retry_after_s=after_s)
    kind = _ERRORS_BY_CODE.get(code)
    if kind is None:
        kind = InvalidRequest if error.type == "invalid_request_error" else DiffserveError
    return kind(error.message, param=error.param, code=code)


def error_of_answer(url: str, response: httpx.Response) -> DiffserveError:
    """Return the exception for an unsuccessful ``response`` of the server at ``url``, whose body has been read."""
    try:
        error = msgspec.json.decode(response.content, type=_Body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return unexpected(url)
    return error_of(error, response.headers)


def unexpected(url: str) -> DiffserveError:
    """Return the exception for an answer from ``url`` that cannot be parsed."""
    return DiffserveError(
        f"the answer from {url} is not from a diffserve server; check the address.", code="unexpected_answer"
    )


def raise_for_transport(url: str, error: Exception) -> NoReturn:
    """Raise the exception for a failed connection to ``url``.

    Raises:
        ServerUnreachable: The connection could not be opened.
        ServerLost: The connection failed or timed out later.
    """
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        raise ServerUnreachable(f"no server answers at {url}; start one with: diffserve serve") from error
    if isinstance(error, httpx.TimeoutException):
        raise ServerLost(f"the server at {url} sent nothing for too long; is it still running?") from error
    raise ServerLost(f"the connection to {url} ended before the answer did; is the server still running?") from error


def _renewal_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds after which a quota renews, or None if the answer does not say."""
    after = headers.get("retry-after", "")
    return float(after) if after.isascii() and after.isdigit() else None


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return float(headers["retry-after-ms"]) / 1000
    except (KeyError, ValueError):
        return 1.0
