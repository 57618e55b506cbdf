"""``diffserve generate --infotext``: uses the parameters in an image file for options that are not given."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from diffserve.api.errors import InvalidRequest
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.cli.generate import GenerateArguments, read_bytes
from diffserve.media.images import read_infotext
from diffserve.media.infotext import parse_infotext
from diffserve.media.infotext_recipe import request_of, sampler_text

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


class RecordedPicture(NamedTuple):
    """The API request fields that reproduce an image."""

    fields: dict[str, Any]

    @property
    def prompt(self) -> str:
        """The prompt."""
        return str(self.fields["prompt"])

    def fill(self, order: GenerateArguments, options: Collection[str]) -> GenerateArguments:
        """Return ``order`` with the parameters of the image, except for those in ``options``."""
        fields = {name: value for name, value in self.fields.items() if name not in ("prompt", "sampler")}
        sampler = sampler_text(self.fields)
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
            name: value
            for name, value in fields.items()
            if name not in ORDER and OPTIONS.get(name, name) not in options
        }
        if "sampler" not in options and sampler is not None:
            changed["sampler"] = sampler
        return replace(order, **changed, further={**order.further, **further})


def read_recorded(file: Path, *, has_start: bool) -> RecordedPicture:
    """Read the parameters in an image or a text file, and print warnings for those that cannot be reproduced.

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
    return RecordedPicture(recorded.fields)
