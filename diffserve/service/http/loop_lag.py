"""Measurement of event loop lag.

The part that this process causes is reported separately: at most the CPU time that it used meanwhile, without the
time in which the loop was runnable but had no core (Linux reports that).
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
"""Interpreter switch interval: the loop waits at most ``MAX_PAGE_THREADS`` times as long for busy page threads."""

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


async def watch_loop(observe: Callable[[float, float], None]) -> None:
    """Call ``observe`` forever with a timer's delay and the part of it that this process caused, in seconds."""
    loop = asyncio.get_running_loop()
    with _waiting_for_cores() as waited_s:
        while True:
            due_s, starved_s, computed_s = loop.time() + LOOK_EVERY_S, waited_s(), time.process_time()
            await asyncio.sleep(LOOK_EVERY_S)
            late_s = max(0.0, loop.time() - due_s)
            starved_s, computed_s = waited_s() - starved_s, time.process_time() - computed_s
            observe(late_s, max(0.0, min(late_s - starved_s, computed_s)))


def keep_loop_nimble() -> None:
    """Bound how long threads can keep the running loop from Python, by thread count and switch interval."""
    sys.setswitchinterval(SWITCH_EVERY_S)
    anyio.to_thread.current_default_thread_limiter().total_tokens = MAX_PAGE_THREADS


@contextmanager
def _waiting_for_cores() -> Iterator[Callable[[], float]]:
    """Yield a function that returns how long this thread waited for a core, in seconds; 0 if unknown."""
    try:
        file = os.open(_SCHEDSTAT, os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(file, 100, 0).split()[1]) / 1e9
    finally:
        os.close(file)
