"""ControlNets in requests, and the folder that they are found in, without torch.

The syntax on the command line is ``NAME:IMAGE[:SCALE][:PREPROCESSOR][:START-END][:resize]``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from diffserve.api.bounds import check, check_chars, is_relative_name
from diffserve.api.errors import InvalidRequest, ModelLoadError
from diffserve.models.model_files import (
    DIFFUSERS_STEM,
    KNOWN_CONDITIONS,
    MAX_NAME_CHARS,
    choose_weights,
    find_below,
    is_valid_name,
    other_family,
    read_json,
    resolve_name,
)
from diffserve.models.safetensors_header import file_problem

PARAM: Final = "controlnets"
MAX_CONTROLNETS: Final = 4
MAX_SCALE: Final = 2.0
CONFIG: Final = "config.json"
ALLOWED_CLASS: Final = "ControlNetModel"
SINGLE_FILES: Final = (".safetensors", ".pth")
"""Suffixes of ControlNets in a single file, as other tools write them; these are not supported."""

DEFAULT_TEXT_WIDTH: Final = 1280
"""``cross_attention_dim`` of a configuration that does not name it, as in diffusers."""

WORK_SHARE: Final = 0.4
"""Cost of a ControlNet row relative to a UNet row; in FLOPs, 0.33 for SD 1.5 at 512 pixels, 0.44 for SDXL at 1024."""

PASSED_THROUGH: Final = "none"
"""Preprocessor of an image that is already a control map."""

CANNY: Final = "canny"
CANNY_THRESHOLDS: Final = (100.0, 200.0)
MAX_THRESHOLD: Final = 2040.0
"""Largest Sobel gradient of 8-bit gray."""

MAX_RESOLUTION: Final = 2048
ResizeMode = Literal["stretch", "crop", "fill"]
RESIZE_LABELS: Final[dict[bool | str, str]] = {
    True: "Just Resize",
    "stretch": "Just Resize",
    "crop": "Crop and Resize",
    "fill": "Resize and Fill",
}
"""A1111's labels of the modes that resize a control image to the size of the generated image."""

RESIZED: Final = "resize"
_WORD, _SPAN = rf"(?!{RESIZED}$)[a-z]\w*", r"[\d.]+-[\d.]+"
_TAIL: Final = re.compile(
    rf"(?P<image>.+?)(?::(?!(?:{_WORD}|{_SPAN}|{RESIZED})(?::|$))(?P<scale>[^:/\\]*))?"
    rf"(?::(?P<preprocessor>{_WORD}))?(?::(?P<span>{_SPAN}))?(?P<resize>:{RESIZED})?"
)


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ControlNet of a request, and how it is applied.

    Attributes:
        name: Path below the ControlNet folder, or the last part of the path if that is unique.
        scale: Factor of the residuals that are added to the UNet; 1 as trained.
        start: Fraction of the steps at which the ControlNet starts.
        end: Fraction of the steps at which it stops.
        preprocessor: Preprocessor that makes the control map; "none" if the image is a control map.
        image: Digest of the image (``digest_of``), set by the request that holds the image.
        resize: How to resize the image to the size of the generated image: True requires the same aspect ratio;
            "stretch", "crop" and "fill" accept any; False requires the same size.
        thresholds: Weak and strong gradient threshold of the preprocessor "canny".
        resolution: Shorter side in pixels at which "canny" detects edges; 0 for the size of the generated image.
    """

    name: str
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0
    preprocessor: str = PASSED_THROUGH
    image: str = ""
    resize: bool | ResizeMode = False
    thresholds: tuple[float, float] = CANNY_THRESHOLDS
    resolution: int = 0

    def __post_init__(self) -> None:
        check_chars(self.name, MAX_NAME_CHARS, PARAM, "the name of a ControlNet")
        message = f"a ControlNet's name is {self.name!r}; give a path below the folder, as canny or xl/canny."
        check(is_relative_name(self.name), message, PARAM)
        check(
            math.isfinite(self.scale) and 0.0 <= self.scale <= MAX_SCALE,
            f"the scale of ControlNet {self.name!r} is {self.scale}; it must lie between 0 and {MAX_SCALE:g}.",
            PARAM,
        )
        check(
            0.0 <= self.start < self.end <= 1.0,
            f"ControlNet {self.name!r} has start {self.start} and end {self.end}; give two fractions of the steps with "
            "0 <= start < end <= 1.",
            PARAM,
        )
        check_chars(self.preprocessor, MAX_NAME_CHARS, PARAM, "the name of a preprocessor")
        weak, strong = self.thresholds
        check(
            0.0 <= weak <= strong <= MAX_THRESHOLD,
            f"the thresholds of ControlNet {self.name!r} are {weak:g} and {strong:g}; give two numbers from 0 to "
            f"{MAX_THRESHOLD:g}, the smaller first.",
            PARAM,
        )
        check(
            0 <= self.resolution <= MAX_RESOLUTION,
            f"the resolution of ControlNet {self.name!r} is {self.resolution}; give 0 to {MAX_RESOLUTION} pixels.",
            PARAM,
        )

    def active(self, step: int, num_steps: int) -> bool:
        """Return whether the 0-based ``step`` of ``num_steps`` lies completely between ``start`` and ``end``."""
        return not (step / num_steps < self.start or (step + 1) / num_steps > self.end)

    @property
    def label(self) -> str:
        """Infotext value of the ControlNet as A1111's extension writes it, and the digest of its image."""
        scale, start, end, weak, strong = (
            repr(number + 0.0).removesuffix(".0") for number in (self.scale, self.start, self.end, *self.thresholds)
        )
        pairs = {
            "Module": self.preprocessor,
            "Model": self.name,
            "Weight": scale,
            "Guidance Start": start,
            "Guidance End": end,
            "Resize Mode": RESIZE_LABELS.get(self.resize),
            "Processor Res": self.resolution or None,
            "Threshold A": None if self.thresholds == CANNY_THRESHOLDS else weak,
            "Threshold B": None if self.thresholds == CANNY_THRESHOLDS else strong,
            "Image": self.image,
        }
        return ", ".join(f"{name}: {value}" for name, value in pairs.items() if value is not None)


def read_control(text: str) -> tuple[Control, str]:
    """Parse ``NAME:IMAGE[:SCALE][:PREPROCESSOR][:START-END][:resize]``.

    Returns:
        The control, and the path of its image.

    Raises:
        InvalidRequest: ``text`` is not of this form.
    """
    name, _, tail = text.partition(":")
    match = _TAIL.fullmatch(tail)
    try:
        if not match:
            raise ValueError
        scale = float(match["scale"] or 1.0)
        start, end = map(float, (match["span"] or "0-1").split("-"))
    except ValueError:
        message = (
            f"a ControlNet is given as {text[:MAX_NAME_CHARS]!r}; write NAME:IMAGE, optionally followed by "
            "any of :SCALE, :PREPROCESSOR, :START-END and :resize, for example canny:edges.png:0.8:0-0.5."
        )
        raise InvalidRequest(message, param=PARAM) from None
    preprocessor = match["preprocessor"] or PASSED_THROUGH
    return Control(name, scale, start, end, preprocessor, resize=bool(match["resize"])), match["image"]


def check_controls(controls: Sequence[Control]) -> None:
    """Check the number of ControlNets of one image.

    Raises:
        InvalidRequest: There are more than ``MAX_CONTROLNETS``.
    """
    message = f"{len(controls)} ControlNets are given; at most {MAX_CONTROLNETS} are allowed per image: leave some out."
    check(len(controls) <= MAX_CONTROLNETS, message, PARAM)


def digest_of(width_px: int, height_px: int, pixels: bytes) -> str:
    """Return a digest of decoded pixels, 16 hexadecimal digits, which does not depend on the file format."""
    return hashlib.sha256(b"%dx%d " % (width_px, height_px) + pixels).hexdigest()[:16]


class ControlNetFolder:
    """Folder of ControlNets, read again at each call.

    A ControlNet is a directory with a ``config.json``, as diffusers writes it.

    Attributes:
        path: The folder, which may itself be a ControlNet; "" if there is none.
        dtype: Data type of the model, which selects the variant of the weights.
        text_width: Numbers of a prompt token of the model; ControlNets of other families do not fit. 0: any model.
    """

    def __init__(self, path: str, dtype: str = "", text_width: int = 0) -> None:
        self.path = path
        self.dtype = dtype
        self.text_width = text_width

    def names(self) -> tuple[str, ...]:
        """Return the names of the usable ControlNets, which are their paths below the folder."""
        return tuple(self.usable())

    def usable(self) -> dict[str, Path]:
        """Return the directories of the usable ControlNets by name, sorted."""
        return {name: path for name, path in self._entries().items() if not self._listed_problem(path)}

    def refused(self) -> dict[str, str]:
        """Return the reason for each unusable directory or file below the folder, by name."""
        problems = {name: self._listed_problem(path) for name, path in self._entries().items()}
        return {name: problem for name, problem in problems.items() if problem}

    def find(self, name: str) -> Path:
        """Return the directory of the ControlNet ``name``.

        Raises:
            InvalidRequest: The ControlNet does not exist, the name is ambiguous, or the ControlNet cannot be used.
        """
        entries = self._entries()
        path = entries[resolve_name(name, self.names(), entries, "ControlNet")]
        if problem := self._problem(path):
            raise InvalidRequest(f"ControlNet {name!r} cannot be used: {problem}", param=PARAM)
        return path

    def _entries(self) -> dict[str, Path]:
        """Return directories and single files below the folder by name; a directory hides a file of the same name."""
        if not self.path:
            return {}
        folder = Path(self.path).expanduser()
        if (folder / CONFIG).is_file():
            return {folder.resolve().name: folder}
        below = find_below(folder, lambda path: path.suffix in SINGLE_FILES or (path / CONFIG).is_file())
        files = {name.rpartition(".")[0]: path for name, path in below.items() if path.suffix in SINGLE_FILES}
        directories = {name: path for name, path in below.items() if path.suffix not in SINGLE_FILES}
        return {name: path for name, path in sorted((files | directories).items()) if is_valid_name(name)}

    def _listed_problem(self, path: Path) -> str:
        """Return why the model cannot use the ControlNet ``path``; "" if it is usable."""
        problem = self._problem(path)
        if problem:
            return problem
        family = other_family(read_controlnet(path).get("cross_attention_dim", DEFAULT_TEXT_WIDTH), self.text_width)
        return family and f"it {family}."

    def _problem(self, path: Path) -> str:
        """Return why no model can use the ControlNet ``path``; "" if it is usable."""
        if path.suffix in SINGLE_FILES:
            return f"{path.name} is a single file; diffserve needs a directory with {CONFIG}, as diffusers writes it."
        try:
            read_controlnet(path)
            files, _ = choose_weights(path, DIFFUSERS_STEM, dtype=self.dtype)
        except ModelLoadError as error:
            return error.message.replace(f"{path}/", "")
        problems = ((file, file_problem(file)) for file in files)
        return next((f"{file.name} {problem}." for file, problem in problems if problem), "")


def read_controlnet(directory: Path) -> dict[str, Any]:
    """Read the configuration of a ControlNet.

    Raises:
        ModelLoadError: No model can use the ControlNet.
    """
    file = directory / CONFIG
    config = read_json(file)
    if config.get("_class_name") != ALLOWED_CLASS:
        raise ModelLoadError(f"{file} is of a {config.get('_class_name')}; diffserve builds {ALLOWED_CLASS} there.")
    for name, values in KNOWN_CONDITIONS.items():
        if config.get(name, values[0]) not in values:
            raise ModelLoadError(f"{file}: {name} is {config[name]!r}; diffserve only supports ControlNets without it.")
    if config.get("global_pool_conditions"):
        raise ModelLoadError(
            f"{file}: it is for conditional rows only (global_pool_conditions), which is not supported."
        )
    return config
