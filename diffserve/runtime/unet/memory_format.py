"""Memory format of a UNet's convolutions on CUDA: channels last where that is clearly faster, else contiguous.

Matrix units read channels last, but torch's group norm on CUDA works on contiguous tensors, so that with channels last
every norm transposes twice. Which costs less depends on the card and the network.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn

from diffserve.disk_cache import DiskCache
from diffserve.runtime.accelerators import least_seconds
from diffserve.runtime.memory import give_memory_back, without_frames
from diffserve.runtime.model import DiffusionModel
from diffserve.runtime.precision import hardware_name
from diffserve.runtime.unet.random_rows import random_call

FORMATS: Final = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CACHE_KIND: Final = "memory-format"
ROUNDS: Final = 2
"""Measurements of each format, in turns, so that other work on the card disturbs both."""

LEAST_GAIN: Final = 0.05
"""Share of the time that channels last must save. On an H200 contiguous weights save 7 % for SDXL."""

NUM_ROWS: Final = 8
"""Rows of the measured call. With fewer, a small UNet is bound by launches and both formats look equal."""

logger = logging.getLogger(__name__)


def store_as(network: nn.Module, name: str) -> None:
    """Store the convolution weights of ``network`` in the memory format ``name``, one of ``FORMATS``."""
    for weight in network.parameters():
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=FORMATS[name])


def faster_format(
    network: nn.Module, run: Callable[[], object], seconds: Callable[[Callable[[], object]], float]
) -> tuple[str, dict[str, float]]:
    """Measure ``run``, a call of ``network``, by ``seconds`` in each memory format, and leave the faster one in use.

    Returns:
        The name of the faster format ("contiguous" unless channels last saves ``LEAST_GAIN``), and the least seconds by
        name.
    """
    measured = dict.fromkeys(FORMATS, math.inf)
    for name in (*FORMATS,) * ROUNDS:
        store_as(network, name)
        measured[name] = min(measured[name], seconds(run))
    is_gain = measured["channels_last"] <= (1.0 - LEAST_GAIN) * measured["contiguous"]
    fastest = "channels_last" if is_gain else "contiguous"
    store_as(network, fastest)
    return fastest, measured


def set_memory_format(
    model: DiffusionModel,
    setting: str,
    cache: DiskCache,
    seconds: Callable[[Callable[[], object]], float] | None = None,
) -> None:
    """Store the UNet of ``model`` as ``setting`` says, where ``has_choice``.

    Args:
        model: Its UNet must not be recorded or compiled yet.
        setting: A name of ``FORMATS``, or "auto": the faster one, measured on the first start and kept in ``cache``,
            so that a seed gives the same image after a restart.
        cache: Where the measured choice is kept.
        seconds: Measures a call; by default with the device's clock.
    """
    if not has_choice(model):
        return
    name = setting
    if setting == "auto":
        key = f"{hardware_name(model.device)} torch {torch.__version__} {model.digest} {model.choice.dtype}"
        stored = cache.read(CACHE_KIND, key)
        timer = seconds or partial(least_seconds, device=model.device)
        name = stored if stored in tuple(FORMATS) else _measure(model, timer)
        cache.write(CACHE_KIND, key, name)
    store_as(model.unet.network, name)


def has_choice(model: DiffusionModel) -> bool:
    """Return whether the format matters: on CUDA in 16 bits, with all of the UNet's weights on the device."""
    is_here = model.choice.is_unet_whole and not model.unet.is_hollow
    return is_here and model.device.type == "cuda" and model.dtype != torch.float32


def _measure(model: DiffusionModel, seconds: Callable[[Callable[[], object]], float]) -> str:
    width_px, height_px = model.info.good_sizes[0]
    try:
        with torch.inference_mode():
            call = random_call(model, (height_px, width_px, model.text.window_tokens), NUM_ROWS)
        run = torch.inference_mode()(lambda: model.unet.plain(call))
        name, measured = faster_format(model.unet.network, run, seconds)
    except torch.OutOfMemoryError as error:
        without_frames(error)
        give_memory_back(model.device)
        logger.warning("no memory to measure the UNet's memory format: it is contiguous")
        return "contiguous"
    times = ", ".join(f"{1e3 * measured[each]:.1f} ms {each.replace('_', ' ')}" for each in measured)
    logger.info("the UNet's convolutions are stored %s: a call takes %s", name.replace("_", " "), times)
    return name
