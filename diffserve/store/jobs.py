"""Durable jobs: a row and, once there is a result, a file for each; every job ends exactly once.

States: queued, running or paused, then succeeded, failed, cancelled or expired. A running job is leased to the process
that ``holder`` names, and ``token`` grows with every lease: only the holder of the current token may end the job.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, delete, func, insert, select, update

from diffserve.api.errors import InvalidRequest
from diffserve.faults import reach
from diffserve.store.database import Database, PageSelection, find_row, insert_row, read_row, select_rows
from diffserve.store.deliveries import add_upload
from diffserve.store.files import require_room
from diffserve.store.schema import job_bodies, jobs
from diffserve.store.webhooks import add_event

FOLDER: Final = "jobs"
CAPTURE: Final = "capture-"
"""Beginning of the names of captured states, after the number of their job and a dash."""

LOCK_CREATED_S: Final = 60.0
"""Seconds after which a server that creates its lock file has done so, or was killed."""

FILES_AT_ONCE: Final = 500
"""Number of files that a sweep compares with their rows at once."""

KEPT_S: Final = 7 * 24 * 3600.0
"""Time for which a finished job is kept after the latest time at which it could begin."""

MAX_UNFINISHED: Final = 10_000
"""Unfinished jobs per owner."""

MAX_BODY_BYTES: Final = 2_000_000_000
"""Total length of the bodies of one owner, so that none fills the disk; that of a successful job is deleted."""

MAX_PROMPT_CHARS: Final = 10_000
"""Characters of a prompt that are shown with a job."""

MAX_LOSSES: Final = 2
"""A job fails when this many engines were lost while they ran it."""

MAX_ATTEMPTS: Final = 10
"""A job fails when this many servers have ended while they ran it."""

CANCELLED_AT_ONCE: Final = 500
"""Jobs that one transaction cancels, so that others do not wait long for the lock of the database."""

Status = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled", "expired"]
NOT_BEGUN: Final = ("queued", "paused")
UNFINISHED: Final = ("queued", "running", "paused")
OVER: Final = ("succeeded", "failed", "cancelled", "expired")
WITH_BODY: Final = (*UNFINISHED, "failed", "cancelled", "expired")
"""States of jobs that may run again, for which they need their bodies."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a job; the body of its request, which may have megabytes, is read with ``Jobs.body``.

    Attributes:
        number: Position in the order of creation.
        id: Name that the client or the server chose; unique for its owner.
        prompt: The prompt in the body, at most ``MAX_PROMPT_CHARS`` of it; None if it has none, or a list of them.
        error: Code and message of a failure, with a colon between them.
        events: JSON list of the states that it entered, each with its time in seconds since 1970.
        holder: The process that runs it, "" if none does.
        token: Number of leases.
        attempts: Number of leases, except those that a pause or a server that drained gave back.
        losses: Engines that were lost while they ran it.
        result_status: HTTP status of the result, 0 if there is none.
        result_bytes: Length of the result's body.
        output: Where its result goes: ``base_url``, the beginning of image URLs; and if the result is uploaded,
            ``put_url``, ``status`` (waiting, delivered or failed) and ``error``.
        digest: SHA-256 of the body of its request.
    """

    number: int
    id: str
    owner: str
    endpoint: str
    prompt: str | None
    status: Status
    error: str
    events: str
    holder: str
    token: int
    attempts: int
    losses: int
    created_s: float
    expires_s: float
    result_status: int
    result_bytes: int
    output: dict[str, str]
    digest: str

    @property
    def is_over(self) -> bool:
        """Whether the job is finished."""
        return self.status in OVER

    @property
    def entered(self) -> list[tuple[Status, float]]:
        """The states that it entered, in order, with their times in seconds since 1970."""
        return msgspec.json.decode(self.events, type=list[tuple[Status, float]])


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job to insert; its number is assigned by the database."""

    id: str
    owner: str
    endpoint: str
    status: Status
    error: str = ""
    events: str
    holder: str = ""
    token: int = 0
    attempts: int = 0
    losses: int = 0
    created_s: float
    expires_s: float
    result_status: int = 0
    result_bytes: int = 0
    output: dict[str, str] = {}
    body_bytes: int
    prompt: str | None
    digest: str


class JobFilter(NamedTuple):
    """Filter of a list of jobs; empty values select all."""

    statuses: tuple[str, ...] = ()
    endpoint: str = ""
    prefix: str = ""  # of the ID

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the conditions of a query of the table."""
        conditions: list[ColumnElement[bool]] = [jobs.c.status.in_(self.statuses)] if self.statuses else []
        if self.endpoint:
            conditions.append(jobs.c.endpoint == self.endpoint)
        if self.prefix:
            conditions.append(func.substr(jobs.c.id, 1, len(self.prefix)) == self.prefix)
        return conditions


class Jobs:
    """Table of jobs and folder of their results.

    Args:
        database: The database; results are in its data folder.
        clock: Returns seconds since 1970.
        max_bytes: Total size of the bodies of one owner; that of a successful job is deleted.
    """

    def __init__(
        self, database: Database, clock: Callable[[], float] = time.time, max_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self.folder = database.folder / FOLDER
        self._database = database
        self._clock = clock
        self._max_bytes = max_bytes

    def add(
        self, owner: str, name: str, endpoint: str, body: str, timeout_s: float, output: dict[str, str] | None = None
    ) -> tuple[Job, bool]:
        """Add a job, which is on the disk when this returns.

        Args:
            owner: The ID of the API key.
            name: The ID of the job.
            endpoint: The path of the request.
            body: The body of the request, JSON.
            timeout_s: Seconds after which it expires if it has not begun.
            output: Where its result goes, see ``Job``.

        Returns:
            The job, and whether it is new; an earlier one has the same endpoint and body, in any order of its fields.

        Raises:
            InvalidRequest: ``owner`` has another job with this ID, too many unfinished ones, or too large bodies.
        """
        now_s = self._clock()
        new = NewJob(
            id=name, owner=owner, endpoint=endpoint, status="queued", events=_events([], "queued", now_s),
            created_s=now_s, expires_s=now_s + timeout_s, output=output or {}, body_bytes=len(body.encode()),
            prompt=_prompt_of(body), digest=_digest_of(body),
        )  # fmt: skip
        totals = select(
            func.count().filter(jobs.c.status.in_(UNFINISHED)), func.coalesce(func.sum(jobs.c.body_bytes), 0)
        ).where(jobs.c.owner == owner, jobs.c.status.in_(WITH_BODY))
        with self._database.writing(exclusive=True) as connection:
            job = find_row(connection, Job, jobs, owner=owner, id=name)
            if job is not None:
                if (job.endpoint, job.digest) != (endpoint, new.digest):
                    message = f"a job {name!r} exists with another endpoint or body; choose another ID."
                    raise InvalidRequest(message, param="id", code="job_exists")
                return job, False
            num_unfinished, num_bytes = connection.execute(totals).one()
            if num_unfinished >= MAX_UNFINISHED:
                message = f"{MAX_UNFINISHED} jobs are unfinished, which is the limit; wait for one or cancel it."
                raise InvalidRequest(message, code="too_many_jobs")
            if num_bytes + new.body_bytes > self._max_bytes:
                message = (
                    f"the bodies of your jobs that have not succeeded have {num_bytes} bytes and this one has "
                    f"{new.body_bytes}; at most {self._max_bytes} are allowed. Wait for a job, or delete finished ones."
                )
                raise InvalidRequest(message, code="too_many_jobs")
            insert_row(connection, jobs, new)
            job = find_row(connection, Job, jobs, owner=owner, id=name)
            assert job is not None
            connection.execute(insert(job_bodies), {"number": job.number, "body": body})
            reach("job_inserted")
        reach("job_added")
        return job, True

    def get(self, owner: str, name: str) -> Job | None:
        """Return ``owner``'s job with the ID ``name``, or None."""
        with self._database.reading() as connection:
            return find_row(connection, Job, jobs, owner=owner, id=name)

    def body(self, job: Job) -> str:
        """Return the body of the request of ``job``, JSON; "" if the job has succeeded or was deleted."""
        query = select(job_bodies.c.body).where(job_bodies.c.number == job.number)
        with self._database.reading() as connection:
            return connection.execute(query).scalar() or ""

    def by_number(self, number: int) -> Job | None:
        """Return the job with this number, or None."""
        with self._database.reading() as connection:
            row = connection.execute(select_rows(Job, jobs).where(jobs.c.number == number)).first()
        return None if row is None else read_row(Job, row)

    def page(self, owner: str, selection: PageSelection, job_filter: JobFilter) -> tuple[list[Job], bool] | None:
        """Return a page of ``owner``'s jobs and whether more follow; None if the entry ``after`` does not exist."""
        return self._database.page(Job, jobs, owner, selection, *job_filter.conditions())

    def num_unfinished(self) -> dict[str, int]:
        """Return the numbers of unfinished jobs of all owners, by status."""
        query = select(jobs.c.status, func.count()).where(jobs.c.status.in_(UNFINISHED)).group_by(jobs.c.status)
        with self._database.reading() as connection:
            return dict.fromkeys(UNFINISHED, 0) | {status: count for status, count in connection.execute(query)}

    def positions(self, numbers: Collection[int]) -> dict[int, int]:
        """Return the positions of queued jobs in the order in which ``claim`` would take them, by number, from 1.

        Args:
            numbers: Numbers of jobs; those that are not queued are ignored.

        Returns:
            Positions among the jobs of all owners, as if no job ended or was added before.
        """
        rank = func.row_number().over(partition_by=jobs.c.owner, order_by=jobs.c.number)
        queued = select(jobs.c.number, jobs.c.owner, rank.label("rank")).where(jobs.c.status == "queued").subquery()
        running = _num_running().subquery()
        level = queued.c.rank + func.coalesce(running.c.num, 0)  # jobs of the owner that run once it has begun
        position = func.row_number().over(order_by=(level, queued.c.number)).label("position")
        joined = queued.outerjoin(running, queued.c.owner == running.c.owner)
        order = select(queued.c.number, position).select_from(joined).subquery()
        with self._database.reading() as connection:
            rows = connection.execute(select(order).where(order.c.number.in_(numbers)))
            return {row.number: row.position for row in rows}

    def claim(self, holder: str, *, is_idle: bool = True, is_full: bool = False) -> Job | None:
        """Lease a queued job to the process ``holder``; return None if there is none to run now.

        The job is the oldest one of the owner with the fewest running jobs, so that no owner waits for all jobs of
        another one. A job that has lost an engine runs alone, so that it cannot take others with it a second time.

        Args:
            holder: The name of the process.
            is_idle: Whether the process runs no other job.
            is_full: Whether only a job of an owner without running jobs is leased.
        """
        is_queued = jobs.c.status == "queued"
        first = select(jobs.c.owner, func.min(jobs.c.number)).where(is_queued).group_by(jobs.c.owner)
        with self._database.writing(exclusive=not self._database.is_postgresql) as connection:
            num_running = {row.owner: row.num for row in connection.execute(_num_running())}
            waiting = sorted((num_running.get(owner, 0), number, owner) for owner, number in connection.execute(first))
            for num, _, owner in waiting:
                if is_full and num:
                    return None
                oldest = select_rows(Job, jobs).where(is_queued, jobs.c.owner == owner).order_by(jobs.c.number).limit(1)
                row = connection.execute(oldest.with_for_update(skip_locked=True)).first()
                if row is not None:
                    job = read_row(Job, row)
                    if job.losses and not is_idle:
                        return None
                    leased = {"holder": holder, "token": job.token + 1, "attempts": job.attempts + 1}
                    claimed = self._move(connection, job, "running", **leased)
                    break
            else:
                return None
        reach("job_claimed")
        return claimed

    def finish(self, job: Job, status: Status, result: tuple[int, bytes] | None = None, error: str = "") -> bool:
        """End the leased ``job``; return False if the lease was lost, in which case nothing changes.

        Args:
            job: The job as it was claimed.
            status: The final state.
            result: HTTP status and body of the answer.
            error: Code and message of a failure.

        Raises:
            OSError, StoreError: The result cannot be written; the job is still running.
        """
        values: dict[str, Any] = {"error": error}
        if result is not None:
            self._write(job, result[1])
            values |= {"result_status": result[0], "result_bytes": len(result[1])}
        is_finished = self._move_leased(job, status, **values)
        reach("job_finished")
        return is_finished

    def release(self, job: Job, *, is_engine_lost: bool = False) -> bool:
        """Return the leased ``job`` to the queue, or fail it if it has lost too many engines or servers."""
        losses = job.losses + is_engine_lost
        status: Status = "queued"
        error = ""
        if losses >= MAX_LOSSES or job.attempts >= MAX_ATTEMPTS:
            is_engine = losses >= MAX_LOSSES
            reason = f"{losses} engines were lost" if is_engine else f"{job.attempts} attempts were interrupted"
            status, error = "failed", f"poison: {reason} while this job ran."
        is_released = self._move_leased(job, status, error=error, losses=losses)
        reach("job_released")
        return is_released

    def drain(self, job: Job) -> bool:
        """Return the leased ``job`` to the queue; the attempt does not count."""
        is_drained = self._move_leased(job, "queued", attempts=job.attempts - 1)
        reach("job_drained")
        return is_drained

    def reclaim(self, list_holders: Callable[[], Collection[str]]) -> list[str]:
        """Requeue the running jobs whose holders have ended, and return the IDs of these jobs.

        Args:
            list_holders: Returns the processes that run now. It is called after the jobs have been read: a process that
                started in between and claimed a job would be missing in an older list.
        """
        with self._database.reading() as connection:
            query = select_rows(Job, jobs).where(jobs.c.status == "running")
            running_jobs = [read_row(Job, row) for row in connection.execute(query)]
        holders = list_holders()
        return [job.id for job in running_jobs if job.holder not in holders and self.release(job)]

    def drain_all(self, holder: str) -> None:
        """Return all jobs of ``holder``, which runs none any more, to the queue; their attempts do not count."""
        query = select_rows(Job, jobs).where(jobs.c.status == "running", jobs.c.holder == holder)
        with self._database.reading() as connection:
            running_jobs = [read_row(Job, row) for row in connection.execute(query)]
        for job in running_jobs:
            self.drain(job)

    def cancel(self, owner: str, name: str) -> Job | None:
        """Cancel a job unless it is over, and return it; None if there is none."""
        return self._change(owner, name, "cancelled", UNFINISHED, error="", holder="")

    def cancel_many(self, owner: str, names: Collection[str] | None, job_filter: JobFilter) -> list[Job]:
        """Cancel ``owner``'s unfinished jobs that ``job_filter`` selects, and return them.

        Args:
            owner: The ID of the API key.
            names: IDs of jobs to select from; None: all.
            job_filter: The filter.
        """
        where = [jobs.c.owner == owner, jobs.c.status.in_(UNFINISHED), *job_filter.conditions()]
        if names is not None:
            where.append(jobs.c.id.in_(names))
        cancelled: list[Job] = []
        num_selected, last = CANCELLED_AT_ONCE, 0
        while num_selected == CANCELLED_AT_ONCE:
            query = select_rows(Job, jobs).where(*where, jobs.c.number > last)
            query = query.order_by(jobs.c.number).limit(CANCELLED_AT_ONCE)
            with self._database.writing(exclusive=True) as connection:
                selected = [read_row(Job, row) for row in connection.execute(query.with_for_update())]
                cancelled += [self._move(connection, job, "cancelled", error="", holder="") for job in selected]
            num_selected = len(selected)
            last = selected[-1].number if selected else last
        return cancelled

    def pause(self, owner: str, name: str) -> Job | None:
        """Hold back a queued or running job, and return it; None if there is none. A lease is not an attempt then."""
        with self._database.writing(exclusive=True) as connection:
            job = _find_locked(connection, owner, name)
            if job is None or job.status not in ("queued", "running"):
                return job
            attempts = job.attempts - (job.status == "running")
            return self._move(connection, job, "paused", holder="", attempts=attempts)

    def resume(self, owner: str, name: str) -> Job | None:
        """Return a paused job to its place in the queue, and return it; None if there is none."""
        return self._change(owner, name, "queued", ("paused",))

    def retry(self, owner: str, name: str, timeout_s: float) -> Job | None:
        """Return a job that failed, expired or was cancelled to the queue, and return it; None if there is none."""
        values = {"error": "", "attempts": 0, "losses": 0, "expires_s": self._clock() + timeout_s}
        cleared = {"result_status": 0, "result_bytes": 0}
        return self._change(owner, name, "queued", ("failed", "cancelled", "expired"), **values, **cleared)

    def delete(self, job: Job) -> None:
        """Delete a finished job with its result; ``sweep`` removes what else is left of it."""
        with self._database.writing() as connection:
            _delete(connection, (jobs.c.number == job.number) & jobs.c.status.in_(OVER))
        reach("job_deleted")
        self._path(job).unlink(missing_ok=True)

    def result(self, job: Job) -> bytes:
        """Read the body of the result of ``job``.

        Raises:
            OSError: It is missing.
        """
        return self._path(job).read_bytes()

    def states(self, numbers: Collection[int]) -> dict[int, tuple[str, int]]:
        """Return status and token of the jobs with the given ``numbers``, by number."""
        query = select(jobs.c.number, jobs.c.status, jobs.c.token).where(jobs.c.number.in_(numbers))
        with self._database.reading() as connection:
            return {row.number: (row.status, row.token) for row in connection.execute(query)}

    def sweep(self) -> None:
        """Expire queued jobs whose time has passed, delete old finished jobs, and remove files that no job needs."""
        now_s = self._clock()
        is_late = jobs.c.status.in_(NOT_BEGUN) & (jobs.c.expires_s <= now_s)
        is_old = jobs.c.status.in_(OVER) & (jobs.c.expires_s < now_s - KEPT_S)
        with self._database.writing() as connection:
            _delete(connection, is_old)
        with self._database.reading() as connection:
            late = connection.execute(select(jobs.c.owner, jobs.c.id).where(is_late)).all()
        for owner, name in late:
            self._change(owner, name, "expired", NOT_BEGUN, error="job_expired: it did not begin in time.")
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        for index in range(0, len(names), FILES_AT_ONCE):
            self._remove_unneeded(names[index : index + FILES_AT_ONCE], now_s)

    def remove_unneeded_of(self, job: Job) -> None:
        """Remove the files of ``job`` that it does not need any more: captured states after its end."""
        self._remove_unneeded([path.name for path in self.folder.glob(f"{job.number}-*")], self._clock())

    def _remove_unneeded(self, names: list[str], now_s: float) -> None:
        """Remove those of the files ``names`` that no job needs.

        These are captured states of finished jobs, results of earlier leases or deleted jobs, and what killed servers
        have left. The names must have been read before this call, so that rows are not older than files.
        """
        numbers = {number for name in names if (number := name.partition("-")[0]).isdigit()}
        columns = jobs.c.number, jobs.c.token, jobs.c.status, jobs.c.result_status
        with self._database.reading() as connection:
            rows = connection.execute(select(*columns).where(jobs.c.number.in_(map(int, numbers))))
            current = {str(row.number): row for row in rows}
        for name in names:
            path = self.folder / name
            number, _, after_number = name.partition("-")
            job = current.get(number)
            if number not in numbers:  # the lock file of a server
                is_needed = path.suffix != ".new" or now_s - _modified_s(path) < LOCK_CREATED_S
            elif job is None:
                is_needed = False
            elif after_number.startswith(CAPTURE):
                is_needed = job.status in UNFINISHED
            elif job.status == "running":
                is_needed = after_number in (f"{job.token}", f"{job.token}.part")
            else:
                is_needed = job.result_status > 0 and after_number == f"{job.token}"
            if not is_needed:
                path.unlink(missing_ok=True)

    def _path(self, job: Job) -> Path:
        return self.folder / f"{job.number}-{job.token}"

    def _write(self, job: Job, body: bytes) -> None:
        """Write a result so that it is complete on the disk before its row says that it exists."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_room(self.folder, len(body))
        part = self.folder / f"{job.number}-{job.token}.part"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        reach("result_written")
        part.replace(self._path(job))
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        reach("result_renamed")

    def _move_leased(self, job: Job, status: Status, **values: Any) -> bool:
        """Move ``job`` if it is still leased with its token."""
        with self._database.writing(exclusive=True) as connection:
            current = _find_locked(connection, job.owner, job.id)
            is_leased = current is not None and (current.number, current.status, current.token) == (
                job.number, "running", job.token,
            )  # fmt: skip
            if current is None or not is_leased:
                return False
            self._move(connection, current, status, holder="", **values)
        return True

    def _change(self, owner: str, name: str, status: Status, of: Collection[str], **values: Any) -> Job | None:
        """Move ``owner``'s job to ``status`` if it is in one of the states ``of``, and return it."""
        with self._database.writing(exclusive=True) as connection:
            job = _find_locked(connection, owner, name)
            if job is None or job.status not in of:
                return job
            return self._move(connection, job, status, **values)

    def _move(self, connection: Connection, job: Job, status: Status, **values: Any) -> Job:
        now_s = self._clock()
        changes = {"status": status, "events": _events(job.entered, status, now_s), **values}
        has_body = status in WITH_BODY
        columns = changes if has_body else changes | {"body_bytes": 0}
        connection.execute(update(jobs).where(jobs.c.number == job.number).values(columns))
        if not has_body:
            connection.execute(delete(job_bodies).where(job_bodies.c.number == job.number))
        if status in OVER:
            add_event(connection, job.owner, f"job.{status}", job.id, now_s)
        if status == "succeeded" and "put_url" in job.output:
            add_upload(connection, job.owner, job.number, now_s)
        return msgspec.structs.replace(job, **changes)


def _delete(connection: Connection, is_chosen: ColumnElement[bool]) -> None:
    """Delete jobs with the bodies of their requests."""
    numbers = select(jobs.c.number).where(is_chosen)
    connection.execute(delete(job_bodies).where(job_bodies.c.number.in_(numbers)))
    connection.execute(delete(jobs).where(is_chosen))


class _Prompted(msgspec.Struct):
    prompt: Any = None


def _prompt_of(body: str) -> str | None:
    """Return the prompt in the JSON ``body``, shortened; None if it has none, or a list of them."""
    prompt = msgspec.json.decode(body, type=_Prompted).prompt
    return prompt[:MAX_PROMPT_CHARS].replace("\0", "") if isinstance(prompt, str) else None  # PostgreSQL has no NUL


def _modified_s(path: Path) -> float:
    """Return when ``path`` was changed, in seconds since 1970; 0 if it does not exist any more."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _digest_of(body: str) -> str:
    """Return the SHA-256 of a JSON text, independent of the order of fields and of spaces."""
    return hashlib.sha256(msgspec.json.encode(msgspec.json.decode(body), order="deterministic")).hexdigest()


def _num_running() -> Select[tuple[str, int]]:
    """Return the query of the numbers of running jobs, by owner."""
    return select(jobs.c.owner, func.count().label("num")).where(jobs.c.status == "running").group_by(jobs.c.owner)


def _find_locked(connection: Connection, owner: str, name: str) -> Job | None:
    """Return a job that no other transaction can change before this one ends; None if there is none."""
    query = select_rows(Job, jobs).where(jobs.c.owner == owner, jobs.c.id == name)
    row = connection.execute(query.with_for_update()).first()
    return None if row is None else read_row(Job, row)


def _events(entered: list[tuple[Status, float]], status: Status, now_s: float) -> str:
    return msgspec.json.encode([*entered, (status, now_s)]).decode()
