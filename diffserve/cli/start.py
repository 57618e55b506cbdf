"""Start and end of a command process: log output, lean imports, error messages and a fast exit."""

from __future__ import annotations

import gc
import logging
import os
import sys

from diffserve.processes import bound_spinning

EXIT_USER_ERROR = 2

_owns_process = False


def own_process() -> None:
    """Mark this process as running one command and nothing else, and print log warnings as notes."""
    global _owns_process
    _owns_process = True
    bound_spinning(os.environ)
    logging.getLogger().addHandler(NoteHandler())


class NoteHandler(logging.Handler):
    """Log handler that prints each distinct warning once on standard error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message and its reason, if it has one."""
        reason = getattr(record, "reason", None)
        line = f"note: {record.getMessage()}{f': {reason}' if reason else ''}"
        if line not in self._printed:
            self._printed.add(line)
            print(line, file=sys.stderr)


def end_soon() -> None:
    """Skip garbage collection at exit, which takes up to 0.8 s, if this process runs only the command."""
    if _owns_process:
        gc.freeze()


def refuse(message: str) -> int:
    """Print ``message`` in one line on standard error and return the exit code for user errors."""
    print(f"diffserve: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USER_ERROR


def import_libraries() -> None:
    """Import torch and related libraries before a model is loaded, without their unused parts."""
    if _owns_process:
        from diffserve.runtime.loading.library_imports import import_lean

        import_lean()
