"""Writing and parsing of the ``parameters`` text that Stable Diffusion tools store in image files (infotext).

Grammar: the prompt on one or more lines; optionally ``Negative prompt: ...``; a last line of ``Key: value`` pairs. A
value with a comma, a colon or a newline is a JSON string; other tools also write JSON objects and arrays. Parsing takes
linear time, skips malformed parts of the last line, and reports them as warnings.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import HIRES, REQUEST_FIELDS, SHARED_FIELDS, NoiseSource
from diffserve.api.types import FILTERS, ImageResult
from diffserve.models.loras import with_tags
from diffserve.version import __version__
from schedulers import SAMPLERS
from schedulers.learned import is_learned

MAX_BYTES = 8192
"""Maximum size of a text in UTF-8."""

SOFTWARE = f"diffserve {__version__}"
NEGATIVE = "Negative prompt: "
ORIGINAL = "Original prompt"
"""Key of the prompt of the user, if the image was generated from a rewritten prompt."""

TEMPLATE = "Template"
"""Key of the template that the prompt was resolved from, as A1111's extension for dynamic prompts writes it."""

UPSCALE = "Upscale"
"""Key of the upscalers of an image that was enlarged after its generation."""

SCHEDULE_LABELS = {
    "karras": "Karras",
    "exponential": "Exponential",
    "sgm_uniform": "SGM Uniform",
    "simple": "Simple",
    "beta": "Beta",
}

RNG_LABELS: Final[dict[NoiseSource, str]] = {"cpu": "CPU", "device": "NV"}
"""A1111's labels of noise sources. "NV" is the sequence of a CUDA generator, on any device."""

_BY_TABLE: Final = tuple(
    name
    for name, field in REQUEST_FIELDS.items()
    if field.label
    and (name == "strength" or (name in SHARED_FIELDS and name != "noise_source" and not name.startswith(HIRES)))
)
"""Request fields whose text is their number or numbers."""

_MIN_PAIRS = 3
_MAX_FRAGMENTS_NAMED = 3
_MAX_FRAGMENT_CHARS = 40
_CUT = "…"
_KEY = re.compile(r"\s*+([\w \-/]++):\s*+")
_JSON_TEXT = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"')
_JSON_DECODER = json.JSONDecoder()
_MAX_JSON_CHARS = MAX_BYTES  # the time of a parse error grows with the length of the text
_VALUE_END = re.compile(r"\s*+(?:,|$)")


class Infotext(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed ``parameters`` text.

    Attributes:
        prompt: The prompt, with LoRA tags.
        negative_prompt: The negative prompt.
        fields: The pairs of the last line, with values as text.
        is_shortened: Whether the end of the prompts was cut to fit into the file.
        skipped: Parts of the last line that are not ``Key: value`` pairs.
    """

    prompt: str
    negative_prompt: str
    fields: dict[str, str]
    is_shortened: bool = False
    skipped: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warning about skipped parts, as a tuple of at most one sentence."""
        if not self.skipped:
            return ()
        texts = [repr(text[:_MAX_FRAGMENT_CHARS]) for text in self.skipped[:_MAX_FRAGMENTS_NAMED]]
        num_more = len(self.skipped) - len(texts)
        ending = f" and {num_more} more" if num_more else ""
        return (f"The parameters contain {', '.join(texts)}{ending}, not of the form 'Key: value'; this was ignored.",)


def write_infotext(result: ImageResult, *, width_px: int, height_px: int) -> str:
    """Write the ``parameters`` text of ``result``.

    Args:
        result: The result to describe.
        width_px: Width of the delivered image, which may have been generated at another size; with hires fix the
            requested width of the first pass.
        height_px: Height, likewise.
    """
    lines, fields = _lines_and_fields(result, width_px, height_px)
    return "\n".join([*lines, _last_line(fields)])


def _hires_fields(result: ImageResult) -> dict[str, object]:
    """Return the fields of hires fix, in A1111's order; empty for an image without a second pass."""
    if not result.has_hires:
        return {}
    sampler, schedule, upscaler = result.hires_sampler, result.hires_schedule, result.hires_upscaler
    return {
        "Denoising strength": None if result.hires_strength is None else _number_text(result.hires_strength),
        "Hires upscale": None if result.hires_scale is None else _number_text(result.hires_scale),
        "Hires resize": result.hires_size,
        "Hires steps": result.num_steps if result.hires_steps is None else result.hires_steps,
        "Hires sampler": sampler and (SAMPLERS[sampler].label if sampler in SAMPLERS else sampler),
        "Hires schedule type": schedule and SCHEDULE_LABELS.get(schedule, schedule),
        "Hires upscaler": upscaler.capitalize() if upscaler in FILTERS else upscaler,
        "Hires prompt": _without_control_characters(result.hires_prompt or "") or None,
        "Hires negative prompt": _without_control_characters(result.hires_negative_prompt or "") or None,
    }


def _lines_and_fields(result: ImageResult, width_px: int, height_px: int) -> tuple[list[str], dict[str, object]]:
    """Return the lines of the prompts, and the fields of the last line; fields that are None are left out."""
    painted = result.picture
    resized = (painted.width_px, painted.height_px) != (width_px, height_px) and not result.has_hires
    controls = {f"ControlNet {index}": control.label for index, control in enumerate(result.controlnets)}
    references = {
        f"Reference {index}": reference.label(result.reference_digests.get(reference.name, ""))
        for index, reference in enumerate(result.references)
    }
    fields: dict[str, object] = {
        "Steps": result.num_steps,
        "Sampler": SAMPLERS[result.sampler].label if result.sampler in SAMPLERS else result.sampler,
        "Schedule type": SCHEDULE_LABELS.get(result.sigma_schedule or "", result.sigma_schedule),
        "CFG scale": _number_text(result.guidance_scale),
        "Seed": result.seed,
        "Size": f"{width_px}x{height_px}",
        "Model hash": result.model_digest.rpartition(":")[2][:10] or None,
        "Model": result.model,
        "Variation seed": result.variation_seed,
        **{REQUEST_FIELDS[name].label: _field_text(result, name) for name in _BY_TABLE},
        **_hires_fields(result),
        "Similarity": None if result.similarity is None else _number_text(result.similarity),
        "Skipped steps": result.skipped_steps or None,
        "Micro conditioning": result.micro_conditioning,
        **controls,
        **references,
        "Lora hashes": _digests_text(result.lora_digests),
        "TI hashes": _digests_text(result.word_digests),
        "Sampler hash": result.sampler_digest[:12] or None,
        "Refiner": result.refiner or None,
        "Refiner switch at": None if result.switch_at is None else _number_text(result.switch_at),
        "Interrupted after": result.interrupted_after or None,
        "Score": None if result.score is None else f"{result.score:.6g}",
        "RNG": RNG_LABELS[result.noise_source],
        "Spacing": None if is_learned(result.sampler) else result.spacing,
        ORIGINAL: None if result.original_prompt is None else _without_control_characters(result.original_prompt),
        TEMPLATE: _without_control_characters(result.template) or None,
        "Painted size": f"{painted.width_px}x{painted.height_px}" if resized else None,
        "Version": SOFTWARE,
    }
    lines = [with_tags(_without_control_characters(result.prompt), result.loras)]
    if result.negative_prompt.strip():
        lines.append(NEGATIVE + _without_control_characters(result.negative_prompt))
    return lines, fields


def _last_line(fields: Mapping[str, object]) -> str:
    return _write_pairs({key: str(value) for key, value in fields.items() if value is not None})


def parse_infotext(text: str) -> Infotext:
    """Parse a ``parameters`` text as A1111 and other tools write it.

    The settings are in the last line, or the last line that begins with ``Steps:``, if it has at least three pairs.
    Otherwise the whole text is the prompt.

    Raises:
        InvalidRequest: ``text`` is longer than ``MAX_BYTES``.
    """
    num_bytes = check_length(text)
    lines, trailing_lines = text.strip().replace("\r\n", "\n").split("\n"), list[str]()
    last_steps = max((index for index, line in enumerate(lines) if line.startswith("Steps:")), default=-1)
    fields, skipped = _read_settings(lines[-1])
    if not fields and last_steps >= 0:
        fields, skipped = _read_settings(lines[last_steps])
        lines, trailing_lines = (lines[: last_steps + 1], lines[last_steps + 1 :]) if fields else (lines, [])
    if fields:
        lines.pop()
    prompt: list[str] = []
    negative: list[str] = []
    for line in lines:
        if line.startswith(NEGATIVE.rstrip()) and not negative:
            negative.append(line.removeprefix(NEGATIVE.rstrip()).removeprefix(" "))
        else:
            (negative or prompt).append(line)
    is_shortened = num_bytes > MAX_BYTES - len(_CUT.encode()) and bool(lines) and lines[-1].endswith(_CUT)
    return Infotext(
        prompt="\n".join(prompt),
        negative_prompt="\n".join(negative),
        fields=fields,
        is_shortened=is_shortened,
        skipped=tuple(part for part in (*skipped, *trailing_lines) if part.strip()),
    )


def check_length(text: str) -> int:
    """Return the number of bytes of ``text`` in UTF-8.

    Raises:
        InvalidRequest: There are more than ``MAX_BYTES``.
    """
    num_bytes = _num_bytes(text)
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(
            f"the parameters of this image have {num_bytes} bytes; at most {MAX_BYTES} are allowed.",
            param="parameters",
            code="parameters_too_long",
        )
    return num_bytes


def shorten(text: str, max_bytes: int) -> str:
    """Shorten ``text`` to ``max_bytes`` of UTF-8 by cutting the end of the prompts.

    The last line stays complete, except that an original prompt or template of more than half of ``max_bytes``
    is removed.
    """
    if _num_bytes(text) <= max_bytes:
        return text
    head, _, last = text.rpartition("\n")
    fields, _ = _read_settings(last)
    long = [key for key in (ORIGINAL, TEMPLATE) if _num_bytes(fields.get(key, "")) > max_bytes // 2]
    if long:
        last = _write_pairs({key: value for key, value in fields.items() if key not in long})
    end = f"{_CUT}\n{last}"
    if not fields or _num_bytes(end) > max_bytes:  # no line of settings, or one that is too long itself
        head, end = text, _CUT
    return head.encode(errors="replace")[: max_bytes - _num_bytes(end)].decode(errors="ignore") + end


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _field_text(result: ImageResult, name: str) -> str | None:
    """Return the text of a recorded field, or None for its default, which is not written."""
    value = getattr(result, name)
    default = None if name == "strength" else REQUEST_FIELDS[name].default
    if name == "eta":
        default = (SAMPLERS[result.sampler].default_eta or 0.0) if result.sampler in SAMPLERS else 0.0
    if value is None or value == default:
        return None
    if isinstance(value, str):
        return value
    return _number_text(*(value if isinstance(value, tuple) else (value,)))


def _number_text(*values: float) -> str:
    """Format numbers with the fewest digits that read back exactly: "7" for 7.0, "0.2-0.8" for an interval."""
    return "-".join(repr(float(value) + 0.0).removesuffix(".0") for value in values)  # adding 0.0 turns -0.0 into 0.0


def _digests_text(digests: Mapping[str, str]) -> str | None:
    """Format digests as A1111 does, with their first twelve digits; other tools look files up by them."""
    pairs = (f"{name.replace(':', '').replace(',', '')}: {digest[:12]}" for name, digest in digests.items())
    return ", ".join(pairs) or None


def _without_control_characters(text: str) -> str:
    """Replace control characters other than newline and tab by spaces."""
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else " " for c in unified)


def _write_pairs(fields: dict[str, str]) -> str:
    return ", ".join(f"{key}: {_quoted(value, always=key in (ORIGINAL, TEMPLATE))}" for key, value in fields.items())


def _quoted(value: str, *, always: bool) -> str:
    return json.dumps(value, ensure_ascii=False) if always or any(mark in value for mark in ",:\n") else value


def _read_settings(line: str) -> tuple[dict[str, str], list[str]]:
    """Parse a line of settings.

    Returns:
        The pairs, and the parts between commas that are not pairs. Both are empty for a line of a prompt: a line of
        settings has at least three pairs, and either no other parts or a pair ``Steps``.
    """
    fields, skipped = dict[str, str](), list[str]()
    start = 0
    while start < len(line):
        key = _KEY.match(line, start)
        has_key = key is not None and bool(key[1].strip())
        end = start
        if key is not None and has_key:
            fields[key[1].strip()], end = _read_value(line, key.end())
        comma = line.find(",", end)
        end = len(line) if comma < 0 else comma
        if not has_key:
            skipped.append(line[start:end].strip())
        start = end + 1
    if len(fields) < _MIN_PAIRS or (skipped and "Steps" not in fields):
        return {}, []
    return fields, skipped


def _read_value(line: str, start: int) -> tuple[str, int]:
    """Parse a JSON string, object or array, or plain text up to the next comma.

    Returns:
        The value (the JSON text of an object or array) and the index of its end.
    """
    quoted = _JSON_TEXT.match(line, start)
    if quoted is not None:
        value = str(json.loads(quoted[0]))
        return value.encode(errors="replace").decode(), quoted.end()  # unpaired surrogates become "?"
    if line.startswith(("{", "["), start):
        with suppress(ValueError, RecursionError):
            end = start + _JSON_DECODER.raw_decode(line[start : start + _MAX_JSON_CHARS])[1]
            if _VALUE_END.match(line, end):
                return line[start:end], end
    comma = line.find(",", start)
    end = len(line) if comma < 0 else comma
    return line[start:end].strip(), end


def seeds_text(seed: int, variation_seed: int | None) -> str:
    """Describe the seeds of an image: "seed 7" or "seed 7, variation seed 9"."""
    return f"seed {seed}" if variation_seed is None else f"seed {seed}, variation seed {variation_seed}"


UNICODE_HEADER: Final = b"UNICODE\x00"
"""Header of a UTF-16 user comment. The EXIF specification does not define the byte order."""

_ENCODINGS: Final[dict[bytes, tuple[str, ...]]] = {
    UNICODE_HEADER: ("utf-16-be", "utf-16-le", "utf-8"),
    b"ASCII\x00\x00\x00": ("utf-8", "latin-1"),
    b"JIS\x00\x00\x00\x00\x00": ("iso2022_jp", "shift_jis"),
    bytes(8): ("utf-8", "utf-16-be", "utf-16-le", "latin-1"),
}
"""The four headers of a user comment, and the encodings that writers use after each."""

_NO_HEADER: Final = _ENCODINGS[bytes(8)]
_BYTE_ORDER_MARKS: Final = (b"\xfe\xff", b"\xff\xfe")
_SAMPLE_BYTES: Final = 4096
"""Number of bytes that are decoded to choose the encoding."""


def decode_user_comment(comment: bytes) -> str:
    """Decode an EXIF user comment with any of the four headers, or without one, as some tools write it."""
    header = next((header for header in _ENCODINGS if comment.startswith(header)), b"")
    content = comment.removeprefix(header)
    if content.startswith(_BYTE_ORDER_MARKS):
        encoding = "utf-16"
    else:
        encoding = _best_encoding(content, _ENCODINGS.get(header, _NO_HEADER))
    text = codecs.getincrementaldecoder(encoding)("replace").decode(content)  # drops a truncated last character
    return text.removeprefix("\ufeff").rstrip("\0")


def decode_png_text(text: str) -> str:
    """Decode a PNG tEXt or zTXt chunk as UTF-8 if possible; it was read as Latin-1, as the specification says."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text


def _best_encoding(content: bytes, encodings: tuple[str, ...]) -> str:
    """Return the encoding in which ``content`` has the largest share of ASCII text and no invalid sequence."""
    scores = {encoding: _ascii_share(content, encoding) for encoding in encodings}
    best = max(encodings, key=lambda encoding: scores[encoding])
    return best if scores[best] >= 0.0 else "latin-1"


def _ascii_share(content: bytes, encoding: str) -> float:
    """Return the share of ASCII text at the start of ``content``, negative if it is not valid in ``encoding``."""
    num_bytes = len(content) & ~1 if encoding.startswith("utf-16") else len(content)
    is_cut = num_bytes > _SAMPLE_BYTES
    try:
        sample = content[: min(num_bytes, _SAMPLE_BYTES)]
        text = codecs.getincrementaldecoder(encoding)("strict").decode(sample, not is_cut).rstrip("\0")
    except UnicodeError:
        return -1.0
    if any(character < " " and character not in "\t\n\r" for character in text):
        return -1.0
    return sum(character < "\x7f" for character in text) / max(1, len(text))
