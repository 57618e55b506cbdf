"""Evaluation of the shipped upscaler: PSNR against Lanczos on held-out scenes, in pairs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from statistics import mean
from typing import Any, Final

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from diffserve.experiments.intervals import bootstrap_interval
from diffserve.experiments.metrics.fidelity import psnr_db
from diffserve.training.upscaler_sprites import FACTOR, render_large
from diffserve.training.upscaler_training import reduce, round_trip
from diffserve.world.captions import HELD_OUT_SEED
from diffserve.world.render import render
from diffserve.world.scenes import Scene, scenes

Pixels = NDArray[np.uint8]
NUM_SCENES: Final = 96
BASELINES: Final = {"lanczos": Image.Resampling.LANCZOS, "bicubic": Image.Resampling.BICUBIC}


def enlarge_by_network(net: nn.Module, pixels: Pixels) -> Pixels:
    """Enlarge an image (H, W, 3) by a network that works in 0..1."""
    parameter = next(net.parameters())
    with torch.inference_mode():
        x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].to(parameter) / 255
        large = net(x)[0].float().clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    enlarged: Pixels = large
    return enlarged


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


def evaluate(net: nn.Module, vae: AutoencoderKL | None = None, count: int = NUM_SCENES) -> dict[str, Any]:
    """Measure ``count`` held-out scenes as one JSON document: mean PSNR in dB, and the paired gain over Lanczos."""
    selected = list(islice(scenes(HELD_OUT_SEED, held_out=True), count))
    truths = [render_large(scene) for scene in selected]
    document: dict[str, Any] = {"count": count, "factor": FACTOR, "inputs": {}}
    for kind, draw in inputs(vae).items():
        small = [draw(scene) for scene in selected]
        painted = {"upscaler": [enlarge_by_network(net, pixels) for pixels in small]}
        painted |= {name: [enlarge(pixels, of) for pixels in small] for name, of in BASELINES.items()}
        scores = {
            name: [psnr_db(image, truth) for image, truth in zip(images, truths, strict=True)]
            for name, images in painted.items()
        }
        gains = [ours - theirs for ours, theirs in zip(scores["upscaler"], scores["lanczos"], strict=True)]
        low, high = bootstrap_interval(gains)
        row = {f"{name}_db": round(mean(values), 3) for name, values in scores.items()}
        document["inputs"][kind] = row | {
            "gain_db": round(mean(gains), 3),
            "gain_interval_db": [round(low, 3), round(high, 3)],
            "worse_than_lanczos": sum(gain < 0 for gain in gains),
        }
    return document
