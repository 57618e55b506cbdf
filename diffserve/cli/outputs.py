"""Output files: names, numbering, and checks before generation starts."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from diffserve.api.bounds import check_num
from diffserve.api.errors import InvalidRequest
from diffserve.api.types import MAX_IMAGES
from diffserve.media.images import image_format_of

MAX_NAME_CHARS = 48
STDOUT = Path("-")
"""Stands for standard output, which receives one PNG image."""


def plan_outputs(output: Path | None, prompt: str, num_images: int, *, overwrite: bool) -> list[Path]:
    """Return the output file of each image, and check that it can be written.

    One image uses the name itself, several use name-1, name-2, and so on.

    Args:
        output: A file, a folder or ``STDOUT``. None: a file in the current folder, named after the prompt.
        prompt: The prompt.
        num_images: Number of images.
        overwrite: Whether to replace existing files. Otherwise the next free number is used.

    Raises:
        InvalidRequest: The suffix is unknown, the folder is missing or not writable, or standard output is a terminal
            or would receive several images.
    """
    check_num(num_images, MAX_IMAGES, "images")
    if output == STDOUT:
        _check_stdout(num_images)
        return [STDOUT]
    file = Path(name_after(prompt)) if output is None else output
    if file.is_dir():
        file = file / name_after(prompt)
    image_format_of(file)
    _check_folder(file.parent)
    names = _candidates(file, num_images)
    if overwrite:
        return [next(names) for _ in range(num_images)]
    free = (name for name in names if not name.exists())
    return [next(free) for _ in range(num_images)]


def name_after(prompt: str) -> str:
    """Return a PNG file name made of the words of ``prompt`` in lower case, joined by hyphens."""
    return f"{safe_stem(prompt.lower()) or 'image'}.png"


def safe_stem(text: str) -> str:
    """Return the words of ``text`` joined by hyphens, without characters that are unsafe in file names."""
    return re.sub(r"\W+", "-", text).strip("-_")[:MAX_NAME_CHARS].strip("-_")


def write_output(file: Path, data: bytes) -> None:
    """Write ``data`` to ``file`` atomically, so that a reader never sees a partial file.

    Raises:
        InvalidRequest: The file cannot be written.
    """
    if file == STDOUT:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    # A short name, because the final name can have the maximum length; unique per thread, because a batch has many.
    temporary = file.with_name(f".diffserve-{os.getpid()}-{threading.get_ident()}.part")
    try:
        temporary.write_bytes(data)
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InvalidRequest(f"cannot write {str(file)!r}: {error.strerror}.", param="output") from error


def _candidates(file: Path, num_images: int) -> Iterator[Path]:
    if num_images == 1:
        yield file
    number = 1 if num_images > 1 else 2
    while True:
        yield file.with_name(f"{file.stem}-{number}{file.suffix}")
        number += 1


def _check_stdout(num_images: int) -> None:
    if num_images > 1:
        raise InvalidRequest(
            f"-o - writes a single image, but -n is {num_images}; give a folder or a file name.", param="output"
        )
    if sys.stdout.isatty():
        raise InvalidRequest("-o - writes an image, but standard output is a terminal; redirect it.", param="output")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InvalidRequest(f"the folder {str(folder)!r} does not exist; create it first.", param="output")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"cannot write into the folder {str(folder)!r}: {error.strerror}."
        raise InvalidRequest(message, param="output") from None
