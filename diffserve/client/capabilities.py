"""What a loaded model can do, as ``GET /v1/models`` tells it. Fields that a newer server adds are passed over."""

from __future__ import annotations

import msgspec


class SamplerChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A sampler on offer.

    name, label            what a request gives; what people read
    takes_eta              whether eta means something
    is_stochastic          whether it draws fresh noise on the way
    evaluations_per_step   calls of the network a step
    """

    name: str
    label: str
    summary: str = ""
    takes_eta: bool = False
    is_stochastic: bool = False
    evaluations_per_step: int = 1


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What a model of a closed world can paint, as its captions name it, and every word that it was taught."""

    objects: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


class ImageCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the image model can do, and what it does unless asked otherwise.

    digest            of the weights
    sizes             (width, height) in pixels that it does well; the first is native
    min_side_px       shortest and longest side that a request may ask for; what the model does not do well is painted
    max_side_px       at the nearest size that it does, and resized
    quality_steps     steps worth choosing between, by name, the fewest first
    default_sampler   as in ``samplers``; ``default_sigma_schedule`` goes with it
    train_timesteps   the most steps that can be asked for
    max_images        pictures in one request
    learnt_words      that prompts may use besides (textual inversion), in small letters
    refused_words     why other files of the embeddings folder cannot be used, by the names of their words
    world             what it can paint and every word it knows, where that can be listed
    loras             adapters that a request may name, as they lay there when this was asked
    refused_loras     what lies beside them and is no LoRA that can be used, by name, and why not
    controlnets       ControlNets that a request may name
    refused_controlnets  why others in their folder cannot be used, by name
    refiner           name and digest of the model that may take over for the last steps; "": none
    scorer            what chooses the best of several pictures; "": nothing does
    safety_filter     what judges prompts and pictures; "": nothing does
    provenance        what pictures bear: xmp; wm, a mark in their pixels; c2pa, a signed manifest
    refused_fields    of a request, that have to be left out; an adapter or a ControlNet that is not there aside
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
    refiner: str = ""
    scorer: str = ""
    safety_filter: str = ""
    provenance: tuple[str, ...] = ()
    refused_fields: tuple[str, ...] = ()

    @property
    def native_size(self) -> tuple[int, int]:
        """(width, height) in pixels of a picture of which nothing is said."""
        return self.sizes[0]

    def sampler(self, name: str) -> SamplerChoice | None:
        """The sampler called ``name`` or labelled so."""
        return next((choice for choice in self.samplers if name in (choice.name, choice.label)), None)


class LanguageCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the language model can do.

    styles            how it may be asked for a prompt
    can_rewrite       whether it turns wishes into prompts; a model without a chat template cannot
    response_formats  what its texts can be held to: text, json_object, json_schema
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
    """One of the two, after the kind of the model."""

    image: ImageCapabilities | None = None
    language: LanguageCapabilities | None = None
