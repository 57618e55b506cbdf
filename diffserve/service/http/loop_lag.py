"""How long the event loop keeps everybody waiting, looked at all the time.

A callback that computes for long, or a thread that does not let go of Python, delays every request. So does a machine
without a free core, but that is nobody's fault here. What this process brought about is told apart: no more than it
computed meanwhile, and nothing of the time for which the loop was ready and had no core (Linux says that).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio.to_thread

LOOK_EVERY_S: Final = 0.05

MAX_PAGE_THREADS: Final = 4
SWITCH_EVERY_S: Final = 0.001
"""Where so many threads compute in Python, the loop has its turn again within ``MAX_PAGE_THREADS`` times this long."""

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


async def watch_loop(observe: Callable[[float, float], None]) -> None:
    """Tell ``observe`` for ever by how many seconds a timer was late, and how many of them this process computed."""
    loop = asyncio.get_running_loop()
    with _WaitForCores() as cores:
        while True:
            due_s, starved_s, computed_s = loop.time() + LOOK_EVERY_S, cores.waited_s(), time.process_time()
            await asyncio.sleep(LOOK_EVERY_S)
            late_s = max(0.0, loop.time() - due_s)
            starved_s, computed_s = cores.waited_s() - starved_s, time.process_time() - computed_s
            observe(late_s, max(0.0, min(late_s - starved_s, computed_s)))


def keep_loop_nimble() -> None:
    """Bound how long threads keep the running loop from Python. They are the page's: forty of them in turns of 5 ms
    would be its libraries' own measure."""
    sys.setswitchinterval(SWITCH_EVERY_S)
    anyio.to_thread.current_default_thread_limiter().total_tokens = MAX_PAGE_THREADS


class _WaitForCores:
    """How long this thread could have run and was not let; always 0 where the system does not say."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open(_SCHEDSTAT, os.O_RDONLY)
        except OSError:
            self._file = None

    def __enter__(self) -> _WaitForCores:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)

    def waited_s(self) -> float:
        """Seconds so far."""
        if self._file is None:
            return 0.0
        _, waited_ns, *_ = os.pread(self._file, 100, 0).split()
        return int(waited_ns) / 1e9
