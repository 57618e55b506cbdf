"""How long a device works at what it is given, read without waiting for it.

On a CPU work is done when its call returns, and the host's clock measures it. CUDA and XPU devices only queue it by
then: events are queued before and after the work, and the time between them is known once the device has passed both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from diffserve.runtime.accelerators import device_module, has_streams, synchronize


class TimeSpan(Protocol):
    """A time that is being taken."""

    @property
    def is_here(self) -> bool:
        """Whether the work is done; before that there are no seconds."""

    @property
    def seconds(self) -> float:
        """How long it took."""


@dataclass(frozen=True)
class HostSpan:
    """Between two readings of the host's clock."""

    seconds: float
    is_here: bool = True


@dataclass(frozen=True, eq=False)
class DeviceSpan:
    """The time between two events in a device's stream."""

    begun: Any
    ended: Any

    @property
    def is_here(self) -> bool:
        """Whether the queue has passed both."""
        return bool(self.ended.query())

    @property
    def seconds(self) -> float:
        """Of the device; it counts in milliseconds."""
        return float(self.begun.elapsed_time(self.ended)) / 1e3


def least_seconds(
    run: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the least time in seconds that ``run`` takes on ``device`` in ``repeats`` calls, after one to warm up."""
    times = []
    for _ in range(1 + repeats):
        synchronize(device)
        started_s = clock()
        run()
        synchronize(device)
        times.append(clock() - started_s)
    return min(times[1:])


class Stopwatch:
    """Times what ``device`` is given. ``clock``: the host's, in seconds."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self._clock = clock

    def start(self) -> Callable[[], TimeSpan | None]:
        """Begin; what is returned ends it. ``None`` where only the host's clock is known and it does not tell."""
        if has_streams(self.device):
            begun = self._event()
            return lambda: DeviceSpan(begun, self._event())
        if self.device.type != "cpu":
            return lambda: None
        started_s = self._clock()
        return lambda: HostSpan(self._clock() - started_s)

    def _event(self) -> Any:
        module = device_module(self.device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self.device))
        return event
