"""Generation parameters: the optional fields of image requests, and their values in answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import msgspec

ResizeMode = Literal["stretch", "crop", "fill"]


class RewriterFields(TypedDict, total=False):
    """Options of the prompt rewriter."""

    style: str
    seed: int
    system: str
    force: bool


class LoraFields(TypedDict, total=False):
    """LoRA adapter of a request.

    Attributes:
        name: A name from ``GET /v1/models``.
        scale: Its weight, by default 1.
        unet_scale: Its weight in the UNet, by default ``scale``.
    """

    name: str
    scale: float
    unet_scale: float


class ControlNetFields(TypedDict, total=False):
    """ControlNet of a request, with its control image.

    Attributes:
        name: A name from ``GET /v1/models``.
        image: The control image, a PNG, JPEG or WebP file: its bytes, or base64 or a data URL of them.
        scale: Its weight, from 0 to 2, by default 1.
        start: Fraction of the steps at which it starts, by default 0.
        end: Fraction of the steps at which it ends, by default 1.
        preprocessor: "canny" detects edges first; "none" uses the image as the control map.
        resize: True resizes an image of the same aspect ratio to the output size; "stretch", "crop" or "fill" resizes
            one of any aspect ratio; False requires the output size.
        thresholds: The weak and the strong threshold of "canny", by default 100 and 200.
        resolution: Pixels of the shorter side at which "canny" detects edges; 0 uses the output size.
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


class ReferenceFields(TypedDict, total=False):
    """Reference image of a request, which an IP-Adapter reads.

    Attributes:
        name: A name from ``GET /v1/models``; by default the only one for the model.
        image: The image, a PNG, JPEG or WebP file: its bytes, or base64 or a data URL of them.
        scale: Its weight, from 0 to 2, by default 1.
        start: Fraction of the steps at which it starts, by default 0.
        end: Fraction of the steps at which it ends, by default 1.
    """

    name: str
    image: bytes | str
    scale: float
    start: float
    end: float


class SizeFields(TypedDict, total=False):
    """Size conditioning of SDXL in pixels: sizes as (width, height), crops as (left, top)."""

    original_size: tuple[int, int]
    crop: tuple[int, int]
    target_size: tuple[int, int]
    negative_original_size: tuple[int, int]
    negative_crop: tuple[int, int]
    negative_target_size: tuple[int, int]


class ImageFields(TypedDict, total=False):
    """Optional fields of an image request; the model's capabilities give the defaults.

    Attributes:
        watermark: False leaves out the watermark; only the server's own page may send it.
        model: Name of the model.
        negative_prompt: What to avoid.
        template: "random" resolves {a|b} and __wildcards__ in the prompt by the seed of each image, "combinatorial"
            gives image i combination i; by default "off".
        prompt_syntax: "a1111" reads brackets as prompt weights; "plain" reads them as text.
        n: Number of images.
        size: WIDTHxHEIGHT in pixels, or "auto".
        quality: A quality name, which selects sampler and steps unless they are given.
        seed: Seed of the first image; the next images add 1. By default random; the answer has it.
        sampler: Name of the sampler.
        sigma_schedule: Name of the sigma schedule.
        spacing: Timestep spacing.
        num_inference_steps: Number of steps.
        guidance_scale: Classifier-free guidance scale.
        eta: Noise factor of samplers that take one.
        guidance_interval: (start, end) of guidance as fractions of the steps.
        clip_skip: Which text encoder layer to use, counted back from the default layer, which is 1.
        guidance_rescale: How far the guided prediction is rescaled to the standard deviation of the conditional one,
            from 0 to 1.
        cache_interval: DeepCache interval: the full UNet runs once in this many evaluations; 1 turns it off.
        sigma_min: Smallest noise level of the sigma schedules karras, exponential and beta.
        sigma_max: Largest noise level of these sigma schedules.
        token_merging: Deprecated since 0.2: has no effect and produces a warning.
        similarity_threshold: Start from a stored image whose prompt has at least this similarity, above 0 to 1.
        noise_source: "cpu" uses a CPU generator per image; "device" reproduces CUDA's random numbers on any device.
        variation_seed: Seed of the variation noise of the first image; the next images add 1. By default random.
        variation_strength: How far the noise is interpolated to that of ``variation_seed``, from 0 to 1. If it is above
            0, all images share ``seed``.
        loras: LoRA adapters. The prompt may also name them as <lora:NAME:SCALE>.
        controlnets: ControlNets with their control images.
        references: Reference images and their IP-Adapters.
        micro_conditioning: Size conditioning of SDXL; by default the size of the image.
        refiner: Whether the refiner model runs the last steps.
        switch_at: Fraction of the steps at which the refiner takes over, by default 0.8.
        hires_scale: Enlarge the finished image by this factor, 1 to 8, and denoise it again in part (hires fix).
        hires_size: WIDTHxHEIGHT to enlarge the image to, instead of ``hires_scale``.
        hires_strength: Denoising strength of the second pass, from 0 to 1, by default 0.4, or 0.1 with tiles.
        hires_steps: Steps of the second pass; by default those of the first.
        hires_upscaler: "lanczos", "nearest" or a network of ``ImageCapabilities.upscalers``.
        hires_sampler: Sampler of the second pass; by default that of the first.
        hires_schedule: Sigma schedule of the second pass; by default that of the first.
        hires_prompt: Prompt of the second pass; by default that of the first.
        hires_negative_prompt: Negative prompt of the second pass; by default that of the first.
        tile_size: Run the UNet on overlapping tiles of this side in pixels, for images beyond the model's largest side;
            0 turns it off.
        tile_overlap: Least overlap of the tiles in pixels; by default a quarter of ``tile_size``.
        outpaint: LEFT,TOP,RIGHT,BOTTOM: pixels to add around the start image and to generate.
        best_of: Generate this many images and return the ``n`` with the highest scores, the best first.
        output_format: File format.
        output_compression: Quality of lossy formats, from 0 to 100.
        prompt_rewriter: Whether the language model rewrites the prompt first.
        priority: "batch" runs when interactive work leaves capacity, and gets at least a tenth of it.
        deadline_s: Seconds after which the result is useless; the server refuses a request that cannot meet it.
        user: An identifier of the end user.
    """

    watermark: bool
    model: str
    negative_prompt: str
    prompt_syntax: Literal["a1111", "plain"]
    template: Literal["off", "random", "combinatorial"]
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
    sigma_min: float
    sigma_max: float
    token_merging: float
    similarity_threshold: float
    noise_source: Literal["cpu", "device"]
    variation_seed: int
    variation_strength: float
    loras: Sequence[LoraFields]
    controlnets: Sequence[ControlNetFields]
    references: Sequence[ReferenceFields]
    micro_conditioning: SizeFields
    refiner: bool
    switch_at: float
    hires_scale: float
    hires_size: str
    hires_strength: float
    hires_steps: int
    hires_upscaler: str
    hires_sampler: str
    hires_schedule: str
    hires_prompt: str
    hires_negative_prompt: str
    tile_size: int
    tile_overlap: int
    outpaint: str
    best_of: int
    output_format: Literal["png", "jpeg", "webp"]
    output_compression: int
    prompt_rewriter: Literal["off", "auto", "force"] | RewriterFields
    priority: Literal["interactive", "batch"]
    deadline_s: float
    user: str


class EditFields(ImageFields, total=False):
    """Optional fields of a request that starts from an image; ``size`` defaults to that of the image.

    Attributes:
        strength: How much of the image is repainted, from 0 to 1; by default 1 with a mask and 0.75 without.
    """

    strength: float


class UpscaleFields(TypedDict, total=False):
    """Optional fields of an upscaling request.

    Attributes:
        upscaler: A name of ``ImageCapabilities.upscalers``; by default the model's own.
        scale: Enlargement; by default that of the upscaler.
        size: WIDTHxHEIGHT instead of ``scale``; an image of another aspect ratio is cropped.
        output_format: "png", "jpeg" or "webp".
        output_compression: Quality of JPEG and WebP, 0 to 100.
        priority: "batch" runs when no interactive work is waiting.
        deadline_s: Seconds after which the request is abandoned.
    """

    upscaler: str
    scale: float
    size: str
    output_format: str
    output_compression: int
    priority: str
    deadline_s: float


class StreamedImageFields(ImageFields, total=False):
    """Optional fields of a streaming image request.

    Attributes:
        partial_images: How many previews of each image to send, from 0 to 3.
    """

    partial_images: int


class StreamedEditFields(EditFields, StreamedImageFields, total=False):
    """Optional fields of a streaming request that starts from an image."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a request, if the server has a price."""

    amount: float
    currency: str


class ImageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that an image request used.

    Attributes:
        input_tokens: Prompt tokens, counted as in OpenAI's API.
        output_tokens: Image tokens, counted as in OpenAI's API.
        total_tokens: The sum of both.
        num_evaluations: UNet evaluations, counted by batch rows.
        num_cached: Images that came from the cache.
        device_s: This request's share of the device time, in seconds.
        cost: The cost, if the server has a price.
    """

    input_tokens: int
    output_tokens: int
    total_tokens: int
    num_evaluations: int = 0
    num_cached: int = 0
    device_s: float = 0.0
    cost: Cost | None = None


class ImageTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Wall-clock seconds of an image by phase; ``step_s`` is the mean duration of a step."""

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    step_s: float


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA adapter of an image; ``unet_scale`` is None if it equals ``scale``."""

    name: str
    scale: float
    unet_scale: float | None = None


class ControlNet(msgspec.Struct, frozen=True, kw_only=True):
    """ControlNet of an image; ``image`` is a digest of the control image."""

    name: str
    scale: float
    start: float
    end: float
    preprocessor: str
    image: str
    resize: bool | ResizeMode = False
    thresholds: tuple[float, float] = (100.0, 200.0)
    resolution: int = 0


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Reference image of an image; ``image`` is a digest of it, ``name`` the IP-Adapter."""

    name: str
    scale: float
    start: float
    end: float
    image: str


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Generation parameters of finished images; ``size`` is WIDTHxHEIGHT in pixels."""

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
    sigma_min: float | None = None
    sigma_max: float | None = None
    similarity_threshold: float | None = None
    noise_source: Literal["cpu", "device"] = "cpu"
    variation_strength: float = 0.0
    loras: tuple[Lora, ...] = ()
    controlnets: tuple[ControlNet, ...] = ()
    references: tuple[Reference, ...] = ()
    micro_conditioning: SizeFields | None = None
    strength: float | None = None
    refiner: str | None = None
    switch_at: float | None = None
    hires_scale: float | None = None
    hires_size: str | None = None
    hires_strength: float | None = None
    hires_steps: int | None = None
    hires_upscaler: str = "lanczos"
    hires_sampler: str | None = None
    hires_schedule: str | None = None
    hires_prompt: str | None = None
    hires_negative_prompt: str | None = None
    tile_size: int | None = None
    tile_overlap: int | None = None
    outpaint: str | None = None
    size: str
    output_format: str
    quality: str
    usage: ImageUsage
    warnings: tuple[str, ...] = ()
