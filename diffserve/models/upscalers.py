"""Upscaler files: the folder that they are found in, and their architecture.

The architecture is read from names and shapes of tensors, without torch; the networks are in
``diffserve.runtime.upscaling``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from diffserve.api.errors import InvalidRequest, ModelLoadError
from diffserve.api.types import FILTERS, LANCZOS
from diffserve.models.model_files import (
    PICKLE_SUFFIXES,
    find_below,
    is_valid_name,
    refuse_pickle,
    resolve_name,
)
from diffserve.models.safetensors_header import FILES_KNOWN, METADATA, file_problem, read_header

SUFFIX: Final = ".safetensors"
OWN_UPSCALERS: Final = "upscalers"
EMBEDDED_UPSCALER: Final = "embedded-4x"
SHIPPED: Final = Path(__file__).resolve().parents[1] / "embedded" / "weights" / OWN_UPSCALERS
"""Folder of the upscalers that ship with diffserve."""

MAX_HEADER_BYTES: Final = 1 << 23
MAX_PARAMETERS: Final = 200_000_000
"""Largest upscaler; the largest published SwinIR has 28 million parameters."""

MAX_SCALE: Final = 16
WRAPPERS: Final = ("params_ema.", "params.", "state_dict.", "module.", "model_state_dict.", "generator.")
"""Beginnings of all names that files have if a wrapper was converted along with the weights."""

Shapes = Mapping[str, tuple[int, ...]]
Upsampler = Literal["", "pixelshuffle", "pixelshuffledirect", "nearest+conv"]


class UnknownUpscalerError(Exception):
    """The tensors are of no known upscaler; the message completes a sentence whose subject is the file."""


@dataclass(frozen=True)
class CompactShape:
    """Shape of the compact network of Real-ESRGAN.

    Attributes:
        features: Channels of the hidden layers.
        num_convs: Hidden convolutions.
        scale: Enlargement.
        has_slopes: Whether the activations are PReLU with a slope for each channel; else leaky ReLU with slope 0.1.
        channels: Channels of the image.
    """

    features: int
    num_convs: int
    scale: int
    has_slopes: bool = True
    channels: int = 3


@dataclass(frozen=True)
class RrdbShape:
    """Shape of the network of ESRGAN and Real-ESRGAN.

    Attributes:
        features: Channels of the trunk.
        growth: Channels that each convolution of a dense block adds.
        num_blocks: Blocks of three dense blocks.
        num_doublings: Doublings of the resolution at the end.
        fold: Side of the squares of pixels that the input folds into channels.
        channels: Channels of the image.
    """

    features: int
    growth: int
    num_blocks: int
    num_doublings: int
    fold: int = 1
    channels: int = 3

    @property
    def scale(self) -> int:
        """Enlargement of the image."""
        return (1 << self.num_doublings) // self.fold


@dataclass(frozen=True)
class SwinIRShape:
    """Shape of a SwinIR network.

    Attributes:
        embed: Channels of the attention layers.
        depths: Attention blocks of each group.
        heads: Attention heads of each group.
        window: Side of an attention window.
        mlp_width: Hidden channels of the feed-forward layers.
        upsampler: How the image is enlarged, as named in the authors' code; "" does not enlarge it.
        scale: Enlargement.
        features: Channels of the enlarging layers.
        has_three_convs: Whether a group ends in three narrow convolutions instead of one (large variant).
        channels: Channels of the image.
    """

    embed: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    mlp_width: int
    upsampler: Upsampler
    scale: int
    features: int = 64
    has_three_convs: bool = False
    channels: int = 3


UpscalerShape = CompactShape | RrdbShape | SwinIRShape
FAMILIES: Final[Mapping[type[UpscalerShape], str]] = {CompactShape: "compact", RrdbShape: "RRDB", SwinIRShape: "SwinIR"}


@dataclass(frozen=True)
class UpscalerFile:
    """Description of an upscaler file, from its header.

    Attributes:
        path: The file.
        shape: Shape of the network.
        names: Name in the file of each tensor that the network needs, by the network's name.
        num_parameters: Number of parameters.
    """

    path: Path
    shape: UpscalerShape
    names: Mapping[str, str]
    num_parameters: int


def read_upscaler(path: Path) -> UpscalerFile:
    """Read the header of an upscaler's file and determine its architecture.

    Raises:
        ModelLoadError: The file is a pickle, damaged, too large, or of an unknown architecture.
    """
    if not path.name.endswith(SUFFIX):
        refuse_pickle(path)
    if problem := upscaler_problem(path):
        raise ModelLoadError(f"{path} {problem}.")
    return _read(path)


def upscaler_problem(path: Path) -> str:
    """Return why the file ``path`` is no usable upscaler, as the end of a sentence about it; "" if it is usable."""
    problem = file_problem(path, MAX_HEADER_BYTES)
    if problem:
        return problem
    try:
        _read(path)
    except UnknownUpscalerError as error:
        return str(error)
    return ""


def _read(path: Path) -> UpscalerFile:
    status = path.stat()
    return _read_stamped(path, status.st_size, status.st_mtime_ns)


@lru_cache(FILES_KNOWN)
def _read_stamped(path: Path, _num_bytes: int, _changed_ns: int) -> UpscalerFile:
    header = read_header(path)
    header.pop(METADATA, None)
    shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    if num_parameters > MAX_PARAMETERS:
        raise UnknownUpscalerError(
            f"has {num_parameters:,} parameters; an upscaler has at most {MAX_PARAMETERS:,}, is this another model?"
        )
    shape, names = detect(shapes)
    return UpscalerFile(path, shape, names, num_parameters)


def detect(shapes: Shapes) -> tuple[UpscalerShape, dict[str, str]]:
    """Determine the architecture of tensors.

    Args:
        shapes: Shape of each tensor by its name in the file.

    Returns:
        The shape of the network, and the name in the file of each tensor by the network's name.

    Raises:
        UnknownUpscalerError: The tensors are of no known architecture.
    """
    names = {_without_wrapper(name, shapes): name for name in shapes}
    bare_shapes = {name: shapes[key] for name, key in names.items()}
    for matches, read in ((_is_swinir, _read_swinir), (_is_rrdb, _read_rrdb), (_is_compact, _read_compact)):
        if matches(bare_shapes):
            try:
                shape, renamed = read(bare_shapes)
            except (LookupError, ValueError, ZeroDivisionError):
                break
            _check(shape)
            return shape, {name: names[old] for name, old in renamed.items()}
    raise UnknownUpscalerError(
        "is of no known upscaler; ESRGAN and Real-ESRGAN (RRDB), Real-ESRGAN compact (SRVGG) and SwinIR are supported"
    )


def _without_wrapper(name: str, shapes: Shapes) -> str:
    for wrapper in WRAPPERS:
        if all(other.startswith(wrapper) for other in shapes):
            return name.removeprefix(wrapper)
    return name


def _check(shape: UpscalerShape) -> None:
    if not 1 <= shape.scale <= MAX_SCALE:
        raise UnknownUpscalerError(f"enlarges {shape.scale} times; 1 to {MAX_SCALE} times are supported")
    if shape.channels != 3:
        raise UnknownUpscalerError(f"is for images of {shape.channels} channels; only RGB, with 3, is supported")


def _count(pattern: str, names: Shapes) -> int:
    """Return the number of different values of the first group of ``pattern``, which must be 0, 1, 2, ..."""
    numbers = {int(match[1]) for name in names if (match := re.match(pattern, name))}
    if numbers != set(range(len(numbers))):
        raise ValueError(f"the numbers of {pattern} have gaps")
    return len(numbers)


def _exact_root(number: int) -> int:
    root = math.isqrt(number)
    if root * root != number:
        raise ValueError(f"{number} is no square")
    return root


# Compact ------------------------------------------------------------------------------------------------------------


def _is_compact(shapes: Shapes) -> bool:
    return "body.0.weight" in shapes and all(re.fullmatch(r"body\.\d+\.(weight|bias)", name) for name in shapes)


def _read_compact(shapes: Shapes) -> tuple[UpscalerShape, dict[str, str]]:
    convs = sorted(int(name.split(".")[1]) for name, shape in shapes.items() if len(shape) == 4)
    first, last = shapes["body.0.weight"], shapes[f"body.{convs[-1]}.weight"]
    scale = _exact_root(last[0] // first[1])
    shape = CompactShape(first[0], len(convs) - 2, scale, "body.1.weight" in shapes, first[1])
    return shape, {name: name for name in shapes}


# RRDB ---------------------------------------------------------------------------------------------------------------

_OLD_BLOCK: Final = r"model\.1\.sub\.(\d+)\.RDB1\.conv1\.0\.weight"
_TRUNK: Final = r"RRDB_trunk\.(\d+)\.RDB1\.conv1\.weight"


def _is_rrdb(shapes: Shapes) -> bool:
    heads = ("model.1.sub.0.RDB1.conv1.0.weight", "RRDB_trunk.0.RDB1.conv1.weight", "body.0.rdb1.conv1.weight")
    return any(head in shapes for head in heads)


def _read_rrdb(shapes: Shapes) -> tuple[UpscalerShape, dict[str, str]]:
    renamed = {_new_rrdb_name(name, shapes): name for name in shapes}
    shape_of = {new: shapes[old] for new, old in renamed.items()}
    num_doublings = _count(r"conv_up\.(\d+)\.weight", shape_of)
    first, channels = shape_of["conv_first.weight"], shape_of["conv_last.weight"][0]
    shape = RrdbShape(
        features=first[0],
        growth=shape_of["body.0.rdb1.conv1.weight"][0],
        num_blocks=_count(r"body\.(\d+)\.", shape_of),
        num_doublings=num_doublings,
        fold=_exact_root(first[1] // channels),
        channels=channels,
    )
    return shape, renamed


def _new_rrdb_name(name: str, shapes: Shapes) -> str:
    """Return the name of a tensor in the network, from that in any of three layouts of files."""
    if name.startswith("model."):
        return _name_of_sequence(name, shapes)
    if match := re.fullmatch(r"(?:conv_up|upconv)(\d)\.(\w+)", name):
        return f"conv_up.{int(match[1]) - 1}.{match[2]}"
    for old, new in (("RRDB_trunk.", "body."), ("trunk_conv.", "conv_body."), ("HRconv.", "conv_hr.")):
        if name.startswith(old):
            return name.replace(old, new, 1).replace(".RDB", ".rdb")
    return name


def _name_of_sequence(name: str, shapes: Shapes) -> str:
    """Return the new name of a tensor of ESRGAN's first layout, a numbered sequence of layers.

    The sequence is: first convolution, blocks; (enlargement, convolution, activation) for each doubling; two more
    convolutions with an activation between them.
    """
    num_blocks = _count(_OLD_BLOCK, shapes)
    numbers = sorted({int(other.split(".")[1]) for other in shapes})
    *ups, high, last = numbers[2:]
    if match := re.fullmatch(r"model\.1\.sub\.(\d+)\.RDB(\d)\.conv(\d)\.0\.(\w+)", name):
        return f"body.{match[1]}.rdb{match[2]}.conv{match[3]}.{match[4]}"
    _, number, *_, part = name.split(".")
    if name == f"model.1.sub.{num_blocks}.{part}":
        return f"conv_body.{part}"
    places = {0: "conv_first", high: "conv_hr", last: "conv_last"}
    places |= {up: f"conv_up.{index}" for index, up in enumerate(ups)}
    if name != f"model.{number}.{part}":
        raise ValueError(f"{name} belongs to another architecture")
    return f"{places[int(number)]}.{part}"


# SwinIR -------------------------------------------------------------------------------------------------------------

_COMPUTED: Final = re.compile(r".*\.(relative_position_index|attn_mask)|mean")
"""Tensors of SwinIR files that the network computes itself."""


def _is_swinir(shapes: Shapes) -> bool:
    return "layers.0.residual_group.blocks.0.attn.qkv.weight" in shapes


def _read_swinir(shapes: Shapes) -> tuple[UpscalerShape, dict[str, str]]:
    block = "layers.{}.residual_group.blocks.0.{}"
    num_groups = _count(r"layers\.(\d+)\.", shapes)
    tables = [shapes[block.format(group, "attn.relative_position_bias_table")] for group in range(num_groups)]
    first = shapes["conv_first.weight"]
    upsampler, scale, features = _swinir_enlargement(shapes, first[1])
    shape = SwinIRShape(
        embed=first[0],
        depths=tuple(
            _count(rf"layers\.{group}\.residual_group\.blocks\.(\d+)\.", shapes) for group in range(num_groups)
        ),
        heads=tuple(table[1] for table in tables),
        window=(_exact_root(tables[0][0]) + 1) // 2,
        mlp_width=shapes[block.format(0, "mlp.fc1.weight")][0],
        upsampler=upsampler,
        scale=scale,
        features=features,
        has_three_convs="layers.0.conv.0.weight" in shapes,
        channels=first[1],
    )
    return shape, {name: name for name in shapes if not _COMPUTED.fullmatch(name)}


def _swinir_enlargement(shapes: Shapes, channels: int) -> tuple[Upsampler, int, int]:
    """Return how a SwinIR network enlarges, the factor, and the channels of its enlarging layers."""
    if "conv_before_upsample.0.weight" not in shapes:
        if "upsample.0.weight" in shapes:
            return "pixelshuffledirect", _exact_root(shapes["upsample.0.weight"][0] // channels), 64
        return "", 1, 64
    features = shapes["conv_before_upsample.0.weight"][0]
    if "conv_up1.weight" in shapes:
        return "nearest+conv", 4 if "conv_up2.weight" in shapes else 2, features
    shuffles = [shape for name, shape in shapes.items() if re.fullmatch(r"upsample\.\d+\.weight", name)]
    return "pixelshuffle", math.prod(_exact_root(wide // features) for wide, *_ in shuffles), features


# Folders ------------------------------------------------------------------------------------------------------------


class UpscalerFolders:
    """The folder of upscalers that a server was started with, and that of the shipped ones; read again at each call.

    A file of the user hides a shipped one of the same name.

    Attributes:
        path: Folder of the user; "" if there is none.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def names(self) -> tuple[str, ...]:
        """Return the names of the usable upscalers: paths below the folder without the suffix, then the filters."""
        return (*self.usable(), *FILTERS)

    def usable(self) -> dict[str, Path]:
        """Return the usable files by name, sorted, those of the user first."""
        return {name: path for name, path in self._entries().items() if not _problem(path)}

    def refused(self) -> dict[str, str]:
        """Return the reason for each unusable file, by name."""
        return {name: problem for name, path in self._entries().items() if (problem := _problem(path))}

    def find(self, name: str, field: str = "upscaler") -> tuple[str, Path]:
        """Return the full name and the file of the upscaler ``name``.

        Args:
            name: A full name, or its last part.
            field: Field of the request that has the name.

        Raises:
            InvalidRequest: There is no such file, the name is ambiguous, or the file cannot be used.
        """
        entries = self._entries()
        full_name = resolve_name(name, self.names(), entries, "upscaler", field=field)
        path = entries[full_name]
        if problem := _problem(path):
            raise InvalidRequest(f"upscaler {name!r} cannot be used: {path.name} {problem}.", param=field)
        return full_name, path

    def _entries(self) -> dict[str, Path]:
        entries: dict[str, Path] = {}
        folders = [Path(self.path).expanduser(), SHIPPED] if self.path else [SHIPPED]
        for folder in folders:
            files = find_below(folder, lambda path: path.suffix in (SUFFIX, *PICKLE_SUFFIXES))
            paths = {str(Path(name).with_suffix("")): path for name, path in reversed(files.items())}
            entries |= {name: path for name, path in sorted(paths.items()) if name not in entries}
        return {name: path for name, path in entries.items() if is_valid_name(name) and name not in FILTERS}


def default_upscaler(folder: str, *, has_world: bool) -> str:
    """Return the upscaler of requests that name none.

    It is the shipped one for the image world of the embedded model, else the first of the user's folder, else Lanczos.

    Args:
        folder: Folder of the user; "" if there is none.
        has_world: Whether the model generates scenes of that world.
    """
    folders = UpscalerFolders(folder)
    usable = folders.usable()
    if has_world and EMBEDDED_UPSCALER in usable:
        return EMBEDDED_UPSCALER
    return next((name for name, path in usable.items() if not path.is_relative_to(SHIPPED)), LANCZOS)


def _problem(path: Path) -> str:
    if path.name.endswith(SUFFIX):
        return upscaler_problem(path)
    try:
        refuse_pickle(path)
    except ModelLoadError as error:
        return error.message.replace(f"{path} ", "", 1)
    return ""
