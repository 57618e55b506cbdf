"""Evaluation of the shipped upscaler: PSNR against Lanczos on held-out scenes, in pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from PIL import Image

from diffserve.engine import Engine
from diffserve.experiments.intervals import bootstrap_interval
from diffserve.experiments.metrics.fidelity import psnr_db
from diffserve.runtime import choose_device
from diffserve.runtime.upscaling.network import Upscaler
from diffserve.training.upscaler_sprites import FACTOR, render_large
from diffserve.training.upscaler_training import reduce, round_trip
from diffserve.world.captions import HELD_OUT_SEED
from diffserve.world.render import render
from diffserve.world.scenes import Scene, scenes

Pixels = NDArray[np.uint8]
Enlarge = Callable[[Pixels], Pixels]
NUM_SCENES: Final = 96
FIRST: Final = 8
"""Number of scenes whose gains are recorded one by one."""

BASELINES: Final = {"lanczos": Image.Resampling.LANCZOS, "bicubic": Image.Resampling.BICUBIC}


def enlarge(pixels: Pixels, resampling: Image.Resampling) -> Pixels:
    """Enlarge an image (H, W, 3) by ``FACTOR`` with a filter of Pillow."""
    size = (pixels.shape[1] * FACTOR, pixels.shape[0] * FACTOR)
    return np.asarray(Image.fromarray(pixels).resize(size, resampling))


def inputs(vae: AutoencoderKL | None = None) -> dict[str, Callable[[Scene], Pixels]]:
    """Return the kinds of inputs at 128 px by name; "autoencoder" is among them if ``vae`` is given."""
    kinds: dict[str, Callable[[Scene], Pixels]] = {
        "rendered": render,
        "reduced by the mean": lambda scene: reduce(render_large(scene), Image.Resampling.BOX),
    }
    if vae is not None:
        kinds["autoencoder"] = lambda scene: round_trip(vae, render(scene)[None])[0]
    return kinds


def evaluate(file: Path, engine: Engine, count: int = NUM_SCENES) -> dict[str, Any]:
    """Measure a served upscaler on held-out scenes; returns one JSON document.

    Args:
        file: The upscaler.
        engine: Engine of the embedded model, whose autoencoder makes one kind of input.
        count: Number of scenes.

    Returns:
        Mean PSNR in dB, and the paired gain over Lanczos with its 95 % interval, for each kind of input.
    """
    served = Upscaler.load(file, choose_device("cpu", "float32"))
    document = compare(served.upscale, engine.model.vae.network, count)
    return {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()} | document


def compare(enlarge_by_network: Enlarge, vae: AutoencoderKL | None = None, count: int = NUM_SCENES) -> dict[str, Any]:
    """Measure a function that enlarges images (H, W, 3) four times on ``count`` held-out scenes."""
    selected = list(islice(scenes(HELD_OUT_SEED, held_out=True), count))
    truths = [render_large(scene) for scene in selected]
    document: dict[str, Any] = {"count": count, "factor": FACTOR, "inputs": {}}
    for kind, draw in inputs(vae).items():
        small = [draw(scene) for scene in selected]
        painted = {"upscaler": [enlarge_by_network(pixels) for pixels in small]}
        painted |= {name: [enlarge(pixels, of) for pixels in small] for name, of in BASELINES.items()}
        scores = {
            name: [psnr_db(image, truth) for image, truth in zip(images, truths, strict=True)]
            for name, images in painted.items()
        }
        gains = [score - baseline for score, baseline in zip(scores["upscaler"], scores["lanczos"], strict=True)]
        low, high = bootstrap_interval(gains)
        row = {f"{name}_db": round(mean(values), 3) for name, values in scores.items()}
        document["inputs"][kind] = row | {
            "gain_db": round(mean(gains), 3),
            "gain_interval_db": [round(low, 3), round(high, 3)],
            "worse_than_lanczos": sum(gain < 0 for gain in gains),
            "first_gains_db": [round(gain, 3) for gain in gains[:FIRST]],
        }
    return document
