"""Conversion of the page's form to an image request, and of an image's parameters back to the form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import HIRES, MAX_GUIDANCE, REQUEST_FIELDS, NoiseSource
from diffserve.api.sizes import parse_size
from diffserve.api.types import FILTERS, MAX_PROMPT_CHARS
from diffserve.client import ImageCapabilities, StreamedImageFields
from diffserve.media import images
from diffserve.media.decoders import ImageReader
from diffserve.media.infotext import UPSCALE, parse_infotext
from diffserve.media.infotext_recipe import KEYS, is_enlarged, read_value
from diffserve.models.controlnets import MAX_SCALE, PASSED_THROUGH, Control
from diffserve.models.loras import read_list
from diffserve.models.model_files import names_for
from ui.fields import MAX_FIELD_CHARS, TYPED, check_text, read_count, read_interval, read_number, read_seed, read_typed

RewriteMode = Literal["Off", "Suggest", "Auto"]
REWRITE_MODES: Final[tuple[RewriteMode, ...]] = ("Off", "Suggest", "Auto")
ASPECTS: Final[dict[str, float]] = {"square": 1.0, "portrait": 2 / 3, "landscape": 3 / 2}
"""Ratio of width to height by the name of the aspect."""

SPACINGS: Final = {
    "leading": "even, starts slightly below full noise",
    "trailing": "even, starts at pure noise",
    "linspace": "even, from first to last timestep",
    "quadratic": "denser near the finished image",
}
"""Labels of the timestep spacings."""

NOISE_SOURCES: Final[dict[str, NoiseSource]] = {
    "One CPU generator per image": "cpu",
    "Same as an NVIDIA GPU (NV)": "device",
}

REPORTED_SEPARATELY: Final = ("switch_at", "similarity_threshold")
"""Fields for which :func:`doubts` has a more specific message than that the model refuses them."""

SECOND_PASS_ONLY: Final = ("hires_sampler", "hires_schedule", "hires_prompt", "hires_negative_prompt")
"""Fields of the second pass (hires fix) that the page does not have."""

SAME_ASPECT: Final = 0.2
"""Largest difference of the logarithms of two aspect ratios that count as equal."""

GRID_PX: Final = 8
NUM_PREVIEWS: Final = 3


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the page's form; numbers are texts. None and empty mean the model's default."""

    prompt: str | None
    negative_prompt: str | None = ""
    quality: str | None = "standard"
    aspect: str | None = "square"
    num_images: int | None = 1
    rewrite_mode: str = "Off"
    steps: str | None = None
    sampler: str | None = None
    guidance: str | None = None
    size: str | None = None
    seed: str | None = None
    spacing: str | None = None
    noise_source: str | None = None
    loras: str | None = None
    model: str | None = None
    strength: str | None = None
    control: str | None = None
    control_scale: str | None = None
    control_steps: str | None = None
    preprocessor: str | None = None
    control_picture: str | None = None
    typed: Mapping[str, str | None] = {}  # texts of the fields in ui.fields.TYPED, by name
    uses_references: bool = False  # whether the image with these settings had references, which are no field

    @classmethod
    def of(cls, values: Sequence[Any]) -> Form:
        """Create a form from values in the order of ``FORM_FIELDS``."""
        by_name = dict(zip(FORM_FIELDS, values, strict=True))
        by_name = {name: value if name == "num_images" else _text_of(value) for name, value in by_name.items()}
        typed = {name: by_name.pop(name) for name in TYPED}
        return cls(**by_name, typed=typed)

    @property
    def texts(self) -> dict[str, Any]:
        """The fields by name, in the order of ``FORM_FIELDS``; numbers are texts, except that of images."""
        return {name: self.typed.get(name) if name in TYPED else getattr(self, name) for name in FORM_FIELDS}

    @property
    def values(self) -> tuple[Any, ...]:
        """Values for the page's components, in the order of ``FORM_FIELDS``."""
        return tuple(_number_of(text) if name in NUMBERS else text for name, text in self.texts.items())


def _text_of(value: Any) -> Any:
    """Return the text of a number from a number field; other values are returned unchanged."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _number_of(text: str | None) -> int | float | None:
    """Return the number for a number field, None for a text that is none."""
    try:
        number = float((text or "").replace(",", "."))
    except ValueError:
        return None
    return None if not math.isfinite(number) else int(number) if number.is_integer() else number


FORM_FIELDS: Final = (*(name for name in Form.__struct_fields__ if name not in ("typed", "uses_references")), *TYPED)
"""Names of all fields, in the order of the page's inputs and outputs."""

NUMBERS: Final = frozenset(
    {"steps", "guidance", "strength", "control_scale"}
    | {name for name in TYPED if REQUEST_FIELDS[name].type in (int, float)} - {"variation_seed"}
)
"""Fields that are number fields of the page. Seeds are not: browsers round large numbers."""

FIELD_OF: Final = {
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "n": "num_images",
    "controlnets": "control",
}
"""Fields of the form by the names in error messages, where they differ."""


class StartFile(msgspec.Struct, frozen=True, kw_only=True):
    """Start image of a request.

    Attributes:
        path: The image file.
        mask: A PNG file that is transparent where the image is generated again; None: everywhere.
        strength: Denoising strength, 0 to 1; None: the server's default.
    """

    path: Path
    mask: bytes | None = None
    strength: float | None = None

    def read(self) -> bytes:
        """Return the contents of the image file. Raises InvalidRequest if it is missing."""
        try:
            return self.path.read_bytes()
        except OSError:
            raise InvalidRequest("The image to edit no longer exists; choose it again.", param="image") from None


class CheckedForm(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a checked form: the prompt, the other fields, and whether the prompt is rewritten."""

    prompt: str
    fields: StreamedImageFields
    rewrites: bool

    @property
    def num_images(self) -> int:
        """Number of images."""
        return self.fields.get("n", 1)


def check_lengths(form: Form) -> None:
    """Check that the fields of ``form`` are texts and not too long. Raises InvalidRequest."""
    check_text(form.prompt, "prompt", MAX_PROMPT_CHARS)
    check_text(form.negative_prompt, "negative prompt", MAX_PROMPT_CHARS)
    for name, value in form.texts.items():
        if name not in ("prompt", "negative_prompt", "num_images"):
            check_text(value, name.replace("_", " "), MAX_FIELD_CHARS)


def order_of(
    form: Form,
    image: ImageCapabilities,
    start: StartFile | None = None,
    control_picture: bytes | None = None,
    references: Sequence[Mapping[str, Any]] = (),
) -> CheckedForm:
    """Convert a form to a request.

    Args:
        form: The form.
        image: Capabilities of the model.
        start: The start image, whose size is used if the form has none.
        control_picture: The file of the ControlNet's control image.
        references: The reference images as request fields.

    Raises:
        InvalidRequest: A field cannot be used.
    """
    prompt, negative = form.prompt or "", form.negative_prompt or ""
    if not prompt.strip():
        raise InvalidRequest("The prompt is empty; describe a picture.", param="prompt", code="empty_prompt")
    size = (form.size or "").strip() or "auto"
    width, height = parse_size(size) or size_of(form.aspect or "square", image)
    is_its_own = start is not None and size == "auto"
    fields = StreamedImageFields(
        n=max(1, min(int(form.num_images or 1), image.max_images)),
        size="auto" if is_its_own else f"{width}x{height}",
        num_inference_steps=_steps(form, image),
        partial_images=NUM_PREVIEWS,
        prompt_rewriter="auto" if form.rewrite_mode == "Auto" else "off",
        output_format="png",
    )
    optional_fields = {
        "negative_prompt": negative if negative.strip() else None,
        "sampler": (form.sampler or "").strip() or None,
        "guidance_scale": read_number(form.guidance, "guidance", MAX_GUIDANCE),
        "spacing": form.spacing or None,
        "noise_source": form.noise_source or None,
        "loras": _loras(form.loras, image) or None,
        "controlnets": _controls(form, image, control_picture) or None,
        "references": list(references) or None,
        "seed": read_seed(form.seed),
        "model": (form.model or "").strip() or None,
        **{name: read_typed(name, form.typed.get(name), image) for name in TYPED},
    }
    if image.quality_points and _leaves_steps(form, image):  # the server resolves the quality
        del fields["num_inference_steps"]
        optional_fields["quality"] = form.quality or None
    fields |= cast(StreamedImageFields, {name: value for name, value in optional_fields.items() if value is not None})
    return CheckedForm(prompt=prompt, fields=fields, rewrites=form.rewrite_mode == "Auto")


def _loras(text: str | None, image: ImageCapabilities) -> list[dict[str, Any]]:
    """Read adapters from "NAME:SCALE, NAME" as the server takes them. Raises InvalidRequest for an unusable one."""
    loras = read_list(text or "")
    for lora in loras:
        if names_for(lora.name, image.loras):  # the server reports an ambiguous name
            continue
        for name in names_for(lora.name, image.refused_loras):
            message = f"The adapter {lora.name!r} cannot be used: {image.refused_loras[name]}"
            raise InvalidRequest(message, param="loras")
        there = f"choose from {', '.join(image.loras[:12])}." if image.loras else "this server has none."
        raise InvalidRequest(f"There is no adapter {lora.name!r}; {there}", param="loras")
    return [msgspec.to_builtins(lora) for lora in loras]


def _controls(form: Form, image: ImageCapabilities, picture: bytes | None) -> list[dict[str, Any]]:
    """Return the ControlNet field of the request, with the control image ``picture``. Raises InvalidRequest."""
    name = (form.control or "").strip()
    if not name:
        return []
    if not names_for(name, image.controlnets):
        there = f"choose from {', '.join(image.controlnets[:12])}." if image.controlnets else "this server has none."
        raise InvalidRequest(f"There is no ControlNet {name!r}; {there}", param="controlnets")
    if picture is None:
        message = f"The ControlNet {name!r} has no control image; choose one, or select no ControlNet."
        raise InvalidRequest(message, param="controlnets")
    scale = read_number(form.control_scale, "strength of the ControlNet", MAX_SCALE)
    start, end = read_interval(form.control_steps, "controlnets", "active range of the ControlNet") or (0.0, 1.0)
    strength, preprocessor = 1.0 if scale is None else scale, form.preprocessor or PASSED_THROUGH
    control = Control(name, strength, start, end, preprocessor, resize=True)
    left_out = ("image", "thresholds", "resolution")
    fields = {key: value for key, value in msgspec.structs.asdict(control).items() if key not in left_out}
    return [fields | {"image": picture}]


def size_of(aspect: str, image: ImageCapabilities) -> tuple[int, int]:
    """Return the size for "square", "portrait" or "landscape".

    Returns:
        (width, height) in pixels: a good size of the model if one has this aspect, else one with the native area.

    Raises:
        InvalidRequest: The aspect is unknown.
    """
    if aspect not in ASPECTS:
        raise InvalidRequest(f"The aspect is {aspect[:40]!r}; choose {', '.join(ASPECTS)}.", param="aspect")
    ratio = ASPECTS[aspect]
    best = min(image.sizes, key=lambda size: _aspect_difference(size, ratio))
    if _aspect_difference(best, ratio) <= SAME_ASPECT:
        return best
    area = image.native_size[0] * image.native_size[1]
    return _on_grid(math.sqrt(area * ratio)), _on_grid(math.sqrt(area / ratio))


def quality_labels(image: ImageCapabilities) -> list[tuple[str, str]]:
    """Return (label, value) of every quality; a label is "Standard, 25 steps"."""
    return [
        (f"{name.capitalize()}, {steps} {'step' if steps == 1 else 'steps'}", name)
        for name, steps in image.quality_steps.items()
    ]


def sampler_labels(image: ImageCapabilities) -> list[tuple[str, str]]:
    """Return (label, value) of every sampler; the empty value means the model's default."""
    default = image.sampler(image.default_sampler)
    label = default.label if default is not None else image.default_sampler
    return [(f"Default ({label})", ""), *((choice.label, choice.name) for choice in image.samplers)]


def infotext_of(data: bytes, reader: ImageReader = images) -> str:
    """Return the parameters in the image file ``data``.

    Slow: call it in a thread. Raises InvalidRequest if it is not an image or has no parameters.
    """
    text = reader.read_infotext(data)
    if not text:
        raise InvalidRequest(
            "This image has no generation parameters; choose the PNG as downloaded, not an edited copy.",
            param="image",
        )
    return text


def form_of(infotext: str, image: ImageCapabilities | None) -> Form:
    """Return the form that reproduces the image with the parameters ``infotext``.

    Steps and size become a quality and an aspect if those of the model are equal, else the values of their fields. With
    a quality profile steps always become the value of their field, because a quality is more than a number of steps.
    Omitted are an unknown spacing, fields that the model refuses, and the similarity threshold of an image that was
    generated from noise.

    Args:
        infotext: The image's parameters.
        image: Capabilities of the model; None if they are unknown.
    """
    read = parse_infotext(infotext)
    fields = read.fields
    has_counts = image is not None and not image.quality_points
    counts = {name: str(count) for name, count in image.quality_steps.items()} if image and has_counts else {}
    sizes = {name: "{}x{}".format(*size_of(name, image)) for name in ASPECTS} if image is not None else {}
    quality, steps = _match_name(fields.get("Steps"), Form(prompt=None).quality, counts)
    aspect, size = _match_name(fields.get("Size"), Form(prompt=None).aspect, sizes)
    omitted_keys = {""} if "Similarity" in fields else {"", "Similarity threshold"}
    omitted_keys |= {KEYS[name] for name in _refused(fields, image)}
    typed = {name: fields.get(KEYS.get(name, "")) for name in TYPED if KEYS.get(name, "") not in omitted_keys}
    typed |= _second_pass(fields) if is_enlarged(read) else {name: None for name in TYPED if name.startswith(HIRES)}
    return Form(
        prompt=read.prompt,
        negative_prompt=read.negative_prompt,
        quality=quality,
        aspect=aspect,
        rewrite_mode="Off",
        steps=steps,
        sampler=_sampler(fields, image),
        guidance=fields.get("CFG scale"),
        size=size,
        seed=fields.get("Seed"),
        spacing=_spacing(fields),
        strength=None if is_enlarged(read) else fields.get("Denoising strength"),
        typed=typed,
        noise_source=read_value("noise_source", fields.get("RNG", "")),
        uses_references="Reference 0" in fields,
    )


def doubts(infotext: str, image: ImageCapabilities) -> tuple[str, ...]:
    """Return the reasons why generating an image from ``infotext`` may not reproduce it; empty if there are none."""
    read = parse_infotext(infotext)
    reasons = [*read.warnings]
    digest, spacing = read.fields.get("Model hash"), read.fields.get("Spacing")
    if digest and image.digest and digest not in image.digest:  # the digest of a model that is not loaded is empty
        name = read.fields.get("Model", digest)
        reasons.append(f"It was generated with {name}, which is not the loaded model: the result will differ.")
    elif read.is_shortened:
        reasons.append("Its prompt was too long for the file and was cut off: the result will differ.")
    if "Similarity" in read.fields:
        reasons.append(
            f"It started from a stored image with prompt similarity {read.fields['Similarity'][:8]} and skipped "
            f"{read.fields.get('Skipped steps', '0')[:8]} steps; that image is not in the file: the result will differ."
        )
    if "Interrupted after" in read.fields:
        steps = f"{read.fields['Interrupted after'][:8]} of {read.fields.get('Steps', '?')[:8]} steps"
        reasons.append(f"It was interrupted after {steps}: the result will be the finished image.")
    if is_enlarged(read):
        second_pass_labels = [KEYS[name] for name in SECOND_PASS_ONLY if KEYS[name] in read.fields]
        if read.fields.get("Hires upscaler", FILTERS[0]).lower() != FILTERS[0]:
            second_pass_labels.append(KEYS["hires_upscaler"])
        if second_pass_labels:
            reasons.append(f"The page has no fields for its {', '.join(second_pass_labels)}: the result will differ.")
    elif "Denoising strength" in read.fields:
        reasons.append("It started from an image that is not in the file: choose that image under Edit an image.")
    if UPSCALE in read.fields:
        reasons.append(f"It was upscaled ({read.fields[UPSCALE][:80]}): press Upscale when it is generated.")
    if "ControlNet 0" in read.fields:
        reasons.append("It used control images that are not in the file: the result will differ.")
    if "Reference 0" in read.fields:
        reasons.append("It used reference images that are not in the file: add them in the group Adapters.")
    refiner = read.fields.get("Refiner", image.refiner)
    if refiner != image.refiner:
        reasons.append(f"Its last steps used the refiner {refiner[:80]}, which is not loaded: the result will differ.")
    refused = [TYPED[name] for name in _refused(read.fields, image) if name not in REPORTED_SEPARATELY]
    if refused:
        reasons.append(
            f"The model does not support some of its settings ({', '.join(refused)}): the result will differ."
        )
    if spacing and _spacing(read.fields) is None:
        reasons.append(f"Its step spacing {spacing[:40]!r} is unknown; choose a step spacing under Advanced.")
    return tuple(reasons)


def sampler_of(infotext: str) -> str | None:
    """Return the sampler's label with its sigma schedule, such as "DPM++ 2M Karras"; None if there is none."""
    return _sampler(parse_infotext(infotext).fields, None)


def _refused(fields: Mapping[str, str], image: ImageCapabilities | None) -> list[str]:
    """Return the names of fields of ``TYPED`` that an image's parameters ``fields`` set and the model refuses."""
    refused = () if image is None else image.refused_fields
    recorded = {name: fields[KEYS[name]] for name in TYPED if name in refused and KEYS.get(name) in fields}
    return [name for name, value in recorded.items() if value != REQUEST_FIELDS[name].default_text]


def _second_pass(fields: Mapping[str, str]) -> dict[str, str | None]:
    """Return the typed fields of the second pass (hires fix) that an image's parameters ``fields`` record."""
    scale = fields.get(KEYS["hires_scale"])
    if scale is None:
        with suppress(InvalidRequest, KeyError):
            first, second = (parse_size(fields[KEYS[name]]) for name in ("size", "hires_size"))
            scale = f"{second[0] / first[0]:g}" if first and second else None
    steps, strength = fields.get(KEYS["hires_steps"]), fields.get(KEYS["strength"])
    return {"hires_scale": scale, "hires_steps": steps, "hires_strength": strength}


def _spacing(fields: Mapping[str, str]) -> str | None:
    spacing: str | None = read_value("spacing", fields.get("Spacing", ""))
    return spacing


def _match_name(value: str | None, default: str | None, meant: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return (name, None) for the name in ``meant`` that means ``value``, else (None, ``value``)."""
    if value is None:
        return default, None
    matched_name = next((name for name, meaning in meant.items() if meaning == value.strip()), None)
    return matched_name, None if matched_name else value


def _leaves_steps(form: Form, image: ImageCapabilities) -> bool:
    sampler = image.sampler((form.sampler or "").strip())
    return not (form.steps or "").strip() and (sampler is None or sampler.num_steps is None)


def _steps(form: Form, image: ImageCapabilities) -> int:
    sampler = image.sampler((form.sampler or "").strip())
    default = image.quality_steps.get(form.quality or "", image.default_num_steps)
    if sampler is not None and sampler.num_steps is not None:
        default = sampler.num_steps
    max_steps = image.train_timesteps
    return (
        read_count(
            form.steps, "number of steps", max_steps, "the number of the quality preset", param="num_inference_steps"
        )
        or default
    )


def _sampler(fields: Mapping[str, str], image: ImageCapabilities | None) -> str | None:
    """Return the name of the sampler, or with a sigma schedule its label and the schedule, as in A1111."""
    label, schedule = fields.get("Sampler"), fields.get("Schedule type", "Automatic")
    if label is None or schedule not in ("Automatic", "Uniform"):
        return label and f"{label} {schedule}"
    sampler = image.sampler(label) if image is not None else None
    return sampler.name if sampler is not None else label


def _aspect_difference(size: tuple[int, int], ratio: float) -> float:
    return abs(math.log(size[0] / size[1]) - math.log(ratio))


def _on_grid(side_px: float) -> int:
    return max(GRID_PX, round(side_px / GRID_PX) * GRID_PX)
