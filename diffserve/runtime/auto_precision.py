"""Which arithmetic ``auto`` means for an image model: on a CPU the faster one is found by trying, not by its flags.

A processor that multiplies bfloat16 in hardware need not be faster in it: without tiles of its own (AMX, or where a
virtual machine hides them) the same ports do the work, and every value is converted twice. So both do what a UNet does
most, a convolution and a linear layer, on one thread, and that thread's own time is compared: what else the machine
does falls on neither.
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
from diffserve.runtime.loading.adapter import read_adapter
from diffserve.runtime.loading.family import location_of
from diffserve.runtime.memory import free_bytes
from diffserve.runtime.precision import DeviceChoice, choose_device, hardware_name
from diffserve.runtime.threads import computing_on

WORTH_ITS_MEMORY: Final = 1.2
"""bfloat16 must take so many times as long as float32 before weights are held in twice the bytes."""

ROOM_SHARE: Final = 0.5
"""Of the memory that is free, for weights in float32."""

KEPT_AS: Final = "arithmetic"
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
    """``choose_device`` for the image model at ``path``: what is left to choose is float32 on a CPU where that is
    clearly faster and its weights find room; who asks for int8 wants them small. Raises what ``choose_device`` does.

    ``cache`` keeps what was found, so that the next start chooses alike and a seed gives the same picture.
    """
    choice = choose_device(device, dtype, offload)
    if dtype != "auto" or choice.device.type != "cpu" or choice.dtype != "bfloat16":
        return choice
    room = free_bytes(choice.device)
    if room is not None and 2 * stored_bytes(path) > ROOM_SHARE * room:
        return choice
    ratio = _kept_or_tried(cache)
    if ratio < WORTH_ITS_MEMORY:
        return choice
    reason = f"since this CPU takes {ratio:.1f} times as long in bfloat16"
    return choose_device(device, dtype, offload, best=("float32", reason))


def _kept_or_tried(cache: DiskCache | None) -> float:
    key = f"{hardware_name(torch.device('cpu'))} torch {torch.__version__}"
    kept = cache.read(KEPT_AS, key) if cache else None
    if isinstance(kept, float) and kept > 0.0:
        return kept
    ratio = bfloat16_over_float32()
    if cache:
        cache.write(KEPT_AS, key, ratio)
    return ratio


def stored_bytes(path: str | Path) -> int:
    """Of the safetensors files of the model at ``path``, variants and an adapter's base among them; 0: none there."""
    location = location_of(path)
    places = [location]
    with suppress(ModelLoadError):  # who loads it says what is wrong
        adapter = read_adapter(location)
        places += [adapter.base] if adapter else []
    files = [file for place in places for file in (place.rglob("*.safetensors") if place.is_dir() else [place])]
    return sum(file.stat().st_size for file in files if file.is_file())


@lru_cache(maxsize=1)
def bfloat16_over_float32() -> float:
    """The least time of this CPU for a convolution and a linear layer in bfloat16, over that in float32; a tenth of a
    second.
    """
    with computing_on(1):
        float_s, bfloat_s = _least_s([_layers(dtype) for dtype in (torch.float32, torch.bfloat16)])
    return bfloat_s / float_s


def _layers(dtype: torch.dtype) -> tuple[Callable[[], Tensor], ...]:
    """A convolution and a linear layer of a small UNet, two rows."""
    image, kernel = torch.ones(2, CHANNELS, SIDE, SIDE, dtype=dtype), torch.ones(CHANNELS, CHANNELS, 3, 3, dtype=dtype)
    hidden, weight = torch.ones(2 * SIDE**2, CHANNELS, dtype=dtype), torch.ones(4 * CHANNELS, CHANNELS, dtype=dtype)
    return (lambda: F.conv2d(image, kernel, padding=1), lambda: F.linear(hidden, weight))


@torch.inference_mode()
def _least_s(arms: Sequence[Sequence[Callable[[], Tensor]]]) -> list[float]:
    """Of each arm the sum of its calls' least times, in seconds of this thread; arms take turns."""
    least = [[float("inf")] * len(calls) for calls in arms]
    for _ in range(1 + ROUNDS):  # in the first, kernels are chosen
        for arm, calls in enumerate(arms):
            for at, call in enumerate(calls):
                started_s = time.thread_time()
                call()
                least[arm][at] = min(least[arm][at], time.thread_time() - started_s)
    return [sum(times) for times in least]
