"""Parsing and checks of single fields of the page's form, and the table of its typed fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import FORM_FIELDS, MAX_SEED, REQUEST_FIELDS
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.types import MAX_PROMPT_CHARS
from diffserve.client import ImageCapabilities
from diffserve.media.infotext_recipe import DASH

MAX_FIELD_CHARS: Final = 200
"""Limit on the text of a field for a number or a name."""

MAX_SEED_DIGITS: Final = len(str(MAX_SEED))


def check_text(text: object, name: str, max_chars: int = MAX_PROMPT_CHARS) -> None:
    """Check that ``text`` is None or a text of at most ``max_chars`` characters. Raises InvalidRequest."""
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"The {name} must be text; enter text or leave it empty.", param=name)
    if text is not None and len(text) > max_chars:
        raise InvalidRequest(
            f"The {name} has {len(text)} characters; at most {max_chars} are allowed. Shorten it.",
            param=name,
            code="string_above_max_length",
        )


def read_number(text: str | None, name: str, max_value: float = math.inf) -> float | None:
    """Parse a number from 0 to ``max_value``; an empty text gives None. Raises InvalidRequest."""
    text = (text or "").strip()
    try:
        value = float(text.replace(",", ".")) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not (math.isfinite(value) and 0 <= value <= max_value):
        kind = f"a number from 0 to {max_value:g}" if math.isfinite(max_value) else "a number of 0 or more"
        raise InvalidRequest(
            f"The {name} is {text[:40]!r}; give {kind}, or leave it empty for the default of the model.", param=name
        )
    return value


def read_count(
    text: str | None, name: str, max_value: int, nothing: str = "1", *, min_value: int = 1, param: str | None = None
) -> int | None:
    """Parse an integer from ``min_value`` to ``max_value``; an empty text gives None.

    Args:
        text: The text in the form.
        name: Name of the field in the message.
        max_value: The largest allowed value.
        nothing: The meaning of an empty text, for the message.
        min_value: The smallest allowed value.
        param: Name of the request field, if it is not ``name``.

    Raises:
        InvalidRequest: The text is not such a number.
    """
    try:
        value = read_number(text, name)
    except InvalidRequest:
        value = math.nan
    if value is not None and not (value.is_integer() and min_value <= value <= max_value):
        raise InvalidRequest(
            f"The {name} is {(text or '').strip()[:40]!r}; give a whole number from {min_value} to {max_value}, or "
            f"leave it empty for {nothing}.",
            param=param or name,
        )
    return None if value is None else int(value)


def read_interval(text: str | None, name: str, called: str) -> tuple[float, float] | None:
    """Parse two ascending numbers from 0 to 1, such as "0.2-0.8"; an empty text gives None.

    Args:
        text: The text in the form.
        name: Name of the request field.
        called: Name of the field in the message.

    Raises:
        InvalidRequest: The text is not such an interval.
    """
    if not (text or "").strip():
        return None
    try:
        first, last = map(float, DASH.split((text or "").replace(",", ".")))
    except ValueError:
        first, last = math.nan, math.nan
    if not 0.0 <= first <= last <= 1.0:
        raise InvalidRequest(
            f"The {called} is {(text or '')[:40]!r}; give two numbers from 0 to 1, such as 0.2-0.8, or leave "
            "it empty for all steps.",
            param=name,
        )
    return first, last


def read_seed(text: str | None, name: str = "seed") -> int | None:
    """Parse a seed; an empty text and "-1" give None. Raises InvalidRequest."""
    text = (text or "").strip()
    if not text or text == "-1":
        return None
    digits = text.lstrip("0") or "0"
    if not (text.isascii() and text.isdigit() and len(digits) <= MAX_SEED_DIGITS and int(digits) <= MAX_SEED):
        raise InvalidRequest(
            f"The {name.replace('_', ' ')} is {text[:40]!r}; give a whole number from 0 to {MAX_SEED}, or "
            "leave it empty for a random seed.",
            param=name,
        )
    return int(digits)


def read_sizes(text: str | None) -> dict[str, Any] | None:
    """Parse the size conditioning of SDXL as the request field; an empty text gives None. Raises InvalidRequest."""
    return msgspec.structs.asdict(MicroConditioning.read(text)) if text and text.strip() else None


def seeds_named(seed: int, variation_seed: int | None) -> str:
    """Return the part of a file name that identifies an image of its request: "7", or "7-9" with a variation seed."""
    return f"{seed}" if variation_seed is None else f"{seed}-{variation_seed}"


def read_typed(name: str, text: str | None, image: ImageCapabilities) -> Any:
    """Return the value of a typed field for the request; ``None`` for an empty text.

    Args:
        name: Name of the request field, a key of ``TYPED``.
        text: The text in the form.
        image: Capabilities of the model.

    Raises:
        InvalidRequest: The text cannot be used.
    """
    field = REQUEST_FIELDS[name]
    if name == "micro_conditioning":
        return read_sizes(text)
    if name == "variation_seed":
        return read_seed(text, name)
    if field.type == tuple[float, float]:
        return read_interval(text, name, TYPED[name].lower())
    maximum = image.max_images if name == "best_of" or field.maximum is None else field.maximum
    if field.type is int:
        min_value = 1 if field.minimum is None else int(field.minimum)
        return read_count(text, name, int(maximum), field.default_text.partition(";")[0], min_value=min_value)
    value = read_number(text, name, maximum)
    if value is not None:
        field.check(name, value)
    return value


TYPED: Final = {name: REQUEST_FIELDS[name].form for name in FORM_FIELDS}
"""Labels of the text inputs under Advanced, by request field, in the order of the page."""


def describe_fields(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield descriptions of the values of ``TYPED`` in a request's ``fields``, such as "clip skip 2".

    Sizes are omitted, and so are seeds, which differ between the images of a request.
    """
    for name, label in TYPED.items():
        match fields.get(name):
            case (first, last):
                yield f"{label.lower()} {first:g}-{last:g}"
            case int() | float() as number if name != "variation_seed":
                yield f"{label.lower()} {number:g}"


KNOWN_BY: Final = re.compile(rf"(?:\bthe )?\b({'|'.join(TYPED)})\b", re.IGNORECASE)


def as_labelled(text: str) -> str:
    """Replace the names of request fields in ``text`` by their labels on the page."""
    return KNOWN_BY.sub(lambda match: f"“{TYPED[match[1].lower()]}”", text)
