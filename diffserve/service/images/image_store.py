"""Image files on disk that clients fetch from a URL for an hour: ``GET /v1/images/files/{name}``.

The random name of 128 bits is the only access control. Files survive a restart of the server.
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
from diffserve.service.http.addresses import public_address
from diffserve.service.http.errors import HttpError
from diffserve.service.http.streams import send_file
from diffserve.service.threads import FILES

KEPT_S: Final = 3600.0
SWEEP_EVERY_S: Final = 60.0
ROUTE: Final = "/v1/images/files"
FREED_SHARE: Final = 0.1
"""Share of the size limit that is freed at once, so that not every new image scans the folder."""

NOT_STORED: Final = "the image could not be stored at a URL; it is in b64_json only."
_NAME: Final = re.compile(r"[0-9a-f]{32}\.(?:png|jpeg|webp)")
_OURS: Final = re.compile(rf"{_NAME.pattern}(?:\.part)?")
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._\-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")

log = logging.getLogger("diffserve.http")


class ImageStore:
    """A folder of image files, private to the server's user; safe to share between threads.

    The oldest images are removed beyond ``max_bytes``, and all after ``kept_s`` seconds.
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
        """Create a store.

        Args:
            folder: The folder, created when needed.
            max_bytes: Limit on the size of all images.
            kept_s: Lifetime of an image in seconds.
            now: Clock for the modification times of the files.
            headers: Headers of every response with an image.
            gone: Called with the names of removed images.
        """
        self.folder = self._folder = folder
        self._headers = headers
        self._gone = gone
        self._max_bytes = max_bytes
        self._kept_s = kept_s
        self._now = now
        self._num_bytes: int | None = None  # unknown before the first look
        self._lock = threading.Lock()

    def store(self, data: bytes, name: str) -> str:
        """Store ``data`` under the unused ``name`` and return the name. Raises OSError."""
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
        """Remove an image if it exists."""
        with self._lock:
            self._num_bytes = None  # counted again before the next image
            (self._folder / name).unlink(missing_ok=True)

    def open(self, name: str) -> StoredImage:
        """Open the image ``name``. Raises HttpError 404 if it does not exist or has expired."""
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
            f"there is no such image; the URL of an image is valid for {self._kept_s / 60:g} minutes.",
            code="picture_not_found",
        )

    def sweep(self) -> None:
        """Remove expired images. Raises OSError if the folder cannot be used."""
        with self._lock:
            if self._folder.is_dir():
                self._make_room(0)

    async def sweep_for_ever(self) -> None:
        """Sweep now and every ``SWEEP_EVERY_S`` in a thread, without end."""
        while True:
            try:
                await FILES.run(self.sweep)
            except OSError as error:
                log.warning(
                    "expired images cannot be removed from the image folder",
                    extra={"reason": error.strerror or type(error).__name__},
                )
            await asyncio.sleep(SWEEP_EVERY_S)

    def _make_room(self, num_bytes: int) -> None:
        """Scan the folder; remove expired images, and the oldest ones if ``num_bytes`` more do not fit."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "the image folder belongs to another user")
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
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        files.append(_File(Path(entry.path), status.st_size, status.st_mtime))
        return files


class StoredImage(NamedTuple):
    """An open image file of ``num_bytes`` that expires in ``left_s`` seconds."""

    name: str
    file: BinaryIO
    num_bytes: int
    left_s: float
    headers: Mapping[str, str] = MappingProxyType({})

    def response(self) -> Response:
        """Return a response that reads the file in threads."""
        headers = {
            **self.headers,
            "Content-Disposition": f'inline; filename="{self.name}"',
            "Cache-Control": f"private, max-age={int(self.left_s)}",
        }
        media_type = MEDIA_TYPES[SUFFIXES[Path(self.name).suffix]]
        return send_file(self.file, self.num_bytes, media_type, headers)


def new_name(image_format: ImageFormat) -> str:
    """Return a new random file name."""
    return f"{secrets.token_hex(16)}.{image_format}"


class ImageUrls:
    """Creates the URLs of one request's images; use it in a thread. ``warnings`` has those of failed images."""

    def __init__(self, pictures: ImageStore, base_url: str) -> None:
        self.warnings: list[str] = []
        self._pictures = pictures
        self._base_url = base_url

    def store(self, file: bytes, name: str) -> str | None:
        """Store ``file`` and return its URL; None, with a warning, if it cannot be stored."""
        try:
            return f"{self._base_url}{ROUTE}/{self._pictures.store(file, name)}"
        except OSError as error:
            log.error("an image could not be stored", extra={"reason": error.strerror or type(error).__name__})
            self.warnings = [NOT_STORED]
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
