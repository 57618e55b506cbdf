"""Evaluation of the parts: the autoencoder, the preview decoder, the checker, and the time per image."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import torch
from torch.utils.flop_counter import FlopCounterMode

from diffserve.engine import Engine
from diffserve.experiments.metrics.fidelity import psnr_db
from diffserve.runtime import DiffusionModel
from diffserve.training.eval.captions import DISTILLED, TEACHER, paint, painter
from diffserve.world.checker import check
from diffserve.world.render import render
from diffserve.world.scenes import scenes

SEED = 5
NUM_SCENES = 64
TIMED = 5
PROMPT = "a fox in the snow"
TIMED_WAYS = {
    "4 steps without guidance": DISTILLED,
    "12 steps": msgspec.structs.replace(TEACHER, num_steps=12),
    "25 steps": TEACHER,
}


def round_trip_db(model: DiffusionModel, num_scenes: int = NUM_SCENES) -> list[float]:
    """Compute the PSNR in dB of every held-out scene after the autoencoder's encoder and decoder."""
    pictures = [render(scene) for scene in islice(scenes(SEED, held_out=True), num_scenes)]
    return [psnr_db(model.vae.decode(model.vae.encode(picture[None]))[0], picture) for picture in pictures]


def preview_db(model: DiffusionModel, num_scenes: int = NUM_SCENES) -> list[float]:
    """Compute the PSNR in dB of the preview of every held-out scene against the autoencoder's decode."""
    values = []
    for scene in islice(scenes(SEED, held_out=True), num_scenes):
        latents = model.vae.encode(render(scene)[None])
        values.append(psnr_db(model.preview(latents), model.vae.decode(latents)))
    return values


def giga_operations(call: Callable[[], Any]) -> float:
    """Count the floating-point operations of ``call`` in units of 10^9 (2 x multiply-add)."""
    with FlopCounterMode(display=False) as counter:
        call()
    return round(float(counter.get_total_flops()) / 1e9, 3)


def times_cheaper(model: DiffusionModel) -> float:
    """Compute how many times fewer operations a preview takes than the autoencoder's decode, at the native size."""
    width_px, height_px = model.info.good_sizes[0]
    factor = model.info.vae_factor
    latents = torch.zeros(1, model.info.latent_channels, height_px // factor, width_px // factor, device=model.device)
    return giga_operations(lambda: model.vae.decode(latents)) / giga_operations(lambda: model.preview(latents))


def median_s(calls: Iterable[Callable[[], Any]]) -> float:
    """Measure the median seconds of ``calls``, without the first one."""
    taken = []
    for call in calls:
        started_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started_s)
    return statistics.median(taken[1:])


def checker_ms(num_scenes: int = 20) -> float:
    """Measure the median milliseconds of the checker on a clean rendering, without the first one."""
    selected = islice(scenes(SEED, held_out=True), num_scenes + 1)
    return 1e3 * median_s(partial(check, render(scene), scene) for scene in selected)


def painting_seconds(engine: Engine) -> dict[str, float]:
    """Measure the median seconds of a single image from request to pixels: TIMED images after a first one."""
    return {
        name: round(median_s(partial(paint, engine, [PROMPT], how, first_seed=i) for i in range(TIMED + 1)), 3)
        for name, how in TIMED_WAYS.items()
    }


def evaluate(engine: Engine) -> dict[str, Any]:
    """Measure all parts as one JSON document; ``preview`` is None without a preview decoder."""
    model = engine.model
    preview = None
    if model.previewer is not None:
        fidelity = statistics.mean(preview_db(model))
        preview = {"psnr_db": round(fidelity, 2), "times_cheaper": round(times_cheaper(model), 1)}
    return {
        **painter(engine),
        "device": engine.info.device,
        "dtype": engine.info.dtype,
        "cores": os.cpu_count(),
        "round_trip_db": round(statistics.mean(round_trip_db(model)), 2),
        "preview": preview,
        "checker_ms": round(checker_ms(), 1),
        "seconds": painting_seconds(engine),
    }
