"""Inputs of a command: the prompt argument, and the parameters in an image file (``generate --infotext``)."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from diffserve.api.errors import InvalidRequest
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.types import MAX_PROMPT_CHARS
from diffserve.cli.generate import GenerateArguments, read_bytes
from diffserve.media.images import read_infotext
from diffserve.media.infotext import parse_infotext
from diffserve.media.infotext_recipe import request_of, sampler_text

STDIN = "-"


OPTION: Final = "--infotext"
ORDER: Final = {
    "negative_prompt": ("negative", "negative"),
    "num_inference_steps": ("num_steps", "steps"),
    "guidance_scale": ("guidance_scale", "guidance"),
    "seed": ("seed", "seed"),
    "size": ("size", "size"),
    "strength": ("strength", "strength"),
}
"""Maps API request fields to (attribute of ``GenerateArguments``, option). Other fields go to ``further``."""

OPTIONS: Final = {"micro_conditioning": "sizes"}
"""Maps request fields to options that have another name."""


def fill_in(order: GenerateArguments, recorded: dict[str, Any], options: Collection[str]) -> GenerateArguments:
    """Return ``order`` with the request fields ``recorded`` in an image, except for those in ``options``."""
    fields = {name: value for name, value in recorded.items() if name not in ("prompt", "sampler")}
    sampler = sampler_text(recorded)
    fields.pop("sigma_schedule", None)
    if "quality" in options:
        fields.pop("num_inference_steps", None)
    if (sizes := fields.get("micro_conditioning")) is not None:
        fields["micro_conditioning"] = MicroConditioning(**sizes)
    changed = {
        attribute: fields[name]
        for name, (attribute, option) in ORDER.items()
        if name in fields and option not in options
    }
    further = {
        name: value for name, value in fields.items() if name not in ORDER and OPTIONS.get(name, name) not in options
    }
    if "sampler" not in options and sampler is not None:
        changed["sampler"] = sampler
    return replace(order, **changed, further={**order.further, **further})


def read_recorded(file: Path, *, has_start: bool) -> dict[str, Any]:
    """Return the API request fields that reproduce an image, and print warnings for those that cannot be reproduced.

    Args:
        file: The image or text file.
        has_start: Whether the command has a start image.

    Raises:
        InvalidRequest: The file cannot be read, or has no parameters.
    """
    data = read_bytes(file, OPTION)
    try:
        text = data.decode() if file.suffix.lower() == ".txt" else read_infotext(data)
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"{OPTION} {str(file)!r} is not UTF-8 text; give an image or a text file.", param=OPTION
        ) from None
    read = parse_infotext(text or "")
    if not read.fields:
        message = f"{OPTION} {str(file)!r} has no parameters; give the original image, not an edited copy."
        raise InvalidRequest(message, param=OPTION)
    recorded = request_of(read, has_start=has_start)
    for warning in recorded.warnings:
        print(warning, file=sys.stderr)
    return recorded.fields


def read_text_argument(words: Sequence[str], *, command: str, name: str = "prompt") -> str:
    """Return the only argument of ``command``, or the text on standard input if it is ``-``.

    Args:
        words: The arguments as the shell passed them.
        command: Name of the command, for the error message.
        name: Name of the argument, for the error message.

    Raises:
        InvalidRequest: There are several arguments (a prompt without quotes), or standard input is empty or not UTF-8.
    """
    if len(words) > 1:
        quoted = shlex.quote(" ".join(words)[:60])
        raise InvalidRequest(
            f"the {name} must be one argument, got {len(words)}; put it in quotes: diffserve {command} {quoted}",
            param=name,
        )
    return _read_stdin(name) if words[0] == STDIN else words[0]


def _read_stdin(name: str) -> str:
    try:
        text = sys.stdin.buffer.read(4 * MAX_PROMPT_CHARS + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the {name} on standard input is not UTF-8 text ({error.reason} at byte {error.start}).", param=name
        ) from None
    if not text.strip():
        raise InvalidRequest(f"standard input has no {name}; it must not be empty.", param=name, code="empty_prompt")
    return text.strip()
