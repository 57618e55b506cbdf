"""LoRAs in requests, as a field or as tags in the prompt, and the folders that they are found in, without torch.

The tags are those of A1111: ``<lora:NAME>``, ``<lora:NAME:SCALE>`` and ``<lora:NAME:TEXT_SCALE:UNET_SCALE>``. ``lyco``
is equivalent to ``lora``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from diffserve.api.bounds import check, check_chars, is_relative_name
from diffserve.api.errors import InvalidRequest
from diffserve.models.lora_layers import MAX_RANK, InvalidLoRAError, check_layers_known, read_layers
from diffserve.models.model_files import MAX_NAME_CHARS, find_below, is_valid_name, other_family, resolve_name
from diffserve.models.safetensors_header import FILES_KNOWN, METADATA, file_problem, read_header

MAX_LORAS: Final = 8
MAX_SCALE: Final = 10.0
MAX_HEADER_BYTES: Final = 1 << 23
"""Maximum header size of a LoRA file. 20,000 tensors take 2 MB, and training tags may take as much."""

MAX_METADATA_CHARS: Final = 2_000
"""Longer texts of a file's metadata, such as the tags of all training images, are not listed."""

SUFFIX: Final = ".safetensors"

_TAG: Final = re.compile(r"(?<!\\)<(?:lora|lyco):([^<>]*)>", re.IGNORECASE)
_SCALES: Final = {"te": 0, "unet": 1}
"""Position in a tag by A1111's names of the two scales."""


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """LoRA of a request.

    Attributes:
        name: Path of the file below the folder, without ``.safetensors``, or its last part if that is unique.
        scale: Scale of the changes; 1 as trained.
        unet_scale: Scale of the changes to the UNet, if it differs; ``scale`` then applies to the text encoders.
    """

    name: str
    scale: float = 1.0
    unet_scale: float | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_chars(self.name, MAX_NAME_CHARS, "loras", "the name of a LoRA")
        message = f"a LoRA's name is {self.name!r}; give a path below the folder, as ink or style/ink."
        check(is_relative_name(self.name), message, "loras")
        for scale in self.scales:
            check(
                math.isfinite(scale) and abs(scale) <= MAX_SCALE,
                f"the scale of LoRA {self.name!r} is {scale}; it must lie between {-MAX_SCALE:g} and {MAX_SCALE:g}.",
                "loras",
            )

    @property
    def scales(self) -> tuple[float, float]:
        """Scales of the text encoders and of the UNet."""
        return self.scale, self.scale if self.unet_scale is UNSET else self.unet_scale

    @classmethod
    def read(cls, text: str) -> Lora:
        """Parse NAME, NAME:SCALE or NAME:TEXT_SCALE:UNET_SCALE, also with A1111's ``te=`` and ``unet=``.

        Raises:
            InvalidRequest: ``text`` is not of this form.
        """
        name, *parts = text.split(":")
        scales: list[float | None] = [None, None]
        try:
            for position, part in enumerate(parts):
                key, equals, value = part.partition("=")
                scales[_SCALES[key.strip()] if equals else position] = float(value if equals else part)
        except (ValueError, LookupError):
            message = (
                f"a LoRA is given as {text[:MAX_NAME_CHARS]!r}; write NAME or NAME:SCALE, for example ink:0.8, or "
                "NAME:TEXT_SCALE:UNET_SCALE."
            )
            raise InvalidRequest(message, param="loras") from None
        text_scale = 1.0 if scales[0] is None else scales[0]
        return cls(name, text_scale).with_unet_scale(scales[1])

    def with_unet_scale(self, scale: float | None) -> Lora:
        """Return a copy with this scale of the UNet; ``None`` for the scale of the text encoders."""
        return msgspec.structs.replace(self, unet_scale=UNSET if scale in (None, self.scale) else scale)

    def __str__(self) -> str:
        numbers = self.scales[:1] if self.unet_scale is UNSET else self.scales
        return ":".join([self.name, *(repr(number + 0.0).removesuffix(".0") for number in numbers)])


class CheckedLoras(NamedTuple):
    """Properties of the LoRAs of a request, from the headers of their files.

    Attributes:
        rank: Rank to which the factors are padded; ``WHOLE`` if a change has no low-rank form.
        digest: Digest of the files and scales, which distinguishes their effect on images.
        words: Trigger words in the files.
        warnings: Warnings about parts of the files that are not loaded.
    """

    rank: int
    digest: bytes
    words: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


NO_LORAS: Final = CheckedLoras(0, b"")


def check_loras(loras: Sequence[Lora]) -> None:
    """Check the number of LoRAs of one image.

    Raises:
        InvalidRequest: There are more than ``MAX_LORAS``.
    """
    message = f"{len(loras)} LoRAs are given; at most {MAX_LORAS} are allowed per image: leave some out."
    check(len(loras) <= MAX_LORAS, message, "loras")


def read_tags(prompt: str) -> tuple[str, tuple[Lora, ...]]:
    """Parse the LoRA tags in ``prompt``.

    Returns:
        The prompt without the tags, and the LoRAs.

    Raises:
        InvalidRequest: A tag is malformed.
    """
    loras = tuple(Lora.read(tag) for tag in _TAG.findall(prompt))
    return (_TAG.sub("", prompt).strip(), loras) if loras else (prompt, ())


def read_list(text: str) -> tuple[Lora, ...]:
    """Parse a list of LoRAs such as "ink:0.8, paper".

    Raises:
        InvalidRequest: An entry is malformed.
    """
    return tuple(Lora.read(entry.strip()) for entry in text.split(",") if entry.strip())


def with_tags(prompt: str, loras: Sequence[Lora]) -> str:
    """Append a tag for each LoRA to ``prompt``; the inverse of ``read_tags``."""
    return " ".join([prompt, *(f"<lora:{lora}>" for lora in loras)])


class LoraFolders:
    """Folders of LoRA files, read again at each call; the first of several files with the same name is used.

    Args:
        paths: The folders.
        text_width: Numbers of a prompt token of the model; files of other families do not fit. 0: any model.
    """

    def __init__(self, paths: Iterable[str], text_width: int = 0) -> None:
        self.paths = tuple(Path(path).expanduser() for path in paths)
        self.text_width = text_width

    def names(self) -> tuple[str, ...]:
        """Return the names of the usable files, which are their paths below the folder without suffix."""
        return tuple(name for name, path in self._files().items() if not lora_problem(path, self.text_width))

    def refused(self) -> dict[str, str]:
        """Return the reason for each unusable file, by name."""
        problems = {name: lora_problem(path, self.text_width) for name, path in self._files().items()}
        return {name: f"it {problem}." for name, problem in problems.items() if problem}

    def find(self, name: str) -> Path:
        """Return the file of the LoRA ``name``.

        Raises:
            InvalidRequest: The file does not exist, or the name is ambiguous.
        """
        for folder in self.paths:
            if os.path.isfile(folder / f"{name}{SUFFIX}"):
                return folder / f"{name}{SUFFIX}"
        files = self._files()
        return files[resolve_name(name, self.names(), files, "LoRA")]

    def metadata(self, name: str) -> dict[str, str]:
        """Return the texts in the file of ``name``, without those longer than ``MAX_METADATA_CHARS``."""
        path = self._files().get(name)
        metadata = read_header(path).get(METADATA) if path is not None else None
        texts = metadata.items() if isinstance(metadata, dict) else ()
        return {key: text for key, text in texts if isinstance(text, str) and len(text) <= MAX_METADATA_CHARS}

    def _files(self) -> dict[str, Path]:
        """Return the files with valid names, by name, sorted."""
        below: dict[str, Path] = {}
        for folder in reversed(self.paths):
            below |= find_below(folder, _is_file)
        names = {file.removesuffix(SUFFIX): path for file, path in sorted(below.items())}
        return {name: path for name, path in names.items() if is_valid_name(name)}


def lora_problem(path: Path, text_width: int = 0) -> str:
    """Return why a model cannot use the LoRA file ``path``, as the end of a sentence about it; "" if it is usable.

    What the file holds is cached until its size or modification time changes.

    Args:
        path: The file.
        text_width: Numbers of a prompt token of the model; 0: any model.
    """
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    problem, width = _examine(path, status.st_size, status.st_mtime_ns)
    return problem or other_family(width, text_width)


@lru_cache(FILES_KNOWN)
def _examine(path: Path, _num_bytes: int, _changed_ns: int) -> tuple[str, int]:
    """Return why no model can use the file ``path``, "" if it is usable, and its ``LoRALayers.text_width``."""
    problem = file_problem(path, MAX_HEADER_BYTES)
    if problem:
        return problem, 0
    header = read_header(path)
    metadata = header.pop(METADATA, None) or {}
    try:
        content = read_layers({name: tensor["shape"] for name, tensor in header.items()}, metadata)
        check_layers_known(content)
    except InvalidLoRAError as error:
        return str(error), 0
    is_too_large = content.rank > MAX_RANK
    return (f"has rank {content.rank}; at most {MAX_RANK} is allowed" if is_too_large else ""), content.text_width


def _is_file(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and not os.path.isdir(path)
