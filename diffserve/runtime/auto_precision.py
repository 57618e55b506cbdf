"""Choice of the dtype "auto" for image models: on a CPU float32 and bfloat16 are measured.

A CPU with bfloat16 instructions need not be faster in it: without AMX the same execution ports do the work, and values
are converted twice. So a convolution and a linear layer run in both on one thread, measured in that thread's CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from diffserve.api.errors import ModelLoadError
from diffserve.disk_cache import DiskCache
from diffserve.runtime.loading.directory import read_adapter
from diffserve.runtime.loading.family import location_of
from diffserve.runtime.memory import free_bytes
from diffserve.runtime.precision import DeviceChoice, choose_device, hardware_name
from diffserve.runtime.threads import computing_on

WORTH_ITS_MEMORY: Final = 1.2
"""bfloat16 must take this many times as long as float32 to justify weights of twice the size."""

ROOM_SHARE: Final = 0.5
"""Share of the free memory for weights in float32."""

CACHE_KIND: Final = "arithmetic"
ROUNDS: Final = 5
CHANNELS: Final = 256
SIDE: Final = 16


def choose_for(
    path: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    offload: str = "none",
    cache: DiskCache | None = None,
) -> DeviceChoice:
    """Choose device and dtype for the image model at ``path`` like ``choose_device``, and measure "auto" on a CPU.

    float32 is chosen if it is clearly faster and its weights fit into memory. ``cache`` stores the measurement, so that
    the next start makes the same choice and a seed gives the same image. Raises what ``choose_device`` raises.
    """
    choice = choose_device(device, dtype, offload)
    if dtype != "auto" or choice.device.type != "cpu" or choice.dtype != "bfloat16":
        return choice
    room = free_bytes(choice.device)
    if room is not None and 2 * stored_bytes(path) > ROOM_SHARE * room:
        return choice
    key = f"{hardware_name(torch.device('cpu'))} torch {torch.__version__}"
    ratio = (cache or DiskCache(None)).read_or_compute(CACHE_KIND, key, float, bfloat16_over_float32)
    if ratio < WORTH_ITS_MEMORY:
        return choice
    reason = f"since this CPU takes {ratio:.1f} times as long in bfloat16"
    return choose_device(device, dtype, offload, best=("float32", reason))


def stored_bytes(path: str | Path) -> int:
    """Return the size of the model's safetensors files, including variants and an adapter's base; 0 without any."""
    location = location_of(path)
    places = [location]
    with suppress(ModelLoadError):  # loading reports the problem
        adapter = read_adapter(location)
        places += [adapter.base] if adapter else []
    files = [file for place in places for file in (place.rglob("*.safetensors") if place.is_dir() else [place])]
    return sum(file.stat().st_size for file in files if file.is_file())


@lru_cache(maxsize=1)
def bfloat16_over_float32() -> float:
    """Return this CPU's time for small layers in bfloat16 over that in float32, measured in 0.1 seconds."""
    with computing_on(1):
        float_s, bfloat_s = _least_s([_layers(dtype) for dtype in (torch.float32, torch.bfloat16)])
    return bfloat_s / float_s


def _layers(dtype: torch.dtype) -> tuple[Callable[[], Tensor], ...]:
    """Return calls of a convolution and a linear layer of a small UNet with two rows."""
    image, kernel = torch.ones(2, CHANNELS, SIDE, SIDE, dtype=dtype), torch.ones(CHANNELS, CHANNELS, 3, 3, dtype=dtype)
    hidden, weight = torch.ones(2 * SIDE**2, CHANNELS, dtype=dtype), torch.ones(4 * CHANNELS, CHANNELS, dtype=dtype)
    return (lambda: F.conv2d(image, kernel, padding=1), lambda: F.linear(hidden, weight))


@torch.inference_mode()
def _least_s(arms: Sequence[Sequence[Callable[[], Tensor]]]) -> list[float]:
    """Return for each arm the sum of its calls' least times in seconds of CPU time; arms take turns."""
    best = [[float("inf")] * len(calls) for calls in arms]
    for _ in range(1 + ROUNDS):  # the first round selects kernels
        for arm, calls in enumerate(arms):
            for at, call in enumerate(calls):
                started_s = time.thread_time()
                call()
                best[arm][at] = min(best[arm][at], time.thread_time() - started_s)
    return [sum(times) for times in best]
