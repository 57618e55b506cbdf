"""How a picture is painted: what a request may say of it, and what an answer tells."""

from __future__ import annotations

from typing import Literal, TypedDict

import msgspec


class RewriterFields(TypedDict, total=False):
    """How a wish is to be rewritten before it is painted."""

    style: str
    seed: int
    system: str
    force: bool


class ImageFields(TypedDict, total=False):
    """What a request for pictures may say beside its prompt; what is left out is as the model does best.

    size               WIDTHxHEIGHT in pixels, or auto
    guidance_interval  (from, to) as fractions of the steps, in which the prompt is weighed
    cache_interval     DeepCache: the whole UNet runs at every so many-th evaluation only; 1: at each
    token_merging      share of the tokens merged in self-attention, 0 to 0.75 in steps of 0.05
    similarity_threshold  begin from a kept picture of a prompt that is at least so similar, above 0 to 1
    noise_source       whose numbers the noise is: a generator's on the CPU for each picture, or CUDA's on any device
    seed               of the first picture; left out: drawn, and told in the answer
    prompt_rewriter    whether the language model turns the wish into a prompt first
    """

    model: str
    negative_prompt: str
    n: int
    size: str
    quality: str
    seed: int
    sampler: str
    sigma_schedule: str
    spacing: str
    num_inference_steps: int
    guidance_scale: float
    eta: float
    guidance_interval: tuple[float, float]
    cache_interval: int
    token_merging: float
    similarity_threshold: float
    noise_source: Literal["cpu", "device"]
    output_format: Literal["png", "jpeg", "webp"]
    output_compression: int
    prompt_rewriter: Literal["off", "auto", "force"] | RewriterFields
    user: str


class StreamedImageFields(ImageFields, total=False):
    """The same, with 0 to 3 previews of each picture on the way."""

    partial_images: int


class ImageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as OpenAI counts them, rows of the UNet that were computed, and pictures for which none had to be."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    num_evaluations: int = 0
    num_cached: int = 0


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How pictures were painted and delivered; ``size`` as WIDTHxHEIGHT in pixels."""

    id: str
    model: str
    model_digest: str
    sampler: str
    sigma_schedule: str | None
    spacing: str
    num_inference_steps: int
    guidance_scale: float
    eta: float
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    cache_interval: int = 1
    token_merging: float = 0.0
    similarity_threshold: float | None = None
    noise_source: Literal["cpu", "device"] = "cpu"
    size: str
    output_format: str
    quality: str
    usage: ImageUsage
    warnings: tuple[str, ...] = ()
