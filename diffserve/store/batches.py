"""Batches: files of requests, each of which is answered exactly once, even across restarts.

States: validating, in_progress, finalizing, completed; or cancelling, cancelled; or failed; or expired.
A line is done once its row is in ``batch_lines``, which is committed together with the length of the output. Output
beyond that length belongs to an unfinished line and is overwritten.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
from sqlalchemy import Connection, delete, func, insert, select, update

from diffserve.api.errors import InvalidRequest
from diffserve.store.batch_input import LineProblem
from diffserve.store.database import Database, PageSelection, find_row, insert_row, read_row
from diffserve.store.files import File, Files, new_file_id
from diffserve.store.schema import batch_lines, batches
from diffserve.store.schema import files as files_table
from diffserve.store.webhooks import add_event

WINDOW_S: Final = 24 * 3600.0
KEPT_S: Final = 30 * 24 * 3600.0
MAX_UNFINISHED: Final = 100
"""Unfinished batches per owner."""

UNFINISHED: Final = ("validating", "in_progress", "finalizing", "cancelling")
OVER: Final = ("completed", "failed", "expired", "cancelled")


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a batch.

    Attributes:
        times: When it entered each status, in seconds since 1970.
        error: Why it failed as a whole; see ``problems``.
        output_bytes: Committed length of its output file.
        error_bytes: Committed length of its error file.
        base_url: Beginning of the image URLs in its output; "" if it is not known.
    """

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
    base_url: str = ""

    @property
    def problems(self) -> list[LineProblem]:
        """The reasons of a failure; ``error`` is JSON for invalid lines, else a code and a message."""
        if self.error.startswith("["):
            return msgspec.json.decode(self.error, type=list[LineProblem])
        code, _, message = self.error.partition(": ")
        return [LineProblem(code, message)] if self.error else []

    @property
    def is_over(self) -> bool:
        """Whether the batch is finished."""
        return self.status not in UNFINISHED


class LineDone(NamedTuple):
    """Result of the line ``number``; ``text`` ends in a newline."""

    number: int
    text: bytes
    is_error: bool


class BatchBacklog(NamedTuple):
    """Summary of the unfinished batches: count by status, unfinished lines, and age of the oldest."""

    by_status: dict[str, int]
    lines_left: int
    oldest_age_s: float


class Batches:
    """Table of batches.

    Args:
        database: The database.
        files: The store of the batches' files.
        clock: Returns seconds since 1970.
    """

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
        base_url: str = "",
    ) -> Batch:
        """Add a batch; it fails at once if its file has ``problems``.

        Raises:
            InvalidRequest: ``owner`` has too many unfinished batches.
        """
        now_s = self._clock()
        status, error = ("failed", _json(list(problems))) if problems else ("validating", "")
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}", owner=owner, endpoint=endpoint, input_file=input_file,
            output_file=new_file_id(), error_file=new_file_id(), status=status, metadata=metadata, error=error,
            times={"failed": now_s} if problems else {}, created_s=now_s, expires_s=now_s + WINDOW_S,
            num_lines=num_lines, num_completed=0, num_failed=0, output_bytes=0, error_bytes=0, base_url=base_url,
        )  # fmt: skip
        query = select(func.count()).where(batches.c.owner == owner, batches.c.status.in_(UNFINISHED))
        with self._database.writing(exclusive=True) as connection:
            if connection.execute(query).scalar_one() >= MAX_UNFINISHED:
                message = f"{MAX_UNFINISHED} batches are unfinished, which is the limit; wait for one or cancel it."
                raise InvalidRequest(message, code="too_many_batches")
            insert_row(connection, batches, batch)
            if problems:
                add_event(connection, owner, "batch.failed", batch.id, now_s)
        return batch

    def page(self, owner: str, selection: PageSelection) -> tuple[list[Batch], bool] | None:
        """Return a page of ``owner``'s batches and whether more follow; None if the entry ``after`` does not exist."""
        return self._database.page(Batch, batches, owner, selection)

    def get(self, name: str) -> Batch | None:
        """Return the batch with the ID ``name`` of any owner, or None."""
        with self._database.reading() as connection:
            return find_row(connection, Batch, batches, id=name)

    def unfinished(self) -> list[Batch]:
        """Return the unfinished batches, the oldest first."""
        query = select(batches).where(batches.c.status.in_(UNFINISHED)).order_by(batches.c.number)
        with self._database.reading() as connection:
            return [read_row(Batch, row) for row in connection.execute(query)]

    def backlog(self) -> BatchBacklog:
        """Return a summary of the unfinished batches."""
        lines_left = batches.c.num_lines - batches.c.num_completed - batches.c.num_failed
        query = select(batches.c.status, func.count(), func.sum(lines_left), func.min(batches.c.created_s))
        with self._database.reading() as connection:
            rows = connection.execute(query.where(batches.c.status.in_(UNFINISHED)).group_by(batches.c.status)).all()
        by_status = dict.fromkeys(UNFINISHED, 0) | {row[0]: row[1] for row in rows}
        oldest_s = min((row[3] for row in rows), default=None)
        age_s = 0.0 if oldest_s is None else max(0.0, self._clock() - oldest_s)
        return BatchBacklog(by_status, int(sum(row[2] for row in rows)), age_s)

    def move(self, name: str, to: str, *, of: Sequence[str], error: str = "") -> Batch | None:
        """Change the status of a batch to ``to`` if it is one of ``of``.

        Args:
            name: The ID of the batch.
            to: The new status.
            of: The statuses that may change.
            error: The reason, if it failed.

        Returns:
            The batch after the call, or None if it does not exist.
        """
        with self._database.writing(exclusive=True) as connection:
            batch = find_row(connection, Batch, batches, id=name)
            if batch is not None and batch.status in of:
                self._move(connection, batch, to, error)
                batch = find_row(connection, Batch, batches, id=name)
        return batch

    def done_lines(self, batch: Batch) -> set[int]:
        """Return the numbers of the lines of ``batch`` that are done."""
        with self._database.reading() as connection:
            return set(connection.execute(select(batch_lines.c.line).where(batch_lines.c.batch == batch.id)).scalars())

    def finish_lines(self, name: str, lines: Sequence[LineDone]) -> None:
        """Write the results of ``lines`` and mark them as done. Only one thread at a time may call this for a batch.

        Raises:
            OSError, StoreError: The results cannot be written; none of the lines is done.
        """
        batch = self.get(name)
        assert batch is not None
        lengths = {batch.output_file: batch.output_bytes, batch.error_file: batch.error_bytes}
        for is_error, file in enumerate((batch.output_file, batch.error_file)):
            if text := b"".join(line.text for line in lines if line.is_error == bool(is_error)):
                self._write(file, text, lengths[file])
                lengths[file] += len(text)
        num_failed = sum(line.is_error for line in lines)
        counts = {
            "output_bytes": lengths[batch.output_file],
            "error_bytes": lengths[batch.error_file],
            "num_completed": batches.c.num_completed + len(lines) - num_failed,
            "num_failed": batches.c.num_failed + num_failed,
        }
        with self._database.writing() as connection:
            connection.execute(insert(batch_lines), [{"batch": batch.id, "line": line.number} for line in lines])
            connection.execute(update(batches).where(batches.c.id == batch.id).values(counts))

    def finish(self, name: str, status: str, error: str = "") -> None:
        """Finish the batch ``name`` with ``status`` and publish its output and error files unless they are empty."""
        batch = self.get(name)
        if batch is None or batch.is_over:
            return
        now_s = self._clock()
        outputs = {"output": (batch.output_file, batch.output_bytes), "error": (batch.error_file, batch.error_bytes)}
        for file, num_bytes in outputs.values():
            if num_bytes:
                os.truncate(self._files.path(file), num_bytes)  # the part beyond belongs to an unfinished line
            else:
                self._files.path(file).unlink(missing_ok=True)
        with self._database.writing() as connection:
            for kind, (file, num_bytes) in outputs.items():
                if num_bytes:
                    filename = f"{batch.id}_{kind}.jsonl"
                    row = File(
                        id=file, owner=batch.owner, purpose="batch_output", filename=filename, num_bytes=num_bytes,
                        created_s=now_s, expires_s=now_s + KEPT_S,
                    )  # fmt: skip
                    insert_row(connection, files_table, row)
            connection.execute(delete(batch_lines).where(batch_lines.c.batch == batch.id))
            self._move(connection, batch, status, error)

    def sweep(self) -> None:
        """Delete finished batches older than ``KEPT_S``."""
        is_old = batches.c.created_s < self._clock() - KEPT_S
        with self._database.writing() as connection:
            connection.execute(delete(batches).where(is_old, batches.c.status.not_in(UNFINISHED)))

    def files_in_use(self) -> set[str]:
        """Return the IDs of the files that unfinished batches read or write."""
        return {file for batch in self.unfinished() for file in (batch.input_file, batch.output_file, batch.error_file)}

    def _write(self, file: str, text: bytes, at: int) -> None:
        self._files.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files.require_room(len(text))
        with open(os.open(self._files.path(file), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as output:
            output.seek(at)
            output.write(text)
            output.flush()
            os.fsync(output.fileno())

    def _move(self, connection: Connection, batch: Batch, to: str, error: str) -> None:
        now_s = self._clock()
        values = {"status": to, "error": error, "times": _json(batch.times | {to: now_s})}
        connection.execute(update(batches).where(batches.c.id == batch.id).values(values))
        if to in OVER:
            add_event(connection, batch.owner, f"batch.{to}", batch.id, now_s)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
