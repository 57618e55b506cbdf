"""Pictures kept on disk for an hour, for clients that fetch them from a URL: ``GET /v1/images/files/{name}``.

The name is the secret: 128 random bits. What is kept outlives a restart of the server, as long as its hour is not over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from diffserve.media.images import MEDIA_TYPES, SUFFIXES, ImageFormat
from diffserve.service.http.errors import HttpError
from diffserve.service.http.public_path import public_address
from diffserve.service.http.sending import send_file
from diffserve.service.threads import FILES

KEPT_S: Final = 3600.0
SWEEP_EVERY_S: Final = 60.0
ROUTE: Final = "/v1/images/files"
FREED_SHARE: Final = 0.1
"""Where the pictures are too many, so much of the bound is freed at once, so that not every one looks for room."""

NOT_KEPT: Final = "the picture could not be kept for its URL; it is here as b64_json alone."
_NAME: Final = re.compile(r"[0-9a-f]{32}\.(?:png|jpeg|webp)")
_OURS: Final = re.compile(rf"{_NAME.pattern}(?:\.part)?")
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._\-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")

log = logging.getLogger("diffserve.http")


class ImageStore:
    """A folder for this user alone, of at most ``max_bytes``: the oldest pictures go first, all after ``kept_s``.

    Safe to share between threads; ``now`` is the clock that the files' times are held against. ``headers`` go with
    every picture.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        kept_s: float = KEPT_S,
        now: Callable[[], float] = time.time,
        headers: Mapping[str, str] = MappingProxyType({}),
        gone: Callable[[list[str]], None] = lambda _: None,
    ) -> None:
        """``headers`` go with each picture. ``gone`` is told which are removed because they are too old or too many."""
        self.folder = self._folder = folder
        self._headers = headers
        self._gone = gone
        self._max_bytes = max_bytes
        self._kept_s = kept_s
        self._now = now
        self._num_bytes: int | None = None  # unknown before the first look
        self._lock = threading.Lock()

    def store(self, data: bytes, name: str) -> str:
        """Keep ``data`` from now on under ``name``, a new one. OSError where it cannot be."""
        if len(data) > self._max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        with self._lock:
            if self._num_bytes is None or self._num_bytes + len(data) > self._max_bytes:
                self._make_room(len(data))
            part = self._folder / f"{name}.part"
            try:
                with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(data)
                now_s = self._now()
                os.utime(part, (now_s, now_s))
                part.rename(self._folder / name)
            except OSError:
                part.unlink(missing_ok=True)
                raise
            self._num_bytes = (self._num_bytes or 0) + len(data)
            return name

    def remove(self, name: str) -> None:
        """Remove a picture, if it is there."""
        with self._lock:
            self._num_bytes = None  # to be counted anew
            (self._folder / name).unlink(missing_ok=True)

    def open(self, name: str) -> StoredImage:
        """The picture called ``name``. HttpError 404 where there is none, or its hour is over."""
        try:
            if _NAME.fullmatch(name) is None:
                raise FileNotFoundError
            file = (self._folder / name).open("rb")
            status = os.fstat(file.fileno())
            left_s = status.st_mtime + self._kept_s - self._now()
            if left_s > 0:
                return StoredImage(name, file, status.st_size, left_s, self._headers)
            file.close()
        except OSError:
            pass
        raise HttpError(
            404,
            f"there is no such picture any more: a picture's URL lives {self._kept_s / 60:g} minutes.",
            code="picture_not_found",
        )

    def sweep(self) -> None:
        """Remove what is too old. OSError where the folder cannot be used."""
        with self._lock:
            if self._folder.is_dir():
                self._make_room(0)

    async def sweep_for_ever(self) -> None:
        """Sweep now and every minute, in a thread."""
        while True:
            try:
                await FILES.run(self.sweep)
            except OSError as error:
                log.warning("kept pictures cannot be swept", extra={"reason": error.strerror or type(error).__name__})
            await asyncio.sleep(SWEEP_EVERY_S)

    def _make_room(self, num_bytes: int) -> None:
        """Look at what is there and remove what is too old, and where ``num_bytes`` more do not fit, the oldest."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "the folder for pictures belongs to somebody else")
        self._folder.chmod(0o700)
        files = sorted(self._files(), key=lambda file: file.changed_s)
        total_bytes = sum(file.num_bytes for file in files)
        bound = self._max_bytes - num_bytes
        if total_bytes > bound:
            bound = max(0, bound - int(FREED_SHARE * self._max_bytes))
        oldest_s, removed = self._now() - self._kept_s, list[str]()
        for file in files:
            if file.changed_s > oldest_s and total_bytes <= bound:
                break
            file.path.unlink(missing_ok=True)
            removed.append(file.path.name)
            total_bytes -= file.num_bytes
        self._num_bytes = total_bytes
        if removed:
            self._gone(removed)

    def _files(self) -> list[_File]:
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append(_File(Path(entry.path), status.st_size, status.st_mtime))
        return found


class StoredImage(NamedTuple):
    """An open ``file`` of ``num_bytes`` that is kept for ``left_s`` more."""

    name: str
    file: BinaryIO
    num_bytes: int
    left_s: float
    headers: Mapping[str, str] = MappingProxyType({})

    def response(self) -> Response:
        """It as an answer, read in threads as fast as it is taken."""
        headers = {
            **self.headers,
            "Content-Disposition": f'inline; filename="{self.name}"',
            "Cache-Control": f"private, max-age={int(self.left_s)}",
        }
        media_type = MEDIA_TYPES[SUFFIXES[Path(self.name).suffix]]
        return send_file(self.file, self.num_bytes, media_type, headers)


def new_name(image_format: ImageFormat) -> str:
    """A name that nobody can guess."""
    return f"{secrets.token_hex(16)}.{image_format}"


class ImageUrls:
    """The URLs of one request's pictures; ``warnings`` of those that could not be kept. Takes a while: use it in a
    thread.
    """

    def __init__(self, pictures: ImageStore, base_url: str) -> None:
        self.warnings: list[str] = []
        self._pictures = pictures
        self._base_url = base_url

    def store(self, file: bytes, name: str) -> str | None:
        """The URL of ``file``; ``None``, with a warning, where it cannot be kept."""
        try:
            return f"{self._base_url}{ROUTE}/{self._pictures.store(file, name)}"
        except OSError as error:
            log.error("a picture could not be kept", extra={"reason": error.strerror or type(error).__name__})
            self.warnings = [NOT_KEPT]
            return None


class _File(NamedTuple):
    path: Path
    num_bytes: int
    changed_s: float


def base_url_of(request: Request, public_url: str) -> str:
    """Return the address of this server for URLs: ``public_url``, a trusted proxy's, or the one the client used."""
    if public_url:
        return public_url.rstrip("/")
    address = public_address(request.scope)
    if address is not None and address.is_stated:
        return address.root
    host = request.headers.get("host", "")
    if _HOST.fullmatch(host) is None:
        name, port = request.scope.get("server") or ("127.0.0.1", None)
        host = f"[{name}]" if ":" in name else name
        host = host if port is None else f"{host}:{port}"
    return f"{request.scope['scheme']}://{host}"
