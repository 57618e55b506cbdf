"""Threads and event loop of the HTTP process: thread pools, the encoding queue, and the lag of the loop.

There is a pool for each kind of work, so that no kind delays another. The event loop's default pool and anyio's
threads are left to the page and its libraries.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import anyio.to_thread

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """At most ``num_threads`` threads for one kind of work, started when they are needed."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Return ``work(*arguments, **named)``, called in a thread with the caller's context variables."""
        call = partial(contextvars.copy_context().run, work, *arguments, **keywords)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


_CORES: Final = os.cpu_count() or 1

ANSWERS: Final = Pool("answers", 2 * _CORES + 2)
"""Encoding images, and building and parsing long JSON."""

FILES: Final = Pool("files", 8)
"""Reading and writing files: uploads, downloads, images that are stored for their URLs."""

LISTINGS: Final = Pool("listings", 4)
"""Queries of the database and other short reads and writes."""

KEYS: Final = Pool("keys", 1)
"""Reading the API keys, which each request waits for."""

BATCHES: Final = Pool("batches", 2)
"""Reading and checking input files of batches, and writing their output."""


AHEAD_S_PER_MPX: Final = 5.0
"""Seconds that an image of one million pixels is placed further back in the queue, about 30 times its encoding time."""


class EncodingQueue:
    """Queue with ``num_slots`` slots; waiting images are ordered by arrival time plus a penalty for their size."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def slot(self, num_pixels: int) -> AsyncIterator[None]:
        """Hold a slot for an image of ``num_pixels``."""
        await self._enter(num_pixels)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, num_pixels: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        heapq.heappush(self._waiting, (loop.time() + AHEAD_S_PER_MPX * num_pixels / 1e6, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot was granted at the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


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
