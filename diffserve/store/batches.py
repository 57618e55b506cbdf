"""Batches: many requests in one file, worked on one by one, each once, whatever happens between.

    validating -> in_progress -> finalizing -> completed          failed: the batch as a whole cannot be worked on
                      |-> cancelling -> cancelled                 expired: its time was over first

A line is done when its row is in ``batch_lines``, which is written together with how far the output reaches. What lies
in the output beyond that is of a line that was not done: the next is written over it.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.store.batch_input import LineProblem
from diffserve.store.database import Database
from diffserve.store.files import File, Files, insert_file, new_file_id
from diffserve.store.pages import PageAsked, read_page

WINDOW_S: Final = 24 * 3600.0
KEPT_S: Final = 30 * 24 * 3600.0
MAX_UNFINISHED: Final = 100
"""Batches that one owner may have at a time."""

UNFINISHED: Final = ("validating", "in_progress", "finalizing", "cancelling")


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch. ``times``: when it came to be what it was, by status; ``error``: why it failed as a whole;
    ``output_bytes``, ``error_bytes``: how far its two files are written."""

    id: str
    owner: str
    endpoint: str
    input_file: str
    output_file: str
    error_file: str
    status: str
    metadata: dict[str, str]
    error: str
    times: dict[str, float]
    created_s: float
    expires_s: float
    num_lines: int
    num_completed: int
    num_failed: int
    output_bytes: int
    error_bytes: int

    @property
    def problems(self) -> list[LineProblem]:
        """The reasons for which it failed; ``error`` is JSON where lines are to blame, else a code and a message."""
        if self.error.startswith("["):
            return msgspec.json.decode(self.error, type=list[LineProblem])
        code, _, message = self.error.partition(": ")
        return [LineProblem(code, message)] if self.error else []

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status not in UNFINISHED


class LineDone(NamedTuple):
    """What came of line ``number``: ``text`` ends in a newline."""

    number: int
    text: bytes
    is_error: bool


class BatchBacklog(NamedTuple):
    """Batches that are not over: how many by status, their lines that are not done, the age of the oldest."""

    by_status: dict[str, int]
    lines_left: int
    oldest_age_s: float


class Batches:
    """The batches of ``database``, whose files are among ``files``. ``clock``: seconds since 1970."""

    def __init__(self, database: Database, files: Files, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._files = files
        self._clock = clock

    def add(
        self,
        owner: str,
        endpoint: str,
        input_file: str,
        num_lines: int,
        metadata: dict[str, str],
        problems: Sequence[LineProblem] = (),
    ) -> Batch:
        """Add a batch; one whose file has ``problems`` has failed from the beginning.

        Raises:
            InvalidRequest: ``owner`` has too many batches that are not over.
        """
        now_s = self._clock()
        status, error = ("failed", _json(list(problems))) if problems else ("validating", "")
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}", owner=owner, endpoint=endpoint, input_file=input_file,
            output_file=new_file_id(), error_file=new_file_id(), status=status, metadata=metadata, error=error,
            times={"failed": now_s} if problems else {}, created_s=now_s, expires_s=now_s + WINDOW_S,
            num_lines=num_lines, num_completed=0, num_failed=0, output_bytes=0, error_bytes=0,
        )  # fmt: skip
        row = msgspec.structs.asdict(batch) | {"metadata": _json(metadata), "times": _json(batch.times)}
        with self._database.connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            said = f"SELECT count(*) FROM batches WHERE owner = ? AND status IN {UNFINISHED}"
            if connection.execute(said, (owner,)).fetchone()[0] >= MAX_UNFINISHED:
                said = f"{MAX_UNFINISHED} batches are being worked on already; wait for one, or cancel it."
                raise InvalidRequest(said, code="too_many_batches")
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO batches ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))
        return batch

    def page(self, owner: str, asked: PageAsked) -> tuple[list[Batch], bool] | None:
        """(the batches of ``owner``, whether there are more); ``None`` where there is none to go on from."""
        with self._database.connected() as connection:
            found = read_page(connection, "batches", owner, asked)
        return None if found is None else ([_batch(row) for row in found[0]], found[1])

    def get(self, name: str) -> Batch | None:
        """The batch of that id, whosever it is."""
        with self._database.connected() as connection:
            return self._get(connection, name)

    def unfinished(self) -> list[Batch]:
        """Those that are not over, the oldest first."""
        with self._database.connected() as connection:
            rows = connection.execute(f"SELECT * FROM batches WHERE status IN {UNFINISHED} ORDER BY number").fetchall()
        return [_batch(row) for row in rows]

    def backlog(self) -> BatchBacklog:
        """What is not over, summed up."""
        said = "SELECT status, count(*), sum(num_lines - num_completed - num_failed), min(created_s) FROM batches"
        with self._database.connected() as connection:
            rows = connection.execute(f"{said} WHERE status IN {UNFINISHED} GROUP BY status").fetchall()
        by_status = dict.fromkeys(UNFINISHED, 0) | {row[0]: row[1] for row in rows}
        oldest_s = min((row[3] for row in rows), default=None)
        age_s = 0.0 if oldest_s is None else max(0.0, self._clock() - oldest_s)
        return BatchBacklog(by_status, sum(row[2] for row in rows), age_s)

    def move(self, name: str, to: str, *, of: Sequence[str], error: str = "") -> Batch | None:
        """The batch, which is ``to`` from now on where it was one ``of`` those; else as it is."""
        with self._database.connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            batch = self._get(connection, name)
            if batch is not None and batch.status in of:
                self._move(connection, batch, to, error)
                batch = self._get(connection, name)
        return batch

    def done_lines(self, batch: Batch) -> set[int]:
        """The numbers of the lines that are done."""
        with self._database.connected() as connection:
            rows = connection.execute("SELECT line FROM batch_lines WHERE batch = ?", (batch.id,)).fetchall()
        return {row["line"] for row in rows}

    def finish_lines(self, name: str, lines: Sequence[LineDone]) -> None:
        """Write what came of ``lines``, none of which is done. One thread at a time for each batch.

        OSError or sqlite3.Error where it cannot be written: then none is done.
        """
        batch = self.get(name)
        assert batch is not None
        parts = {batch.output_file: batch.output_bytes, batch.error_file: batch.error_bytes}
        for is_error, file in enumerate((batch.output_file, batch.error_file)):
            if text := b"".join(line.text for line in lines if line.is_error == bool(is_error)):
                self._write(file, text, parts[file])
                parts[file] += len(text)
        num_failed = sum(line.is_error for line in lines)
        with self._database.connected() as connection:
            numbers = [(batch.id, line.number) for line in lines]
            connection.executemany("INSERT INTO batch_lines VALUES (?, ?)", numbers)
            connection.execute(
                "UPDATE batches SET output_bytes = ?, error_bytes = ?, num_completed = num_completed + ?, "
                "num_failed = num_failed + ? WHERE id = ?",
                (parts[batch.output_file], parts[batch.error_file], len(lines) - num_failed, num_failed, batch.id),
            )

    def finish(self, name: str, status: str, error: str = "") -> None:
        """End it as ``status``: its two files, where there is anything in them, are files from now on."""
        batch = self.get(name)
        if batch is None or batch.is_over:
            return
        now_s = self._clock()
        made = {"output": (batch.output_file, batch.output_bytes), "error": (batch.error_file, batch.error_bytes)}
        for file, num_bytes in made.values():
            if num_bytes:
                os.truncate(self._files.path(file), num_bytes)  # what lies beyond is of a line that was not done
            else:
                self._files.path(file).unlink(missing_ok=True)
        with self._database.connected() as connection:
            for kind, (file, num_bytes) in made.items():
                if num_bytes:
                    told = f"{batch.id}_{kind}.jsonl"
                    row = File(
                        id=file, owner=batch.owner, purpose="batch_output", filename=told, num_bytes=num_bytes,
                        created_s=now_s, expires_s=now_s + KEPT_S,
                    )  # fmt: skip
                    insert_file(connection, row)
            connection.execute("DELETE FROM batch_lines WHERE batch = ?", (batch.id,))
            self._move(connection, batch, status, error)

    def sweep(self) -> None:
        """Forget those that have been over for long."""
        with self._database.connected() as connection:
            said = f"DELETE FROM batches WHERE created_s < ? AND status NOT IN {UNFINISHED}"
            connection.execute(said, (self._clock() - KEPT_S,))

    def files_in_use(self) -> set[str]:
        """The ids of files that batches which are not over read or write."""
        return {file for batch in self.unfinished() for file in (batch.input_file, batch.output_file, batch.error_file)}

    def _write(self, file: str, text: bytes, at: int) -> None:
        self._files.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files.require_room(len(text))
        with open(os.open(self._files.path(file), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as written:
            written.seek(at)
            written.write(text)
            written.flush()
            os.fsync(written.fileno())

    def _move(self, connection: sqlite3.Connection, batch: Batch, to: str, error: str) -> None:
        times = batch.times | {to: self._clock()}
        said = "UPDATE batches SET status = ?, error = ?, times = ? WHERE id = ?"
        connection.execute(said, (to, error, _json(times), batch.id))

    def _get(self, connection: sqlite3.Connection, name: str) -> Batch | None:
        row = connection.execute("SELECT * FROM batches WHERE id = ?", (name,)).fetchone()
        return None if row is None else _batch(row)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _batch(row: sqlite3.Row) -> Batch:
    told = {name: row[name] for name in Batch.__struct_fields__}
    read = {name: msgspec.json.decode(told[name]) for name in ("metadata", "times")}
    return Batch(**told | read)
