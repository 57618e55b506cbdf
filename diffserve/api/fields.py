"""The table of image request fields: name, type, bounds, default, help text and names in other interfaces.

The HTTP bodies, the CLI options, infotext, A1111's API, the page's form and the checks of requests derive from it.
This module imports only the standard library and the checks, because the command line imports it at start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, get_origin

from diffserve.api.bounds import check

MAX_SEED: Final = 2**63 - 1
MAX_GUIDANCE: Final = 30.0
MAX_MERGING: Final = 0.75
"""One of every 2 x 2 tokens remains."""
MAX_CLIP_SKIP: Final = 100
"""Upper limit for any model; each model is limited by the layers of its text encoders."""
MAX_CACHE_INTERVAL: Final = 1000
"""Upper limit for any model; each model is limited by its training length."""
MAX_SIGMA: Final = 1e6
"""Upper limit for any model; each model is limited by its training noise levels."""
FULL_INTERVAL: Final = (0.0, 1.0)
"""Guidance applies to all steps."""

MAX_TILE_PX: Final = 2048
MAX_HIRES_SCALE: Final = 8.0
MAX_HIRES_STEPS: Final = 1000
"""Upper limit for any model; each model is limited by its training length."""
HIRES: Final = "hires_"
"""Beginning of the names of the fields of hires fix."""
HIRES_STRENGTH: Final = 0.4
"""Default denoising strength of the second pass of hires fix: it adds detail and keeps the picture."""
TILED_HIRES_STRENGTH: Final = 0.1
"""The same where the second pass is tiled: with more, every tile turns into a picture of the prompt."""

NoiseSource = Literal["cpu", "device"]
TemplateMode = Literal["off", "random", "combinatorial"]


@dataclass(frozen=True, kw_only=True)
class RequestField:
    """A field of image requests.

    Attributes:
        type: The Python type of a value that is given.
        help: One sentence for OpenAPI, the command line, the page's form and the documentation.
        default: Value of ``DiffusionParams`` if the field is not given.
        absent: Text for a missing value, if ``default`` does not say it.
        unit: Unit of the value in the documentation; "": none.
        minimum: Smallest value; ``None``: none. For an interval: of both ends.
        maximum: Largest value; ``None``: none.
        is_minimum_excluded: Whether values must be above ``minimum``.
        hint: Ending of the error message for a value out of range, such as "; 1 is off".
        label: Key in infotext; "": not recorded.
        option: Command line option of a field that the HTTP body, the command line and ``DiffusionParams`` share
            unchanged, so that nothing else declares it there; "": a field with code of its own.
        metavar: Placeholder of the option's value in its help text.
        is_hidden: Whether the option is left out of the help text.
        a1111: Name in the bodies of A1111's API; "": none.
        a1111_setting: Name in ``override_settings`` of A1111's API, where 0 stands for the default; "": none.
        form: Label in the page's form; "": not one of the typed fields of the form.
    """

    type: Any
    help: str = ""
    default: Any = None
    absent: str = ""
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    is_minimum_excluded: bool = False
    hint: str = ""
    label: str = ""
    option: str = ""
    metavar: str | None = None
    is_hidden: bool = False
    a1111: str = ""
    a1111_setting: str = ""
    form: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a field with a fixed list of them; empty for other fields."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def default_text(self) -> str:
        """The meaning of a missing value, for the documentation and the empty field of the page's form."""
        return self.absent or f"{self.default:g}"

    def check(self, name: str, value: Any) -> None:
        """Check a value against the bounds and choices of this field; ``None`` is allowed if it is the default.

        Raises:
            InvalidRequest: The value is out of range; its ``param`` is ``name``.
        """
        if value is None and self.default is None:
            return
        if self.choices:
            message = f"{name} is {str(value)[:40]!r}; give {' or '.join(self.choices)}, or leave it out."
            check(value in self.choices, message, name)
        elif self.minimum is not None and self.maximum is not None and self.type in (int, float):
            low, high = (str(limit) if self.type is int else f"{limit:g}" for limit in (self.minimum, self.maximum))
            limits = f"lie between {low} and {high}"
            if self.is_minimum_excluded:
                limits = f"be above {low} and at most {high}"
            is_above = value > self.minimum if self.is_minimum_excluded else value >= self.minimum
            is_finite = isinstance(value, int) or math.isfinite(value)  # a huge int does not fit into a float
            message = f"{name} is {str(value)[:40]}; it must {limits}{self.hint}."
            check(is_finite and is_above and value <= self.maximum, message, name)


REQUEST_FIELDS: Final[dict[str, RequestField]] = {
    "num_inference_steps": RequestField(
        type=int,
        help="Number of denoising steps; limited by the training length of the model.",
        absent="model default",
        unit="steps",
        label="Steps",
        a1111="steps",
    ),
    "sampler": RequestField(
        type=str,
        help="Sampler: its name, A1111 label or diffusers class, or learned:NAME.",
        absent="model default",
        label="Sampler",
        a1111="sampler_name",
    ),
    "sigma_schedule": RequestField(
        type=str,
        help="Sigma schedule: karras, exponential, sgm_uniform, simple or beta.",
        absent="model default",
        label="Schedule type",
    ),
    "guidance_scale": RequestField(
        type=float,
        help="Classifier-free guidance scale; 1: no guidance.",
        absent="model default",
        minimum=0.0,
        maximum=MAX_GUIDANCE,
        label="CFG scale",
        a1111="cfg_scale",
    ),
    "seed": RequestField(
        type=int,
        help="Seed of the first image; image i uses seed + i. -1: random.",
        absent="random",
        label="Seed",
        a1111="seed",
    ),
    "size": RequestField(
        type=str, help="WIDTHxHEIGHT, or auto for the native size.", absent="native size", unit="pixels", label="Size"
    ),
    "variation_seed": RequestField(
        type=int,
        help="Seed of the variation noise; image i uses variation_seed + i and the same seed.",
        absent="random",
        minimum=0,
        maximum=MAX_SEED,
        label="Variation seed",
        a1111="subseed",
        form="Variation seed",
    ),
    "variation_strength": RequestField(
        type=float,
        help="Amount of variation noise mixed into the start noise, 0 to 1.",
        default=0.0,
        unit="fraction",
        minimum=0.0,
        maximum=1.0,
        label="Variation seed strength",
        option="--variation-strength",
        metavar="SHARE",
        a1111="subseed_strength",
        form="Variation",
    ),
    "strength": RequestField(
        type=float,
        help="Strength of a request that starts from an image: 0 keeps it, 1 ignores it.",
        default=0.75,
        unit="fraction",
        minimum=0.0,
        maximum=1.0,
        label="Denoising strength",
        a1111="denoising_strength",
    ),
    "eta": RequestField(
        type=float,
        help="Noise added by ddim, euler_a and tcd, 0 to 1.",
        absent="sampler default",
        unit="fraction",
        minimum=0.0,
        maximum=1.0,
        label="Eta",
        option="--eta",
        a1111="eta",
        form="Eta",
    ),
    "guidance_interval": RequestField(
        type=tuple[float, float],
        help="Apply guidance only in this part of the steps.",
        default=FULL_INTERVAL,
        absent="0-1 (all steps)",
        unit="fractions of the steps",
        minimum=0.0,
        maximum=1.0,
        label="Guidance interval",
        option="--guidance-interval",
        metavar="FROM TO",
        form="Guidance interval",
    ),
    "clip_skip": RequestField(
        type=int,
        help="Use the N-th last text encoder layer; 1: the last.",
        default=1,
        unit="layers",
        minimum=1,
        maximum=MAX_CLIP_SKIP,
        hint="; 1 is the default layer",
        label="Clip skip",
        option="--clip-skip",
        metavar="N",
        a1111="clip_skip",
        form="Clip skip",
    ),
    "guidance_rescale": RequestField(
        type=float,
        help="Rescale the guided output to the unguided standard deviation, 0 to 1.",
        default=0.0,
        unit="fraction",
        minimum=0.0,
        maximum=1.0,
        label="CFG rescale phi",
        option="--guidance-rescale",
        metavar="SHARE",
        form="Guidance rescale",
    ),
    "cache_interval": RequestField(
        type=int,
        help="Run the full UNet only every N-th evaluation (DeepCache); 1: always.",
        default=1,
        unit="evaluations",
        minimum=1,
        maximum=MAX_CACHE_INTERVAL,
        hint="; 1 is off",
        label="Cache interval",
        option="--cache-interval",
        metavar="N",
        form="DeepCache interval",
    ),
    "sigma_min": RequestField(
        type=float,
        help="Smallest noise level of the karras, exponential and beta schedules, such as 0.03.",
        absent="schedule default",
        unit="sigma",
        minimum=0.0,
        maximum=MAX_SIGMA,
        is_minimum_excluded=True,
        hint=", or be left out",
        label="Schedule min sigma",
        option="--sigma-min",
        metavar="SIGMA",
        a1111_setting="sigma_min",
        form="Smallest sigma",
    ),
    "sigma_max": RequestField(
        type=float,
        help="Largest noise level of the karras, exponential and beta schedules, such as 14.6.",
        absent="schedule default",
        unit="sigma",
        minimum=0.0,
        maximum=MAX_SIGMA,
        is_minimum_excluded=True,
        hint=", or be left out",
        label="Schedule max sigma",
        option="--sigma-max",
        metavar="SIGMA",
        a1111_setting="sigma_max",
        form="Largest sigma",
    ),
    "token_merging": RequestField(
        type=float,
        help="No effect; removed in 0.2.",
        default=0.0,
        minimum=0.0,
        maximum=MAX_MERGING,
        hint="; 0 is off",
        option="--token-merging",
        is_hidden=True,
    ),
    "similarity_threshold": RequestField(
        type=float,
        help="Start from cached latents of a prompt with at least this similarity, up to 1.",
        absent="never",
        unit="cosine",
        minimum=0.0,
        maximum=1.0,
        is_minimum_excluded=True,
        hint=", or be left out",
        label="Similarity threshold",
        option="--similarity-threshold",
        metavar="COSINE",
        form="Similarity threshold",
    ),
    "micro_conditioning": RequestField(
        type=object,
        help="SDXL only: original_size 640x480 crop 0x0 target_size 1024x1024, also negative_*.",
        absent="image size",
        unit="pixels",
        label="Micro conditioning",
        form="Size conditioning",
    ),
    "switch_at": RequestField(
        type=float,
        help="Share of the noise levels after which the refiner takes over, such as 0.8.",
        absent="never",
        unit="fraction",
        minimum=0.0,
        maximum=1.0,
        label="Refiner switch at",
        form="Refiner switch",
    ),
    "noise_source": RequestField(
        type=NoiseSource,
        help="Noise source: cpu, or device for CUDA noise (A1111: NV).",
        absent="server default",
        label="RNG",
        option="--noise-source",
        metavar="SOURCE",
    ),
    "spacing": RequestField(
        type=str,
        help="Timestep spacing: leading, trailing, linspace or quadratic.",
        absent="model default",
        label="Spacing",
    ),
    "template": RequestField(
        type=TemplateMode,
        help="Resolve braces and wildcards of the prompt: off, random (by the seed) or combinatorial.",
        absent="off",
        a1111="template",
    ),
    "hires_scale": RequestField(
        type=float,
        help="Hires fix: enlarge the image by this factor and denoise it again in part.",
        absent="off",
        minimum=1.0,
        maximum=MAX_HIRES_SCALE,
        hint=", or be left out",
        label="Hires upscale",
        option="--hires-scale",
        metavar="FACTOR",
        a1111="hr_scale",
        form="Hires scale",
    ),
    "hires_size": RequestField(
        type=str,
        help="Hires fix: enlarge the image to WIDTHxHEIGHT, instead of hires_scale.",
        absent="off",
        unit="pixels",
        label="Hires resize",
        option="--hires-size",
        metavar="WxH",
    ),
    "hires_strength": RequestField(
        type=float,
        help="Denoising strength of the second pass of hires fix, 0 to 1.",
        absent=f"{HIRES_STRENGTH:g}, or {TILED_HIRES_STRENGTH:g} with tiles",
        unit="fraction",
        minimum=0.0,
        maximum=1.0,
        option="--hires-strength",
        metavar="SHARE",
        a1111="denoising_strength",
        form="Hires strength",
    ),
    "hires_steps": RequestField(
        type=int,
        help="Steps of the second pass of hires fix, of which hires_strength is run.",
        absent="those of the first pass",
        unit="steps",
        minimum=1,
        maximum=MAX_HIRES_STEPS,
        hint=", or be left out",
        label="Hires steps",
        option="--hires-steps",
        metavar="N",
        a1111="hr_second_pass_steps",
        form="Hires steps",
    ),
    "hires_upscaler": RequestField(
        type=str,
        help="Upscaler between the passes of hires fix: lanczos, nearest or a network of /v1/models.",
        default="lanczos",
        absent="lanczos",
        label="Hires upscaler",
        option="--hires-upscaler",
        metavar="NAME",
        a1111="hr_upscaler",
    ),
    "hires_sampler": RequestField(
        type=str,
        help="Sampler of the second pass of hires fix.",
        absent="that of the first pass",
        label="Hires sampler",
        option="--hires-sampler",
        metavar="NAME",
        a1111="hr_sampler_name",
    ),
    "hires_schedule": RequestField(
        type=str,
        help="Sigma schedule of the second pass of hires fix.",
        absent="that of the first pass",
        label="Hires schedule type",
        option="--hires-schedule",
        metavar="NAME",
        a1111="hr_scheduler",
    ),
    "hires_prompt": RequestField(
        type=str,
        help="Prompt of the second pass of hires fix.",
        absent="that of the first pass",
        label="Hires prompt",
        option="--hires-prompt",
        metavar="TEXT",
        a1111="hr_prompt",
    ),
    "hires_negative_prompt": RequestField(
        type=str,
        help="Negative prompt of the second pass of hires fix.",
        absent="that of the first pass",
        label="Hires negative prompt",
        option="--hires-negative-prompt",
        metavar="TEXT",
        a1111="hr_negative_prompt",
    ),
    "tile_size": RequestField(
        type=int,
        help="Tiled diffusion: side of the tiles on which the UNet runs; 0: off.",
        absent="off; for a second pass beyond the model's largest side, its native size",
        unit="pixels",
        minimum=0,
        maximum=MAX_TILE_PX,
        hint="; 0 is off",
        label="Tile size",
        option="--tile-size",
        metavar="PX",
        form="Tile size",
    ),
    "tile_overlap": RequestField(
        type=int,
        help="Least overlap of neighboring tiles.",
        absent="a quarter of tile_size",
        unit="pixels",
        minimum=0,
        maximum=MAX_TILE_PX,
        hint=", or be left out",
        label="Tile overlap",
        option="--tile-overlap",
        metavar="PX",
        form="Tile overlap",
    ),
    "outpaint": RequestField(
        type=str,
        help="Outpainting: add LEFT,TOP,RIGHT,BOTTOM pixels to the start image and generate them.",
        absent="nothing is added",
        unit="pixels",
        label="Outpaint",
        option="--outpaint",
        metavar="L,T,R,B",
    ),
    "best_of": RequestField(
        type=int,
        help="Generate this many images and return the n with the highest scores; at most 10.",
        absent="n",
        unit="images",
        form="Candidates",
    ),
}
"""Image request fields by name, in the order in which infotext keys are read."""

SHARED_FIELDS: Final = {name: field for name, field in REQUEST_FIELDS.items() if field.option}
"""Fields that the HTTP body, the command line and ``DiffusionParams`` share unchanged."""

FORM_FIELDS: Final = (
    *("eta", "guidance_interval", "cache_interval", "similarity_threshold", "clip_skip", "micro_conditioning"),
    *("guidance_rescale", "variation_strength", "variation_seed", "switch_at", "best_of", "sigma_min", "sigma_max"),
    *("hires_scale", "hires_steps", "hires_strength", "tile_size", "tile_overlap"),
)
"""Typed fields of the page's form, in the order of the arguments of the page's API. New fields follow at the end."""


def check_fields(values: Any) -> None:
    """Check all attributes of ``values`` that are request fields with bounds or choices.

    Raises:
        InvalidRequest: A value is out of range.
    """
    for name, field in REQUEST_FIELDS.items():
        if hasattr(values, name):
            field.check(name, getattr(values, name))
