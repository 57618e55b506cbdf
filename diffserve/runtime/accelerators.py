"""Capabilities of devices, and timing of their work without waiting for it.

CUDA and XPU have the same calls in their torch modules, so code for both goes through ``device_module``. ROCm builds
call their devices ``cuda``. Work on CUDA and XPU is timed by events in the stream, on a CPU by the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

ACCELERATORS: Final = ("cuda", "xpu", "mps")
"""Device types that ``auto`` may choose."""

STREAM_DEVICES: Final = ("cuda", "xpu")
"""Device types with several streams, timed events, and figures of free memory."""


def has_streams(device: torch.device) -> bool:
    """Return whether work on ``device`` can be queued in a second stream and awaited by events."""
    return device.type in STREAM_DEVICES


def device_module(device: torch.device) -> Any:
    """Return torch's module for ``device``, such as ``torch.cuda``; only for an accelerator."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait for all work that is queued on ``device``; does nothing on a CPU."""
    if device.type in ACCELERATORS:
        torch.accelerator.synchronize(device)


def device_count(device_type: str) -> int:
    """Return the number of devices of ``device_type`` that torch finds here."""
    module = torch.get_device_module(device_type)
    return int(module.device_count()) if module.is_available() else 0


def has_float64(device: torch.device) -> bool:
    """Return whether ``device`` computes in float64: Apple's GPUs and some of Intel's do not."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def float64_device(device: torch.device) -> torch.device:
    """Return ``device`` where it computes in float64, else the CPU."""
    return device if has_float64(device) else torch.device("cpu")


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; ``None`` for any other device.

    ROCm answers the same call with the version of its instruction set, which says nothing about NVIDIA's features.
    """
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True)
class TimeSpan:
    """Measured time of work, possibly not known yet.

    Attributes:
        host_s: Duration by the host's clock, if there are no events.
        events: The first and the last event in a device's stream.
    """

    host_s: float = 0.0
    events: tuple[Any, Any] | None = None

    @property
    def is_here(self) -> bool:
        """Whether the work is done and ``seconds`` is known."""
        return self.events is None or bool(self.events[1].query())

    @property
    def seconds(self) -> float:
        """Duration in seconds; a device measures milliseconds."""
        return self.host_s if self.events is None else float(self.events[0].elapsed_time(self.events[1])) / 1e3


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
    """Measures the time of work on ``device``; ``clock`` is the host's, in seconds."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self._clock = clock

    def start(self) -> Callable[[], TimeSpan | None]:
        """Start a measurement and return a function that ends it; it returns ``None`` on devices without events."""
        if has_streams(self.device):
            first_event = self._event()
            return lambda: TimeSpan(events=(first_event, self._event()))
        if self.device.type != "cpu":
            return lambda: None
        started_s = self._clock()
        return lambda: TimeSpan(self._clock() - started_s)

    def _event(self) -> Any:
        module = device_module(self.device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self.device))
        return event
