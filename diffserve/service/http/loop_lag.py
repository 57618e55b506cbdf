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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    with _waiting_for_cores() as waited_s:
        while True:
            due_s, starved_s, computed_s = loop.time() + LOOK_EVERY_S, waited_s(), time.process_time()
            await asyncio.sleep(LOOK_EVERY_S)
            late_s = max(0.0, loop.time() - due_s)
            starved_s, computed_s = waited_s() - starved_s, time.process_time() - computed_s
            observe(late_s, max(0.0, min(late_s - starved_s, computed_s)))


def keep_loop_nimble() -> None:
    """Bound how long threads keep the running loop from Python. They are the page's: forty of them in turns of 5 ms
    would be its libraries' own measure.
    """
    sys.setswitchinterval(SWITCH_EVERY_S)
    anyio.to_thread.current_default_thread_limiter().total_tokens = MAX_PAGE_THREADS


@contextmanager
def _waiting_for_cores() -> Iterator[Callable[[], float]]:
    """How many seconds so far this thread could have run and was not let; always 0 where the system does not say."""
    try:
        file = os.open(_SCHEDSTAT, os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(file, 100, 0).split()[1]) / 1e9
    finally:
        os.close(file)
