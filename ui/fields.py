"""What stands in a single field: how long it may be, and the number in it."""

from __future__ import annotations

import math
import re
from typing import Final

from diffserve.errors import InvalidRequest
from diffserve.types import MAX_PROMPT_CHARS, MAX_SEED

MAX_FIELD_CHARS: Final = 200
"""Of a field that holds a number or a name."""

LABELS: Final = {
    "eta": "Fresh noise",
    "guidance_interval": "Guided part",
    "cache_interval": "Whole network every",
    "token_merging": "Merged tokens",
    "similarity_threshold": "Similar enough",
    "micro_conditioning": "Told sizes",
    "guidance_rescale": "Rescaled guidance",
    "clip_skip": "Clip skip",
    "switch_at": "Refiner from",
    "best_of": "Best of",
}
"""What the page calls the fields of a request that nobody who only paints has heard of."""

KNOWN_BY: Final = re.compile(rf"(?:\bthe )?\b({'|'.join(LABELS)})\b", re.IGNORECASE)
DASH: Final = re.compile(r"(?<![eE])-")
"""Between two numbers, not in the exponent of one: "1e-05-0.5"."""

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


def as_labelled(text: str) -> str:
    """``text`` with fields called as on the page."""
    return KNOWN_BY.sub(lambda found: f"“{LABELS[found[1].lower()]}”", text)


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


def read_count(text: str | None, name: str, most: int) -> int | None:
    """The whole number from 1 to ``most`` in ``text``, ``None`` for an empty one. InvalidRequest for anything else."""
    value = read_number(text, name)
    if value is not None and not (value.is_integer() and 1 <= value <= most):
        raise InvalidRequest(
            f"The {name} is {(text or '')[:40]!r}; give a whole number from 1 to {most}, or nothing for 1.", param=name
        )
    return None if value is None else int(value)


def read_interval(text: str | None, name: str, called: str) -> tuple[float, float] | None:
    """The two numbers from 0 to 1 in ``text`` ("0.2-0.8"), ``None`` for an empty one. InvalidRequest for others, in
    which the field ``name`` is ``called`` something."""
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


def read_seed(text: str | None) -> int | None:
    """The whole number in ``text``, ``None`` for an empty one. InvalidRequest for anything else."""
    text = (text or "").strip()
    if not text or text == "-1":
        return None
    digits = text.lstrip("0") or "0"
    if not (text.isascii() and text.isdigit() and len(digits) <= MAX_SEED_DIGITS and int(digits) <= MAX_SEED):
        raise InvalidRequest(
            f"The seed is {text[:40]!r}; give a whole number from 0 to {MAX_SEED}, or nothing for a random one.",
            param="seed",
        )
    return int(digits)
