"""Replays a recorded trace with a real engine, open loop, in the ticking thread, without HTTP; idle time is skipped."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from benchmarks.trace import Recorded
from diffserve.api.types import TERMINAL, Event, ImageFinished
from diffserve.engine import Engine
from diffserve.engine.image.task import TickTrace


class Clock(Protocol):
    """Clock in seconds that can skip idle time."""

    def __call__(self) -> float:
        """Now."""

    def skip_to(self, until_s: float) -> None:
        """Nothing is to do before ``until_s``."""


class WallTime:
    """Wall clock that skips idle time."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self._read() + self._skipped_s

    def skip_to(self, until_s: float) -> None:
        """Nothing is to do before ``until_s``."""
        self._skipped_s += max(0.0, until_s - self())

    def _read(self) -> float:
        return time.perf_counter()


class WorkingTime(WallTime):
    """Clock of the CPU time of this thread that skips idle time."""

    def _read(self) -> float:
        return time.thread_time()


class RealTime(WallTime):
    """Wall clock that sleeps through idle time."""

    def skip_to(self, until_s: float) -> None:
        """Sleep until ``until_s``."""
        time.sleep(max(0.0, until_s - self()))


class PaintedTrace(NamedTuple):
    """Result of running a trace.

    ``served`` has every request with its latency; ``ticks`` are those still in the engine's history; the digests are
    SHA-256 of the images of each request in order.
    """

    served: list[Recorded]
    ticks: list[TickTrace]
    digests: list[str]


Watch = Callable[[Event, float], None]
"""Told of every event, and when it came."""


def run(engine: Engine, clock: Clock, trace: Sequence[Recorded], watch: Watch | None = None) -> PaintedTrace:
    """Run ``trace`` on the ``clock`` of the ``engine``.

    A request enters between two ticks at its arrival time, from which its latency counts.

    Raises:
        RuntimeError: an image is missing.
    """
    began_s, first_tick = clock(), engine.scheduler.num_ticks
    coming = list(enumerate(trace))[::-1]
    over: dict[str, float] = {}
    digests = {f"{first_tick} {place}": hashlib.sha256() for place in range(len(trace))}
    num_painted = 0
    while coming or engine.has_work:
        if not engine.has_work:
            clock.skip_to(began_s + coming[-1][1].arrival_s)
        while coming and began_s + coming[-1][1].arrival_s <= clock():
            place, request = coming.pop()
            engine.submit(request.request(f"{first_tick} {place}"))
        for event in engine.tick():
            if watch is not None:
                watch(event, clock())
            if isinstance(event, ImageFinished):
                num_painted += 1
                digests[event.request_id].update(event.result.picture.data)
            if isinstance(event, TERMINAL):
                over[event.request_id] = clock() - began_s
    if num_painted != sum(request.num_images for request in trace):
        raise RuntimeError(f"{num_painted} images were painted for {len(trace)} requests")
    served = [
        msgspec.structs.replace(request, latency_s=over[f"{first_tick} {place}"] - request.arrival_s)
        for place, request in enumerate(trace)
    ]
    ticks = [tick for tick in engine.trace if tick.tick > first_tick]
    return PaintedTrace(served, ticks, [digest.hexdigest() for digest in digests.values()])
