"""LoRA adapters as people ask for them: by name and scale, in a field or in the prompt, from folders. No torch.

<lora:NAME>  <lora:NAME:SCALE>      in a prompt, as Stable Diffusion tools write it
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

from diffserve.bounds import check, check_chars, is_plain_name
from diffserve.errors import InvalidRequest
from diffserve.safetensors_header import FILES_KNOWN, is_whole, read_header

MAX_LORAS: Final = 8
MAX_SCALE: Final = 10.0
MAX_NAME_CHARS: Final = 200
SUFFIX: Final = ".safetensors"
TOLD: Final = 12
"""Names at most that an error lists."""

IP_ADAPTER: Final = re.compile(r"(image_proj|ip_adapter|encoder_hid_proj\.image_projection_layers)\.|.*\.to_[kv]_ip\.")
"""How tensors of an IP-Adapter begin (Ye et al. 2023, arXiv 2308.06721), in its own file and within a UNet."""
OTHER_KINDS: Final = {
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "oft_": "OFT",
    "lora_mid": "a LoCon in three factors (Tucker)",
}
"""What stands in the names of adapters of other kinds -> what people call them."""

_TAG: Final = re.compile(r"(?<!\\)<lora:([^<>]*)>")


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter, by the name of its file without ``.safetensors``, and how much of it: 1 as it was trained."""

    name: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_chars(self.name, MAX_NAME_CHARS, "loras", "the name of a LoRA")
        said = f"a LoRA's name is {self.name!r}; give the name of a file of the folder, without folders before it."
        check(is_plain_name(self.name), said, "loras")
        check(
            math.isfinite(self.scale) and abs(self.scale) <= MAX_SCALE,
            f"the scale of LoRA {self.name!r} is {self.scale}; it must lie between {-MAX_SCALE:g} and {MAX_SCALE:g}.",
            "loras",
        )

    @classmethod
    def read(cls, text: str) -> Lora:
        """From NAME or NAME:SCALE. Raises InvalidRequest."""
        name, colon, scale = text.partition(":")
        try:
            return cls(name, float(scale) if colon else 1.0)
        except ValueError:
            said = f"a LoRA is given as {text[:MAX_NAME_CHARS]!r}; write NAME or NAME:SCALE, for example ink:0.8."
            raise InvalidRequest(said, param="loras") from None

    def __str__(self) -> str:
        return f"{self.name}:{repr(self.scale + 0.0).removesuffix('.0')}"


class CheckedLoras(NamedTuple):
    """What is known of adapters before they are read: the rank that their factors are padded to, a digest of which they
    are and how much of each, for whatever must not mix them up, and the words that they say they teach."""

    rank: int
    digest: bytes
    words: tuple[str, ...] = ()


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


TORN: Final = "no whole safetensors file, or not yet"


class LoraFolders:
    """The safetensors files in the folders ``paths``, as they are at the moment of asking; of one name, the first."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = tuple(Path(path).expanduser() for path in paths)

    def names(self) -> tuple[str, ...]:
        """In order; those whose names could not be asked for are left out, files that are not whole, and adapters of a
        kind that is not served."""
        return tuple(name for name, kind in self._kinds().items() if not kind)

    def refused(self) -> dict[str, str]:
        """Those that are not whole or of a kind that is not served, in order, and why not."""
        why = "it is {}; plain LoRA is served, on linear layers and convolutions."
        return {name: why.format(kind) for name, kind in self._kinds().items() if kind}

    def _kinds(self) -> dict[str, str]:
        """What they are, "" where that is LoRA."""
        found = {name: path / f"{name}{SUFFIX}" for path in reversed(self.paths) for name in _names_in(path)}
        return {name: _kind_of(found[name]) if is_whole(found[name]) else TORN for name in sorted(found)}

    def find(self, name: str) -> Path:
        """The file of adapter ``name``. Raises InvalidRequest where there is none."""
        for path in self.paths:
            if name in _names_in(path):
                return path / f"{name}{SUFFIX}"
        known = self.names()
        there = ", ".join(known[:TOLD]) + ", ..." * (len(known) > TOLD)
        way_out = f"there are {there}." if known else "none are served here: start with --lora-dir DIR."
        raise InvalidRequest(f"there is no LoRA {name!r}; {way_out}", param="loras", code="unknown_lora")


def _kind_of(path: Path) -> str:
    """Of the adapter in a file, by the names of its tensors, which are read once for as long as it stays."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return _kind_as_of(path, status.st_size, status.st_mtime_ns)


@lru_cache(FILES_KNOWN)
def _kind_as_of(path: Path, _num_bytes: int, _changed_ns: int) -> str:
    for name in read_header(path):
        if IP_ADAPTER.match(name):
            return "an IP-Adapter"
        kind = next((kind for mark, kind in OTHER_KINDS.items() if mark in name), "")
        if kind:
            return kind
    return ""


def _names_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            files = [entry.name for entry in entries if entry.name.endswith(SUFFIX) and _is_file(entry)]
    except OSError:
        return []
    return [name for name in (file.removesuffix(SUFFIX) for file in files) if _can_be_asked(name)]


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself, say
        return False


def _can_be_asked(name: str) -> bool:
    try:
        return bool(Lora(name).name)
    except InvalidRequest:
        return False
