"""Capabilities of the server and its models. Unknown fields of a newer server are ignored."""

from __future__ import annotations

from typing import Any

import msgspec


class SamplerChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Sampler of an image model.

    Attributes:
        name: The value of the request field ``sampler``.
        label: The name for display.
        summary: A short description.
        takes_eta: Whether the field ``eta`` has an effect.
        is_stochastic: Whether it adds noise between steps.
        evaluations_per_step: UNet evaluations per step.
        num_steps: The only number of steps that it allows (a learned sampler); None: any.
    """

    name: str
    label: str
    summary: str = ""
    takes_eta: bool = False
    is_stochastic: bool = False
    evaluations_per_step: int = 1
    num_steps: int | None = None


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Vocabulary of a model that was trained on a closed set of captions.

    Attributes:
        objects: Objects that it can generate.
        places: Places that it can generate.
        colors: Colors that it can generate.
        words: Every word in its training captions.
    """

    objects: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


class QualityPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a quality name stands for, and what was measured with them.

    Attributes:
        sampler: Sampler, optionally with a sigma schedule.
        num_inference_steps: Number of steps.
        cache_interval: DeepCache interval; 1 means off.
        guidance_interval: The part of the steps with guidance.
        seconds: Seconds of one image alone on the machine that made the profile.
        psnr_db: Mean PSNR to the converged image.
        exact: Share of images that show exactly what their prompts say, if it was measured.
    """

    sampler: str
    num_inference_steps: int
    cache_interval: int = 1
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    seconds: float
    psnr_db: float
    exact: float | None = None


class ImageCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities and defaults of an image model.

    Attributes:
        family: The model family, such as "sd15" or "sdxl".
        digest: Digest of the weights.
        device: The device it runs on.
        dtype: The data type of its weights.
        samplers: The available samplers.
        sigma_schedules: The available sigma schedules.
        sizes: (width, height) in pixels that the model generates well; the first is its native size.
        min_side_px: Shortest side that a request may use. Other sizes are generated at the nearest entry of ``sizes``
            and resized.
        max_side_px: Longest side that a request may use.
        quality_steps: Recommended step counts by quality name, the fewest first.
        quality_points: Measured settings by quality name, if the model has a quality profile.
        default_sampler: Sampler of requests that name none.
        default_sigma_schedule: Sigma schedule that goes with ``default_sampler``.
        default_num_steps: Steps of requests that give no number.
        default_guidance_scale: Guidance scale of requests that give none.
        default_spacing: Timestep spacing of requests that give none.
        train_timesteps: The largest number of steps that a request may use.
        max_images: The largest number of images in one request.
        learnt_words: Textual inversion words that prompts may use, in lower case.
        refused_words: Textual inversion words whose files cannot be used, with the reasons.
        world: The vocabulary of the model, if it is closed.
        loras: LoRA adapters that a request may name, as of this answer.
        refused_loras: Files in the LoRA folder that cannot be used, with the reasons.
        controlnets: ControlNets that a request may name.
        refused_controlnets: Files in the ControlNet folder that cannot be used, with the reasons.
        references: IP-Adapters that a request's references may name.
        refused_references: Files in the folder of IP-Adapters that cannot be used, with the reasons.
        wildcards: Names that a template may use as __NAME__.
        upscalers: Upscalers that a request may name.
        default_upscaler: Upscaler of requests that name none.
        refused_upscalers: Files in the upscaler folder that cannot be used, with the reasons.
        refiner: Name and digest of the refiner model, empty if there is none.
        scorer: The model that ranks images for ``best_of``, empty if there is none.
        safety_filter: The filter of prompts and images, empty if there is none.
        provenance: Marks that images get: "xmp" (metadata), "wm" (watermark) and "c2pa" (signed manifest).
        refused_fields: Request fields that this model does not support.
    """

    family: str
    digest: str
    device: str
    dtype: str
    samplers: tuple[SamplerChoice, ...]
    sigma_schedules: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...]
    min_side_px: int
    max_side_px: int
    quality_steps: dict[str, int]
    quality_points: dict[str, QualityPoint] = {}
    default_sampler: str
    default_sigma_schedule: str | None = None
    default_num_steps: int
    default_guidance_scale: float
    default_spacing: str
    train_timesteps: int
    max_images: int
    learnt_words: tuple[str, ...] = ()
    refused_words: dict[str, str] = {}
    world: World | None = None
    loras: tuple[str, ...] = ()
    refused_loras: dict[str, str] = {}
    controlnets: tuple[str, ...] = ()
    refused_controlnets: dict[str, str] = {}
    references: tuple[str, ...] = ()
    refused_references: dict[str, str] = {}
    wildcards: tuple[str, ...] = ()
    upscalers: tuple[str, ...] = ()
    default_upscaler: str = ""
    refused_upscalers: dict[str, str] = {}
    refiner: str = ""
    scorer: str = ""
    safety_filter: str = ""
    provenance: tuple[str, ...] = ()
    refused_fields: tuple[str, ...] = ()

    @property
    def native_size(self) -> tuple[int, int]:
        """The default (width, height) in pixels."""
        return self.sizes[0]

    def sampler(self, name: str) -> SamplerChoice | None:
        """Return the sampler with this name or label, or None."""
        return next((choice for choice in self.samplers if name in (choice.name, choice.label)), None)


class LanguageCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a language model.

    Attributes:
        architecture: The model architecture.
        digest: Digest of the weights.
        device: The device it runs on.
        dtype: The data type of its weights.
        context_tokens: Context length in tokens.
        styles: Styles of prompt rewriting.
        can_rewrite: Whether it can rewrite prompts, which requires a chat template.
        response_formats: Supported response formats: "text", "json_object" or "json_schema".
    """

    architecture: str
    digest: str
    device: str
    dtype: str
    context_tokens: int
    styles: tuple[str, ...]
    can_rewrite: bool = True
    response_formats: tuple[str, ...] = ("text",)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a model: ``image`` or ``language``, depending on its kind."""

    image: ImageCapabilities | None = None
    language: LanguageCapabilities | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Model or alias that a request may name.

    Attributes:
        id: The name.
        created: When it was created, in seconds since 1970.
        capabilities: What it supports; None for aliases.
        loaded: Whether it is in memory; if not, the first request loads it. None for aliases.
        problem: Why its last load failed, empty if it did not.
        endpoints: Paths of the endpoints that accept it.
    """

    id: str
    created: int
    capabilities: Capabilities | None = None
    loaded: bool | None = None
    problem: str = ""
    endpoints: tuple[str, ...] = ()


class EndpointFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of an endpoint as JSON Schemas by name; ``asks`` is the kind of model: image, text or chat."""

    asks: str
    fields: dict[str, dict[str, Any]]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a request as a whole, in the units at the end of each name."""

    max_body_bytes: int
    request_timeout_s: float
    max_backlog_s: float
    min_size_px: int
    max_size_px: int
    max_json_depth: int
    max_schema_chars: int
    max_schema_depth: int


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Price of the device per hour."""

    per_hour: float
    currency: str


class ServerCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a server: models, fields of each endpoint with their bounds, limits and price."""

    version: str
    models: tuple[Model, ...]
    aliases: tuple[str, ...]
    endpoints: dict[str, EndpointFields]
    output_formats: tuple[str, ...]
    prompt_syntaxes: tuple[str, ...]
    qualities: tuple[str, ...]
    spacings: tuple[str, ...]
    limits: Limits
    price: Price | None = None
