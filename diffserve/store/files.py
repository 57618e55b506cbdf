"""Files of clients: metadata in the database, contents in a folder of the data folder under generated names.

A file exists once its row is committed. Contents without a row are removed by ``Files.sweep``.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from sqlalchemy import Connection, delete, func, select

from diffserve.api.errors import InvalidRequest
from diffserve.store.database import Database, PageSelection, find_row, insert_row, read_row
from diffserve.store.schema import files

FOLDER: Final = "files"
MAX_FILES: Final = 1000
"""Files per owner."""

KEPT_S: Final = 30 * 24 * 3600.0
SPARE_BYTES: Final = 128 << 20
"""Free disk space that is reserved for essential writes."""

CHUNK_BYTES: Final = 1 << 20
ORPHAN_S: Final = 24 * 3600.0
"""Age of a file without a row that is deleted; longer than a clock may be wrong, so that uploads are not deleted."""
_ID: Final = re.compile(r"file-[0-9a-f]{32}")


class File(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a file. ``owner`` is the ID of the API key that sent it; times are in seconds since 1970."""

    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created_s: float
    expires_s: float


class Files:
    """Store of files.

    Args:
        database: The database; the contents are stored in its data folder.
        max_bytes: Total size of the files of one owner.
        clock: Returns seconds since 1970.
    """

    def __init__(self, database: Database, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.folder = database.folder / FOLDER
        self.max_bytes = max_bytes
        self._database = database
        self._clock = clock

    def add(
        self, owner: str, purpose: str, filename: str, source: BinaryIO, *, max_bytes: int, kept_s: float = KEPT_S
    ) -> File:
        """Store the contents of ``source``. Nothing remains of a file that fails.

        Args:
            owner: The ID of the API key.
            purpose: What the file is for.
            filename: The name to list it by.
            source: The contents.
            max_bytes: Largest size of this file.
            kept_s: How long to keep it, in seconds.

        Returns:
            The metadata of the new file.

        Raises:
            InvalidRequest: The file is too large, or the owner's limit is reached.
            OSError: The disk is full.
        """
        name = new_file_id()
        path = self.path(name)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                num_bytes = 0
                while chunk := source.read(CHUNK_BYTES):
                    num_bytes += len(chunk)
                    if num_bytes > max_bytes:
                        message = f"the file is longer than {max_bytes} bytes."
                        raise InvalidRequest(message, param="file", code="file_too_large")
                    self.require_room(len(chunk))
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            now_s = self._clock()
            metadata = File(
                id=name, owner=owner, purpose=purpose, filename=filename, num_bytes=num_bytes,
                created_s=now_s, expires_s=now_s + kept_s,
            )  # fmt: skip
            with self._database.writing(exclusive=True) as connection:
                self._require_share(connection, owner, num_bytes)
                insert_row(connection, files, metadata)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return metadata

    def page(self, owner: str, selection: PageSelection, purpose: str = "") -> tuple[list[File], bool] | None:
        """Return a page of ``owner``'s files and whether more follow; None if the entry ``after`` does not exist."""
        where = [files.c.purpose == purpose] if purpose else []
        return self._database.page(File, files, owner, selection, *where)

    def get(self, owner: str, name: str) -> File | None:
        """Return the file with the ID ``name`` if it belongs to ``owner`` and has not expired, else None."""
        if _ID.fullmatch(name) is None:
            return None
        with self._database.reading() as connection:
            file = find_row(connection, File, files, id=name, owner=owner)
        return None if file is None or file.expires_s <= self._clock() else file

    def open(self, file: File) -> BinaryIO:
        """Open the contents of ``file``.

        Raises:
            OSError: The contents are missing.
        """
        return self.path(file.id).open("rb")

    def delete(self, file: File) -> None:
        """Delete ``file``: first the contents, so that a row never disappears before them."""
        self.path(file.id).unlink(missing_ok=True)
        with self._database.writing() as connection:
            connection.execute(delete(files).where(files.c.id == file.id))

    def path(self, name: str) -> Path:
        """Return the path of the contents of the file with the ID ``name``, which must be a generated ID."""
        return self.folder / name

    def require_room(self, num_bytes: int) -> None:
        """Check that ``num_bytes`` fit on the disk without using the reserved space.

        Raises:
            OSError: They do not fit.
        """
        require_room(self.folder, num_bytes)

    def require_share(self, owner: str) -> None:
        """Check that ``owner`` may store more files.

        Raises:
            InvalidRequest: The owner's limit is reached.
        """
        with self._database.reading() as connection:
            self._require_share(connection, owner, 0)

    def sweep(self, in_use: Collection[str]) -> None:
        """Delete expired files and contents without a row.

        Args:
            in_use: IDs of files to keep in any case.

        Raises:
            OSError, StoreError: A file cannot be deleted.
        """
        now_s = self._clock()
        with self._database.reading() as connection:
            stored = [read_row(File, row) for row in connection.execute(select(files))]
        for file in stored:
            if file.expires_s <= now_s and file.id not in in_use:
                self.delete(file)
        kept_ids = {file.id for file in stored} | set(in_use)
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in kept_ids and now_s - path.stat().st_mtime > ORPHAN_S:
                path.unlink(missing_ok=True)

    def _require_share(self, connection: Connection, owner: str, num_bytes: int) -> None:
        query = select(func.count(), func.coalesce(func.sum(files.c.num_bytes), 0)).where(files.c.owner == owner)
        num_files, stored_bytes = connection.execute(query).one()
        if num_files >= MAX_FILES:
            message = f"{num_files} files are stored already, which is the limit; delete some."
            raise InvalidRequest(message, param="file", code="too_many_files")
        if stored_bytes + num_bytes > self.max_bytes:
            usage = f"the stored files take {stored_bytes} bytes of {self.max_bytes}"
            raise InvalidRequest(
                f"{usage}, and {num_bytes} more exceed the limit; delete some.", param="file", code="files_full"
            )


def require_room(folder: Path, num_bytes: int) -> None:
    """Check that ``num_bytes`` fit on the disk of ``folder`` without using the reserved space.

    Raises:
        OSError: They do not fit.
    """
    if shutil.disk_usage(folder).free - num_bytes < SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def new_file_id() -> str:
    """Return a new random file ID."""
    return f"file-{secrets.token_hex(16)}"
