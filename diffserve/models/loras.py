"""LoRA adapters as requests name them: by name and scale, in a field or in the prompt, from folders. No torch.

<lora:NAME>  <lora:NAME:SCALE>  <lora:NAME:TEXT_SCALE:UNET_SCALE>      in a prompt, as A1111 writes it; so is <lyco:...>
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
from diffserve.models.folder_names import find_below, names_for
from diffserve.models.lora_layers import MAX_RANK, InvalidLoRAError, check_layers_known, read_layers
from diffserve.models.safetensors_header import FILES_KNOWN, METADATA, file_problem, read_header

MAX_LORAS: Final = 8
MAX_SCALE: Final = 10.0
MAX_HEADER_BYTES: Final = 1 << 23
"""Of a LoRA file. That of one with 20,000 tensors has 2 MB, and tags of a training set may take as much."""

MAX_NAME_CHARS: Final = 200
SUFFIX: Final = ".safetensors"
TOLD: Final = 12
"""Names at most that an error lists."""

_TAG: Final = re.compile(r"(?<!\\)<(?:lora|lyco):([^<>]*)>", re.IGNORECASE)
_SCALES: Final = {"te": 0, "unet": 1}
"""A1111's names of the two scales -> their places in a tag."""


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that a request asks for.

    name        path of its file below the folder, without ``.safetensors``; or its last part where that is unique
    scale       how much of its changes is applied: 1 as it was trained
    unet_scale  how much of its changes to the UNet, where that differs; ``scale`` is that of the text encoders then
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
        """The scales of the changes to the text encoders and to the UNet."""
        return self.scale, self.scale if self.unet_scale is UNSET else self.unet_scale

    @classmethod
    def read(cls, text: str) -> Lora:
        """Read NAME, NAME:SCALE or NAME:TEXT_SCALE:UNET_SCALE; A1111's ``te=`` and ``unet=`` are taken, too.

        Raises:
            InvalidRequest: ``text`` is not of this form.
        """
        name, *parts = text.split(":")
        scales: list[float | None] = [None, None]
        try:
            for place, part in enumerate(parts):
                key, equals, value = part.partition("=")
                scales[_SCALES[key.strip()] if equals else place] = float(value if equals else part)
        except (ValueError, LookupError):
            message = (
                f"a LoRA is given as {text[:MAX_NAME_CHARS]!r}; write NAME or NAME:SCALE, for example ink:0.8, or "
                "NAME:TEXT_SCALE:UNET_SCALE."
            )
            raise InvalidRequest(message, param="loras") from None
        text_scale = 1.0 if scales[0] is None else scales[0]
        return cls(name, text_scale).with_unet_scale(scales[1])

    def with_unet_scale(self, scale: float | None) -> Lora:
        """Return the adapter with another scale for the UNet; ``None``: with the same as for the text encoders."""
        return msgspec.structs.replace(self, unet_scale=UNSET if scale in (None, self.scale) else scale)

    def __str__(self) -> str:
        numbers = self.scales[:1] if self.unet_scale is UNSET else self.scales
        return ":".join([self.name, *(repr(number + 0.0).removesuffix(".0") for number in numbers)])


class CheckedLoras(NamedTuple):
    """What the headers of LoRA files say before their tensors are read.

    rank      the rank that their factors are padded to; ``WHOLE`` where a change has no low-rank form
    digest    of the files and their scales, to tell apart what they paint
    words     trigger words that the files name
    warnings  about parts of the files that are not loaded
    """

    rank: int
    digest: bytes
    words: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


NO_LORAS: Final = CheckedLoras(0, b"")


def check_loras(loras: Sequence[Lora]) -> None:
    """InvalidRequest for more of them than a picture takes."""
    said = f"{len(loras)} LoRAs are asked for at once; a picture takes at most {MAX_LORAS}: leave some out."
    check(len(loras) <= MAX_LORAS, said, "loras")


def read_tags(prompt: str) -> tuple[str, tuple[Lora, ...]]:
    """``prompt`` without its tags, and what they ask for. Raises InvalidRequest for a tag that asks for nothing."""
    loras = tuple(Lora.read(tag) for tag in _TAG.findall(prompt))
    return (_TAG.sub("", prompt).strip(), loras) if loras else (prompt, ())


def read_list(text: str) -> tuple[Lora, ...]:
    """Those of "ink:0.8, paper". Raises InvalidRequest."""
    return tuple(Lora.read(one.strip()) for one in text.split(",") if one.strip())


def with_tags(prompt: str, loras: Sequence[Lora]) -> str:
    """What ``read_tags`` reads."""
    return " ".join([prompt, *(f"<lora:{lora}>" for lora in loras)])


class LoraFolders:
    """The safetensors files in the folders ``paths`` and below, read at each call; the first of equal names counts."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = tuple(Path(path).expanduser() for path in paths)

    def names(self) -> tuple[str, ...]:
        """List the files that can be used, by their paths below the folder, without suffix."""
        return tuple(name for name, path in self._files().items() if not lora_problem(path))

    def refused(self) -> dict[str, str]:
        """Return why the other files cannot be used, by their names."""
        problems = {name: lora_problem(path) for name, path in self._files().items()}
        return {name: f"it {problem}." for name, problem in problems.items() if problem}

    def find(self, name: str) -> Path:
        """Return the file of the adapter ``name``.

        Raises:
            InvalidRequest: there is none, or there are several that the name may mean.
        """
        for folder in self.paths:
            if os.path.isfile(folder / f"{name}{SUFFIX}"):
                return folder / f"{name}{SUFFIX}"
        files, usable = self._files(), self.names()
        meant = names_for(name, usable) or names_for(name, files)
        if len(meant) == 1:
            return files[meant[0]]
        if meant:
            message = f"there are several LoRAs called {name!r}: {', '.join(meant[:TOLD])}; give one of these names."
            raise InvalidRequest(message, param="loras", code="unknown_lora")
        there = ", ".join(usable[:TOLD]) + ", ..." * (len(usable) > TOLD)
        way_out = f"there are {there}." if usable else "none are served here: start with --lora-dir DIR."
        raise InvalidRequest(f"there is no LoRA {name!r}; {way_out}", param="loras", code="unknown_lora")

    def _files(self) -> dict[str, Path]:
        """Return the files whose names a request can give, by name, in order."""
        below: dict[str, Path] = {}
        for folder in reversed(self.paths):
            below |= find_below(folder, _is_file)
        names = {file.removesuffix(SUFFIX): path for file, path in sorted(below.items())}
        return {name: path for name, path in names.items() if _can_be_asked(name)}


def lora_problem(path: Path) -> str:
    """Say why no model can use the LoRA file ``path``, as the end of a sentence about it; "" where some model can.

    The result is cached for as long as the size and modification time of the file stay the same.
    """
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return _lora_problem(path, status.st_size, status.st_mtime_ns)


@lru_cache(FILES_KNOWN)
def _lora_problem(path: Path, _num_bytes: int, _changed_ns: int) -> str:
    problem = _header_problem(path) or file_problem(path)
    if problem:
        return problem
    header = read_header(path)
    metadata = header.pop(METADATA, None) or {}
    try:
        content = read_layers({name: tensor["shape"] for name, tensor in header.items()}, metadata)
        check_layers_known(content)
    except InvalidLoRAError as error:
        return str(error)
    return f"has rank {content.rank}; at most {MAX_RANK} is taken" if content.rank > MAX_RANK else ""


def _header_problem(path: Path) -> str:
    """Refuse a header that would take seconds to read, while everybody waits; "" where it is of a usual size."""
    try:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    is_long = MAX_HEADER_BYTES < num_bytes <= path.stat().st_size
    return f"has a header of {num_bytes:,} bytes; at most {MAX_HEADER_BYTES:,} are taken" if is_long else ""


def _is_file(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and not os.path.isdir(path)


def _can_be_asked(name: str) -> bool:
    try:
        return bool(Lora(name).name)
    except InvalidRequest:
        return False
