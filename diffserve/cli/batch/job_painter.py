"""Backend of a batch on a server: every line is a job there, which survives the end of both processes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest, QueueFull
from diffserve.cli.batch.lines import Line, Outcome
from diffserve.cli.batch.painters import (
    LOADING_TIMEOUT_S,
    PaintedFile,
    ReportProgress,
    ServerPainter,
    Stopped,
    received_file,
)
from diffserve.cli.remote import with_command_line_hints
from diffserve.client import (
    Client,
    CompletedImage,
    Images,
    JobEvent,
    JobProgress,
    StoredJob,
    Stream,
)
from diffserve.client.errors import PASSING_CODES
from diffserve.client.images import EDITS, GENERATIONS
from diffserve.client.recipe import Recipe

TIMEOUT_S: Final = 7 * 24 * 3600.0
RETRY_S: Final = 1.0
WITHOUT_JOBS: Final = frozenset({"keys_needed", "unknown_url", "body_too_large"})
"""Error codes of servers that store nothing for this client, and of images that are too large for JSON: lines are then
ordinary requests."""


class JobPainter:
    """Generates images with jobs of a server.

    The ID of a job is a digest of the line and of the output folder: the same command finds its jobs again, and a
    batch in another folder has jobs of its own.

    Args:
        client: Client of the server.
        model: Model of lines that name none; None: the default one.
        folder: The output folder.
    """

    def __init__(self, client: Client, model: str | None, folder: Path) -> None:
        self._client = client
        self._model = {} if model is None else {"model": model}
        self._folder = str(folder.absolute())
        self._without_jobs = ServerPainter(client, model)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._active: dict[str, Stream[JobEvent | JobProgress] | None] = {}

    def paint(self, line: Line, report_progress: ReportProgress) -> list[PaintedFile]:
        """Return all images of a line, as described in ``LinePainter.paint``."""
        job_id = self._job_id(line)
        with self._following(job_id), with_command_line_hints():
            try:
                job = self._begin(job_id, line.fields)
            except DiffserveError as error:
                if error.code not in WITHOUT_JOBS:
                    raise
                return self._without_jobs.paint(line, report_progress)
            if not job.is_over:
                job = self._follow(job_id, report_progress)
            if not job.has_result:
                code, message = (
                    (job.error.code, job.error.message) if job.error else (job.status, f"it was {job.status}.")
                )
                raise DiffserveError(f"job {job_id} has no result: {message}", code=code)
            answer = msgspec.json.decode(self._client.job_result(job_id), type=Images)
        return [received_file(image) for image in _completed(answer)]

    def forget(self, outcome: Outcome) -> None:
        """Delete the job of a line whose result is recorded."""
        if outcome.digest:
            with suppress(DiffserveError):
                self._client.delete_job(self._job_id(outcome))

    def stop(self) -> None:
        """Cancel the jobs of all lines in progress; the server stops the work at its next step."""
        self._stopped.set()
        self._without_jobs.stop()
        with self._lock:
            active = dict(self._active)
        with suppress(DiffserveError):
            if active:
                self._client.cancel_jobs(list(active))
        for stream in active.values():
            if stream is not None:
                stream.close()

    def _job_id(self, line: Line | Outcome) -> str:
        parts = (self._folder, line.id, line.digest, self._model)
        return f"batch-{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]}"

    @contextmanager
    def _following(self, job_id: str) -> Iterator[None]:
        """Register the job ``job_id`` as active during the block, so that ``stop`` cancels it."""
        with self._lock:
            self._active[job_id] = None
        try:
            yield
        finally:
            with self._lock:
                del self._active[job_id]

    def _begin(self, job_id: str, fields: Mapping[str, Any]) -> StoredJob:
        """Create the job, or return the one of an earlier run, which runs again if it was not successful."""
        body = {name: value for name, value in {**self._model, **fields}.items() if name != "stream"}
        endpoint = EDITS if body.get("image") is not None else GENERATIONS
        while not self._stopped.is_set():
            try:
                job = self._client.put_job(job_id, endpoint, body, timeout_s=TIMEOUT_S)
                if job.status in ("failed", "cancelled", "expired"):
                    job = self._client.retry_job(job_id)
            except QueueFull as full:
                self._stopped.wait(max(0.1, full.retry_after_s))
            except InvalidRequest as error:
                if error.code != "too_many_jobs":
                    raise
                self._stopped.wait(RETRY_S)
            else:
                if self._stopped.is_set():
                    self._client.cancel_jobs([job_id])
                    break
                return job
        raise Stopped

    def _follow(self, job_id: str, report_progress: ReportProgress) -> StoredJob:
        """Return the finished job; a server that stops, or refuses to answer, has ``LOADING_TIMEOUT_S`` to return."""
        lost_s: float | None = None
        while not self._stopped.is_set():
            try:
                with self._client.job_events(job_id) as events:
                    lost_s = None
                    with self._lock:
                        self._active[job_id] = events
                    for event in events:
                        if isinstance(event, JobProgress):
                            report_progress(event.progress)
                        elif event.job is not None and event.job.is_over and not self._stopped.is_set():
                            return event.job
            except DiffserveError as error:
                lost_s = time.monotonic() if lost_s is None else lost_s
                if error.code not in PASSING_CODES or time.monotonic() > lost_s + LOADING_TIMEOUT_S:
                    raise
            self._stopped.wait(RETRY_S)
        raise Stopped


def _completed(answer: Images) -> list[CompletedImage]:
    """Return the images of an answer with the fields that they have in a stream."""
    shared = {name: getattr(answer, name) for name in Recipe.__struct_fields__}
    return [
        CompletedImage(**shared, **msgspec.structs.asdict(image), created_at=answer.created, image_index=index)
        for index, image in enumerate(answer.images)
    ]
