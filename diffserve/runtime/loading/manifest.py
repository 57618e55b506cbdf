"""The manifest of shipped weights: a digest of every file, so that a flipped bit is found at load and not in pictures.

``manifest-sha256.json`` in a directory maps files, by their path below it, to the sha256 of their bytes. Directories
without one, as people have them, are taken as they are. ``python -m diffserve.embedded.manifest`` writes them anew.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from diffserve.errors import ModelLoadError
from diffserve.runtime.loading.checkpoint import read_json

MANIFEST_FILE: Final = "manifest-sha256.json"
NOT_COVERED: Final = frozenset({MANIFEST_FILE, "fewest_steps.json", "world.json"})
"""The manifest itself, and what is told of the weights later: no network is made of it."""

OUR_OWN: Final = Path(__file__).resolve().parents[2]
"""The installed package."""


def write_manifest(directory: Path) -> Path:
    """Write the manifest over all files below ``directory`` that a network is made of."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in NOT_COVERED)
    listed = {path.relative_to(directory).as_posix(): _digest(path) for path in files}
    manifest = directory / MANIFEST_FILE
    manifest.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    return manifest


def check_manifest(directory: Path) -> None:
    """Hash what the manifest of ``directory`` lists; nothing is done where there is none.

    Raises ModelLoadError naming the first file that is missing or is not the one that was shipped.
    """
    manifest = directory / MANIFEST_FILE
    if not manifest.is_file():
        return
    for name, expected in read_json(manifest).items():
        file = directory / name
        try:
            found = _digest(file)
        except OSError as error:
            raise ModelLoadError(f"{file} cannot be read ({error.strerror}); {_way_out(directory)}.") from error
        if found != expected:
            raise ModelLoadError(
                f"{file} is damaged: its sha256 begins with {found[:12]}, that of the file that was shipped with "
                f"{str(expected)[:12]}; {_way_out(directory)}."
            )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _way_out(directory: Path) -> str:
    if not directory.resolve().is_relative_to(OUR_OWN):
        return f"copy it anew, or, if it was changed on purpose, remove {directory / MANIFEST_FILE}"
    again = "install diffserve again (pip install --force-reinstall --no-deps diffserve)"
    return f"{again}, or, if it was changed on purpose, run python -m diffserve.embedded.manifest"
