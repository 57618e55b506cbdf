"""What stands in a single field: how long it may be, and the number in it; and all that is told of one few know of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.types import MAX_CACHE_INTERVAL, MAX_CLIP_SKIP, MAX_PROMPT_CHARS, MAX_SEED
from diffserve.client import ImageCapabilities
from diffserve.media.infotext_recipe import DASH

MAX_FIELD_CHARS: Final = 200
"""Of a field that holds a number or a name."""

MAX_SEED_DIGITS: Final = len(str(MAX_SEED))


def check_text(text: object, name: str, most: int = MAX_PROMPT_CHARS) -> None:
    """InvalidRequest where ``text`` is neither a text of at most ``most`` characters nor ``None``."""
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"The {name} is no text; write one, or nothing.", param=name)
    if text is not None and len(text) > most:
        raise InvalidRequest(
            f"The {name} has {len(text)} characters; at most {most} are taken, so shorten it.",
            param=name,
            code="string_above_max_length",
        )


def read_number(text: str | None, name: str, most: float = math.inf) -> float | None:
    """The number from 0 to ``most`` in ``text``, ``None`` for an empty one. InvalidRequest for anything else."""
    text = (text or "").strip()
    try:
        value = float(text.replace(",", ".")) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not (math.isfinite(value) and 0 <= value <= most):
        kind = f"a number from 0 to {most:g}" if math.isfinite(most) else "a number from 0 on"
        raise InvalidRequest(f"The {name} is {text[:40]!r}; give {kind}, or nothing for the model's own.", param=name)
    return value


def read_count(text: str | None, name: str, most: int, nothing: str = "1", *, param: str | None = None) -> int | None:
    """The whole number from 1 to ``most`` in ``text``, ``None`` for an empty one, which stands for ``nothing``.
    InvalidRequest for anything else; ``param``: the field, where it is called otherwise than ``name``.
    """
    try:
        value = read_number(text, name)
    except InvalidRequest:
        value = math.nan
    if value is not None and not (value.is_integer() and 1 <= value <= most):
        raise InvalidRequest(
            f"The {name} is {(text or '').strip()[:40]!r}; give a whole number from 1 to {most}, or nothing for "
            f"{nothing}.",
            param=param or name,
        )
    return None if value is None else int(value)


def read_interval(text: str | None, name: str, called: str) -> tuple[float, float] | None:
    """The two numbers from 0 to 1 in ``text`` ("0.2-0.8"), ``None`` for an empty one. InvalidRequest for others, in
    which the field ``name`` is ``called`` something.
    """
    if not (text or "").strip():
        return None
    try:
        first, last = map(float, DASH.split((text or "").replace(",", ".")))
    except ValueError:
        first, last = math.nan, math.nan
    if not 0.0 <= first <= last <= 1.0:
        raise InvalidRequest(
            f"The {called} is {(text or '')[:40]!r}; give two numbers from 0 to 1, such as 0.2-0.8, or nothing for "
            "all steps.",
            param=name,
        )
    return first, last


def read_seed(text: str | None, name: str = "seed") -> int | None:
    """The whole number in ``text``, ``None`` for an empty one. InvalidRequest for anything else."""
    text = (text or "").strip()
    if not text or text == "-1":
        return None
    digits = text.lstrip("0") or "0"
    if not (text.isascii() and text.isdigit() and len(digits) <= MAX_SEED_DIGITS and int(digits) <= MAX_SEED):
        raise InvalidRequest(
            f"The {name.replace('_', ' ')} is {text[:40]!r}; give a whole number from 0 to {MAX_SEED}, or nothing for "
            "a random one.",
            param=name,
        )
    return int(digits)


def read_sizes(text: str | None) -> dict[str, Any] | None:
    """What SDXL is to be told of sizes, as the server takes it, ``None`` for an empty text. Raises InvalidRequest."""
    return msgspec.structs.asdict(MicroConditioning.read(text)) if text and text.strip() else None


def seeds_named(seed: int, variation_seed: int | None) -> str:
    """What tells a picture from others of its request, in the name of its file: "7", "7-9"."""
    return f"{seed}" if variation_seed is None else f"{seed}-{variation_seed}"


class TypedField(NamedTuple):
    """A field of a request that nobody who only paints has heard of, typed as text under Advanced.

    label        what the page calls it
    placeholder  what stands there for nothing
    info         a line below
    read         from the text, the field's name and what the model can do, the value; InvalidRequest
    """

    label: str
    placeholder: str
    info: str
    read: Callable[[str | None, str, ImageCapabilities], Any]


def _part(text: str | None, name: str, image: ImageCapabilities) -> float | None:
    return read_number(text, name, 1.0)


TYPED: Final = {
    "eta": TypedField("Fresh noise", "the sampler's own", "Of every step (eta), 0 to 1.", _part),
    "guidance_interval": TypedField(
        "Guided part", "all steps", "From and to, as parts of the way: 0.2-0.8.",
        lambda text, name, image: read_interval(text, name, "guided part"),
    ),
    "cache_interval": TypedField(
        "Whole network every", "1", "So many steps, a part of it between (DeepCache).",
        lambda text, name, image: read_count(text, name, MAX_CACHE_INTERVAL),
    ),
    "similarity_threshold": TypedField(
        "Similar enough", "never", "To begin from a kept picture, above 0 to 1.", _part
    ),
    "clip_skip": TypedField(
        "Clip skip", "1", "Layers from the text encoders' end.",
        lambda text, name, image: read_count(text, name, MAX_CLIP_SKIP),
    ),
    "micro_conditioning": TypedField(
        "Told sizes", "the picture's own",
        "What SDXL is told: original_size 640x480 crop 0x0 target_size 1024x1024.",
        lambda text, name, image: read_sizes(text),
    ),
    "guidance_rescale": TypedField(
        "Rescaled guidance", "none", "To the spread of what is not guided, 0 to 1.", _part
    ),
    "variation_strength": TypedField(
        "Variation", "none", "How far from the seed's picture, 0 to 1.", _part
    ),
    "variation_seed": TypedField(
        "Variation seed", "random", "Pictures have the same seed, and these in turn.",
        lambda text, name, image: read_seed(text, name),
    ),
    "switch_at": TypedField("Refiner from", "never", "Where it takes over, 0 to 1: 0.8.", _part),
    "best_of": TypedField(
        "Best of", "all are kept", "Painted, of which the best are kept.",
        lambda text, name, image: read_count(text, name, image.max_images),
    ),
}  # fmt: skip
"""By the names that a request calls them, in the order in which the page shows them."""


def told(fields: Mapping[str, Any]) -> Iterator[str]:
    """What a request's ``fields`` say of those in ``TYPED``, in the page's words: "clip skip 2"; but for sizes,
    and for seeds, which differ from picture to picture.
    """
    for name, one in TYPED.items():
        match fields.get(name):
            case (first, last):
                yield f"{one.label.lower()} {first:g}-{last:g}"
            case int() | float() as number if name != "variation_seed":
                yield f"{one.label.lower()} {number:g}"


KNOWN_BY: Final = re.compile(rf"(?:\bthe )?\b({'|'.join(TYPED)})\b", re.IGNORECASE)


def as_labelled(text: str) -> str:
    """``text`` with fields called as on the page."""
    return KNOWN_BY.sub(lambda found: f"“{TYPED[found[1].lower()].label}”", text)
