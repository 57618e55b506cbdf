"""``diffserve upscale``: enlarges an image file on this machine, without an image model, or on a server."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console

from diffserve.api.sizes import parse_size
from diffserve.api.types import FILTERS, LANCZOS, NEAREST, Picture
from diffserve.api.upscale_types import check_input_size, check_network_size
from diffserve.cli.generate import JPEG_QUALITY, note, read_bytes
from diffserve.cli.outputs import STDOUT, plan_outputs, write_output
from diffserve.media.images import decode_image, has_transparency, image_format_of, read_infotext
from diffserve.media.provenance import Marks, examine
from diffserve.media.upscaling import (
    FILTER_SCALE,
    FLATTENED,
    enlarge,
    kind_of,
    target_size,
    upscale_label,
    with_upscale,
)
from diffserve.models.upscalers import UpscalerFolders, default_upscaler, read_upscaler
from diffserve.service.safety import Safety
from diffserve.settings.config import Settings

if TYPE_CHECKING:
    from diffserve.runtime.upscaling.network import Upscaler

OPTION: Final = "IMAGE"


class UpscaleArguments(NamedTuple):
    """Arguments of the command. ``None`` stands for the default.

    Attributes:
        image: File to enlarge.
        output: File or folder to write.
        upscaler: Name of the upscaler.
        scale: Enlargement.
        size: WIDTHxHEIGHT instead.
        overwrite: Whether to replace an existing file.
    """

    image: Path
    output: Path | None
    upscaler: str | None
    scale: float | None
    size: str | None
    overwrite: bool

    @property
    def file(self) -> Path:
        """The file to write. Raises InvalidRequest if that is not possible."""
        name = f"{self.image.stem}-upscaled.png"
        output = self.output or self.image.with_name(name)
        output = output / name if output != STDOUT and output.is_dir() else output
        return plan_outputs(output, "", 1, overwrite=self.overwrite)[0]


def run(arguments: UpscaleArguments, settings: Settings) -> int:
    """Enlarge an image on this machine and return the exit code.

    Raises:
        DiffserveError: The image, the upscaler or an option cannot be used, or the safety filter blocks the result.
    """
    data, file = read_bytes(arguments.image, OPTION), arguments.file
    folder = settings.model.upscaler_dir
    name = arguments.upscaler or default_upscaler(folder, has_world=not folder)
    picture = decode_image(data, name=OPTION)
    network = None if name.lower() in FILTERS else UpscalerFolders(folder).find(name)[1]
    scale = FILTER_SCALE if network is None else float(read_upscaler(network).shape.scale)
    size = None if arguments.size is None else parse_size(arguments.size)
    target = target_size(picture.width_px, picture.height_px, scale=arguments.scale, size=size, default_scale=scale)
    started_s = time.perf_counter()
    factor = max(target.width_px / picture.width_px, target.height_px / picture.height_px)
    infotext = with_upscale(read_infotext(data, may_shorten=True), upscale_label(name, round(factor, 3)))
    kind = kind_of(examine(data, name=OPTION)) or (None if network is None else "composite")
    if network is not None:
        check_input_size(picture.width_px, picture.height_px)
        check_network_size(name, round(scale), picture.width_px, picture.height_px, OPTION)
        with Console(stderr=True, highlight=False).status(f"upscaling by {name}"):
            upscaler = open_upscaler(network, settings)
            picture = Picture.from_array(upscaler.upscale(picture.array))
    large = enlarge(picture, *target, NEAREST if name.lower() == NEAREST else LANCZOS)
    with Safety.running(settings) as safety:
        if safety is not None:
            safety.check_picture(large)
    marks = Marks.of(settings.serve)
    image_format = "png" if file == STDOUT else image_format_of(file)
    written = marks.write(
        marks.mark(large, kind), kind=kind, image_format=image_format, quality=JPEG_QUALITY, infotext=infotext
    )
    write_output(file, written)
    _report(file, f"{target.width_px}x{target.height_px}", name, time.perf_counter() - started_s)
    if has_transparency(data, name=OPTION):
        note(Console(stderr=True, highlight=False), f"{OPTION} {FLATTENED}")
    return 0


def open_upscaler(path: Path, settings: Settings) -> Upscaler:
    """Load the upscaler in ``path``; torch is imported only here."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from diffserve.runtime import choose_device
    from diffserve.runtime.upscaling.network import Upscaler

    return Upscaler.load(path, choose_device(settings.model.device, settings.model.dtype))


def run_on_server(arguments: UpscaleArguments, server: str) -> int:
    """Enlarge an image on a server and return the exit code. Raises DiffserveError."""
    from diffserve.cli.remote import with_command_line_hints
    from diffserve.client import Client

    data, file = read_bytes(arguments.image, OPTION), arguments.file
    image_format = "png" if file == STDOUT else image_format_of(file)
    fields: dict[str, Any] = {
        "upscaler": arguments.upscaler,
        "scale": arguments.scale,
        "size": arguments.size,
        "output_format": image_format,
        "output_compression": None if image_format == "png" else JPEG_QUALITY,
    }
    started_s = time.perf_counter()
    with Client(server) as client, with_command_line_hints():
        result = client.upscale(data, **{name: value for name, value in fields.items() if value is not None})
    write_output(file, result.file)
    _report(file, result.size, result.upscaler, time.perf_counter() - started_s)
    note(Console(stderr=True, highlight=False), *result.warnings)
    return 0


def _report(file: Path, size: str, name: str, seconds: float) -> None:
    line = f"{file}: {size}, upscaled by {name}, {seconds:.2f} s"
    print(line, file=sys.stderr if file == STDOUT else sys.stdout)
