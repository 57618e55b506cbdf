"""Where pictures are written: names, numbers, and the refusal before any painting is done."""

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
"""One picture, a PNG, to standard output."""


def plan_outputs(output: Path | None, prompt: str, num_images: int, *, overwrite: bool) -> list[Path]:
    """The file of each image, after making sure that they can be written.

    ``output`` is a file, a folder, or ``None`` (a file named after the prompt, here). One image takes the name itself,
    more take name-1, name-2, ... A file that exists is never replaced unless ``overwrite``: the next free number is
    taken. ``STDOUT`` takes one image. Raises InvalidRequest for an unknown suffix, a missing folder or one that cannot
    be written, and for a terminal.
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
    """A file name from a prompt: its words in lower case, joined by hyphens, as a PNG."""
    return f"{safe_stem(prompt.lower()) or 'picture'}.png"


def safe_stem(text: str) -> str:
    """The words of ``text``, joined by hyphens: what a file may be called."""
    return re.sub(r"\W+", "-", text).strip("-_")[:MAX_NAME_CHARS].strip("-_")


def write_output(file: Path, data: bytes) -> None:
    """Write ``data`` whole: a reader never sees half a picture. Raises InvalidRequest when the disk refuses."""
    if file == STDOUT:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    # Short, as the name itself may be as long as names get; a thread's own, as a batch writes in many of them.
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
            f"-o - takes one picture and -n is {num_images}; give a folder, or a name to number.", param="output"
        )
    if sys.stdout.isatty():
        raise InvalidRequest("-o - writes a picture, and standard output is a terminal; send it on.", param="output")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InvalidRequest(f"the folder {str(folder)!r} does not exist; make it first.", param="output")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"cannot write into the folder {str(folder)!r}: {error.strerror}."
        raise InvalidRequest(message, param="output") from None
