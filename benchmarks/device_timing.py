"""Timing on a device: calls by CUDA events, the peak of a matrix product, copy bandwidth, and the cost of a launch."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from diffserve.runtime.accelerators import synchronize

PEAK_SIZE: Final = {"cuda": 8192, "cpu": 2048}
"""Rows of the square matrices whose product is timed: large enough to reach the rate of the matrix units."""

PEAK_REPEATS: Final = {"cuda": 25, "cpu": 8}

COPY_BYTES: Final = {"cuda": 1 << 31, "cpu": 1 << 26}
"""Several times the largest cache, so that the copy goes through memory."""

LAUNCHES: Final = 2000


def call_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` calls, after one that is not timed.

    On CUDA the calls are queued one behind the other and timed by events, so reading the clock is not part of them.
    """
    call()
    if device.type != "cuda":
        return [_wall_seconds(call, device) for _ in range(repeats)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    synchronize(device)
    with torch.cuda.device(device):
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
    synchronize(device)
    return [1e-3 * start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def _wall_seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started_s = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started_s


def peak_flops(device: torch.device, dtype: torch.dtype, *, size: int = 0) -> float:
    """Operations a second of a product of square matrices of random numbers, 2 x multiply-add.

    Random numbers, because products of zeros run faster. The median of many products; on a CPU, which has other work,
    the fastest. ``size``: rows of a matrix; 0: ``PEAK_SIZE``.
    """
    size = size or PEAK_SIZE.get(device.type, PEAK_SIZE["cuda"])
    repeats = PEAK_REPEATS.get(device.type, PEAK_REPEATS["cuda"])
    left, right = (torch.randn((size, size), device=device).to(dtype) for _ in range(2))
    seconds = call_seconds(lambda: left @ right, device, repeats)
    return 2.0 * size**3 / (min(seconds) if device.type == "cpu" else statistics.median(seconds))


def copy_bytes_per_s(device: torch.device, *, num_bytes: int = 0, repeats: int = 10) -> float:
    """Bytes a second of a copy from the device's memory to itself: the median, bytes read plus bytes written."""
    num_bytes = num_bytes or COPY_BYTES.get(device.type, COPY_BYTES["cuda"])
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / statistics.median(call_seconds(lambda: target.copy_(source), device, repeats))


def launch_seconds(device: torch.device, *, launches: int = LAUNCHES) -> float:
    """Seconds that Python and torch take to launch one kernel: many additions to a tensor of one number."""
    number = torch.zeros(1, device=device)

    def launch_all() -> None:
        for _ in range(launches):
            number.add_(1.0)

    launch_all()
    return min(_wall_seconds(launch_all, device) for _ in range(3)) / launches
