"""Reference images in requests, and the folder of IP-Adapters and image encoders that read them, without torch.

(Ye et al. 2023, "IP-Adapter", arXiv 2308.06721.) The syntax on the command line is
``IMAGE[:ADAPTER][:SCALE][:START-END]``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.api.bounds import check, check_chars, is_relative_name
from diffserve.api.errors import InvalidRequest, ModelLoadError
from diffserve.models.ip_adapter_layout import AdapterLayout, NotAnAdapterError, read_layout
from diffserve.models.model_files import (
    MAX_NAME_CHARS,
    PICKLE_SUFFIXES,
    TRANSFORMERS_STEM,
    choose_weights,
    find_below,
    is_valid_name,
    other_family,
    pickle_command,
    read_json,
    resolve_name,
)
from diffserve.models.safetensors_header import FILES_KNOWN, METADATA, file_problem, read_header

PARAM: Final = "references"
MAX_REFERENCES: Final = 8
MAX_SCALE: Final = 2.0
MAX_EDGE_PX: Final = 1024
"""Longest shorter side of a reference that is passed on; encoders read 224 to 336 px."""

WORK_SHARE: Final = 0.04
"""Cost of the attention to one reference relative to a UNet row; measured by ``benchmarks/bench_references.py``."""

ENCODING_ROWS: Final = 0.5
"""Cost of encoding a reference image, in UNet rows: CLIP ViT-H has about half of the FLOPs of SD 1.5 at 512 pixels."""

SUFFIX: Final = ".safetensors"
CONFIG: Final = "config.json"
ENCODER_TYPE: Final = "clip_vision_model"
WHAT: Final = "IP-Adapter"

_SPAN: Final = r"[\d.]+-[\d.]+"
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+|nan|inf)", re.IGNORECASE)


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reference image of a request, and how an IP-Adapter applies it.

    Attributes:
        name: Path of the adapter below the folder without suffix, or the last part of the path if that is unique; "":
            the only adapter that fits the model.
        scale: Weight of the attention to the image; 1 as trained.
        start: Fraction of the steps at which it starts.
        end: Fraction of the steps at which it stops.
        image: Digest of the image (``controlnets.digest_of``), set by the request that holds the image.
    """

    name: str = ""
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0
    image: str = ""

    def __post_init__(self) -> None:
        if self.name:
            check_chars(self.name, MAX_NAME_CHARS, PARAM, f"the name of an {WHAT}")
            message = f"an {WHAT}'s name is {self.name!r}; give a path below the folder, as plus or xl/plus."
            check(is_relative_name(self.name), message, PARAM)
        check(
            math.isfinite(self.scale) and 0.0 <= self.scale <= MAX_SCALE,
            f"the scale of a reference is {self.scale}; it must lie between 0 and {MAX_SCALE:g}.",
            PARAM,
        )
        check(
            0.0 <= self.start < self.end <= 1.0,
            f"a reference has start {self.start} and end {self.end}; give two fractions of the steps with "
            "0 <= start < end <= 1.",
            PARAM,
        )

    def active(self, step: int, num_steps: int) -> bool:
        """Return whether it adds to the 0-based ``step`` of ``num_steps``, as ``Control.active``; never at scale 0."""
        return self.scale > 0.0 and not (step / num_steps < self.start or (step + 1) / num_steps > self.end)

    def label(self, digest: str = "") -> str:
        """Return the infotext value, with the start of the ``digest`` of the adapter's file."""
        scale, start, end = (repr(number + 0.0).removesuffix(".0") for number in (self.scale, self.start, self.end))
        pairs = {
            "Model": self.name,
            "Hash": digest[:12] or None,
            "Weight": scale,
            "Guidance Start": start,
            "Guidance End": end,
            "Image": self.image,
        }
        return ", ".join(f"{name}: {value}" for name, value in pairs.items() if value is not None)


def read_reference(text: str) -> tuple[Reference, str]:
    """Parse ``IMAGE[:ADAPTER][:SCALE][:START-END]``; parts after the image may be left out.

    The drive letter of a path is no part of its own.

    Returns:
        The reference, and the path of its image.

    Raises:
        InvalidRequest: ``text`` is not of this form.
    """
    parts, span, scale, name = text.split(":"), "0-1", "1", ""
    if len(parts) > 1 and re.fullmatch(_SPAN, parts[-1]):
        span = parts.pop()
    if len(parts) > 1 and _NUMBER.fullmatch(parts[-1]):
        scale = parts.pop()
    is_drive = len(parts) == 2 and len(parts[0]) == 1 and parts[1][:1] in ("/", "\\")
    if len(parts) > 1 and not is_drive:
        name = parts.pop()
    image = ":".join(parts)
    try:
        if not image:
            raise ValueError
        start, end = map(float, span.split("-"))
        return Reference(name, float(scale), start, end), image
    except ValueError:
        message = (
            f"a reference is given as {text[:MAX_NAME_CHARS]!r}; write IMAGE, optionally followed by :ADAPTER, :SCALE "
            "and :START-END, for example cat.png:plus:0.6:0-0.8."
        )
        raise InvalidRequest(message, param=PARAM) from None


def check_references(references: Sequence[Reference]) -> None:
    """Check the number of references of one image.

    Raises:
        InvalidRequest: There are more than ``MAX_REFERENCES``.
    """
    message = f"{len(references)} references are given; at most {MAX_REFERENCES} are allowed per image: leave some out."
    check(len(references) <= MAX_REFERENCES, message, PARAM)


class ImageEncoder(NamedTuple):
    """Directory of a ``CLIPVisionModelWithProjection`` in transformers' layout, and its configuration."""

    directory: Path
    config: dict[str, Any]

    def fits(self, layout: AdapterLayout) -> bool:
        """Return whether the adapter can read what it makes of an image."""
        name, default = ("projection_dim", 512) if layout.kind == "base" else ("hidden_size", 768)
        return bool(self.config.get(name, default) == layout.image_dim)


class ReferenceFolder:
    """Folder of IP-Adapters and image encoders, read again at each call.

    An adapter is a safetensors file, an encoder a directory with a ``config.json``. An adapter uses the encoder that
    fits it and is nearest to it, in its own folder or above.

    Attributes:
        path: The folder; "" if there is none.
        dtype: Data type of the model, which selects the variant of an encoder's weights.
        text_width: Numbers of a prompt token of the model; adapters of other families do not fit. 0: any model.
    """

    def __init__(self, path: str, dtype: str = "", text_width: int = 0) -> None:
        self.path = path
        self.dtype = dtype
        self.text_width = text_width

    def names(self) -> tuple[str, ...]:
        """Return the names of the usable adapters, which are their paths below the folder without suffix."""
        files, encoders = self._entries()
        return tuple(name for name, file in files.items() if not self._listed_problem(file, encoders))

    def refused(self) -> dict[str, str]:
        """Return the reason for each unusable file below the folder, by name."""
        files, encoders = self._entries()
        problems = {name: self._listed_problem(file, encoders) for name, file in files.items()}
        return {name: f"it {problem}." for name, problem in problems.items() if problem}

    def find(self, name: str) -> tuple[Path, ImageEncoder]:
        """Return the file of the adapter ``name``, and the image encoder that it needs.

        Raises:
            InvalidRequest: The adapter does not exist, the name is ambiguous, or the adapter cannot be used.
        """
        files, encoders = self._entries()
        file = files[resolve_name(name, self.names(), files, WHAT, kind="reference")]
        if problem := self._problem(file, encoders):
            raise InvalidRequest(f"{WHAT} {name!r} cannot be used: {file.name} {problem}.", param=PARAM)
        return file, encoder_for(file, layout_of(file), encoders)

    def full_name(self, name: str) -> str:
        """Return the path below the folder, without suffix, of the adapter ``name``. Raises InvalidRequest."""
        files, _ = self._entries()
        return resolve_name(name, self.names(), files, WHAT, kind="reference")

    def _entries(self) -> tuple[dict[str, Path], list[ImageEncoder]]:
        """Return the adapter files by name, sorted, and the image encoders."""
        if not self.path:
            return {}, []
        suffixes = (SUFFIX, *PICKLE_SUFFIXES)
        below = find_below(
            Path(self.path).expanduser(), lambda path: path.suffix in suffixes or (path / CONFIG).is_file()
        )
        encoders = []
        for path in below.values():
            with suppress(ModelLoadError):
                config = {} if path.suffix in suffixes else read_json(path / CONFIG)
                encoders += [ImageEncoder(path, config)] if config.get("model_type") == ENCODER_TYPE else []
        pickles = {name.rpartition(".")[0]: path for name, path in below.items() if path.suffix in PICKLE_SUFFIXES}
        files = {name.removesuffix(SUFFIX): path for name, path in below.items() if path.suffix == SUFFIX}
        return {name: path for name, path in sorted((pickles | files).items()) if is_valid_name(name)}, encoders

    def _listed_problem(self, file: Path, encoders: Sequence[ImageEncoder]) -> str:
        """Return why the model cannot use the adapter ``file``, as ``_problem`` does."""
        return self._problem(file, encoders) or other_family(layout_of(file).width, self.text_width)

    def _problem(self, file: Path, encoders: Sequence[ImageEncoder]) -> str:
        """Return why no model can use the adapter ``file``, as the end of a sentence about it; "" if it is usable."""
        if file.suffix in PICKLE_SUFFIXES:
            return f"is a pickle file, which can run code when it is read; convert it: {pickle_command(file, NESTED)}"
        try:
            layout = layout_of(file)
            encoder = encoder_for(file, layout, encoders)
            files, _ = choose_weights(encoder.directory, TRANSFORMERS_STEM, dtype=self.dtype)
        except NotAnAdapterError as error:
            return str(error)
        except ModelLoadError as error:
            return f"needs the image encoder {encoder.directory.name}: {error.message.rstrip('.')}".replace(
                f"{encoder.directory}/", ""
            )
        problems = ((weights, file_problem(weights)) for weights in files)
        return next(
            (f"needs an encoder whose {weights.name} {problem}" for weights, problem in problems if problem), ""
        )


NESTED: Final = (
    "import sys, torch; from safetensors.torch import save_file; "
    "d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "save_file({a + '.' + b: t.clone().contiguous() for a in ('image_proj', 'ip_adapter') for b, t in d[a].items()}, "
    "sys.argv[2])"
)
"""Python program that converts the pickle file of an IP-Adapter to safetensors without running code in the file."""


def layout_of(file: Path) -> AdapterLayout:
    """Return the layout of the adapter ``file``, cached until its size or modification time changes.

    Raises:
        NotAnAdapterError: The file is damaged, or not of a supported kind.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise NotAnAdapterError(f"cannot be read ({error.strerror})") from None
    layout = _layout_of(file, status.st_size, status.st_mtime_ns)
    if isinstance(layout, str):
        raise NotAnAdapterError(layout)
    return layout


@lru_cache(FILES_KNOWN)
def _layout_of(file: Path, _num_bytes: int, _changed_ns: int) -> AdapterLayout | str:
    problem = file_problem(file)
    if problem:
        return problem
    header = read_header(file)
    header.pop(METADATA, None)
    try:
        return read_layout({name: tensor["shape"] for name, tensor in header.items()})
    except NotAnAdapterError as error:
        return str(error)


def encoder_for(file: Path, layout: AdapterLayout, encoders: Sequence[ImageEncoder]) -> ImageEncoder:
    """Return the encoder that fits the adapter ``file`` and shares most of its path; of several the first by name.

    Raises:
        NotAnAdapterError: No encoder fits.
    """
    fitting = [encoder for encoder in encoders if encoder.fits(layout)]
    if not fitting:
        number = "projection_dim" if layout.kind == "base" else "hidden_size"
        raise NotAnAdapterError(
            f"needs a CLIP image encoder of {number} {layout.image_dim}, and the folder has none; put its directory "
            f"(image_encoder, with {CONFIG} and {TRANSFORMERS_STEM}.safetensors) beside it"
        )

    def distance(encoder: ImageEncoder) -> tuple[int, str]:
        common = sum(1 for part, other in zip(file.parts, encoder.directory.parts, strict=False) if part == other)
        return len(encoder.directory.parts) - 2 * common, str(encoder.directory)

    return min(fitting, key=distance)
