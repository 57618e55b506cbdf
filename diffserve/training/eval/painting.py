"""Image generation for evaluations, and the identity of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine import Engine

BEST_GUIDANCE = 3.0
TEACHER = DiffusionParams(sampler="dpmpp_2m_sde", num_steps=25, guidance_scale=BEST_GUIDANCE)
"""Serving defaults of the model, see ``configs/embedded.toml``."""
DISTILLED = DiffusionParams(sampler="ddim", num_steps=4, guidance_scale=1.0)


def paint(
    engine: Engine,
    prompts: Sequence[str],
    how: DiffusionParams = TEACHER,
    *,
    first_seed: int = 0,
    seeds: Iterable[int] | None = None,
    negatives: Iterable[str] = repeat(""),
    size: tuple[int | None, int | None] = (None, None),
) -> list[NDArray[np.uint8]]:
    """Generate an image (height, width, 3) in uint8 for each prompt.

    Prompt i uses seed ``first_seed`` + i (or + ``seeds[i]``); ``size`` is (width, height), by default the native one.
    """
    requests = [
        GenerationRequest(
            prompt=words,
            negative_prompt=negative,
            seed=first_seed + offset,
            diffusion=how,
            width_px=size[0],
            height_px=size[1],
        )
        for words, negative, offset in zip(prompts, negatives, seeds or count(), strict=False)
    ]
    return [result.pixels for result in engine.generate(requests)]


def painter(engine: Engine) -> dict[str, Any]:
    """Return the head of every document: model and digest of its weights."""
    return {"model": engine.info.model_id, "digest": engine.info.digest}
