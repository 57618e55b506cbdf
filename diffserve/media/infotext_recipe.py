"""Conversion of the parameters in an image file to a request that repeats it, for HTTP, A1111's API, CLI and page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import HIRES, REQUEST_FIELDS
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.types import FILTERS
from diffserve.media.infotext import RNG_LABELS, SCHEDULE_LABELS, UPSCALE, Infotext, parse_infotext
from diffserve.media.upscaling import canonical_upscaler
from schedulers import SPACINGS

DASH: Final = re.compile(r"(?<![eE])-")
"""Dash between two numbers, but not in an exponent, as in "1e-05-0.5"."""

SIZE: Final = re.compile(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _schedule(text: str) -> str | None:
    names = {label.lower(): name for name, label in SCHEDULE_LABELS.items()}
    names |= {"automatic": "", "uniform": "", "normal": "", "polyexponential": "exponential", "turbo": "simple"}
    return names.get(text.strip().lower().replace("_", " "))


def _interval(text: str) -> tuple[float, float]:
    first, last = map(_number, DASH.split(text))
    return first, last


def _size(text: str) -> str:
    if not SIZE.fullmatch(text.strip()):
        raise ValueError(text)
    return text.strip()


def _sizes(text: str) -> dict[str, Any]:
    sizes = msgspec.structs.asdict(MicroConditioning.read(text))
    return {name: value for name, value in sizes.items() if value is not None}


def _noise_source(text: str) -> str | None:
    return next((name for name, label in RNG_LABELS.items() if label == text.strip()), None)


def _spacing(text: str) -> str | None:
    return text.strip() if text.strip() in SPACINGS else None


_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "sampler": str.strip,
    "sigma_schedule": _schedule,
    "size": _size,
    "micro_conditioning": _sizes,
    "noise_source": _noise_source,
    "spacing": _spacing,
    "hires_size": _size,
    "hires_upscaler": canonical_upscaler,
    "hires_schedule": _schedule,
}
_READERS_BY_TYPE: Final[dict[Any, Callable[[str], Any]]] = {
    int: int,
    float: _number,
    str: str.strip,
    tuple[float, float]: _interval,
}

KEYS: Final = {name: field.label for name, field in REQUEST_FIELDS.items() if field.label}
"""Infotext key by request field, for all values that a request can repeat. A test compares the keys with the writer."""

NOT_REPEATED: Final = frozenset(
    {
        *("ControlNet 0", "Interrupted after", "Lora hashes", "Model", "Model hash", "Original prompt", "Reference 0"),
        *("Painted size", "Refiner", "Sampler hash", "Score", "Similarity", "Skipped steps", "TI hashes", "Template"),
        "Version",
    }
)
"""Infotext keys that no request field repeats. LoRAs are tags in the prompt."""


def read_value(name: str, text: str) -> Any:
    """Return the value of the request field ``name`` that ``text`` records; None for an unknown name.

    Raises:
        ValueError: The text is malformed.
        InvalidRequest: The text is malformed.
    """
    reader = _READERS.get(name) or _READERS_BY_TYPE[REQUEST_FIELDS[name].type]
    return reader(text)


class InfotextFields(NamedTuple):
    """Fields of a request that repeats an image, and warnings about values that cannot be repeated."""

    fields: dict[str, Any]
    warnings: tuple[str, ...]


def parse_sent(text: str) -> Infotext:
    """Parse the ``infotext`` of a request.

    Raises:
        InvalidRequest: The text is too long.
    """
    try:
        return parse_infotext(text)
    except InvalidRequest as error:
        message = f"infotext is too long: {error.message} Shorten its prompt, or give the fields."
        raise InvalidRequest(message, param="infotext", code=error.code) from None


def request_of(
    read: Infotext,
    *,
    has_start: bool = False,
    refused: Collection[str] = (),
    models: Collection[str] = (),
    upscalers: Callable[[], Collection[str]] | None = None,
) -> InfotextFields:
    """Return the request that repeats an image with the parameters ``read``.

    Args:
        read: The parameters, from ``parse_infotext``.
        has_start: Whether the request has an input image.
        refused: Fields that the model does not support.
        models: Names of the available models; empty if they are not known.
        upscalers: Returns the names of the available upscaler networks; ``None`` if they are not known.

    Raises:
        InvalidRequest: A value is malformed.
    """
    fields: dict[str, Any] = {"prompt": read.prompt, "negative_prompt": read.negative_prompt}
    warnings = [*read.warnings]
    for name, key in KEYS.items():
        if key not in read.fields or (name == "similarity_threshold" and "Similarity" not in read.fields):
            continue
        text = read.fields[key]
        if name.startswith(HIRES) and (has_start or not is_enlarged(read)):
            continue
        if name == "outpaint" and not has_start:  # reported with the start image
            continue
        if name == "strength" and not has_start:
            if is_enlarged(read):
                name = "hires_strength"
            else:
                warnings.append("The image was generated from a start image, which is not in its parameters.")
                continue
        try:
            value = read_value(name, text)
        except (InvalidRequest, ValueError):
            message = f"a value in the infotext cannot be used: {key} is {text[:40]!r}; correct it, or leave it out."
            raise InvalidRequest(message, param="infotext") from None
        if name == "hires_upscaler" and upscalers is not None and value not in {*FILTERS, *upscalers()}:
            value = None
        if value is None or name in refused:
            reason = "is unknown" if value is None else "is not supported by this model"
            warnings.append(f"The parameters have {key}: {text[:40]}, which {reason}; it was ignored.")
        else:
            fields[name] = value
    model = read.fields.get("Model", "")
    if model in models:
        fields["model"] = model
    elif model and models:
        warnings.append(f"The image was generated by {model[:80]}, which is not served here.")
    if is_enlarged(read) and has_start:
        warnings.append("The image was enlarged in a second pass (hires fix), which is repeated only without an image.")
    if UPSCALE in read.fields:
        warnings.append(f"The image was upscaled ({read.fields[UPSCALE][:80]}), which /v1/images/upscale repeats.")
    if unknown := [key for key in read.fields if not _is_known(key)]:
        warnings.append(f"The parameters have {', '.join(unknown)[:200]}, which this server does not support.")
    if "ControlNet 0" in read.fields:
        warnings.append("The image was generated with a ControlNet, whose control image is not in its parameters.")
    if "Reference 0" in read.fields:
        warnings.append("The image was generated with a reference image, which is not in its parameters.")
    if "Similarity" in read.fields:
        warnings.append(
            "The image was generated from the latents of a similar prompt, which are not in its parameters."
        )
    if read.is_shortened:
        warnings.append("The prompt in the parameters is shortened; its end is missing.")
    return InfotextFields({name: value for name, value in fields.items() if value != ""}, tuple(warnings))


def _is_known(key: str) -> bool:
    return key in KEYS.values() or key in NOT_REPEATED or key == UPSCALE or key.startswith("Hires ")


def is_enlarged(read: Infotext) -> bool:
    """Return whether the image was enlarged in a second pass (hires fix)."""
    return "Hires upscale" in read.fields or "Hires resize" in read.fields


def sampler_text(fields: dict[str, Any]) -> str | None:
    """Return the sampler and sigma schedule of ``fields`` as one text, such as "DPM++ 2M Karras"."""
    sampler, schedule = fields.get("sampler"), fields.get("sigma_schedule")
    return f"{sampler} {SCHEDULE_LABELS.get(schedule, schedule)}" if sampler and schedule else sampler
