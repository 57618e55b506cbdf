"""Signals in child processes: a terminal or service manager sends them to every process of a server."""

from __future__ import annotations

import signal
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a server: each makes it finish its work first."""


def leave_stopping_to_parent() -> None:
    """Ignore the signals that end a server: this process serves it until the server closes the connection."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
