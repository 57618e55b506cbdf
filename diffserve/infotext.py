"""The ``parameters`` text that Stable Diffusion tools write into a picture and read back.

Grammar: the prompt on one or more lines; then, if there is a negative prompt, a line ``Negative prompt: ...``; then a
last line of ``Key: value`` pairs. A value that holds a comma, a colon or a newline is a JSON string.
"""

from __future__ import annotations

import json
import unicodedata

import msgspec

from diffserve import __version__
from diffserve.types import ImageResult
from schedulers import SAMPLERS

SOFTWARE = f"diffserve {__version__}"
NEGATIVE = "Negative prompt: "
ORIGINAL = "Original prompt"
"""The wish, where it was rewritten into the prompt that was painted."""

SCHEDULE_LABELS = {
    "karras": "Karras",
    "exponential": "Exponential",
    "sgm_uniform": "SGM Uniform",
    "simple": "Simple",
    "beta": "Beta",
}

_MIN_PAIRS = 3
_json = json.JSONDecoder()


class Infotext(msgspec.Struct, frozen=True, kw_only=True):
    """A read ``parameters`` text: the two prompts and the pairs of the last line, values as text."""

    prompt: str
    negative_prompt: str
    fields: dict[str, str]


def write_infotext(result: ImageResult, *, width_px: int, height_px: int) -> str:
    """The text for ``result`` delivered at ``width_px`` x ``height_px`` (it may have been painted at another size)."""
    painted = result.picture
    resized = (painted.width_px, painted.height_px) != (width_px, height_px)
    fields: dict[str, object] = {
        "Steps": result.num_steps,
        "Sampler": SAMPLERS[result.sampler].label if result.sampler in SAMPLERS else result.sampler,
        "Schedule type": SCHEDULE_LABELS.get(result.sigma_schedule or "", result.sigma_schedule),
        "CFG scale": _number_text(result.guidance_scale),
        "Seed": result.seed,
        "Size": f"{width_px}x{height_px}",
        "Model hash": result.model_digest.rpartition(":")[2][:10] or None,
        "Model": result.model,
        "Eta": None if result.eta == _own_eta(result.sampler) else _number_text(result.eta),
        "RNG": "CPU",
        "Spacing": result.spacing,
        ORIGINAL: None if result.original_prompt is None else _plain(result.original_prompt),
        "Painted size": f"{painted.width_px}x{painted.height_px}" if resized else None,
        "Version": SOFTWARE,
    }
    last = _write_pairs({key: str(value) for key, value in fields.items() if value is not None})
    lines = [_plain(result.prompt)]
    if result.negative_prompt.strip():
        lines.append(NEGATIVE + _plain(result.negative_prompt))
    return "\n".join([*lines, last])


def parse_infotext(text: str) -> Infotext:
    """Read a ``parameters`` text as those tools do; a last line with fewer than three pairs belongs to the prompt."""
    *lines, last = text.strip().split("\n")
    fields = _read_pairs(last)
    if len(fields) < _MIN_PAIRS:
        lines, fields = [*lines, last], {}
    prompt: list[str] = []
    negative: list[str] = []
    for line in lines:
        if line.startswith(NEGATIVE) and not negative:
            negative.append(line.removeprefix(NEGATIVE))
        else:
            (negative or prompt).append(line)
    return Infotext(prompt="\n".join(prompt), negative_prompt="\n".join(negative), fields=fields)


def shorten(text: str, max_chars: int) -> str:
    """``text`` within ``max_chars``: the prompts lose their end, the line of pairs stays whole, but for an original
    prompt that is longer than half of ``max_chars``."""
    if len(text) <= max_chars:
        return text
    head, _, last = text.rpartition("\n")
    fields = _read_pairs(last)
    if len(fields.get(ORIGINAL, "")) > max_chars // 2:
        last = _write_pairs({key: value for key, value in fields.items() if key != ORIGINAL})
    return f"{head[: max(0, max_chars - len(last) - 2)]}…\n{last}"


def _own_eta(sampler: str) -> float:
    """The eta that ``sampler`` paints with where none is given: what a reader who finds none will take."""
    return (SAMPLERS[sampler].default_eta or 0.0) if sampler in SAMPLERS else 0.0


def _number_text(value: float) -> str:
    """The shortest text that reads back as ``value``: "7" for 7.0, "7.5", "2.123456789"."""
    return repr(float(value)).removesuffix(".0")


def _plain(text: str) -> str:
    """``text`` without control characters other than newline and tab."""
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else " " for c in unified)


def _write_pairs(fields: dict[str, str]) -> str:
    return ", ".join(f"{key}: {_quoted(value, always=key == ORIGINAL)}" for key, value in fields.items())


def _quoted(value: str, *, always: bool) -> str:
    return json.dumps(value, ensure_ascii=False) if always or any(mark in value for mark in ",:\n") else value


def _read_pairs(line: str) -> dict[str, str]:
    """The pairs of ``line``; none where it is not made of pairs alone."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(line):
        colon = line.find(":", at)
        key = line[at:colon].strip()
        if colon < 0 or not key or not all(c.isalnum() or c in " -/_" for c in key):
            return {}
        start = colon + 1 + (len(line[colon + 1 :]) - len(line[colon + 1 :].lstrip()))
        value, end = _read_value(line, start)
        fields[key] = value
        comma = line.find(",", end)
        at = len(line) if comma < 0 else comma + 1
    return fields


def _read_value(line: str, start: int) -> tuple[str, int]:
    """The value at ``start``, a JSON string or plain text up to the next comma, and where it ends."""
    if line.startswith('"', start):
        try:
            value, end = _json.raw_decode(line, start)
            return str(value), end
        except ValueError:
            pass
    comma = line.find(",", start)
    end = len(line) if comma < 0 else comma
    return line[start:end].strip(), end
