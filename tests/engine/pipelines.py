"""diffusers' own pipelines on the tiny models: the judge of parity."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from tests.device import DEVICE
from tests.schedulers.diffusers_samplers import ARGUMENTS, scheduler_class

SCHEDULERS = ("ddim", "ddpm", "dpmpp_2m", "euler")
"""Samplers that most tests compare."""
PIPELINES = {"sd15": "StableDiffusionPipeline", "sd2": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}
SPACING = {"sd2": "trailing"}


@cache
def load_pipeline(name: str, directory: Path) -> Any:
    """``name`` ("StableDiffusionPipeline", ...) on the model in ``directory``, float32, silent; loaded once."""
    optional = {} if "XL" in name else {"safety_checker": None, "requires_safety_checker": False}
    with hushed("transformers", "diffusers"):
        pipeline = import_quietly("diffusers", name).from_pretrained(str(directory), **optional).to(DEVICE)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def use_sampler(pipeline: Any, sampler: str, spacing: str) -> None:
    """Give ``pipeline`` the diffusers class of ``sampler``, configured by the model."""
    if not hasattr(pipeline, "published_scheduler"):  # the first sampler replaces the one that came with the model
        pipeline.published_scheduler = dict(pipeline.scheduler.config)
    arguments = {"clip_sample": False, **ARGUMENTS.get(sampler, {})}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="__array", category=DeprecationWarning)  # of diffusers
        pipeline.scheduler = scheduler_class(sampler).from_config(
            pipeline.published_scheduler, timestep_spacing=spacing, **arguments
        )


def spacing_of(kind: str) -> str:
    """Return the timestep spacing of the tiny model's scheduler."""
    return SPACING.get(kind, "leading")


def pipeline_latents(
    pipeline: Any, request: GenerationRequest, kind: str, *, keep_scheduler: bool = False, **inputs: Any
) -> NDArray[np.float32]:
    """Return the final latents (C, h, w) of ``pipeline`` for ``request``, with its scheduler if ``keep_scheduler``."""
    params = request.diffusion
    assert params.sampler is not None
    assert request.seed is not None
    if not keep_scheduler:
        use_sampler(pipeline, params.sampler, spacing_of(kind))
    size = (
        {}
        if "image" in inputs and "mask_image" not in inputs
        else {"width": request.width_px, "height": request.height_px}
    )
    with hushed("transformers", "diffusers"), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="__array__ implementation", category=DeprecationWarning
        )  # raised in diffusers
        output = pipeline(
            request.prompt,
            guidance_scale=params.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            output_type="latent",
            **{"negative_prompt": request.negative_prompt, "num_inference_steps": params.num_steps} | size | inputs,
        )
    latents: NDArray[np.float32] = output.images[0].float().cpu().numpy()
    return latents


def image_request(kind: str, sampler: str, seed: int, **fields: Any) -> GenerationRequest:
    """Return a guided request of ten steps; ``fields`` override it, including those of DiffusionParams."""
    request_fields = {name: fields.pop(name) for name in list(fields) if name in DiffusionParams.__struct_fields__}
    params = {"num_steps": 10, "guidance_scale": 5.0, "spacing": spacing_of(kind), "sampler": sampler, **request_fields}
    defaults: dict[str, Any] = {
        "prompt": "the red fox",
        "negative_prompt": "cat",
        "width_px": 64,
        "height_px": 64,
        "return_latents": True,
    }
    return GenerationRequest(seed=seed, diffusion=DiffusionParams(**params), **{**defaults, **fields})
