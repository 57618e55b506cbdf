"""All errors that diffserve raises on purpose, with their codes and HTTP statuses.

Each message names the wrong value and the fix. The server and the client derive their tables from ``ERRORS_BY_CODE``.
"""

from __future__ import annotations

from typing import Final


class DiffserveError(Exception):
    """Base class of all errors except DeviceLost.

    Attributes:
        code: Stable machine-readable code.
        param: The request field that is wrong, if there is one.
        status: The HTTP status of answers.
        answer_type: The ``type`` of the error object in answers; ``None``: that of the status.
    """

    default_code = "internal_error"
    status = 500
    answer_type: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class InvalidRequest(DiffserveError):
    """The request is invalid or cannot be served by this model."""

    default_code = "invalid_value"
    status = 400


class ModerationBlocked(InvalidRequest):
    """A safety filter blocked the request or its result."""

    default_code = "moderation_blocked"
    answer_type = "image_generation_user_error"


class ModelNotFound(DiffserveError):
    """There is no model with this name or at this path."""

    default_code = "model_not_found"
    status = 404


class ModelLoadError(DiffserveError):
    """The files exist, but diffserve cannot or will not load them as weights."""

    default_code = "model_load_error"


class InsufficientMemory(DiffserveError):
    """There is not enough memory to load a model next to those in use."""

    default_code = "insufficient_memory"
    status = 507


class ConfigError(DiffserveError):
    """A configuration value is unknown or wrong."""

    default_code = "config_error"


class QueueFull(DiffserveError):
    """The queue is full; retry after ``retry_after_s``."""

    default_code = "queue_full"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(DiffserveError):
    """The API key has used its quota of the day, which renews after ``retry_after_s`` seconds (None: unknown)."""

    default_code = "insufficient_quota"
    answer_type = "insufficient_quota"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(DiffserveError):
    """The request's deadline passed before it was finished."""

    default_code = "deadline_exceeded"
    status = 504


class DeadlineUnreachable(DiffserveError):
    """The forecast says that the request would miss its deadline, so it was refused before any work.

    Attributes:
        predicted_s: Forecast until the request would be done.
        retry_after_s: Seconds after which it might be done in time; ``None`` if it never can be, or if unknown.
    """

    default_code = "deadline_unreachable"
    status = 429

    def __init__(self, message: str, *, predicted_s: float | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param="deadline_s")
        self.predicted_s = predicted_s
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, deadline_s: float, predicted_s: float, least_s: float) -> DeadlineUnreachable:
        """Return the error for a request that takes at least ``least_s`` on an idle engine."""
        is_hopeless = least_s > deadline_s
        advice = (
            "request less work, or set a longer deadline" if is_hopeless else "try again when the server is less busy"
        )
        message = f"deadline_s is {deadline_s:g}, but this request would take about {predicted_s:.1f} s; {advice}."
        retry_after_s = None if is_hopeless else predicted_s - deadline_s
        return cls(message, predicted_s=predicted_s, retry_after_s=retry_after_s)


NOT_FINITE: Final = {"denoise": "the latents are not finite", "vae_decode": "the decoded image is not finite"}
"""Beginning of the message of a NumericalError, by the phase that found it."""


class NumericalError(DiffserveError):
    """Latents or an image are not finite."""

    default_code = "numerical_error"


class EngineUnavailable(DiffserveError):
    """The engine is starting, draining or stopped; ``retry_after_s`` is ``None`` if unknown."""

    default_code = "engine_unavailable"
    status = 503

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


ERRORS_BY_CODE: Final[dict[str, type[DiffserveError]]] = {
    kind.default_code: kind
    for kind in (
        *(DiffserveError, InvalidRequest, ModerationBlocked, ModelNotFound, ModelLoadError, InsufficientMemory),
        *(ConfigError, QueueFull, QuotaExceeded, DeadlineExceeded, DeadlineUnreachable, NumericalError),
        EngineUnavailable,
    )
}
"""The error classes by their default codes."""

ANSWER_TYPES: Final[dict[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""OpenAI's ``type`` of errors by HTTP status; other statuses are ``invalid_request_error`` or ``server_error``."""


class DeviceLost(BaseException):
    """The device no longer works in this process, which must exit. Not an Exception, so that no handler continues."""
