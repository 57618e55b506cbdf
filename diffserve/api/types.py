"""Shared types of image generation: requests, parameters, images, results and events.

Every type is a frozen ``msgspec.Struct`` that is sent between processes as msgpack. ``__post_init__`` validates values
and raises :class:`diffserve.api.errors.InvalidRequest`. This module does not import torch.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Any, Final, Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffserve.api.bounds import check, check_chars, check_deadline, check_num, check_share
from diffserve.api.fields import (
    FULL_INTERVAL,
    HIRES_STRENGTH,
    MAX_SEED,
    TILED_HIRES_STRENGTH,
    NoiseSource,
    check_fields,
)
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.prompt_schedule import texts_read
from diffserve.api.tensor_values import Encodings
from diffserve.models.controlnets import Control, check_controls, digest_of
from diffserve.models.loras import Lora, check_loras, read_tags
from diffserve.models.model_files import MAX_NAME_CHARS
from diffserve.models.references import Reference, check_references
from diffserve.models.vocabulary import FewestSteps, Vocabulary

MAX_PROMPT_CHARS = 32_000
MAX_JUDGED_STEPS = 1000
"""Largest number of steps for which the texts of a prompt that changes are listed for a filter."""
MAX_IMAGES = 10
SWITCH_AT: Final = 0.8
"""Default ``switch_at`` of requests that ask for a refiner."""
CHECKER: Final = "checker"
"""Name of the built-in scorer, which checks images of the embedded model."""
MAX_STEPS = 1_000_000
LANCZOS: Final = "lanczos"
NEAREST: Final = "nearest"
FILTERS: Final = (LANCZOS, NEAREST)
"""Upscalers that are filters instead of networks; the first is the default of hires fix."""

E = TypeVar("E")

AUTO_SPACING: Final = "auto"

OtherAspects = Literal["paint", "pad"]
Priority = Literal["interactive", "batch"]
PRIORITIES: Final[tuple[Priority, ...]] = get_args(Priority)


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """An 8-bit image: ``height_px * width_px * channels`` bytes of ``data``, row by row.

    ``channels`` is 3 (RGB) for images and 1 for masks (255: inpaint this pixel).
    """

    width_px: int
    height_px: int
    data: bytes
    channels: int = 3

    def __post_init__(self) -> None:
        expected = self.width_px * self.height_px * self.channels
        check(
            self.width_px > 0 and self.height_px > 0 and self.channels in (1, 3) and len(self.data) == expected,
            f"an image of {self.width_px}x{self.height_px} with {self.channels} channel(s) needs {expected} bytes, "
            f"not {len(self.data)}.",
            "image",
            "invalid_image",
        )

    @classmethod
    def from_array(cls, pixels: NDArray[np.uint8]) -> Picture:
        """Wrap ``pixels`` of shape (height, width, 3), or (height, width) for a mask."""
        height, width = pixels.shape[:2]
        channels = pixels.shape[2] if pixels.ndim == 3 else 1
        return cls(width_px=width, height_px=height, channels=channels, data=np.ascontiguousarray(pixels).tobytes())

    @property
    def array(self) -> NDArray[np.uint8]:
        """The pixels as a read-only (height, width, 3) array, or (height, width) for a mask."""
        shape = (self.height_px, self.width_px, 3) if self.channels == 3 else (self.height_px, self.width_px)
        return np.frombuffer(self.data, dtype=np.uint8).reshape(shape)


class LatentArray(msgspec.Struct, frozen=True, kw_only=True):
    """Final latents as little-endian float32 bytes of ``shape`` (channels, height / factor, width / factor)."""

    shape: tuple[int, int, int]
    data: bytes

    @classmethod
    def from_array(cls, latents: NDArray[np.float32]) -> LatentArray:
        """Wrap ``latents`` of shape (channels, height, width)."""
        channels, height, width = latents.shape
        return cls(shape=(channels, height, width), data=latents.astype("<f4").tobytes())

    @property
    def array(self) -> NDArray[np.float32]:
        """The latents as a float32 array of ``shape``."""
        return np.frombuffer(self.data, dtype="<f4").reshape(self.shape)


class DiffusionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Denoising parameters. ``None`` means the default of the model's profile.

    Attributes:
        sampler: Canonical name, A1111 label or diffusers class name (see ``schedulers.SAMPLERS``), or "learned:NAME".
        num_steps: Denoising steps, from 1 to the training length (checked against the model at submit).
        spacing: "leading", "trailing", "linspace" or "quadratic".
        sigma_schedule: "karras", "exponential", "sgm_uniform", "simple" or "beta".
        eta: Share of fresh noise, 0 (none) to 1 (as much as ddpm). Default 0 (ddim), 1 (euler_a) or 0.3 (tcd, its
            gamma). With other samplers it has no effect and causes a warning.
        guidance_scale: Classifier-free guidance weight; at 1 and below there is no unconditional row.
        guidance_interval: (from, to) as fractions of the steps; outside it the unconditional row is skipped.
        clip_skip: Layer of the text encoders that the UNet reads, counted from the one that it was trained with, which
            is 1. Applies to the negative prompt as well, as in A1111 (in diffusers only to the prompt).
        guidance_rescale: Strength of rescaling the guided output to the standard deviation of the conditional one, 0
            (off) to 1.
        cache_interval: DeepCache: the full UNet runs once in this many evaluations, the others run its shallow part on
            cached deep features; 1: off.
        sigma_min: Smallest noise level of the sigma schedules karras, exponential and beta, as k-diffusion; ``None``:
            that of the schedule without bounds. With other schedules it has no effect and causes a warning.
        sigma_max: Largest noise level of these sigma schedules; ``None``: as for ``sigma_min``.
        token_merging: Removed in 0.2; has no effect and causes a warning.
        similarity_threshold: Start from the latents of the most similar prompt if its similarity is at least this,
            above 0 to 1, and skip more steps the more similar it is; ``None``: always start from noise.
        micro_conditioning: SDXL's size conditioning; unset sizes are the image's own.
        noise_source: "cpu" or "device", see ``EngineConfig``; ``None``: the configured one.
        variation_strength: Interpolation of all noise toward that of the variation seed, 0 (off) to 1 (only that seed).
            The images of a request then share the seed and differ in the variation seed.
        variation_seed: Variation seed of image 0; image i adds i; ``None``: drawn at submit and reported.
        strength: Strength of image-to-image, 0 (init image unchanged) to 1 (init image ignored).
        loras: LoRAs from the server's folder, applied to this request only.
        controlnets: ControlNets from the server's folder, each with one of the request's ``control_images``.
        references: IP-Adapters from the server's folder, each with one of the request's ``reference_images``.
        switch_at: Share of the noise levels, 0 to 1, after which the refiner takes over (``denoising_end`` and
            ``denoising_start`` in diffusers; 0.8 is usual for SDXL); ``None``: no refiner.
        hires_scale: Hires fix: the finished image is enlarged by this factor, 1 to 8, and denoised again from
            ``hires_strength`` on, like image-to-image with the same seed; ``None``: off, unless ``hires_size`` is
            given.
        hires_size: Size "WIDTHxHEIGHT" of the enlarged image, instead of ``hires_scale``.
        hires_strength: Strength of the second pass, above 0 to 1 (enlarged image ignored); ``None``: see
            ``second_strength``.
        hires_steps: Steps of the second pass; ``None``: those of the first.
        hires_upscaler: Upscaler between the passes: one of ``FILTERS``, or an upscaler network by its name.
        hires_sampler: Sampler of the second pass, ``None``: that of the first.
        hires_schedule: Sigma schedule of the second pass; ``None``: that of the first.
        hires_prompt: Prompt of the second pass, without LoRA tags; ``None``: that of the first.
        hires_negative_prompt: Negative prompt of the second pass; ``None``: that of the first.
        tile_size: Tiled diffusion: the UNet runs on overlapping tiles of at most this side in pixels, and images may
            exceed the model's largest side; 0: off; ``None``: off, but tiles of the native size for a second pass that
            exceeds it. See ``diffserve.api.tiles``.
        tile_overlap: Least overlap of neighboring tiles in pixels; ``None``: a quarter of ``tile_size``.
        outpaint: The margins "LEFT,TOP,RIGHT,BOTTOM" in pixels by which the caller has extended the init image, see
            ``StartPicture.extended``; only recorded.
    """

    sampler: str | None = None
    num_steps: int | None = None
    spacing: str | None = None
    sigma_schedule: str | None = None
    eta: float | None = None
    guidance_scale: float | None = None
    guidance_interval: tuple[float, float] = FULL_INTERVAL
    clip_skip: int = 1
    guidance_rescale: float = 0.0
    cache_interval: int = 1
    sigma_min: float | None = None
    sigma_max: float | None = None
    token_merging: float = 0.0
    similarity_threshold: float | None = None
    noise_source: NoiseSource | None = None
    variation_seed: int | None = None
    variation_strength: float = 0.0
    micro_conditioning: MicroConditioning | None = None
    strength: float = 0.75
    loras: tuple[Lora, ...] = ()
    controlnets: tuple[Control, ...] = ()
    references: tuple[Reference, ...] = ()
    switch_at: float | None = None
    hires_scale: float | None = None
    hires_size: str | None = None
    hires_strength: float | None = None
    hires_steps: int | None = None
    hires_upscaler: str = LANCZOS
    hires_sampler: str | None = None
    hires_schedule: str | None = None
    hires_prompt: str | None = None
    hires_negative_prompt: str | None = None
    tile_size: int | None = None
    tile_overlap: int | None = None
    outpaint: str | None = None

    def __post_init__(self) -> None:
        check(
            self.num_steps is None or self.num_steps >= 1,
            f"num_steps is {self.num_steps}; ask for at least 1 step.",
            "num_inference_steps",
        )
        check(
            self.num_steps is None or self.num_steps <= MAX_STEPS,
            f"num_steps is {str(self.num_steps)[:40]}; no model allows more than {MAX_STEPS} steps.",
            "num_inference_steps",
        )
        check_fields(self)
        start, stop = self.guidance_interval
        check(
            0.0 <= start <= stop <= 1.0,
            f"guidance_interval is ({start}, {stop}); give two fractions with 0 <= from <= to <= 1.",
            "guidance_interval",
        )
        merging = self.token_merging
        check(
            merging == round(merging * 20) / 20,
            f"token_merging is {merging}; give a multiple of 0.05, or 0, which is off.",
            "token_merging",
        )
        check_loras(self.loras)
        check_controls(self.controlnets)
        check_references(self.references)
        for name in ("hires_prompt", "hires_negative_prompt"):
            check_chars(getattr(self, name) or "", MAX_PROMPT_CHARS, name)
        check_chars(self.hires_upscaler, MAX_NAME_CHARS, "hires_upscaler")
        one_size = f"hires_scale is {self.hires_scale} and hires_size {self.hires_size!r}; give one of them."
        check(self.hires_scale is None or self.hires_size is None, one_size, "hires_size")

    @property
    def has_hires(self) -> bool:
        """Whether the image is enlarged and denoised again (hires fix)."""
        return self.hires_scale is not None or self.hires_size is not None

    def second_strength(self, num_steps: int, *, is_tiled: bool) -> float:
        """Return the strength of the second pass (hires fix) of ``num_steps`` steps.

        By default it is less with tiles, and enough for one step.
        """
        if self.hires_strength is not None:
            return self.hires_strength
        return max(TILED_HIRES_STRENGTH if is_tiled else HIRES_STRENGTH, math.ceil(1000 / num_steps) / 1000)


class RewriteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of prompt rewriting.

    Attributes:
        style: Name of a file in ``configs/rewriter/``; ``None``: the style that suits the image model.
        seed: Seed of all prompts but the first, and of models that sample; ``None``: 0.
        system: System prompt that replaces the one of the style.
        force: Accept the answer even if the model was unsure. Empty answers, refusals and endless answers are never
            accepted.
    """

    style: str | None = None
    seed: int | None = None
    system: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check(
            self.seed is None or 0 <= self.seed <= MAX_SEED,
            f"seed is {self.seed}; it must lie between 0 and {MAX_SEED}.",
            "seed",
        )
        check_chars(self.system or "", MAX_PROMPT_CHARS, "system")


def check_scheduling(deadline_s: float | None, priority: str, share: float = 1.0) -> None:
    """Check the deadline in seconds, the priority and the share of a request.

    Raises:
        InvalidRequest: One of them is out of range or unknown.
    """
    check_deadline(deadline_s)
    check_share(share)
    message = f"priority is {priority[:40]!r}; give {' or '.join(PRIORITIES)}, or leave it out."
    check(priority in PRIORITIES, message, "priority")


def new_request_id(kind: str = "img") -> str:
    """Return a new request id: ``kind`` (img, txt, rwt or emb) and 24 hexadecimal digits."""
    return f"{kind}-{uuid.uuid4().hex[:24]}"


class Asks(Generic[E]):
    """Base of all requests; ``E`` is the type of the events that answer the request."""

    __slots__ = ()

    request_id: str

    @property
    def kind(self) -> str:
        """The tag in messages and metrics, for example "image", "text", "rewrite" or "embedding"."""
        return str(type(self).__struct_config__.tag)  # type: ignore[attr-defined]  # defined by Struct


class GenerationRequest(
    msgspec.Struct, Asks["Event"], frozen=True, kw_only=True, forbid_unknown_fields=True, tag="image"
):
    """A request for images.

    LoRA tags in the prompt (``loras.read_tags``) are moved to ``diffusion`` at construction, and digests of
    ``control_images`` and ``reference_images`` are added to it.

    Attributes:
        width_px: Width, a multiple of the model's VAE factor (checked at submit); ``None``: the native width. With
            hires fix it is the width of the first pass.
        height_px: Height, with the same rules.
        num_images: Image i equals a single image with seed + i, or with the same seed and variation_seed + i.
        best_of: Generate this many images and return the ``num_images`` with the highest scores, the best first;
            ``None``: no selection.
        seed: ``None``: drawn at submit and reported.
        init_image: Start image (image-to-image), already resized to width x height by the caller.
        mask_image: Inpainting mask with one channel, 255: inpaint; needs ``init_image``.
        control_images: One input image for each ControlNet of ``diffusion``, at the size of the image or to be resized.
        reference_images: One image for each reference of ``diffusion``, of any size.
        hires_px: Width and height of the second pass of hires fix, if they are planned; ``None``: as ``diffusion``
            says, on the model's grid.
        preview_every: Number of steps between Preview events; 0: no previews.
        rewriting: Rewrite the prompt first; ``None``: use it unchanged.
        deadline_s: Seconds after submit at which the request is abandoned.
        refuses_late: Refuse the request at once if the forecast says that it would miss its deadline.
        priority: "batch" gets what "interactive" leaves, and at least a tenth of the work.
        model: Name of the model if several are served; "": the first.
        client: Identifier of the client, for fair sharing of the engine; never reported.
        share: Weight of the client: its part of the engine relative to other clients while all have work.
        encodings: Text encodings computed by another process (see ``stage_types``).
        image_prompts: Prompt of each image, with the same LoRA tags in all, if they differ; ``prompt`` is then the
            first of them.
        template: Template that the prompts were resolved from (``models.templates``), for the parameters; "": none.
        capture_every_s: Seconds between ``Captured`` events of unfinished images; 0: none.
        resume_from: State of the images in an earlier ``Captured`` event of the same request, from which they continue.
            A state of another request, model or version is ignored: the images then start at their first step.
    """

    prompt: str
    negative_prompt: str = ""
    width_px: int | None = None
    height_px: int | None = None
    num_images: int = 1
    best_of: int | None = None
    seed: int | None = None
    diffusion: DiffusionParams = DiffusionParams()
    init_image: Picture | None = None
    mask_image: Picture | None = None
    control_images: tuple[Picture, ...] = ()
    reference_images: tuple[Picture, ...] = ()
    hires_px: tuple[int, int] | None = None
    preview_every: int = 0
    return_latents: bool = False
    rewriting: RewriteOptions | None = None
    deadline_s: float | None = None
    refuses_late: bool = True
    priority: Priority = "interactive"
    model: str = ""
    client: str = ""
    share: float = 1.0
    encodings: Encodings | None = None
    image_prompts: tuple[str, ...] = ()
    template: str = ""
    capture_every_s: float = 0.0
    resume_from: bytes | None = None
    request_id: str = msgspec.field(default_factory=new_request_id)

    def __post_init__(self) -> None:
        prompt, loras = read_tags(self.prompt)
        if self.image_prompts:
            self._read_image_prompts(loras)
        if loras:
            msgspec.structs.force_setattr(self, "prompt", prompt)
            diffusion = msgspec.structs.replace(self.diffusion, loras=(*self.diffusion.loras, *loras))
            msgspec.structs.force_setattr(self, "diffusion", diffusion)
        self._digest_images()
        has_input = bool(self.prompt.strip()) or self.init_image is not None
        check(has_input, "the prompt is empty; describe the image.", "prompt", "empty_prompt")
        for name, text in (("prompt", self.prompt), ("negative_prompt", self.negative_prompt)):
            check_chars(text, MAX_PROMPT_CHARS, name)
        for name, size in (("width", self.width_px), ("height", self.height_px)):
            check(size is None or size > 0, f"{name} is {size} px; it must be positive.", "size", "invalid_size")
        check_num(self.num_images, MAX_IMAGES, "images")
        is_valid = self.best_of is None or self.num_images <= self.best_of <= MAX_IMAGES
        advice = f"give at least n, which is {self.num_images}, and at most {MAX_IMAGES}."
        check(is_valid, f"best_of is {str(self.best_of)[:40]}; {advice}", "best_of")
        has_variation = self.diffusion.variation_strength > 0.0
        self._check_seed("seed", self.seed, 0 if has_variation else self.num_painted - 1)
        self._check_seed("variation_seed", self.diffusion.variation_seed, self.num_painted - 1)
        check(self.preview_every >= 0, f"preview_every is {self.preview_every}; give 0 or more.", "preview_every")
        every_s = self.capture_every_s
        check(every_s >= 0.0, f"capture_every_s is {every_s}; give seconds, or 0 for never.", "capture_every_s")
        check(
            self.mask_image is None or self.init_image is not None,
            "a mask was given without an image to inpaint; give init_image too.",
            "mask",
        )
        check_scheduling(self.deadline_s, self.priority, self.share)

    def _read_image_prompts(self, loras: tuple[Lora, ...]) -> None:
        """Check the prompts of the images, and remove their LoRA tags, which must be ``loras``."""
        message = f"{len(self.image_prompts)} prompts were given for {self.num_painted} images; give one for each."
        check(len(self.image_prompts) == self.num_painted, message, "image_prompts")
        texts, tags = zip(*map(read_tags, self.image_prompts), strict=True)
        mixed = "the images of one request would use different LoRAs; take their tags out of the template's braces, or "
        check(all(each == loras for each in tags), mixed + "ask for one image at a time.", "prompt")
        for text in texts:
            check_chars(text, MAX_PROMPT_CHARS, "prompt")
        msgspec.structs.force_setattr(self, "image_prompts", texts)

    def _check_seed(self, name: str, seed: int | None, num_further: int) -> None:
        """Check that ``seed`` and the ``num_further`` seeds after it are in range."""
        largest = MAX_SEED - num_further
        check(
            seed is None or 0 <= seed <= largest,
            f"{name} is {seed}; it must lie between 0 and {largest}"
            f"{f' (the last of {self.num_painted} images uses {name} + {num_further})' * (num_further > 0)},"
            " or be left out for a random one.",
            name,
        )

    def _digest_images(self) -> None:
        """Add the digest of its image to each ControlNet and reference that has none.

        A resized image keeps the digest of the original.
        """
        controls = _with_digests(self.diffusion.controlnets, self.control_images, "ControlNet", "controlnets")
        references = _with_digests(self.diffusion.references, self.reference_images, "reference", "references")
        if controls is not self.diffusion.controlnets or references is not self.diffusion.references:
            diffusion = msgspec.structs.replace(self.diffusion, controlnets=controls, references=references)
            msgspec.structs.force_setattr(self, "diffusion", diffusion)

    @property
    def texts(self) -> dict[str, str]:
        """The inputs of the text encoders, by field name; further texts of a field have "#" and a number.

        These are the prompts of all images and of the second pass of hires fix, and what their editing and alternation
        make of them.
        """
        params = self.diffusion
        num_steps = params.num_steps or 1
        counts = [num_steps, math.ceil(num_steps * params.strength)]
        prompts = {"prompt": (self.prompt, *self.image_prompts), "negative_prompt": (self.negative_prompt,)}
        if params.has_hires:
            second_steps = params.hires_steps or num_steps
            strengths = [params.second_strength(second_steps, is_tiled=is_tiled) for is_tiled in (False, True)]
            counts += [math.ceil(second_steps * strength) for strength in strengths]
        further = {name: getattr(params, name) for name in ("hires_prompt", "hires_negative_prompt")}
        prompts |= {name: (text,) for name, text in further.items() if text is not None}
        judged = [min(max(count, 1), MAX_JUDGED_STEPS) for count in dict.fromkeys(counts)]
        texts: dict[str, str] = {}
        for name, of_field in prompts.items():
            each = (text for prompt in dict.fromkeys(of_field) for text in (prompt, *texts_read(prompt, name, judged)))
            for number, text in enumerate(dict.fromkeys(each), start=1):
                texts[name if number == 1 else f"{name}#{number}"] = text
        return texts

    def prompt_of(self, image_index: int, *, is_second: bool = False) -> str:
        """Return the prompt of image ``image_index``, for its first or its second pass (hires fix)."""
        if is_second and self.diffusion.hires_prompt is not None:
            return self.diffusion.hires_prompt
        return self.image_prompts[image_index] if self.image_prompts else self.prompt

    def negative_of(self, *, is_second: bool) -> str:
        """Return the negative prompt of the first or of the second pass (hires fix)."""
        text = self.diffusion.hires_negative_prompt if is_second else None
        return self.negative_prompt if text is None else text

    @property
    def num_painted(self) -> int:
        """Number of images to generate, including those that ``best_of`` discards."""
        return self.best_of or self.num_images


WithImage = TypeVar("WithImage", Control, Reference)


def _with_digests(
    adapters: tuple[WithImage, ...], images: Sequence[Picture], what: str, param: str
) -> tuple[WithImage, ...]:
    """Return ``adapters`` with the digests of their ``images``, or unchanged if all have one. Raises InvalidRequest."""
    message = f"{len(adapters)} {what}s are requested with {len(images)} images; give one image for each."
    check(len(adapters) == len(images), message, param)
    if all(adapter.image for adapter in adapters):
        return adapters
    return tuple(
        adapter
        if adapter.image
        else msgspec.structs.replace(adapter, image=digest_of(image.width_px, image.height_px, image.data))
        for adapter, image in zip(adapters, images, strict=True)
    )


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Time of an image by phase, in seconds. ``step_s`` is the mean wall time of a denoising step."""

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    step_s: float


class DenoisingRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Denoising parameters with every default resolved; part of results, metadata and responses.

    See :class:`DiffusionParams` for the other fields.

    Attributes:
        strength: Strength of image-to-image; ``None`` without an init image.
        variation_seed: Variation seed of this image; ``None`` without variation.
    """

    sampler: str
    sigma_schedule: str | None
    spacing: str
    num_steps: int
    guidance_scale: float
    guidance_interval: tuple[float, float] = FULL_INTERVAL
    clip_skip: int = 1
    guidance_rescale: float = 0.0
    cache_interval: int = 1
    sigma_min: float | None = None
    sigma_max: float | None = None
    similarity_threshold: float | None = None
    noise_source: NoiseSource = "cpu"
    variation_seed: int | None = None
    variation_strength: float = 0.0
    micro_conditioning: MicroConditioning | None = None
    eta: float
    strength: float | None = None
    loras: tuple[Lora, ...] = ()
    controlnets: tuple[Control, ...] = ()
    references: tuple[Reference, ...] = ()
    switch_at: float | None = None
    hires_scale: float | None = None
    hires_size: str | None = None
    hires_strength: float | None = None
    hires_steps: int | None = None
    hires_upscaler: str = LANCZOS
    hires_sampler: str | None = None
    hires_schedule: str | None = None
    hires_prompt: str | None = None
    hires_negative_prompt: str | None = None
    tile_size: int | None = None
    tile_overlap: int | None = None
    outpaint: str | None = None

    @property
    def has_hires(self) -> bool:
        """Whether the image is enlarged and denoised again (hires fix)."""
        return self.hires_scale is not None or self.hires_size is not None

    def recipe(self) -> dict[str, Any]:
        """Return the fields of the recipe, without those of subclasses, by name."""
        return {name: getattr(self, name) for name in DenoisingRecipe.__struct_fields__}


class ImageResult(DenoisingRecipe, frozen=True, kw_only=True):
    """A finished image and the parameters that produced it (without the caller's init image and mask).

    Attributes:
        num_evaluations: UNet rows (two per step with guidance).
        latents: Final latents, if the request set ``return_latents``.
        prompt: The prompt that was used.
        original_prompt: The prompt before rewriting; ``None`` if it was not rewritten.
        template: Template that the prompt was resolved from; "": none.
        cached: "hit": taken from the result cache; "shared": generated for an equal request that was running. Nothing
            was computed for this request in either case.
        similarity: Similarity of the prompt whose latents were the start; ``None``: started from noise.
        skipped_steps: The number of first steps that were skipped. Such an image can be reproduced only while those
            latents are cached.
        lora_digests: SHA-256 of the LoRA files, by name.
        word_digests: SHA-256 of the textual inversion files, by name.
        reference_digests: SHA-256 of the IP-Adapters' files, by name.
        sampler_digest: SHA-256 of the file of a learned sampler; "": the sampler is built in.
        refiner: Name and digest of the model that ran the last steps; "": none.
        score: Score of the image if ``best_of`` was set; ``image_index`` is then the rank.
        num_discarded: Number of images that ``best_of`` discarded; set on the best image only.
        discarded_evaluations: UNet rows of the discarded images; set on the best image only.
        device_s: This image's share of the device time. The shares of all images, including ``discarded_device_s``, add
            up to the engine's busy time.
        interrupted_after: Steps after which the image was interrupted; it then shows the denoised estimate. 0:
            finished.
    """

    request_id: str
    image_index: int
    seed: int
    picture: Picture
    timings: Timings
    prompt: str
    negative_prompt: str
    num_evaluations: int
    model: str
    model_digest: str
    warnings: tuple[str, ...] = ()
    latents: LatentArray | None = None
    original_prompt: str | None = None
    template: str = ""
    cached: Literal["hit", "shared"] | None = None
    similarity: float | None = None
    skipped_steps: int = 0
    lora_digests: dict[str, str] = {}
    word_digests: dict[str, str] = {}
    reference_digests: dict[str, str] = {}
    sampler_digest: str = ""
    refiner: str = ""
    score: float | None = None
    num_discarded: int = 0
    discarded_evaluations: int = 0
    device_s: float = 0.0
    discarded_device_s: float = 0.0
    interrupted_after: int = 0

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """The image as a uint8 RGB array of shape (height, width, 3)."""
        return self.picture.array

    @property
    def image(self) -> Any:
        """The image as a ``PIL.Image.Image``. PIL is imported on first use."""
        from PIL import Image

        return Image.fromarray(self.pixels)


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the events that answer a request."""

    request_id: str


class Accepted(RequestEvent, frozen=True, kw_only=True):
    """The request is queued.

    Attributes:
        seed: Seed of image 0.
        num_images: Number of images to generate.
        seconds_left: Forecast until the last image is finished; ``None`` if unknown.
    """

    seed: int
    num_images: int
    queue_position: int
    warnings: tuple[str, ...] = ()
    seconds_left: float | None = None


class Queued(RequestEvent, frozen=True, kw_only=True):
    """The queue position of a waiting request has changed: ``queue_position`` requests are ahead of it."""

    queue_position: int
    seconds_left: float | None = None


class Progress(RequestEvent, frozen=True, kw_only=True):
    """An image has completed ``step_index`` of ``num_steps`` steps.

    Attributes:
        seconds_left: Forecast until this image is finished, with the current queue; ``None`` if unknown.
        request_seconds_left: Forecast until the last image of the request is finished; ``None`` if unknown.
    """

    image_index: int
    step_index: int
    num_steps: int
    seconds_left: float | None = None
    request_seconds_left: float | None = None


class Preview(RequestEvent, frozen=True, kw_only=True):
    """The denoised estimate after ``step_index`` steps, as an image."""

    image_index: int
    step_index: int
    picture: Picture


class Captured(RequestEvent, frozen=True, kw_only=True):
    """The state of all images of the request between two steps, for ``GenerationRequest.resume_from``."""

    data: bytes


class ImageFinished(RequestEvent, frozen=True, kw_only=True):
    """An image of the request is finished."""

    result: ImageResult


class ImageFailed(RequestEvent, frozen=True, kw_only=True):
    """An image of the request failed; the other images continue."""

    image_index: int
    code: str
    message: str


class Finished(RequestEvent, frozen=True, kw_only=True):
    """Terminal: every image is finished or has failed, and at least one is finished."""

    num_painted: int
    num_failed: int


class Failed(RequestEvent, frozen=True, kw_only=True):
    """Terminal: the request produced no image."""

    code: str
    message: str
    param: str | None = None


class Cancelled(RequestEvent, frozen=True, kw_only=True):
    """Terminal: the request was cancelled and its lanes are free."""


Event = Accepted | Queued | Progress | Preview | Captured | ImageFinished | ImageFailed | Finished | Failed | Cancelled
TERMINAL = (Finished, Failed, Cancelled)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a loaded model, for the HTTP process and the CLI.

    Attributes:
        vae_factor: Pixels per latent cell.
        size_multiple_px: Sizes are multiples of this.
        good_sizes: (width, height) pairs that the model generates well; the first is native.
        world: Vocabulary of a model with a closed vocabulary, else ``None``.
        other_aspects: Handling of aspect ratios that ``good_sizes`` lacks, see :class:`ModelProfile`.
        fewest_steps: Smallest number of steps that works, by sampler, if it was measured.
        learnt_words: Names of the textual inversion embeddings read from ``ModelProfile.embeddings_dir``, in lower
            case.
        refused_words: Reasons why other files of that folder cannot be used, by embedding name.
        has_size_conditioning: Whether the UNet takes size conditioning (SDXL).
        text_width: Numbers of each prompt token that the UNet reads, which differ between families; 0: unknown.
        most_clip_skip: Largest ``clip_skip``; it leaves the smallest text encoder one layer.
        embeds_guidance: Whether the UNet takes the guidance scale as an embedding, so that images have no unconditional
            row.
        shallow_share: Work of a row in the UNet's shallow part (``cache_interval``), relative to the full UNet;
            ``None`` if the UNet cannot be split.
        lora_dirs: Folders of LoRAs that requests may name: ``lora_dir`` of the profile, and the model's own.
        sampler_dirs: Folders of learned samplers: ``sampler_dir`` of the profile, and the model's own.
        quality_profile: File with the meaning of the quality words, see :class:`ModelProfile`.
        controlnet_dir: Folder of ControlNets, see :class:`ModelProfile`.
        wildcard_dir: Folder of wildcards, see :class:`ModelProfile`.
        reference_dir: Folder of IP-Adapters, see :class:`ModelProfile`.
        upscaler_dir: Folder of upscalers, see :class:`ModelProfile`.
        refiner: Name and digest of the refiner; "": none.
        scorer: Scorer for ``GenerationRequest.best_of``: "checker" or a model name; "": none.
    """

    model_id: str
    family: str
    digest: str
    prediction_type: str
    vae_factor: int
    latent_channels: int
    size_multiple_px: int
    good_sizes: tuple[tuple[int, int], ...]
    max_side_px: int
    train_timesteps: int
    is_inpainting: bool
    default_sampler: str
    default_num_steps: int
    default_guidance_scale: float
    default_spacing: str
    device: str
    dtype: str
    choice_reason: str
    num_parameters: int
    weights_bytes: int
    world: Vocabulary | None = None
    other_aspects: OtherAspects = "paint"
    fewest_steps: FewestSteps | None = None
    shallow_share: float | None = None
    embeds_guidance: bool = False
    most_clip_skip: int = 1
    text_width: int = 0
    has_size_conditioning: bool = False
    learnt_words: tuple[str, ...] = ()
    refused_words: dict[str, str] = {}
    lora_dirs: tuple[str, ...] = ()
    sampler_dirs: tuple[str, ...] = ()
    quality_profile: str = ""
    controlnet_dir: str = ""
    wildcard_dir: str = ""
    reference_dir: str = ""
    upscaler_dir: str = ""
    refiner: str = ""
    scorer: str = ""


class UNetPath(msgspec.Struct, frozen=True, kw_only=True):
    """The implementation of UNet calls of one shape. It is stored, so that a seed gives the same bytes after a restart.

    Attributes:
        key: Digest of everything that the choice depends on: model, precision, hardware, compiler and ``[engine]
            compile``.
        height_px, width_px, num_tokens: Shape of the calls.
        lora_rank: LoRA rank of the calls; 0 without LoRAs.
        path: "plain": the eager network; "compiled": packages compiled ahead of time.
        reason: Human-readable reason for the choice.
    """

    key: str
    height_px: int
    width_px: int
    num_tokens: int
    lora_rank: int = 0
    path: Literal["plain", "compiled"] = "plain"
    reason: str = ""

    @property
    def calls(self) -> tuple[str, int, int, int, int]:
        """The key and shape of the calls, usable as a dictionary key."""
        return self.key, self.height_px, self.width_px, self.num_tokens, self.lora_rank


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that requests may name.

    Attributes:
        info: Capabilities, read from the files until the model is first loaded; ``None`` if the files are unusable.
        is_loaded: Whether the model is loaded; else its first request loads it.
        problem: Reason why it cannot be loaded; "" if none is known.
        keeps_latents: Whether requests may start from latents of similar prompts.
        unet_paths: Implementation of the UNet calls for each shape seen so far.
        records_graphs: Whether UNet calls are recorded as CUDA graphs and replayed.
    """

    name: str
    info: ModelInfo | None
    is_loaded: bool
    problem: str = ""
    keeps_latents: bool = False
    unet_paths: tuple[UNetPath, ...] = ()
    records_graphs: bool = False


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The image model and its defaults: the ``[model]`` table of a file in ``configs/``.

    Attributes:
        path: Weights: "embedded", "embedded-turbo", a diffusers directory, or one safetensors file.
        device: "auto" or a torch device.
        dtype: Type of the weights: auto, float32, bfloat16, float16, int8, int8_dynamic or int8_static.
        vae_dtype: Type of the VAE: auto, float32, bfloat16 or float16; "auto": as ``dtype``, but float32 for a VAE that
            is known to overflow in float16 (SDXL's).
        vae: "": the VAE of the model; else a diffusers directory of a VAE or of a whole model, or a VAE file.
        text_encoder: "": the text encoder of the model; else a diffusers directory with a text encoder and its
            tokenizer; for both of SDXL's the directory of a whole model.
        embeddings_dir: Folder of textual inversion embeddings (.safetensors); "": none.
        good_sizes: (width, height) in pixels that the model generates well; the first is its native size; empty: the
            training size (``sample_size`` in the UNet's configuration).
        max_side_px: Largest side that the model generates.
        other_aspects: "paint": generate an aspect ratio that ``good_sizes`` lacks directly; "pad": generate the nearest
            good size and extend its edges.
        sampler: Name, A1111 label or diffusers class; a sigma schedule may follow ("DPM++ 2M Karras").
        spacing: As in :class:`DiffusionParams`; "auto": the value in the model's scheduler configuration, else the
            default of the sampler's class in diffusers (euler: linspace; ddim: leading).
        probe: At load, denoise a known image and refuse a model whose prediction type does not match.
        lora_dir: Folder of LoRA files (.safetensors) that requests may name, read again at each use; "": none.
        controlnet_dir: Folder of ControlNets in diffusers format, or one ControlNet; "": none.
        reference_dir: Folder of IP-Adapters (.safetensors) and their CLIP image encoders, read again at each use; "":
            none.
        upscaler_dir: Folder of upscaler files (.safetensors) that requests may name, in addition to the shipped one;
            read again at each use; that of the first model counts. "": none.
        sampler_dir: Folder of learned samplers (.json) that requests may name, read again at each use; "": none.
        wildcard_dir: Folder of text files (.txt) that templates may name as __NAME__, read again at each use; "": none.
        quality_profile: TOML file of ``diffserve calibrate`` with the meaning of the quality words, read again at each
            use; "auto": the shipped file of these weights, if there is one; "": none.
        refiner: Model for the last steps of requests that ask for it (``DiffusionParams.switch_at``), a directory or a
            single file with the same latents and noise, for example the SDXL refiner; "": none.
        scorer: Rates the images of ``best_of``: "checker" (of the embedded model), a directory of a CLIP model or of
            one trained on preferences, or "" (off).
    """

    model_id: str
    path: str
    device: str
    dtype: str
    sampler: str
    num_steps: int
    guidance_scale: float
    spacing: str
    good_sizes: tuple[tuple[int, int], ...]
    max_side_px: int
    other_aspects: OtherAspects = "paint"
    probe: bool = True
    vae_dtype: str = "auto"
    vae: str = ""
    text_encoder: str = ""
    embeddings_dir: str = ""
    lora_dir: str = ""
    controlnet_dir: str = ""
    reference_dir: str = ""
    upscaler_dir: str = ""
    sampler_dir: str = ""
    wildcard_dir: str = ""
    quality_profile: str = "auto"
    refiner: str = ""
    scorer: str = ""

    @property
    def diffusion(self) -> DiffusionParams:
        """The defaults of this profile as :class:`DiffusionParams`."""
        return DiffusionParams(
            sampler=self.sampler,
            num_steps=self.num_steps,
            spacing=None if self.spacing == AUTO_SPACING else self.spacing,
            guidance_scale=self.guidance_scale,
        )
