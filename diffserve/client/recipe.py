"""How a picture is painted: what a request may say of it, and what an answer tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import msgspec

ResizeMode = Literal["stretch", "crop", "fill"]


class RewriterFields(TypedDict, total=False):
    """How a wish is to be rewritten before it is painted."""

    style: str
    seed: int
    system: str
    force: bool


class LoraFields(TypedDict, total=False):
    """An adapter, by a name that ``GET /v1/models`` lists, and how much of it (1); of its changes to the UNet another
    share, where ``unet_scale`` says so."""

    name: str
    scale: float
    unet_scale: float


class ControlNetFields(TypedDict, total=False):
    """A ControlNet, by a name that ``GET /v1/models`` lists, and the picture that it goes by.

    image         a PNG, JPEG or WebP file: its bytes, or base64 or a data URL of them
    scale         of what it adds, 0 to 2 (1)
    start, end    between which shares of the steps it is at work (0, 1)
    preprocessor  "canny": find edges first; "none": the picture is a control map already
    resize        True: bring a picture of the same aspect to the size that is painted; "stretch", "crop" or "fill":
                  one of any aspect; else it has to have that size
    thresholds    of "canny": weak and strong (100, 200)
    resolution    pixels of the shorter side at which "canny" finds edges; 0: those of the picture that is painted
    """

    name: str
    image: bytes | str
    scale: float
    start: float
    end: float
    preprocessor: str
    resize: bool | ResizeMode
    thresholds: tuple[float, float]
    resolution: int


class SizeFields(TypedDict, total=False):
    """The sizes that SDXL is told of a picture, in pixels: (width, height), a crop as (left, top)."""

    original_size: tuple[int, int]
    crop: tuple[int, int]
    target_size: tuple[int, int]
    negative_original_size: tuple[int, int]
    negative_crop: tuple[int, int]
    negative_target_size: tuple[int, int]


class ImageFields(TypedDict, total=False):
    """What a request for pictures may say beside its prompt; what is left out is as the model does best.

    size               WIDTHxHEIGHT in pixels, or auto
    prompt_syntax      whether brackets weigh words (a1111), or are brackets (plain)
    guidance_interval  (from, to) as fractions of the steps, in which the prompt is weighed
    clip_skip          which layer of the text encoders is read, counted from the one that is read anyway: 1
    guidance_rescale   how far the guided output is brought back to the spread of the unguided, 0 to 1
    cache_interval     DeepCache: the whole UNet runs at every so many-th evaluation only; 1: at each
    token_merging      without effect and with a warning: it was removed in 0.2
    similarity_threshold  begin from a kept picture of a prompt that is at least so similar, above 0 to 1
    controlnets        ControlNets that these pictures go by
    loras              adapters that change the model for these pictures; the prompt may name them: <lora:NAME:SCALE>
    micro_conditioning sizes that SDXL is told of, the picture's own unless given
    refiner            whether the refiner takes over for the last steps, at 0.8 of the way unless said otherwise
    switch_at          where it does, 0 to 1
    best_of            so many are painted, and the n with the highest scores come back, the best first
    noise_source       whose numbers the noise is: a generator's on the CPU for each picture, or CUDA's on any device
    variation_strength how far the noise of a picture is turned towards another seed's, 0 to 1
    variation_seed     that of the first picture, which the next adds 1 to, while all have one seed; left out: drawn
    seed               of the first picture, or of all that are varied; left out: drawn, and told in the answer
    prompt_rewriter    whether the language model turns the wish into a prompt first
    watermark          False: without one; heard of a server's own page alone
    priority           batch: it gets what interactive work leaves, which is a tenth at least
    deadline_s         seconds after which nobody wants it: DeadlineUnreachable where it cannot be done by then
    """

    watermark: bool
    model: str
    negative_prompt: str
    prompt_syntax: Literal["a1111", "plain"]
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
    clip_skip: int
    guidance_rescale: float
    cache_interval: int
    token_merging: float
    similarity_threshold: float
    noise_source: Literal["cpu", "device"]
    variation_seed: int
    variation_strength: float
    loras: Sequence[LoraFields]
    controlnets: Sequence[ControlNetFields]
    micro_conditioning: SizeFields
    refiner: bool
    switch_at: float
    best_of: int
    output_format: Literal["png", "jpeg", "webp"]
    output_compression: int
    prompt_rewriter: Literal["off", "auto", "force"] | RewriterFields
    priority: Literal["interactive", "batch"]
    deadline_s: float
    user: str


class EditFields(ImageFields, total=False):
    """What a request to paint from a picture may say beside its prompt.

    strength  how much is repainted, 0 to 1: 1 with a mask, else 0.75
    size      that of the picture unless given
    """

    strength: float


class StreamedImageFields(ImageFields, total=False):
    """The same, with 0 to 3 previews of each picture on the way."""

    partial_images: int


class StreamedEditFields(EditFields, StreamedImageFields, total=False):
    """The same from a picture."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What something cost, where the server knows a price."""

    amount: float
    currency: str


class ImageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as OpenAI counts them, rows of the UNet that were computed, and pictures for which none had to be.

    device_s  seconds of the device: this request's share of those that it had with others
    """

    input_tokens: int
    output_tokens: int
    total_tokens: int
    num_evaluations: int = 0
    num_cached: int = 0
    device_s: float = 0.0
    cost: Cost | None = None


class ImageTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a picture went, in seconds of the clock; ``step_s``: the mean of a step."""

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    step_s: float


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that changed the model, and how much of it; ``unet_scale`` where the UNet's is another."""

    name: str
    scale: float
    unet_scale: float | None = None


class ControlNet(msgspec.Struct, frozen=True, kw_only=True):
    """A ControlNet that pictures went by; ``image`` is a digest of what it was given."""

    name: str
    scale: float
    start: float
    end: float
    preprocessor: str
    image: str
    resize: bool | ResizeMode = False
    thresholds: tuple[float, float] = (100.0, 200.0)
    resolution: int = 0


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
    clip_skip: int = 1
    guidance_rescale: float = 0.0
    cache_interval: int = 1
    similarity_threshold: float | None = None
    noise_source: Literal["cpu", "device"] = "cpu"
    variation_strength: float = 0.0
    loras: tuple[Lora, ...] = ()
    controlnets: tuple[ControlNet, ...] = ()
    micro_conditioning: SizeFields | None = None
    strength: float | None = None
    refiner: str | None = None
    switch_at: float | None = None
    size: str
    output_format: str
    quality: str
    usage: ImageUsage
    warnings: tuple[str, ...] = ()
