"""Logs as one JSON object per line on standard error: ids, counts, times and places in the code, never a prompt.

What an exception or a library says may quote what a client sent. So of an exception its kind and its way through the
code are kept, and its words only where the machine is speaking; what stands in quotes is left out everywhere.
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
"""Kinds whose words come from torch or the device in an engine process, where no file is named after a prompt."""

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_QUOTED: Final = re.compile(r"""(?<!\w)["'`].*["'`]|(?<!\w)["'`].*$""", re.DOTALL)
_RAISED: Final = re.compile(r"\braised (?:\w+\.)*(\w+): .*$", re.DOTALL)
_WARNED: Final = re.compile(r"(?P<file>.{1,1000}?):(?P<line>\d{1,9}): (?P<category>\w+):")
_TRACEBACK: Final = "Traceback (most recent call last):"
_BETWEEN: Final = ("During handling of the above exception", "The above exception was the direct cause")


class JsonLines(logging.Formatter):
    """A record as one line: ts, level, event, what was given as ``extra``, and where an exception came from.

    trusted   kinds of exceptions whose words are kept
    """

    def __init__(self, trusted: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._trusted = trusted

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its newline; control characters are escaped by JSON."""
        finished: str | None = getattr(record, "json_line", None)
        if finished is not None:
            return finished
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
            words = words_of(error, self._trusted)
            line |= {} if words is None else {"reason": words}
        return msgspec.json.encode(line, enc_hook=str).decode()


class Lines(TextIOBase):
    """Standard error for everybody who knows of no logs: what is written becomes JSON lines, tracebacks one each."""

    def __init__(self, beneath: TextIO, log: logging.Logger) -> None:
        self._beneath = beneath
        self._log = log
        self._state = threading.local()

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """Of the stream beneath, for those who write past Python."""
        return self._beneath.fileno()

    def write(self, text: str) -> int:
        """Take a piece; whole lines are told at once."""
        whole = getattr(self._state, "started", "") + text
        if not whole.endswith("\n") and len(whole) < 64 * MAX_TEXT_CHARS:
            self._state.started = whole
            return len(text)
        self._state.started = ""
        self._state.traceback = self._take(whole, getattr(self._state, "traceback", None))
        return len(text)

    def _take(self, text: str, frames: list[str] | None) -> list[str] | None:
        """Tell what is whole; the lines of a traceback that is not, ``None`` outside of one.

        The lines after an exception's own are its words: they end with the piece in which they came.
        """
        is_words = False
        for line in text.splitlines():
            if line == _TRACEBACK:
                frames, is_words = [], False
            elif frames is None:
                if line.strip() and not is_words and not line.startswith(_BETWEEN):
                    self._log.warning("said on standard error", extra={"text": without_quotes(line)[:MAX_TEXT_CHARS]})
            elif line.startswith(" ") or not line.strip():
                frames.append(line)
            else:
                kind = line.partition(":")[0][:MAX_TEXT_CHARS]
                self._log.warning("exception", extra={"error": kind, "traceback": "\n".join(frames)})
                frames, is_words = None, True
        return frames


def pass_on(line: str, log: logging.Logger) -> None:
    """Write ``line``, which is a record of another process as JSON already."""
    log.warning("a record", extra={"json_line": line})


class _Handler(logging.StreamHandler[TextIO]):
    """A line that cannot be written, for the disk is full or nobody reads, is lost: telling that would be another."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's own name
        """Nothing."""


@contextmanager
def json_logs(level: str, *, trusted: frozenset[str] = frozenset()) -> Iterator[None]:
    """For the length of the block, all that Python says on standard error is JSON: our own records from ``level`` up,
    others' and warnings from warnings up, and what nobody caught, which ends the process where it leaves the block. A
    DiffserveError or an OSError goes on to whoever tells it to a person."""
    root, ours, before = logging.getLogger(), logging.getLogger("diffserve"), sys.stderr
    was = root.handlers, root.level, ours.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    handler = _Handler(before)
    handler.setFormatter(JsonLines(trusted))
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    ours.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.stderr = Lines(before, logging.getLogger("stderr"))
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
        sys.stderr = before
        logging.captureWarnings(False)
        root.handlers, root.level, ours.level = was


def without_quotes(text: str) -> str:
    """``text`` without what stands in quotes, which may be somebody's words; where quotes are mixed, with less."""
    return _QUOTED.sub("…", text)


def origin_of(warning: str) -> dict[str, str]:
    """Of a ``warning`` as Python writes it its category, file and line; its words may be anybody's."""
    found = _WARNED.match(warning)
    return found.groupdict() if found else {}


def reason_of(message: str) -> str:
    """The message of a failure that is ours: of an exception in it only the kind, but for the machine's own words."""
    shown = _RAISED.sub(lambda found: found[0] if found[1] in MACHINE else f"raised {found[1]}", message)
    return without_quotes(shown)[:MAX_TEXT_CHARS]


def kind_of(error: BaseException) -> str:
    """The class of ``error`` with its module, where that says something."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def words_of(error: BaseException, trusted: frozenset[str]) -> str | None:
    """What may be repeated of what ``error`` says; ``None``: nothing."""
    if isinstance(error, DiffserveError):
        return error.code
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return without_quotes(str(error))[:MAX_TEXT_CHARS] if type(error).__name__ in trusted else None


def way_of(error: BaseException) -> str:
    """Where ``error`` came from, and the kinds that caused it, the latest first; without words."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < MAX_CAUSES:
        parts.append("".join([*traceback.format_tb(cause.__traceback__), kind_of(cause)]))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n\ncaused by\n\n".join(parts)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit | KeyboardInterrupt):
        logging.getLogger("diffserve").critical("nobody caught this", exc_info=(kind, error or kind(), trace))
