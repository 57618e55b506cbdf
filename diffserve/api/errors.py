"""Every error diffserve raises on purpose, as one tree. The message names the value and the way out.

DiffserveError
  InvalidRequest        the caller asked for something that cannot be painted (400)
    ModerationBlocked   a safety filter does not allow what was asked for, or what came of it (400)
  ModelNotFound         no such model (404)
  ModelLoadError        the weights on disk cannot be used
  InsufficientMemory    there is no room for another model (507)
  ConfigError           a configuration file or setting is wrong
  QueueFull             try again later (429)
  DeadlineExceeded      the request's own deadline passed (504)
  DeadlineUnreachable   the request could not be done by its deadline, and nothing of it was begun (429)
  NumericalError        the network gave a non-finite picture (500)
  EngineUnavailable     the engine is starting, draining or gone (503)

Beside it stands DeviceLost, which nobody may catch and go on.
"""

from __future__ import annotations

from typing import Final


class DiffserveError(Exception):
    """Base of the tree. ``code`` is a stable machine word, ``param`` the request field to blame, if one is."""

    default_code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class InvalidRequest(DiffserveError):
    """The request cannot be painted as it stands."""

    default_code = "invalid_value"


class ModerationBlocked(InvalidRequest):
    """A safety filter does not allow it."""

    default_code = "moderation_blocked"


class ModelNotFound(DiffserveError):
    """No model of that name, or no directory at that path."""

    default_code = "model_not_found"


class ModelLoadError(DiffserveError):
    """The files are there but are not weights that diffserve can or will load."""

    default_code = "model_load_error"


class InsufficientMemory(DiffserveError):
    """A model finds no room beside those that are painting."""

    default_code = "insufficient_memory"


class ConfigError(DiffserveError):
    """A configuration value is unknown or wrong."""

    default_code = "config_error"


class QueueFull(DiffserveError):
    """The queue is full; ``retry_after_s`` says when to come back."""

    default_code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(DiffserveError):
    """The request's own deadline passed before it was finished."""

    default_code = "deadline_exceeded"


class DeadlineUnreachable(DiffserveError):
    """The request would be done in ``predicted_s``, which is later than its deadline. ``retry_after_s``: when it might
    be done in time, None where it never is, or where nobody knows."""

    default_code = "deadline_unreachable"

    def __init__(self, message: str, *, predicted_s: float | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param="deadline_s")
        self.predicted_s = predicted_s
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, deadline_s: float, predicted_s: float, least_s: float) -> DeadlineUnreachable:
        """The error for what takes ``least_s`` alone."""
        is_hopeless = least_s > deadline_s
        advice = "ask for less, or give it more time" if is_hopeless else "try again when there is less to do"
        said = f"deadline_s is {deadline_s:g}, and this would be done in about {predicted_s:.1f} s; {advice}."
        retry_after_s = None if is_hopeless else predicted_s - deadline_s
        return cls(said, predicted_s=predicted_s, retry_after_s=retry_after_s)


NOT_FINITE: Final = {"denoise": "the latents are not finite", "vae_decode": "the VAE gave a picture that is not finite"}
"""How its message begins, by where it was seen."""


class NumericalError(DiffserveError):
    """A latent or a picture was not finite."""

    default_code = "numerical_error"


class EngineUnavailable(DiffserveError):
    """The engine is not there to take work; ``retry_after_s`` says when it should be, None where nobody knows."""

    default_code = "engine_unavailable"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeviceLost(BaseException):
    """The device computes nothing more in this process, which has to end. No Exception: nobody goes on after it."""
