"""A visitor's pictures on disk, so that a page finds them again when its server was started anew."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ui.create.painting import FinishedPicture
from ui.files import Files, owner_of


class Galleries:
    """Visitors' pictures in ``files``, by their owner: a digest of the visitor's token, which itself lies nowhere."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._left = _found(files.left)

    def keep(self, owner: str, picture: FinishedPicture) -> None:
        """Note whose ``picture`` it is. Where the disk is full it is merely not found again."""
        data = msgspec.json.encode(picture, enc_hook=lambda path: path.name)
        with contextlib.suppress(OSError):
            self._files.note(picture.path, owner, data)

    def take(self, owner: str) -> list[FinishedPicture]:
        """Pictures of ``owner`` from the process before this one, the newest first; once."""
        return [picture for picture in self._left.pop(owner, []) if picture.path.is_file()]


def owner_named(token: str) -> str:
    """How the visitor with ``token`` is called on disk."""
    return hashlib.sha256(token.encode()).hexdigest()


def _found(folders: Iterable[Path]) -> dict[str, list[FinishedPicture]]:
    """What notes in ``folders`` tell of, the oldest folder first; what cannot be read is passed over."""
    found: dict[str, list[FinishedPicture]] = {}
    for folder in folders:
        for note in folder.glob("*.json"):
            try:
                told = msgspec.json.decode(note.read_bytes(), type=FinishedPicture, dec_hook=lambda _, path: Path(path))
            except (OSError, TypeError, msgspec.MsgspecError):
                continue
            picture = msgspec.structs.replace(told, path=folder / told.path.name)
            found.setdefault(owner_of(note), []).insert(0, picture)
    return found
