"""Logging as one JSON object per line on standard error, without prompts or other text of clients.

Messages of exceptions and libraries may quote what a client sent. Of an exception only its type and traceback are
logged, and its message only for trusted types (device errors). Quoted text is removed everywhere.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import TextIOBase
from types import TracebackType
from typing import Final, TextIO

import msgspec

from diffserve.api.errors import DiffserveError

MAX_TEXT_CHARS: Final = 400
MAX_CAUSES: Final = 4
MACHINE: Final = frozenset({"RuntimeError", "OutOfMemoryError", "MemoryError", "AcceleratorError"})
"""Exception types whose messages come from torch or the device and contain no client text in an engine process."""

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_QUOTED: Final = re.compile(r"""(?<!\w)["'`].*["'`]|(?<!\w)["'`].*$""", re.DOTALL)
_RAISED: Final = re.compile(r"\braised (?:\w+\.)*(\w+): .*$", re.DOTALL)
_WARNED: Final = re.compile(r"(?P<file>.{1,1000}?):(?P<line>\d{1,9}): (?P<category>\w+):")
_TRACEBACK: Final = "Traceback (most recent call last):"
_BETWEEN: Final = ("During handling of the above exception", "The above exception was the direct cause")


class JsonLines(logging.Formatter):
    """Formatter of one JSON line: ts, level, event, the fields of ``extra``, and type and traceback of an exception.

    Args:
        trusted: Names of exception types whose messages are logged.
    """

    def __init__(self, trusted: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._trusted = trusted

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its newline. JSON escapes control characters."""
        json_line: str | None = getattr(record, "json_line", None)
        if json_line is not None:
            return json_line
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if record.name == "py.warnings":
            line |= {"event": "a warning", "logger": record.name} | origin_of(record.getMessage())
        elif record.name.partition(".")[0] != "diffserve":
            line |= {"event": without_quotes(record.getMessage()), "logger": record.name}
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line |= {"error": kind_of(error), "traceback": way_of(error)}
            reason = words_of(error, self._trusted)
            line |= {} if reason is None else {"reason": reason}
        return msgspec.json.encode(line, enc_hook=str).decode()


class Lines(TextIOBase):
    """Replacement of standard error for code that prints: text becomes JSON lines, a traceback becomes one line."""

    def __init__(self, stream: TextIO, log: logging.Logger) -> None:
        self._stream = stream
        self._log = log
        self._state = threading.local()

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor of the real stream, for code that bypasses Python."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Buffer ``text`` and log complete lines."""
        pending = getattr(self._state, "pending", "") + text
        if not pending.endswith("\n") and len(pending) < 64 * MAX_TEXT_CHARS:
            self._state.pending = pending
            return len(text)
        self._state.pending = ""
        self._state.traceback = self._log_lines(pending, getattr(self._state, "traceback", None))
        return len(text)

    def _log_lines(self, text: str, frames: list[str] | None) -> list[str] | None:
        """Log the complete lines of ``text``.

        The lines after the type of an exception are its message, which is dropped up to the end of this piece of text.

        Args:
            text: Complete lines.
            frames: The lines of an unfinished traceback; ``None`` outside of one.

        Returns:
            The lines of a traceback that is still unfinished, else ``None``.
        """
        is_message = False
        for line in text.splitlines():
            if line == _TRACEBACK:
                frames, is_message = [], False
            elif frames is None:
                if line.strip() and not is_message and not line.startswith(_BETWEEN):
                    self._log.warning("standard error output", extra={"text": without_quotes(line)[:MAX_TEXT_CHARS]})
            elif line.startswith(" ") or not line.strip():
                frames.append(line)
            else:
                kind = line.partition(":")[0][:MAX_TEXT_CHARS]
                self._log.warning("exception", extra={"error": kind, "traceback": "\n".join(frames)})
                frames, is_message = None, True
        return frames


def pass_on(line: str, log: logging.Logger) -> None:
    """Log ``line``, a JSON record of another process, unchanged."""
    log.warning("a record", extra={"json_line": line})


class _Handler(logging.StreamHandler[TextIO]):
    """Handler that drops a line that cannot be written (disk full, reader gone): an error message would fail, too."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # defined by logging
        """Do nothing."""


@contextmanager
def json_logs(level: str, *, trusted: frozenset[str] = frozenset()) -> Iterator[None]:
    """Write everything that Python prints on standard error as JSON while the block runs.

    This includes records of this package from ``level`` up, records of libraries and Python warnings from "warning" up,
    and uncaught exceptions, which end the process. DiffserveError and OSError pass through to the caller.

    Args:
        level: Lowest level of this package's records.
        trusted: Names of exception types whose messages are logged.
    """
    root, package, stderr = logging.getLogger(), logging.getLogger("diffserve"), sys.stderr
    saved = root.handlers, root.level, package.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    handler = _Handler(stderr)
    handler.setFormatter(JsonLines(trusted))
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    package.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.stderr = Lines(stderr, logging.getLogger("stderr"))
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    try:
        yield
    except (DiffserveError, OSError):
        raise
    except Exception as error:
        _uncaught(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
        sys.stderr = stderr
        logging.captureWarnings(False)
        root.handlers, root.level, package.level = saved


def without_quotes(text: str) -> str:
    """Return ``text`` without quoted parts, which may be text of a client. Mixed quotes remove more."""
    return _QUOTED.sub("…", text)


def origin_of(warning: str) -> dict[str, str]:
    """Return category, file and line of a formatted Python ``warning``, without its message."""
    match = _WARNED.match(warning)
    return match.groupdict() if match else {}


def reason_of(message: str) -> str:
    """Return the failure ``message`` without client text: for most exceptions in it only the type is kept."""
    cleaned = _RAISED.sub(lambda match: match[0] if match[1] in MACHINE else f"raised {match[1]}", message)
    return without_quotes(cleaned)[:MAX_TEXT_CHARS]


def kind_of(error: BaseException) -> str:
    """Return the class name of ``error``, with its module unless that is ``builtins``."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def words_of(error: BaseException, trusted: frozenset[str]) -> str | None:
    """Return the part of the message of ``error`` that may be logged; ``None`` if there is none."""
    if isinstance(error, DiffserveError):
        return error.code
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return without_quotes(str(error))[:MAX_TEXT_CHARS] if type(error).__name__ in trusted else None


def way_of(error: BaseException) -> str:
    """Return the tracebacks and types of ``error`` and its causes, without messages, the latest first."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < MAX_CAUSES:
        parts.append("".join([*traceback.format_tb(cause.__traceback__), kind_of(cause)]))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n\ncaused by\n\n".join(parts)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit | KeyboardInterrupt):
        logging.getLogger("diffserve").critical("uncaught exception", exc_info=(kind, error or kind(), trace))
