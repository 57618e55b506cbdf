"""Every error diffserve raises on purpose, as one tree. The message names the value and the way out.

DiffserveError
  InvalidRequest        the caller asked for something that cannot be painted (400)
  ModelNotFound         no such model (404)
  ModelLoadError        the weights on disk cannot be used
  ConfigError           a configuration file or setting is wrong
  QueueFull             try again later (429)
  DeadlineExceeded      the request's own deadline passed (504)
  NumericalError        the network gave a non-finite picture (500)
  EngineUnavailable     the engine is starting, draining or gone (503)

Beside it stands DeviceLost, which nobody may catch and go on.
"""

from __future__ import annotations


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


class ModelNotFound(DiffserveError):
    """No model of that name, or no directory at that path."""

    default_code = "model_not_found"


class ModelLoadError(DiffserveError):
    """The files are there but are not weights that diffserve can or will load."""

    default_code = "model_load_error"


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
