"""Golden images: the SHA-256 of the pixels of some hundred requests, to compare one tree or machine with another.

    PYTHONPATH=. python benchmarks/golden_pictures.py > new.txt
    PYTHONPATH=../old python benchmarks/golden_pictures.py > old.txt; diff old.txt new.txt

Every sampler from noise and from an image, spacings and sigma schedules; of the embedded model also adapters, a
ControlNet, inpainting, a refiner, DeepCache and more. It uses the public API, so it runs unchanged on trees whose
insides differ, the one that PYTHONPATH names; ``--model`` (a name or a directory, any number of times) gives two trees
the same weights, and leaves out what only the embedded model is given. One line an image: digest of size and RGB
bytes, model, and label. About a minute on two cores. Other processors may round otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL.Image import Image

import schedulers
from benchmarks.gpu.embedded_row import save_controlnet
from diffserve import DiffusionParams, Engine, GenerationRequest, Picture
from diffserve.models.controlnets import Control
from diffserve.models.loras import Lora
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings

MODELS = ("embedded", "embedded-turbo")
PROMPT = "a fox next to a cactus on the beach"
NUM_STEPS = 4
CONTROLNET = "edges"
PLAIN = EngineConfig(compile="off")
"""Packages in the cache folder round otherwise, and other programs make them."""


def labeled_params() -> dict[str, DiffusionParams]:
    """Return the parameters by label: every sampler, spacing and sigma schedule, and other options that change rows."""
    params = {name: DiffusionParams(sampler=name, num_steps=NUM_STEPS) for name in schedulers.SAMPLERS}
    for spacing in schedulers.SPACINGS:
        params[f"ddim spacing={spacing}"] = DiffusionParams(sampler="ddim", num_steps=NUM_STEPS, spacing=spacing)
    for sigmas in schedulers.SIGMA_SCHEDULES:
        params[f"dpmpp_2m {sigmas}"] = DiffusionParams(sampler="dpmpp_2m", num_steps=NUM_STEPS, sigma_schedule=sigmas)
    params["ddim eta=0.5"] = DiffusionParams(sampler="ddim", num_steps=NUM_STEPS, eta=0.5)
    params["euler guidance=1"] = DiffusionParams(sampler="euler", num_steps=NUM_STEPS, guidance_scale=1.0)
    params["euler interval"] = DiffusionParams(
        sampler="euler", num_steps=NUM_STEPS, guidance_scale=5.0, guidance_interval=(0.25, 0.75)
    )
    return params


def digest(image: Image) -> str:
    """Return the SHA-256 of an image's size and RGB bytes, in hex."""
    return hashlib.sha256(repr(image.size).encode() + image.convert("RGB").tobytes()).hexdigest()


def further(image: Picture) -> dict[str, GenerationRequest]:
    """Return requests to the embedded model by label: adapters, a ControlNet, inpainting, a refiner and more.

    ``image`` is used as the start image and as the control image.
    """
    mask = np.zeros((image.height_px, image.width_px), dtype=np.uint8)
    mask[:, image.width_px // 2 :] = 255
    half = Picture.from_array(mask)
    gift, sepia, edges = Lora("gift"), Lora("sepia", 0.6), (Control(CONTROLNET),)
    params: dict[str, dict[str, Any]] = {
        "lora gift": {"loras": (gift,)},
        "lora sepia at 0.6": {"loras": (sepia,)},
        "two loras": {"loras": (gift, sepia)},
        "controlnet": {"controlnets": edges},
        "controlnet with a lora": {"controlnets": edges, "loras": (gift,)},
        "refiner": {"switch_at": 0.5},
        "deep cache": {"cache_interval": 2},
        "guidance rescale": {"guidance_scale": 7.0, "guidance_rescale": 0.7},
        "variation": {"variation_seed": 7, "variation_strength": 0.3},
        "clip skip": {"clip_skip": 2},
        "inpaint": {"strength": 0.8},
        "inpaint euler_a": {"strength": 0.8, "sampler": "euler_a"},
    }
    requests = {}
    for label, fields in params.items():
        fields_of_images: dict[str, Any] = {"control_images": (image,)} if "controlnets" in fields else {}
        fields_of_images |= {"init_image": image, "mask_image": half} if label.startswith("inpaint") else {}
        diffusion = DiffusionParams(**{"sampler": "ddim", "num_steps": NUM_STEPS, **fields})
        requests[label] = GenerationRequest(prompt=PROMPT, seed=19, diffusion=diffusion, **fields_of_images)
    few = DiffusionParams(sampler="ddim", num_steps=NUM_STEPS)
    requests["negative prompt"] = GenerationRequest(
        prompt=PROMPT, negative_prompt="a cactus", seed=19, diffusion=few, num_images=2
    )
    requests["128x192"] = GenerationRequest(prompt=PROMPT, seed=19, diffusion=few, width_px=128, height_px=192)
    return requests


def further_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the images of ``further`` by label. A random ControlNet is written to ``folder``."""
    profile = load_settings(model="embedded", env={}).model
    plain = Engine.from_pretrained("embedded", config=PLAIN)
    save_controlnet(plain.model.unet.network, folder / CONTROLNET)
    first = plain.generate(GenerationRequest(prompt=PROMPT, seed=19, diffusion=DiffusionParams(num_steps=NUM_STEPS)))
    profile = msgspec.structs.replace(profile, controlnet_dir=str(folder), refiner=str(EMBEDDED_DIRECTORY))
    engine = Engine.from_pretrained("embedded", profile=profile, config=PLAIN)
    requests = further(first[0].picture)
    results = engine.generate(list(requests.values()))
    labels = [label for label, request in requests.items() for _ in range(request.num_images)]
    names = [f"{label} {labels[:place].count(label)}" for place, label in enumerate(labels)]
    return {name: digest(result.image) for name, result in zip(names, results, strict=True)}


def digests(model: str) -> dict[str, str]:
    """Return the digests by label of ``model``: each request of one batch, then variations of the first image."""
    engine = Engine.from_pretrained(model, config=PLAIN)
    params_by_label = labeled_params()
    requests = [GenerationRequest(prompt=PROMPT, seed=19, diffusion=params) for params in params_by_label.values()]
    results = engine.generate(requests)
    first = results[0].image
    init_image = Picture(width_px=first.width, height_px=first.height, data=first.convert("RGB").tobytes())
    varied = {name: DiffusionParams(sampler=name, num_steps=NUM_STEPS, strength=0.5) for name in schedulers.SAMPLERS}
    requests = [GenerationRequest(prompt=PROMPT, seed=19, diffusion=p, init_image=init_image) for p in varied.values()]
    results += engine.generate(requests)
    labels = [*params_by_label, *(f"{name} strength=0.5" for name in varied)]
    return {label: digest(result.image) for label, result in zip(labels, results, strict=True)}


def main() -> None:
    """Print the digests of all requested models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"default: {' and '.join(MODELS)}")
    models = parser.parse_args().model
    for model in models or MODELS:
        for label, sha256 in digests(model).items():
            print(sha256, model, label, flush=True)
    if not models:
        with tempfile.TemporaryDirectory() as folder:
            for label, sha256 in further_digests(Path(folder)).items():
                print(sha256, "embedded", label, flush=True)


if __name__ == "__main__":
    main()
