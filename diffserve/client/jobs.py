"""Jobs: requests that survive restarts of the server. Types of answers, and the methods of the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Unpack, get_args
from urllib.parse import urlencode

import msgspec

from diffserve.client.stored import Listed, PageFields
from diffserve.client.transport import AsyncStream, HttpClient, TypedReader, encode_json, resource

JOBS: Final = "/v1/jobs"
JobStatus = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled", "expired"]
UNFINISHED: Final = ("queued", "running", "paused")
OVER: Final = ("succeeded", "failed", "cancelled", "expired")


class JobFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Code and message of the error that ended a job."""

    code: str
    message: str = ""


class JobOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Upload of a result; ``put_url`` lacks its query, and ``error`` says why the latest attempt failed."""

    put_url: str
    status: Literal["waiting", "delivered", "failed"]
    error: str | None = None


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """State of a job on the server; times are in seconds since 1970.

    Attributes:
        prompt: Prompt in the body of the request, None if it has none.
        attempts: Number of times that the server began to run the job.
        position: Position in the queue of all clients, 1 starts next; None if it is not queued.
        progress: Share of its work that is done, from 0 to 1; None if it does not run, or unknown.
        estimated_seconds: Seconds until its end; None if unknown.
        expires_at: When it expires if it has not begun.
        has_result: Whether ``Client.job_result`` has an answer; so has a job that failed with an error answer.
        output: The upload of the result, if one was requested.
    """

    id: str
    endpoint: str
    prompt: str | None = None
    status: JobStatus
    error: JobFailure | None = None
    attempts: int
    position: int | None = None
    progress: float | None = None
    estimated_seconds: float | None = None
    created_at: int
    expires_at: int
    started_at: int | None = None
    finished_at: int | None = None
    has_result: bool = False
    output: JobOutput | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job is finished."""
        return self.status in OVER


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """State that a job entered, and when; the latest one has the whole ``job``."""

    id: str
    status: JobStatus
    at: float
    job: StoredJob | None = None


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a running job: the share of its work that is done, and the seconds until its end if known."""

    id: str
    progress: float
    estimated_seconds: float | None = None


class CancelledJobs(msgspec.Struct, frozen=True, kw_only=True):
    """IDs of the jobs that a call cancelled, and those of its other IDs: of finished and of unknown jobs."""

    cancelled: tuple[str, ...]
    not_cancelled: tuple[str, ...]


class JobFields(PageFields, total=False):
    """Filter and page selection of a list of jobs.

    Attributes:
        status: Only jobs in these states.
        endpoint: Only jobs of this path.
        prefix: Only jobs whose ID begins with this.
    """

    status: JobStatus | Sequence[JobStatus]
    endpoint: str
    prefix: str


def job_reader() -> TypedReader[JobEvent | JobProgress]:
    """Return a decoder of the events of a job."""
    types: dict[str, type[JobEvent | JobProgress]] = {f"job.{status}": JobEvent for status in get_args(JobStatus)}
    return TypedReader(types | {"job.progress": JobProgress}, frozenset(f"job.{status}" for status in OVER), 1)


class JobMethods(HttpClient):
    """Methods of the client for jobs."""

    async def begin_job(
        self,
        endpoint: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        put_url: str | None = None,
    ) -> StoredJob:
        """Create a job: a request that the server runs in the background, also after a restart.

        Args:
            endpoint: Path of the request, such as /v1/images/generations.
            body: Body of the request.
            timeout_s: Seconds within which it must begin; None: a day.
            put_url: Presigned https URL to which the server also uploads the answer; None: no upload.

        Returns:
            The job, which is on the disk of the server.

        Raises:
            InvalidRequest: A value is wrong.
        """
        return await self._call("POST", JOBS, StoredJob, _fields(endpoint, body, timeout_s, put_url))

    async def put_job(
        self,
        job_id: str,
        endpoint: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        put_url: str | None = None,
    ) -> StoredJob:
        """Create a job with an ID of your own; repeating the call, such as after a lost answer, creates no second job.

        Args:
            job_id: ID of the job, 1 to 64 letters, digits, dashes or underscores.
            endpoint: Path of the request, such as /v1/images/generations.
            body: Body of the request.
            timeout_s: Seconds within which it must begin; None: a day.
            put_url: Presigned https URL to which the server also uploads the answer; None: no upload.

        Returns:
            The job, which is on the disk of the server.

        Raises:
            InvalidRequest: A value is wrong, or the job exists with another endpoint or body.
        """
        return await self._call("PUT", resource(JOBS, job_id), StoredJob, _fields(endpoint, body, timeout_s, put_url))

    async def jobs(self, **fields: Unpack[JobFields]) -> Listed[StoredJob]:
        """List one page of the jobs.

        Args:
            **fields: Optional request fields, see ``JobFields``.

        Returns:
            The jobs, the newest first unless ``order`` says otherwise.
        """
        return await self._call("GET", f"{JOBS}?{urlencode(fields, doseq=True)}" if fields else JOBS, Listed[StoredJob])

    async def job(self, job_id: str) -> StoredJob:
        """Fetch the current state of a job.

        Args:
            job_id: The ID of the job.

        Returns:
            The job.

        Raises:
            InvalidRequest: No job has this ID.
        """
        return await self._call("GET", resource(JOBS, job_id), StoredJob)

    def job_events(self, job_id: str, after: int = 0) -> AsyncStream[JobEvent | JobProgress]:
        """Follow a job until it is over: first the states that it has entered already, and its progress.

        Args:
            job_id: The ID of the job.
            after: Number of states that are known already, which the stream leaves out.

        Returns:
            A stream of events; leaving it does not stop the job.

        Raises:
            InvalidRequest: No job has this ID.
        """
        return self._events(resource(JOBS, job_id, "events"), job_reader(), {"Last-Event-ID": str(after)})

    async def job_result(self, job_id: str) -> bytes:
        """Fetch the answer of a job, which is that of the request itself.

        Args:
            job_id: The ID of the job.

        Returns:
            The body of the answer, JSON.

        Raises:
            DiffserveError: The job has no result yet, or its answer is an error, which is raised.
        """
        return await self._fetch("GET", resource(JOBS, job_id, "result"))

    async def cancel_job(self, job_id: str) -> StoredJob:
        """Cancel a job.

        Args:
            job_id: The ID of the job.

        Returns:
            The job in its new state.

        Raises:
            InvalidRequest: The job is already over.
        """
        return await self._call("POST", resource(JOBS, job_id, "cancel"), StoredJob)

    async def cancel_jobs(
        self,
        ids: Sequence[str] | None = None,
        *,
        status: Sequence[Literal["queued", "running", "paused"]] | None = None,
        endpoint: str | None = None,
    ) -> CancelledJobs:
        """Cancel several jobs: those that all of the given conditions select; ``ids`` or ``status`` is needed.

        Args:
            ids: IDs of at most 1000 jobs.
            status: States of the jobs.
            endpoint: Path of their requests.

        Returns:
            The IDs of the cancelled jobs, and the other ones of ``ids``.

        Raises:
            InvalidRequest: A value is wrong or missing.
        """
        fields = {"ids": ids, "status": status, "endpoint": endpoint}
        body = {name: value for name, value in fields.items() if value is not None}
        return await self._call("POST", f"{JOBS}/cancel", CancelledJobs, body)

    async def pause_job(self, job_id: str) -> StoredJob:
        """Hold back a job; one that runs is stopped and continues from its last captured state when it is resumed.

        Args:
            job_id: The ID of the job.

        Returns:
            The job in its new state.

        Raises:
            InvalidRequest: The job is already over.
        """
        return await self._call("POST", resource(JOBS, job_id, "pause"), StoredJob)

    async def resume_job(self, job_id: str) -> StoredJob:
        """Return a paused job to its place in the queue.

        Args:
            job_id: The ID of the job.

        Returns:
            The job in its new state.

        Raises:
            InvalidRequest: The job is not paused.
        """
        return await self._call("POST", resource(JOBS, job_id, "resume"), StoredJob)

    async def retry_job(self, job_id: str) -> StoredJob:
        """Run a job again that failed, expired or was cancelled.

        Args:
            job_id: The ID of the job.

        Returns:
            The job in its new state.

        Raises:
            InvalidRequest: The job is in another state.
        """
        return await self._call("POST", resource(JOBS, job_id, "retry"), StoredJob)

    async def delete_job(self, job_id: str) -> bool:
        """Delete a finished job with its result.

        Args:
            job_id: The ID of the job.

        Returns:
            True if it was deleted, False if it does not exist.
        """
        return await self._succeeds("DELETE", resource(JOBS, job_id), "job_not_found")


def _fields(endpoint: str, body: Mapping[str, Any], timeout_s: float | None, put_url: str | None) -> bytes:
    """Encode the body of a request for a job."""
    fields: dict[str, Any] = {"endpoint": endpoint, "body": body}
    if timeout_s is not None:
        fields["timeout_s"] = timeout_s
    if put_url is not None:
        fields["output"] = {"put_url": put_url}
    return encode_json(fields)
