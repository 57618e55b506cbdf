"""What may stand in the body of ``POST /v1/images/generations``, and what is said when something else does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from diffserve.service.http.bodies import Body
from diffserve.service.texts.schemas import RewriterChoice, RewriterMode
from diffserve.types import (
    MAX_CACHE_INTERVAL,
    MAX_GUIDANCE,
    MAX_IMAGES,
    MAX_MERGING,
    MAX_PROMPT_CHARS,
    MAX_SEED,
    NoiseSource,
)

MAX_STEPS = 1000
MAX_NAME_CHARS = 64

REFUSED: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "latents", "kwargs", "extra_body"),
        "tensors and raw pipeline arguments are not taken over HTTP.",
    ),
    **dict.fromkeys(
        ("image", "images", "init_image", "init_images", "mask", "strength", "denoising_strength"),
        "this endpoint paints from text alone.",
    ),
    **dict.fromkeys(("callback_url", "webhook", "webhook_url"), "the server calls nobody back; wait for the answer."),
}

Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Field(ge=0.0, le=MAX_GUIDANCE)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Interval = Annotated[
    tuple[Fraction, Fraction], Field(description="Part of the steps that is guided; omitted: all of it.")
]
Every = Annotated[
    int,
    Field(
        ge=1,
        le=MAX_CACHE_INTERVAL,
        description="DeepCache: the whole UNet at every so many-th evaluation; omitted: at each.",
    ),
]
Merging = Annotated[
    float,
    Field(ge=0.0, le=MAX_MERGING, description="Share of tokens merged in self-attention, by 0.05; omitted: none."),
]
Similarity = Annotated[
    float,
    Field(gt=0.0, le=1.0, description="Begin from a kept picture of so similar a prompt; omitted: always from noise."),
]
Noise = Annotated[
    NoiseSource, Field(description="A CPU generator for each picture, or CUDA's numbers; omitted: the server's own.")
]
Seed = Annotated[int, Field(ge=-1, le=MAX_SEED, description="-1 or null: random, and told in the answer.")]
HOW_MANY: Final = "draft, standard or fine (low, medium, high): how many steps, where none are given."
Quality = Annotated[str, Field(max_length=256, description=HOW_MANY)]
FOR_AN_HOUR: Final = "url: also at a URL, for an hour; what dall-e-2 and dall-e-3 do where nothing is said."
Delivery = Annotated[Literal["b64_json", "url"], Field(description=FOR_AN_HOUR)]
FIRST: Final = "Whether the language model turns the wish into a prompt first."
Rewriter = Annotated[RewriterMode | RewriterChoice, Field(description=FIRST)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Label = Annotated[str, Field(max_length=512, pattern=r"^[^\x00-\x1f\x7f]*$")]
Ignored = Annotated[str, Field(max_length=256, description="Taken for compatibility; changes nothing.")]


class GenerateBody(Body):
    """OpenAI's fields, and beside them the ones that self-hosted servers agree on."""

    model_config = ConfigDict(title="CreateImageRequest")
    hints: ClassVar[Mapping[str, str]] = {"prompt": "say what to paint"}
    refused: ClassVar[Mapping[str, str]] = REFUSED

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]
    model: Annotated[str, Field(description="A name from /v1/models; omitted: the loaded model.")] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES, description="Image i has seed + i.")] | None = None
    size: Annotated[str, Field(description="WIDTHxHEIGHT in pixels, or auto.")] | None = None
    quality: Quality | None = None
    response_format: Delivery | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100, description="JPEG and WebP quality.")] | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    moderation: Ignored | None = None
    style: Ignored | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3, description="Previews on the way, with stream.")] | None = None
    progress: Annotated[bool, Field(description="With stream: an event for every step; omitted: yes.")] | None = None
    prompt_rewriter: Rewriter | None = None

    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    num_inference_steps: Steps | None = None
    steps: Annotated[Steps, Field(description="Another name for num_inference_steps.")] | None = None
    guidance_scale: Guidance | None = None
    cfg_scale: Annotated[Guidance, Field(description="Another name for guidance_scale.")] | None = None
    sampler: Annotated[str, Field(description="For example dpmpp_2m, DPM++ 2M Karras, euler_a.")] | None = None
    sampler_name: Annotated[str, Field(description="Another name for sampler.")] | None = None
    scheduler: Annotated[str, Field(description="A sampler by another name, or a schedule type.")] | None = None
    sigma_schedule: Name | None = None
    spacing: Name | None = None
    seed: Seed | None = None
    eta: Fraction | None = None
    guidance_interval: Interval | None = None
    cache_interval: Every | None = None
    token_merging: Merging | None = None
    similarity_threshold: Similarity | None = None
    noise_source: Noise | None = None
    width: Annotated[int, Field(description="With height, another way to give size.")] | None = None
    height: int | None = None
