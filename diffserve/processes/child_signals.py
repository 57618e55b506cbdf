"""Signal handling in child processes, which receive the signals that a terminal or service manager sends the server."""

from __future__ import annotations

import signal
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a server after it has finished its work."""


def leave_stopping_to_parent() -> None:
    """Ignore the signals that end a server; the child exits when the server closes the connection."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
