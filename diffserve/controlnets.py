"""ControlNets as people ask for them: by name, with a picture that says what goes where, from a folder. No torch.

NAME:IMAGE[:SCALE][:PREPROCESSOR][:START-END][:resize]     on the command line
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from diffserve.bounds import check, check_chars, is_plain_name
from diffserve.errors import InvalidRequest

PARAM: Final = "controlnets"
MAX_CONTROLNETS: Final = 4
MAX_SCALE: Final = 2.0
MAX_NAME_CHARS: Final = 200
CONFIG: Final = "config.json"
TOLD: Final = 12
"""Names at most that an error lists."""

WORK_SHARE: Final = 0.4
"""Work of a ControlNet's row over that of its UNet's: by FLOPs 0.33 for SD 1.5 at 512 pixels, 0.44 for SDXL at 1024."""

PASSED_THROUGH: Final = "none"
"""The preprocessor of a picture that is a control map already."""

RESIZED: Final = "resize"
_WORD, _SPAN = rf"(?!{RESIZED}$)[a-z]\w*", r"[\d.]+-[\d.]+"
_TAIL: Final = re.compile(
    rf"(?P<image>.+?)(?::(?!(?:{_WORD}|{_SPAN}|{RESIZED})(?::|$))(?P<scale>[^:/\\]*))?"
    rf"(?::(?P<preprocessor>{_WORD}))?(?::(?P<span>{_SPAN}))?(?P<resize>:{RESIZED})?"
)


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ControlNet, by the name of its folder, and how it is used.

    scale         of what it adds to the UNet: 1 as it was trained
    start, end    between which shares of the steps it is at work
    preprocessor  what makes a control map of the picture; "none": it is one
    image         digest of the picture as it was given (``digest_of``), filled in by the request that holds it
    resize        bring its picture to the size of the one that is painted; else it has to have that size
    """

    name: str
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0
    preprocessor: str = PASSED_THROUGH
    image: str = ""
    resize: bool = False

    def __post_init__(self) -> None:
        check_chars(self.name, MAX_NAME_CHARS, PARAM, "the name of a ControlNet")
        said = f"a ControlNet's name is {self.name!r}; give the name of one of the folder, without folders before it."
        check(is_plain_name(self.name), said, PARAM)
        check(
            math.isfinite(self.scale) and 0.0 <= self.scale <= MAX_SCALE,
            f"the scale of ControlNet {self.name!r} is {self.scale}; it must lie between 0 and {MAX_SCALE:g}.",
            PARAM,
        )
        check(
            0.0 <= self.start < self.end <= 1.0,
            f"ControlNet {self.name!r} is at work from {self.start} to {self.end}; give two shares of the steps with "
            "0 <= start < end <= 1.",
            PARAM,
        )
        check_chars(self.preprocessor, MAX_NAME_CHARS, PARAM, "the name of a preprocessor")

    def active(self, step: int, num_steps: int) -> bool:
        """Whether it is at work in ``step`` of ``num_steps`` (0-based): only steps that lie wholly between its ends."""
        return not (step / num_steps < self.start or (step + 1) / num_steps > self.end)

    @property
    def label(self) -> str:
        """As A1111's extension writes one into a picture, and the digest of its own."""
        numbers = (repr(number + 0.0).removesuffix(".0") for number in (self.scale, self.start, self.end))
        scale, start, end = numbers
        return (
            f"Module: {self.preprocessor}, Model: {self.name}, Weight: {scale}, Guidance Start: {start}, "
            f"Guidance End: {end}, {'Resize Mode: Just Resize, ' * self.resize}Image: {self.image}"
        )


def read_control(text: str) -> tuple[Control, str]:
    """From NAME:IMAGE[:SCALE][:PREPROCESSOR][:START-END][:resize], the control and where its picture lies. Raises
    InvalidRequest."""
    name, _, rest = text.partition(":")
    found = _TAIL.fullmatch(rest)
    try:
        if not found:
            raise ValueError
        scale = float(found["scale"] or 1.0)
        start, end = map(float, (found["span"] or "0-1").split("-"))
    except ValueError:
        said = (
            f"a ControlNet is given as {text[:MAX_NAME_CHARS]!r}; write NAME:IMAGE, and behind it what is "
            "wanted of :SCALE, :PREPROCESSOR, :START-END and :resize, for example canny:edges.png:0.8:0-0.5."
        )
        raise InvalidRequest(said, param=PARAM) from None
    preprocessor = found["preprocessor"] or PASSED_THROUGH
    return Control(name, scale, start, end, preprocessor, resize=bool(found["resize"])), found["image"]


def check_controls(controls: Sequence[Control]) -> None:
    """InvalidRequest for more of them than a picture takes."""
    said = (
        f"{len(controls)} ControlNets are asked for at once; a picture takes at most {MAX_CONTROLNETS}: leave some out."
    )
    check(len(controls) <= MAX_CONTROLNETS, said, PARAM)


def digest_of(width_px: int, height_px: int, pixels: bytes) -> str:
    """Of a picture, the same for the same pixels whatever file they came in: 16 hexadecimal digits."""
    return hashlib.sha256(b"%dx%d " % (width_px, height_px) + pixels).hexdigest()[:16]


class ControlNetFolder:
    """The ControlNets below the folder ``path``, or that it is itself ("": there is none), as they are at the moment of
    asking: directories with a ``config.json``, as diffusers writes them."""

    def __init__(self, path: str) -> None:
        self.path = path

    def found(self) -> dict[str, Path]:
        """By name, in order; those whose names could not be asked for are left out."""
        if not self.path:
            return {}
        folder = Path(self.path).expanduser()
        if (folder / CONFIG).is_file():
            return {folder.resolve().name: folder}
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if (folder / entry.name / CONFIG).is_file())
        except OSError:
            return {}
        return {name: folder / name for name in names if _can_be_asked(name)}

    def names(self) -> tuple[str, ...]:
        """In order."""
        return tuple(self.found())

    def find(self, name: str) -> Path:
        """The directory of ControlNet ``name``. Raises InvalidRequest where there is none."""
        known = self.found()
        if name in known:
            return known[name]
        there = ", ".join([*known][:TOLD]) + ", ..." * (len(known) > TOLD)
        way_out = f"there are {there}." if known else "none are served here: start with --controlnet-dir DIR."
        raise InvalidRequest(f"there is no ControlNet {name!r}; {way_out}", param=PARAM, code="unknown_controlnet")


def _can_be_asked(name: str) -> bool:
    try:
        return bool(Control(name).name)
    except InvalidRequest:
        return False
