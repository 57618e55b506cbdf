"""Files that clients keep here: rows in the database, bytes beside it under names of our own.

A file is there for good once its row is; bytes without a row are nobody's, and swept.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.store.database import Database
from diffserve.store.pages import PageAsked, read_page

FOLDER: Final = "files"
MAX_FILES: Final = 1000
"""That one owner may keep."""

KEPT_S: Final = 30 * 24 * 3600.0
SPARE_BYTES: Final = 128 << 20
"""Of the disk, which are left for what must be written."""

CHUNK_BYTES: Final = 1 << 20
ORPHAN_S: Final = 3600.0
_ID: Final = re.compile(r"file-[0-9a-f]{32}")


class File(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file. ``owner``: the id of the key that sent it; times in seconds since 1970."""

    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created_s: float
    expires_s: float


class Files:
    """The files of ``database``, at most ``max_bytes`` of each owner. ``clock``: seconds since 1970."""

    def __init__(self, database: Database, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.folder = database.file.parent / FOLDER
        self.max_bytes = max_bytes
        self._database = database
        self._clock = clock

    def add(
        self, owner: str, purpose: str, filename: str, source: BinaryIO, *, max_bytes: int, kept_s: float = KEPT_S
    ) -> File:
        """Keep what ``source`` holds. Raises InvalidRequest where that is too much, OSError where there is no room;
        then nothing is kept of it."""
        name = new_file_id()
        path = self.path(name)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                num_bytes = 0
                while chunk := source.read(CHUNK_BYTES):
                    num_bytes += len(chunk)
                    if num_bytes > max_bytes:
                        said = f"the file is longer than {max_bytes} bytes."
                        raise InvalidRequest(said, param="file", code="file_too_large")
                    self.require_room(len(chunk))
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            now_s = self._clock()
            kept = File(
                id=name, owner=owner, purpose=purpose, filename=filename, num_bytes=num_bytes,
                created_s=now_s, expires_s=now_s + kept_s,
            )  # fmt: skip
            with self._database.connected() as connection:
                connection.execute("BEGIN IMMEDIATE")
                self._require_share(connection, owner, num_bytes)
                insert_file(connection, kept)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return kept

    def page(self, owner: str, asked: PageAsked, purpose: str = "") -> tuple[list[File], bool] | None:
        """(the files of ``owner``, whether there are more); ``None`` where there is none to go on from."""
        which, values = (" AND purpose = ?", (purpose,)) if purpose else ("", ())
        with self._database.connected() as connection:
            found = read_page(connection, "files", owner, asked, which, values)
        return None if found is None else ([_file(row) for row in found[0]], found[1])

    def get(self, owner: str, name: str) -> File | None:
        """The file of that id, where it is ``owner``'s and not over."""
        if _ID.fullmatch(name) is None:
            return None
        with self._database.connected() as connection:
            row = connection.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (name, owner)).fetchone()
        return None if row is None or row["expires_s"] <= self._clock() else _file(row)

    def open(self, file: File) -> BinaryIO:
        """Its bytes. OSError where they are gone."""
        return self.path(file.id).open("rb")

    def delete(self, file: File) -> None:
        """Forget it, bytes first: whoever is told that it is gone is told the truth."""
        self.path(file.id).unlink(missing_ok=True)
        with self._database.connected() as connection:
            connection.execute("DELETE FROM files WHERE id = ?", (file.id,))

    def path(self, name: str) -> Path:
        """Where the bytes of the file ``name``, an id of ours, lie."""
        return self.folder / name

    def require_room(self, num_bytes: int) -> None:
        """OSError where the disk has not so many bytes to spare."""
        if shutil.disk_usage(self.folder).free - num_bytes < SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def require_share(self, owner: str) -> None:
        """InvalidRequest where ``owner`` keeps as much as one may."""
        with self._database.connected() as connection:
            self._require_share(connection, owner, 0)

    def sweep(self, in_use: Collection[str]) -> None:
        """Remove what is over, and bytes that no row tells of but those ``in_use``. OSError, sqlite3.Error."""
        now_s = self._clock()
        with self._database.connected() as connection:
            rows = connection.execute("SELECT * FROM files").fetchall()
        for row in rows:
            if row["expires_s"] <= now_s and row["id"] not in in_use:
                self.delete(_file(row))
        known = {row["id"] for row in rows} | set(in_use)
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in known and now_s - path.stat().st_mtime > ORPHAN_S:
                path.unlink(missing_ok=True)

    def _require_share(self, connection: sqlite3.Connection, owner: str, num_bytes: int) -> None:
        said = "SELECT count(*), coalesce(sum(num_bytes), 0) FROM files WHERE owner = ?"
        num_files, num_kept = connection.execute(said, (owner,)).fetchone()
        if num_files >= MAX_FILES:
            said = f"{num_files} files are kept here already, which is as many as may be; delete some."
            raise InvalidRequest(said, param="file", code="too_many_files")
        if num_kept + num_bytes > self.max_bytes:
            said = f"the files kept here take {num_kept} bytes of {self.max_bytes}, and {num_bytes} more do not fit; "
            raise InvalidRequest(f"{said}delete some.", param="file", code="files_full")


def new_file_id() -> str:
    """A name that says nothing."""
    return f"file-{secrets.token_hex(16)}"


def insert_file(connection: sqlite3.Connection, file: File) -> None:
    """Write the row of a file whose bytes are there."""
    row = msgspec.structs.asdict(file)
    connection.execute(
        f"INSERT INTO files ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values())
    )


def _file(row: sqlite3.Row) -> File:
    return File(**{name: row[name] for name in File.__struct_fields__})
