"""The words every floor of the house speaks: requests, parameters, pictures, results, events.

Nothing here imports torch. Every type is a frozen ``msgspec.Struct``, so the same object travels from the HTTP process
to the engine process as msgpack, with no pickle. A value that would be wrong cannot be built: ``__post_init__`` raises
:class:`diffserve.api.errors.InvalidRequest` with the value and the way out.
"""

from __future__ import annotations

import math
import uuid
from typing import Any, Final, Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffserve.api.bounds import check, check_chars, check_deadline, check_num, check_share
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.tensor_values import Encodings
from diffserve.models.controlnets import Control, check_controls, digest_of
from diffserve.models.fewest_steps import FewestSteps
from diffserve.models.loras import Lora, check_loras, read_tags
from diffserve.models.vocabulary import Vocabulary

MAX_PROMPT_CHARS = 32_000
MAX_IMAGES = 10
MAX_SEED = 2**63 - 1
MAX_GUIDANCE = 30.0
SWITCH_AT: Final = 0.8
"""Where a refiner takes over of whose request no more is said."""
CHECKER: Final = "checker"
"""The scorer of the embedded model's world, which is no file."""
MAX_STEPS = 1_000_000
MAX_MERGING = 0.75
"""One token of every 2 x 2 stays."""
MAX_CLIP_SKIP = 100
"""More than any model takes; its own bound are its text encoders' layers."""
MAX_CACHE_INTERVAL = 1000
"""More than any model takes; its own bound is its training length."""

E = TypeVar("E")
FULL_INTERVAL = (0.0, 1.0)
"""Guidance in all steps."""

AUTO_SPACING: Final = "auto"

OtherAspects = Literal["paint", "pad"]
NoiseSource = Literal["cpu", "device"]
NOISE_SOURCES: Final[tuple[NoiseSource, ...]] = get_args(NoiseSource)
Priority = Literal["interactive", "batch"]
PRIORITIES: Final[tuple[Priority, ...]] = get_args(Priority)


def _check_number(value: float | None, name: str, low: float, high: float, hint: str = "") -> None:
    if value is not None:
        check(
            math.isfinite(value) and low <= value <= high,
            f"{name} is {value}; it must lie between {low:g} and {high:g}{hint}.",
            name,
        )


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """An 8-bit picture: ``data`` holds ``height_px * width_px * channels`` bytes, rows first.

    ``channels`` is 3 (RGB) for pictures, 1 for masks (255 = paint here).
    """

    width_px: int
    height_px: int
    data: bytes
    channels: int = 3

    def __post_init__(self) -> None:
        expected = self.width_px * self.height_px * self.channels
        check(
            self.width_px > 0 and self.height_px > 0 and self.channels in (1, 3) and len(self.data) == expected,
            f"a picture of {self.width_px}x{self.height_px} with {self.channels} channel(s) needs {expected} bytes, "
            f"not {len(self.data)}.",
            "image",
            "invalid_image",
        )

    @classmethod
    def from_array(cls, pixels: NDArray[np.uint8]) -> Picture:
        """Wrap ``pixels`` of shape (height, width, 3) or (height, width) for a mask."""
        height, width = pixels.shape[:2]
        channels = pixels.shape[2] if pixels.ndim == 3 else 1
        return cls(width_px=width, height_px=height, channels=channels, data=np.ascontiguousarray(pixels).tobytes())

    @property
    def array(self) -> NDArray[np.uint8]:
        """The pixels as a read-only (height, width, 3) array, or (height, width) for a mask."""
        shape = (self.height_px, self.width_px, 3) if self.channels == 3 else (self.height_px, self.width_px)
        return np.frombuffer(self.data, dtype=np.uint8).reshape(shape)


class LatentArray(msgspec.Struct, frozen=True, kw_only=True):
    """Final latents as little-endian float32 bytes of ``shape`` (channels, height / f, width / f)."""

    shape: tuple[int, int, int]
    data: bytes

    @classmethod
    def from_array(cls, latents: NDArray[np.float32]) -> LatentArray:
        channels, height, width = latents.shape
        return cls(shape=(channels, height, width), data=latents.astype("<f4").tobytes())

    @property
    def array(self) -> NDArray[np.float32]:
        """The latents as a float32 array of ``shape``."""
        return np.frombuffer(self.data, dtype="<f4").reshape(self.shape)


class DiffusionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to denoise. ``None`` means: as the model's profile says.

    sampler            canonical name, A1111 label or diffusers class name (see ``schedulers.SAMPLERS``)
    num_steps          denoising steps, 1 up to the training length (checked against the model at submit)
    spacing            "leading" | "trailing" | "linspace" | "quadratic"
    sigma_schedule     "karras" | "exponential" | "sgm_uniform" | "simple" | "beta"
    eta                share of fresh noise, 0 (none) to 1 (as much as ddpm): default 0 (ddim), 1 (euler_a) or
                       0.3 (tcd, its gamma); with other samplers it has no effect and causes a warning
    guidance_scale     classifier-free guidance weight; 1 and below: no unconditional row
    guidance_interval  (from, to) as fractions of the steps; outside it the unconditional row is skipped
    clip_skip          which layer of the text encoders the UNet reads, counted from the one it was trained with: 1;
                       of the negative prompt as well, as in A1111 (diffusers: of the prompt alone)
    guidance_rescale   how far the guided output is brought back to the spread of the unguided, 0 (off) to 1
    cache_interval     DeepCache: the whole UNet runs at every so many-th evaluation, between them its shallow part on
                       the features that it left; 1: always the whole
    token_merging      without effect and with a warning: it was removed in 0.2
    similarity_threshold  begin from the latents of the most similar prompt that is at least so similar, above 0 to 1,
                       and leave out the more steps the more similar it is; ``None``: always from noise
    micro_conditioning the sizes that SDXL is told of, the picture's own unless given
    noise_source       "cpu" | "device", see ``EngineConfig``; ``None``: as that says
    variation_strength how far all noise of a picture is turned towards that of another seed, 0 (off) to 1 (its
                       picture); the images of a request then have one seed and these others
    variation_seed     that of image 0, which image i adds i to; ``None``: drawn at submit and reported back
    strength           how much of an init image is repainted, 0 (nothing) to 1 (everything)
    loras              adapters of the server's folder that change the model for this picture alone
    controlnets        of the server's folder, each with a picture among the request's ``control_images``
    switch_at          the refiner takes over after this share of the noise levels, 0 to 1 (diffusers' denoising_end
                       and denoising_start; 0.8 is SDXL's); ``None``: it does not
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
    token_merging: float = 0.0
    similarity_threshold: float | None = None
    noise_source: NoiseSource | None = None
    variation_seed: int | None = None
    variation_strength: float = 0.0
    micro_conditioning: MicroConditioning | None = None
    strength: float = 0.75
    loras: tuple[Lora, ...] = ()
    controlnets: tuple[Control, ...] = ()
    switch_at: float | None = None

    def __post_init__(self) -> None:
        check(
            self.num_steps is None or self.num_steps >= 1,
            f"num_steps is {self.num_steps}; ask for at least 1 step.",
            "num_inference_steps",
        )
        check(
            self.num_steps is None or self.num_steps <= MAX_STEPS,
            f"num_steps is {str(self.num_steps)[:40]}; no model takes more than {MAX_STEPS} steps.",
            "num_inference_steps",
        )
        _check_number(self.eta, "eta", 0.0, 1.0)
        _check_number(self.guidance_scale, "guidance_scale", 0.0, MAX_GUIDANCE)
        _check_number(self.strength, "strength", 0.0, 1.0)
        skip = self.clip_skip
        check(skip >= 1, f"clip_skip is {skip}; give 1, the layer that is read anyway, or more.", "clip_skip")
        _check_number(self.guidance_rescale, "guidance_rescale", 0.0, 1.0)
        _check_number(self.switch_at, "switch_at", 0.0, 1.0)
        start, stop = self.guidance_interval
        check(
            0.0 <= start <= stop <= 1.0,
            f"guidance_interval is ({start}, {stop}); give two fractions with 0 <= from <= to <= 1.",
            "guidance_interval",
        )
        check(
            1 <= self.cache_interval <= MAX_CACHE_INTERVAL,
            f"cache_interval is {str(self.cache_interval)[:40]}; give a whole number from 1, which is off, to "
            f"{MAX_CACHE_INTERVAL}.",
            "cache_interval",
        )
        merging = self.token_merging
        check(
            0.0 <= merging <= MAX_MERGING and merging == round(merging * 20) / 20,
            f"token_merging is {merging}; give 0, which is off, to {MAX_MERGING} in steps of 0.05.",
            "token_merging",
        )
        threshold = self.similarity_threshold
        check(
            threshold is None or 0.0 < threshold <= 1.0,
            f"similarity_threshold is {threshold}; give a number above 0, at most 1, or leave it out.",
            "similarity_threshold",
        )
        source = self.noise_source
        check(
            source is None or source in NOISE_SOURCES,
            f"noise_source is {str(source)[:40]!r}; give {' or '.join(NOISE_SOURCES)}, or leave it out.",
            "noise_source",
        )
        _check_number(self.variation_strength, "variation_strength", 0.0, 1.0)
        check_loras(self.loras)
        check_controls(self.controlnets)


class RewriteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a wish is rewritten into a prompt.

    style   whose prompts the image model reads best: file name in ``configs/rewriter/``; ``None``: the model's own
    seed    of the second prompt and those after it, and of models that draw; ``None``: 0
    system  a system text in place of the style's own
    force   take an answer although the model was unsure of it; empty, refusing and endless ones are never taken
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


def check_priority(priority: str) -> None:
    """InvalidRequest for a priority that is none."""
    said = f"priority is {priority[:40]!r}; give {' or '.join(PRIORITIES)}, or leave it out."
    check(priority in PRIORITIES, said, "priority")


def new_request_id(kind: str = "img") -> str:
    """A fresh request id: ``kind``, which is img, txt or rwt, and 24 hexadecimal digits."""
    return f"{kind}-{uuid.uuid4().hex[:24]}"


class Asks(Generic[E]):
    """A request that is answered by events ``E``."""

    __slots__ = ()

    request_id: str

    @property
    def kind(self) -> str:
        """The tag with which it travels, and by which metrics name it: "image", "text", "rewrite" or "embedding"."""
        return str(type(self).__struct_config__.tag)  # type: ignore[attr-defined]  # a Struct's


class GenerationRequest(
    msgspec.Struct, Asks["Event"], frozen=True, kw_only=True, forbid_unknown_fields=True, tag="image"
):
    """What somebody wants painted.

    width_px, height_px   multiples of the model's VAE factor (checked at submit); ``None``: the model's native size
    num_images            image i is the picture that seed + i gives alone, or the same seed and variation_seed + i
    best_of               so many are painted, and the ``num_images`` with the highest scores are delivered, the best
                          first; ``None``: none are chosen from
    seed                  ``None``: drawn at submit and reported back
    init_image            start from this picture (image-to-image), resized by the caller to width x height
    mask_image            one channel, 255 = repaint here (inpainting); needs ``init_image``
    control_images        of the ControlNets of ``diffusion``, in turn: what each goes by, of the picture's size or
                          to be resized
    preview_every         a Preview event each so many steps; 0: none
    rewriting             have the prompt rewritten first; ``None``: paint it as it is
    deadline_s            seconds after submit at which the work is given up
    refuses_late          whether it is refused at once where it is foreseen to be done later than that
    priority              "batch" gets what "interactive" leaves, and a tenth of the work whatever that leaves
    model                 the name of the model that paints, where several are served; "": the first of them
    client                whose request it is, by any name: clients share the engine fairly; told to nobody
    share                 how many times as much its client gets as others do, while they all want some
    encodings             of its texts, where another process has encoded them (see ``stage_types``)

    Adapters that the prompt asks for (``loras.read_tags``) are moved from there to ``diffusion``, and digests of
    ``control_images`` are put there.
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
    request_id: str = msgspec.field(default_factory=new_request_id)

    def __post_init__(self) -> None:
        prompt, loras = read_tags(self.prompt)
        if loras:
            msgspec.structs.force_setattr(self, "prompt", prompt)
            asked = msgspec.structs.replace(self.diffusion, loras=(*self.diffusion.loras, *loras))
            msgspec.structs.force_setattr(self, "diffusion", asked)
        self._digest_control_images()
        has_any = bool(self.prompt.strip()) or self.init_image is not None
        check(has_any, "the prompt is empty; say what to paint.", "prompt", "empty_prompt")
        for name, text in (("prompt", self.prompt), ("negative_prompt", self.negative_prompt)):
            check_chars(text, MAX_PROMPT_CHARS, name)
        for name, size in (("width", self.width_px), ("height", self.height_px)):
            check(size is None or size > 0, f"{name} is {size} px; it must be positive.", "size", "invalid_size")
        check_num(self.num_images, MAX_IMAGES, "images")
        best = f"best_of is {str(self.best_of)[:40]}; paint at least the {self.num_images} that are kept, at most "
        is_fine = self.best_of is None or self.num_images <= self.best_of <= MAX_IMAGES
        check(is_fine, f"{best}{MAX_IMAGES}.", "best_of")
        varied = self.diffusion.variation_strength > 0.0
        self._check_seed("seed", self.seed, 0 if varied else self.num_painted - 1)
        self._check_seed("variation_seed", self.diffusion.variation_seed, self.num_painted - 1)
        check(self.preview_every >= 0, f"preview_every is {self.preview_every}; 0 or more.", "preview_every")
        check(
            self.mask_image is None or self.init_image is not None,
            "a mask was given without an image to repaint; give init_image too.",
            "mask",
        )
        check_deadline(self.deadline_s)
        check_share(self.share)
        check_priority(self.priority)

    def _check_seed(self, name: str, seed: int | None, further: int) -> None:
        most = MAX_SEED - further
        check(
            seed is None or 0 <= seed <= most,
            f"{name} is {seed}; it must lie between 0 and {most}"
            f"{f', for the last of {self.num_painted} images has {further} more' * (further > 0)},"
            " or be left out to be drawn.",
            name,
        )

    def _digest_control_images(self) -> None:
        """Tell each ControlNet of which picture it is, unless it knows: a resized one keeps the digest it came with."""
        asked, pictures = self.diffusion.controlnets, self.control_images
        said = f"{len(asked)} ControlNets are asked for with {len(pictures)} pictures; give each of them one."
        check(len(asked) == len(pictures), said, "controlnets")
        if all(control.image for control in asked):
            return
        told = tuple(
            control
            if control.image
            else msgspec.structs.replace(control, image=digest_of(picture.width_px, picture.height_px, picture.data))
            for control, picture in zip(asked, pictures, strict=True)
        )
        msgspec.structs.force_setattr(self, "diffusion", msgspec.structs.replace(self.diffusion, controlnets=told))

    @property
    def texts(self) -> dict[str, str]:
        """The texts that reach the text encoders, by the names of their fields."""
        return {"prompt": self.prompt, "negative_prompt": self.negative_prompt}

    @property
    def num_painted(self) -> int:
        """Pictures that are painted, whether they are kept or not."""
        return self.best_of or self.num_images


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where an image's time went, in seconds. ``step_s`` is the mean wall time of a denoising step."""

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    step_s: float


class DenoisingRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a picture is denoised, every default resolved: :class:`DiffusionParams` with no question left open.

    The engine paints by it, and result, metadata and answers tell it.

    strength        how much of the init image is repainted, ``None`` where there is none
    variation_seed  ``None`` where nothing is varied; of a result, that of its picture
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
    similarity_threshold: float | None = None
    noise_source: NoiseSource = "cpu"
    variation_seed: int | None = None
    variation_strength: float = 0.0
    micro_conditioning: MicroConditioning | None = None
    eta: float
    strength: float | None = None
    loras: tuple[Lora, ...] = ()
    controlnets: tuple[Control, ...] = ()
    switch_at: float | None = None

    def recipe(self) -> dict[str, Any]:
        """The fields of a recipe alone, by name."""
        return {name: getattr(self, name) for name in DenoisingRecipe.__struct_fields__}


class ImageResult(DenoisingRecipe, frozen=True, kw_only=True):
    """One finished image and what it was painted with (an init image and its mask are the caller's).

    ``num_evaluations`` counts UNet rows (two a step under guidance); ``latents`` only when asked for. ``prompt`` is
    what was painted from; ``original_prompt`` the wish before it was rewritten, ``None`` where it was not. ``cached``:
    the picture was known ("hit"), or painted for an equal request ("shared"); then nothing was computed for this one.
    ``similarity``: of the prompt whose latents it began from, ``None`` where it began from noise; then the first
    ``skipped_steps`` of its ``num_steps`` were left out, and it repeats itself only while those latents are kept.
    ``lora_digests``, ``word_digests``: SHA-256 of the files of its adapters and learnt words, by their names.
    ``refiner``: name and digest of the model that painted the last steps, "" where none did. ``score``: by which it was
    chosen from several (``best_of``); then ``image_index`` is its rank, and the first of them tells how many others
    were painted and not kept, ``num_discarded``, and with how many rows, ``discarded_evaluations``. ``device_s``: its
    share of the seconds of the ticks that it took part in; those of all images, ``discarded_device_s`` among them, add
    up to the time in which the engine was busy. ``interrupted_after``: the steps after which it was interrupted, and
    shows the denoised estimate; 0 where it is finished.
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
    cached: Literal["hit", "shared"] | None = None
    similarity: float | None = None
    skipped_steps: int = 0
    lora_digests: dict[str, str] = {}
    word_digests: dict[str, str] = {}
    refiner: str = ""
    score: float | None = None
    num_discarded: int = 0
    discarded_evaluations: int = 0
    device_s: float = 0.0
    discarded_device_s: float = 0.0
    interrupted_after: int = 0

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """(height, width, 3) uint8 RGB."""
        return self.picture.array

    @property
    def image(self) -> Any:
        """The picture as a ``PIL.Image.Image`` (imported only here)."""
        from PIL import Image

        return Image.fromarray(self.pixels)


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request is in the queue; ``seed`` is the one that will be used for image 0. ``num_images`` are painted, the
    last in about ``seconds_left``, ``None`` where that is not known."""

    request_id: str
    seed: int
    num_images: int
    queue_position: int
    warnings: tuple[str, ...] = ()
    seconds_left: float | None = None


class Queued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request still waits, and ``queue_position`` others will begin before it; told when that has changed."""

    request_id: str
    queue_position: int
    seconds_left: float | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``step_index`` of ``num_steps`` steps of image ``image_index`` are done; it is a picture in about
    ``seconds_left``, with all that is queued now and nothing that comes later, and the last of its request is one in
    ``request_seconds_left``."""

    request_id: str
    image_index: int
    step_index: int
    num_steps: int
    seconds_left: float | None = None
    request_seconds_left: float | None = None


class Preview(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The denoised estimate after ``step_index`` steps, as a picture."""

    request_id: str
    image_index: int
    step_index: int
    picture: Picture


class Painted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One image of the request is finished."""

    request_id: str
    result: ImageResult


class ImageFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One image of the request failed; its neighbours and its siblings go on."""

    request_id: str
    image_index: int
    code: str
    message: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Terminal: every image is painted or has failed, and at least one is painted."""

    request_id: str
    num_painted: int
    num_failed: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Terminal: the request gave no image."""

    request_id: str
    code: str
    message: str
    param: str | None = None


class Cancelled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Terminal: the request was cancelled; its lanes are free."""

    request_id: str


Event = Accepted | Queued | Progress | Preview | Painted | ImageFailed | Finished | Failed | Cancelled
TERMINAL = (Finished, Failed, Cancelled)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model can do; the HTTP process and the CLI read it, no torch needed.

    vae_factor    pixels per latent cell; sizes are multiples of ``size_multiple_px``
    good_sizes    (width, height) pairs that the model does well; the first is native
    world         of a model that knows a closed one: what it can paint, and its words
    other_aspects what becomes of a picture of another aspect than the good sizes have: see :class:`ModelProfile`
    fewest_steps  from how many steps on each sampler paints right, where that was measured
    learnt_words  that were read from ``ModelProfile.embeddings_dir``, by their names in small letters
    refused_words why other files of that folder cannot be used, by the names of their words
    has_size_conditioning  whether its UNet is told sizes (SDXL)
    most_clip_skip   the largest ``clip_skip``, which leaves its smallest text encoder one layer
    embeds_guidance  whether the UNet is told guidance as a vector, and no image has an unconditional row
    shallow_share work of a row of the UNet's shallow part (``cache_interval``) over that of a whole one; ``None`` for a
                  UNet that cannot be split so
    lora_dirs     folders of adapters that requests may name: the profile's ``lora_dir``, and the model's own
    controlnet_dir  see :class:`ModelProfile`
    refiner       name and digest of the model that may take over for the last steps; "": there is none
    scorer        what chooses pictures (``GenerationRequest.best_of``), "checker" or a model's name; "": nothing does
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
    has_size_conditioning: bool = False
    learnt_words: tuple[str, ...] = ()
    refused_words: dict[str, str] = {}
    lora_dirs: tuple[str, ...] = ()
    controlnet_dir: str = ""
    refiner: str = ""
    scorer: str = ""


class UNetPath(msgspec.Struct, frozen=True, kw_only=True):
    """How the UNet calls of one shape are made. It is chosen once, so that a seed keeps its bytes over restarts.

    key        digest of everything the choice depends on: model, precision, hardware, compiler and ``[engine] compile``
    height_px, width_px, num_tokens, lora_rank  shape of the calls; ``lora_rank`` is 0 for calls without adapters
    path       "plain": the network itself; "compiled": packages that were compiled ahead of time
    reason     why this path was chosen, for people
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
        """The calls that this path is for, as a dictionary key."""
        return self.key, self.height_px, self.width_px, self.num_tokens, self.lora_rank


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that requests may name.

    info           what it can do: as its files say until it has been loaded once; ``None``: they say nothing usable
    is_loaded      whether it paints at once; else it is loaded for the first request
    problem        why it cannot be loaded, "" where nothing is known to be wrong
    keeps_latents  whether pictures may begin from those of similar prompts
    unet_paths     how UNet calls are made, for each shape seen so far
    records_graphs whether UNet calls are recorded as CUDA graphs and replayed
    """

    name: str
    info: ModelInfo | None
    is_loaded: bool
    problem: str = ""
    keeps_latents: bool = False
    unet_paths: tuple[UNetPath, ...] = ()
    records_graphs: bool = False


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a model lies and how it is best used: the ``[model]`` table of a file in ``configs/``.

    path             "embedded", "embedded-turbo", a diffusers directory, or a single safetensors file
    device, dtype    "auto", or a torch device / one of float32, bfloat16, float16, int8, int8_dynamic,
                     int8_static
    vae_dtype        "auto": as ``dtype`` computes, but float32 where the VAE is known to overflow in float16 (SDXL's);
                     or float32, bfloat16, float16
    vae              "": the model's own; else what is read instead: a directory as diffusers writes a VAE or a whole
                     model, or a file that is a VAE
    text_encoder     the same of the text encoder and its tokenizer, directories only; SDXL's two are named by a whole
                     model's
    embeddings_dir   folder of learned words (textual inversion) as safetensors files; empty: none
    good_sizes       (width, height) in pixels that the model does well; the first is native; empty: the model's own
                     training size (``sample_size`` in its UNet's configuration)
    max_side_px      longest side that is painted directly
    other_aspects    of another aspect than the good sizes have: "paint", at the nearest size of that aspect, or "pad",
                     painted at the nearest good size, whose edges then go on to the sides
    sampler          any name a request may use; a sigma schedule may follow it ("DPM++ 2M Karras")
    spacing          as in :class:`DiffusionParams`, or "auto": what the model's scheduler configuration says, else the
                     own one of each sampler's class in diffusers (euler: linspace; ddim: leading)
    probe            at load, have the model denoise a known picture, and refuse it where it answers as another kind
    lora_dir         a folder of adapters that requests may name, safetensors files, looked at anew each time; "": none
    controlnet_dir   the same of ControlNets, directories as diffusers writes them, or one such directory
    refiner          a model that takes over for the last steps of who asks for it (``DiffusionParams.switch_at``), a
                     directory or a single file; SDXL's refiner, or any of the same latents and noise; "": none
    scorer           what chooses the best of several pictures: "checker", which knows the embedded model's world, or
                     the directory of a CLIP model, trained on pictures and texts, or on choices; "": nothing
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
    refiner: str = ""
    scorer: str = ""

    @property
    def diffusion(self) -> DiffusionParams:
        """The profile's defaults as :class:`DiffusionParams`."""
        return DiffusionParams(
            sampler=self.sampler,
            num_steps=self.num_steps,
            spacing=None if self.spacing == AUTO_SPACING else self.spacing,
            guidance_scale=self.guidance_scale,
        )
