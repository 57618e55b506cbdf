"""Reference images of a visitor with their settings, as request fields."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.models.references import MAX_REFERENCES, PARAM, Reference

MISSING: Final = "A reference image no longer exists; remove it and choose it again."


class ReferenceSettings(msgspec.Struct, frozen=True):
    """Settings of a reference image in the browser; empty numbers are None.

    Attributes:
        id: Identifies the image among those of the visitor.
        name: The IP-Adapter; empty: the only one for the model.
        scale: Weight of the image.
        start: Fraction of the steps at which it starts.
        end: Fraction of the steps at which it stops.
    """

    id: str
    name: str = ""
    scale: float | None = None
    start: float | None = None
    end: float | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the request, without the image. Raises InvalidRequest for an unusable value."""
        values = {name: getattr(self, name) for name in ("name", "scale", "start", "end")}
        fields = {name: value for name, value in values.items() if value not in (None, "")}
        Reference(**fields)
        return fields


class ReferenceFile(msgspec.Struct, frozen=True):
    """Image file of a reference and its settings."""

    path: Path
    settings: ReferenceSettings


class References:
    """Reference images of one visitor, in the order in which they were added."""

    def __init__(self) -> None:
        self._files: dict[str, ReferenceFile] = {}

    def __bool__(self) -> bool:
        return bool(self._files)

    @property
    def files(self) -> list[ReferenceFile]:
        """The images that still exist."""
        return [file for file in self._files.values() if file.path.is_file()]

    def add(self, path: Path, name: str) -> None:
        """Add the image in ``path``, read by the IP-Adapter ``name``. Raises InvalidRequest if there are too many."""
        if len(self.files) >= MAX_REFERENCES:
            message = f"There are {MAX_REFERENCES} reference images, which is the largest number; remove one first."
            raise InvalidRequest(message, param=PARAM)
        settings = ReferenceSettings(secrets.token_hex(8), name)
        self._files[settings.id] = ReferenceFile(path, settings)

    def remove(self, name: object) -> None:
        """Remove the image with the ID ``name``; nothing if there is none."""
        self._files.pop(name if isinstance(name, str) else "", None)

    def clear(self) -> None:
        """Remove all images."""
        self._files.clear()

    def change(self, changed: Sequence[ReferenceSettings]) -> None:
        """Replace the settings of the images; those of unknown images are ignored."""
        for settings in changed:
            if settings.id in self._files:
                self._files[settings.id] = ReferenceFile(self._files[settings.id].path, settings)

    def fields(self, shown: Sequence[ReferenceSettings]) -> list[dict[str, Any]]:
        """Return the request fields of the references that a page shows; this reads files, so call it in a thread.

        Raises:
            InvalidRequest: An image no longer exists, or a setting cannot be used.
        """
        self.change(shown)
        fields = []
        for settings in shown:
            try:
                fields.append(settings.fields | {"image": self._files[settings.id].path.read_bytes()})
            except (KeyError, OSError):
                raise InvalidRequest(MISSING, param=PARAM) from None
        return fields
