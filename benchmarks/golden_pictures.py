"""Golden pictures: the SHA-256 of the pixels that every sampler paints, to hold one tree or machine against another.

    PYTHONPATH=. python benchmarks/golden_pictures.py > new.txt
    PYTHONPATH=../old python benchmarks/golden_pictures.py > old.txt; diff old.txt new.txt

It speaks only the public API, so it runs unchanged on trees whose insides differ, the one that PYTHONPATH names;
``--model`` (a name or a directory, any number of times) gives two trees the same weights. One line a picture: digest
of size and RGB bytes, model, and what was asked. About a minute on two cores.
"""

from __future__ import annotations

import argparse
import hashlib

from PIL.Image import Image

import schedulers
from diffserve import DiffusionParams, Engine, GenerationRequest, Picture

MODELS = ("embedded", "embedded-turbo")
PROMPT = "a fox next to a cactus on the beach"
NUM_STEPS = 4


def asked() -> dict[str, DiffusionParams]:
    """Label -> parameters: every sampler, every spacing and sigma schedule, and what else changes a step's rows."""
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
    """SHA-256 of a picture's size and RGB bytes, in hex."""
    return hashlib.sha256(repr(image.size).encode() + image.convert("RGB").tobytes()).hexdigest()


def digests(model: str) -> dict[str, str]:
    """Label -> digest of what ``model`` paints: each request of one batch, then variations of the first picture."""
    engine = Engine.from_pretrained(model)
    wanted = asked()
    requests = [GenerationRequest(prompt=PROMPT, seed=19, diffusion=params) for params in wanted.values()]
    results = engine.generate(requests)
    first = results[0].image
    given = Picture(width_px=first.width, height_px=first.height, data=first.convert("RGB").tobytes())
    varied = {name: DiffusionParams(sampler=name, num_steps=NUM_STEPS, strength=0.5) for name in schedulers.SAMPLERS}
    requests = [GenerationRequest(prompt=PROMPT, seed=19, diffusion=p, init_image=given) for p in varied.values()]
    results += engine.generate(requests)
    labels = [*wanted, *(f"{name} strength=0.5" for name in varied)]
    return {label: digest(result.image) for label, result in zip(labels, results, strict=True)}


def main() -> None:
    """Print the digests of all models asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"default: {' and '.join(MODELS)}")
    for model in parser.parse_args().model or MODELS:
        for label, sha256 in digests(model).items():
            print(sha256, model, label, flush=True)


if __name__ == "__main__":
    main()
