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

NoiseSource = Literal["cpu", "device"]


@dataclass(frozen=True, kw_only=True)
class FormText:
    """Texts of a field in the page's form: its label, its placeholder when empty, and a line of help below it."""

    label: str
    placeholder: str
    info: str


@dataclass(frozen=True, kw_only=True)
class RequestField:
    """A field of image requests.

    Attributes:
        type: The Python type of a value that is given.
        help: One sentence for OpenAPI and the command line.
        default: Value of ``DiffusionParams`` if the field is not given.
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
        form: Texts of the page's form; ``None``: not one of the typed fields of the form.
    """

    type: Any
    help: str = ""
    default: Any = None
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
    form: FormText | None = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a field with a fixed list of them; empty for other fields."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

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
    "num_inference_steps": RequestField(type=int, label="Steps", a1111="steps"),
    "sampler": RequestField(type=str, label="Sampler", a1111="sampler_name"),
    "sigma_schedule": RequestField(type=str, label="Schedule type"),
    "guidance_scale": RequestField(type=float, minimum=0.0, maximum=MAX_GUIDANCE, label="CFG scale", a1111="cfg_scale"),
    "seed": RequestField(type=int, label="Seed", a1111="seed"),
    "size": RequestField(type=str, label="Size"),
    "variation_seed": RequestField(
        type=int,
        minimum=0,
        maximum=MAX_SEED,
        label="Variation seed",
        a1111="subseed",
        form=FormText(
            label="Variation seed", placeholder="random", info="Pictures have the same seed, and these in turn."
        ),
    ),
    "variation_strength": RequestField(
        type=float,
        help="Amount of variation noise mixed into the start noise, 0 to 1.",
        default=0.0,
        minimum=0.0,
        maximum=1.0,
        label="Variation seed strength",
        option="--variation-strength",
        metavar="SHARE",
        a1111="subseed_strength",
        form=FormText(label="Variation", placeholder="none", info="How far from the seed's picture, 0 to 1."),
    ),
    "strength": RequestField(
        type=float, default=0.75, minimum=0.0, maximum=1.0, label="Denoising strength", a1111="denoising_strength"
    ),
    "eta": RequestField(
        type=float,
        help="Noise added by ddim, euler_a and tcd, 0 to 1.",
        minimum=0.0,
        maximum=1.0,
        label="Eta",
        option="--eta",
        a1111="eta",
        form=FormText(label="Fresh noise", placeholder="the sampler's own", info="Of every step (eta), 0 to 1."),
    ),
    "guidance_interval": RequestField(
        type=tuple[float, float],
        help="Apply guidance only in this part of the steps.",
        default=FULL_INTERVAL,
        minimum=0.0,
        maximum=1.0,
        label="Guidance interval",
        option="--guidance-interval",
        metavar="FROM TO",
        form=FormText(label="Guided part", placeholder="all steps", info="From and to, as parts of the way: 0.2-0.8."),
    ),
    "clip_skip": RequestField(
        type=int,
        help="Use the N-th last text encoder layer; 1: the last.",
        default=1,
        minimum=1,
        maximum=MAX_CLIP_SKIP,
        hint="; 1 is the default layer",
        label="Clip skip",
        option="--clip-skip",
        metavar="N",
        a1111="clip_skip",
        form=FormText(label="Clip skip", placeholder="1", info="Layers from the text encoders' end."),
    ),
    "guidance_rescale": RequestField(
        type=float,
        help="Rescale the guided output to the unguided standard deviation, 0 to 1.",
        default=0.0,
        minimum=0.0,
        maximum=1.0,
        label="CFG rescale phi",
        option="--guidance-rescale",
        metavar="SHARE",
        form=FormText(
            label="Rescaled guidance", placeholder="none", info="To the spread of what is not guided, 0 to 1."
        ),
    ),
    "cache_interval": RequestField(
        type=int,
        help="Run the full UNet only every N-th evaluation (DeepCache); 1: always.",
        default=1,
        minimum=1,
        maximum=MAX_CACHE_INTERVAL,
        hint="; 1 is off",
        label="Cache interval",
        option="--cache-interval",
        metavar="N",
        form=FormText(
            label="Whole network every", placeholder="1", info="So many steps, a part of it between (DeepCache)."
        ),
    ),
    "sigma_min": RequestField(
        type=float,
        help="Smallest noise level of the karras, exponential and beta schedules, such as 0.03.",
        minimum=0.0,
        maximum=MAX_SIGMA,
        is_minimum_excluded=True,
        hint=", or be left out",
        label="Schedule min sigma",
        option="--sigma-min",
        metavar="SIGMA",
        a1111_setting="sigma_min",
        form=FormText(
            label="Smallest noise", placeholder="the schedule's own", info="Last sigma of Karras, exponential and beta."
        ),
    ),
    "sigma_max": RequestField(
        type=float,
        help="Largest noise level of the karras, exponential and beta schedules, such as 14.6.",
        minimum=0.0,
        maximum=MAX_SIGMA,
        is_minimum_excluded=True,
        hint=", or be left out",
        label="Schedule max sigma",
        option="--sigma-max",
        metavar="SIGMA",
        a1111_setting="sigma_max",
        form=FormText(
            label="Largest noise", placeholder="the schedule's own", info="First sigma of Karras, exponential and beta."
        ),
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
        minimum=0.0,
        maximum=1.0,
        is_minimum_excluded=True,
        hint=", or be left out",
        label="Similarity threshold",
        option="--similarity-threshold",
        metavar="COSINE",
        form=FormText(label="Similar enough", placeholder="never", info="To begin from a kept picture, above 0 to 1."),
    ),
    "micro_conditioning": RequestField(
        type=object,
        label="Micro conditioning",
        form=FormText(
            label="Told sizes",
            placeholder="the picture's own",
            info="What SDXL is told: original_size 640x480 crop 0x0 target_size 1024x1024.",
        ),
    ),
    "switch_at": RequestField(
        type=float,
        minimum=0.0,
        maximum=1.0,
        label="Refiner switch at",
        form=FormText(label="Refiner from", placeholder="never", info="Where it takes over, 0 to 1: 0.8."),
    ),
    "noise_source": RequestField(
        type=NoiseSource,
        help="Noise source: cpu, or device for CUDA noise (A1111: NV).",
        label="RNG",
        option="--noise-source",
        metavar="SOURCE",
    ),
    "spacing": RequestField(type=str, label="Spacing"),
    "best_of": RequestField(
        type=int,
        form=FormText(label="Best of", placeholder="all are kept", info="Painted, of which the best are kept."),
    ),
}
"""Image request fields by name, in the order in which infotext keys are read."""

SHARED_FIELDS: Final = {name: field for name, field in REQUEST_FIELDS.items() if field.option}
"""Fields that the HTTP body, the command line and ``DiffusionParams`` share unchanged."""

FORM_FIELDS: Final = (
    *("eta", "guidance_interval", "cache_interval", "similarity_threshold", "clip_skip", "micro_conditioning"),
    *("guidance_rescale", "variation_strength", "variation_seed", "switch_at", "best_of", "sigma_min", "sigma_max"),
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
