"""How a command starts (is the process its own? then the libraries are imported leanly), and how it refuses."""

from __future__ import annotations

import gc
import logging
import os
import sys

from diffserve.processes.wait_policy import bound_spinning

EXIT_USER_ERROR = 2

_owns_process = False


def own_process() -> None:
    """Say that this process runs one command and nothing else."""
    global _owns_process
    _owns_process = True
    bound_spinning(os.environ)
    logging.getLogger().addHandler(Notes())


class Notes(logging.Handler):
    """What the log has to say to a person: a line for each warning on standard error, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message and, where it has one, its reason."""
        reason = getattr(record, "reason", None)
        line = f"note: {record.getMessage()}{f': {reason}' if reason else ''}"
        if line not in self._told:
            self._told.add(line)
            print(line, file=sys.stderr)


def end_soon() -> None:
    """Before this process ends: what it holds goes with it, and is not looked through for garbage first (0.8 s)."""
    if _owns_process:
        gc.freeze()


def refuse(message: str) -> int:
    """Say it in one line on standard error; the exit code of a user's mistake."""
    print(f"diffserve: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USER_ERROR


def import_libraries() -> None:
    """Before a model is loaded: torch and its friends, without what nobody here uses."""
    if _owns_process:
        from diffserve.runtime.loading.library_imports import import_lean

        import_lean()
