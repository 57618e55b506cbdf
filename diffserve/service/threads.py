"""Thread pools of the HTTP process, one for each kind of work, so that no kind of work delays another.

The event loop's default pool and anyio's threads are left to the page and its libraries.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

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

BATCHES: Final = Pool("batches", 2)
"""Reading and checking input files of batches, and writing their output."""
