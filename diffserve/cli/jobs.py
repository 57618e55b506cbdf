"""``diffserve jobs``: list, follow and control the jobs of a server."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from diffserve.api.bounds import check
from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.cli.generate import EXIT_FAILED
from diffserve.cli.outputs import write_output
from diffserve.cli.remote import with_command_line_hints
from diffserve.client import (
    Client,
    JobEvent,
    JobFields,
    JobProgress,
    JobStatus,
    StoredJob,
)
from diffserve.client.errors import PASSING_CODES

PAGE: Final = 100
"""Largest number of jobs in one answer of the server."""

COLUMNS: Final = ("id", "status", "position", "progress", "left", "endpoint", "created")
RETRY_S: Final = 1.0
MAX_SILENCE_S: Final = 300.0
"""How long ``watch`` waits for a server that has stopped or refuses to answer for now."""


@contextmanager
def opened(server: str) -> Iterator[Client]:
    """Open a client of ``server`` whose errors have hints for command line users."""
    with Client(server) as client, with_command_line_hints():
        yield client


def show_list(server: str, status: str | None, endpoint: str | None, limit: int, *, is_json: bool) -> int:
    """Print the newest ``limit`` jobs that the filter selects."""
    check(limit >= 1, f"--limit must be at least 1, got {limit}.", "--limit")
    fields = JobFields()
    if status is not None:
        fields["status"] = cast(JobStatus, status)
    if endpoint is not None:
        fields["endpoint"] = endpoint
    listed: list[StoredJob] = []
    with opened(server) as client:
        has_more = True
        while has_more and len(listed) < limit:
            fields["limit"] = min(PAGE, limit - len(listed))
            page = client.jobs(**fields)
            listed += page.data
            fields["after"] = listed[-1].id if listed else ""
            has_more = page.has_more and bool(page.data)
    show(listed, is_json=is_json)
    if has_more:
        print("there are more jobs; give --limit N to see them", file=sys.stderr)
    return 0


def show_one(server: str, job_id: str, *, is_json: bool) -> int:
    """Print all fields of a job."""
    with opened(server) as client:
        job = client.job(job_id)
    if is_json:
        show([job], is_json=True)
        return 0
    fields = {**_cells(job), "prompt": _in_one_line(job.prompt or "")}
    fields |= {"attempts": str(job.attempts), "started": _time(job.started_at)}
    fields |= {"finished": _time(job.finished_at), "expires": _time(job.expires_at)}
    fields |= {"error": f"{job.error.code}: {job.error.message}"} if job.error is not None else {}
    for name, value in fields.items():
        if value:
            print(f"{name:<9} {value}")
    return 0


def watch(server: str, job_id: str, *, is_json: bool) -> int:
    """Print states and progress of a job until it is over, also over restarts of the server and of its database.

    Returns:
        0 if the job succeeded, else 1.
    """
    num_seen = 0
    lost_s: float | None = None
    while True:
        try:
            with opened(server) as client, client.job_events(job_id, num_seen) as events:
                lost_s = None
                for event in events:
                    num_seen += isinstance(event, JobEvent)
                    print(msgspec.json.encode(event).decode() if is_json else _event_text(event), flush=True)
                    if isinstance(event, JobEvent) and event.job is not None and event.job.is_over:
                        return 0 if event.status == "succeeded" else EXIT_FAILED
        except DiffserveError as error:
            lost_s = time.monotonic() if lost_s is None else lost_s
            if num_seen == 0 or error.code not in PASSING_CODES or time.monotonic() > lost_s + MAX_SILENCE_S:
                raise
        time.sleep(RETRY_S)


def change(server: str, job_ids: Sequence[str], act: Callable[[Client, str], StoredJob], *, is_json: bool) -> int:
    """Apply ``act`` to each job in turn, and print its new state; the first error ends it."""
    with opened(server) as client:
        for job_id in job_ids:
            job = act(client, job_id)
            print(msgspec.json.encode(job).decode() if is_json else f"{job.id} is {job.status}")
    return 0


def cancel(server: str, job_ids: Sequence[str], status: Sequence[Any], endpoint: str | None, *, is_json: bool) -> int:
    """Cancel jobs by ID or filter, and print their IDs.

    Returns:
        0, or 1 if a job with a given ID was not cancelled.
    """
    check(bool(job_ids or status), "no job is given; give IDs of jobs, or --status queued.", "ID")
    with opened(server) as client:
        answer = client.cancel_jobs(job_ids or None, status=status or None, endpoint=endpoint)
    if is_json:
        print(msgspec.json.encode(answer).decode())
    else:
        for name in answer.cancelled:
            print(f"{name} is cancelled")
        for name in answer.not_cancelled:
            print(f"{name} is not cancelled: it is over, or there is no such job", file=sys.stderr)
        if not job_ids:
            print(f"{len(answer.cancelled)} jobs are cancelled", file=sys.stderr)
    return EXIT_FAILED if answer.not_cancelled else 0


def result(server: str, job_id: str, output: Path | None) -> int:
    """Print the answer of a job, or write its images to the folder ``output``."""
    with opened(server) as client:
        body = client.job_result(job_id)
    if output is not None and output.exists() and not output.is_dir():
        raise InvalidRequest(f"--output is {str(output)!r}, which is a file; give a folder.", param="--output")
    if output is None:
        sys.stdout.buffer.write(body + b"\n")
        sys.stdout.buffer.flush()
        return 0
    images, suffix = _images_in(body)
    if not images:
        message = f"the answer of {job_id} has no images; leave --output out to print it."
        raise InvalidRequest(message, param="--output")
    output.mkdir(parents=True, exist_ok=True)
    names = [f"{job_id}-{number}" for number in range(1, len(images) + 1)] if len(images) > 1 else [job_id]
    for name, image in zip(names, images, strict=True):
        file = output / f"{name}.{suffix}"
        write_output(file, base64.b64decode(image))
        print(file)
    return 0


def show(listed: Sequence[StoredJob], *, is_json: bool) -> None:
    """Print jobs as aligned columns, or as one JSON object per line."""
    if is_json:
        for job in listed:
            print(msgspec.json.encode(job).decode())
        return
    rows = [dict(zip(COLUMNS, COLUMNS, strict=True)), *map(_cells, listed)]
    widths = {name: max(len(row[name]) for row in rows) for name in COLUMNS}
    for row in rows:
        print("  ".join(row[name].ljust(widths[name]) for name in COLUMNS).rstrip())


def _cells(job: StoredJob) -> dict[str, str]:
    return {
        "id": job.id,
        "status": job.status,
        "position": "" if job.position is None else str(job.position),
        "progress": "" if job.progress is None else f"{job.progress:.0%}",
        "left": "" if job.estimated_seconds is None else f"{job.estimated_seconds:.0f} s",
        "endpoint": job.endpoint,
        "created": _time(job.created_at),
    }


def _event_text(event: JobEvent | JobProgress) -> str:
    if isinstance(event, JobProgress):
        left = "" if event.estimated_seconds is None else f", {event.estimated_seconds:.0f} s left"
        return f"{event.progress:.0%}{left}"
    error = event.job.error if event.job is not None else None
    return f"{_time(event.at)} {event.status}{'' if error is None else f': {error.message}'}"


def _in_one_line(text: str) -> str:
    """Return ``text`` without characters that move the cursor of a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


class _Image(msgspec.Struct):
    b64_json: str = ""


class _ImageCall(msgspec.Struct):
    type: str = ""
    result: str | None = None
    output_format: str = "png"


class _Answer(msgspec.Struct):
    """Images of OpenAI's images (``data``) and responses (``output``), or of A1111's API (``images``, ``image``)."""

    data: list[_Image] = []
    output: list[_ImageCall] = []
    images: list[str] = []
    image: str = ""
    output_format: str = "png"


def _images_in(body: bytes) -> tuple[list[str], str]:
    """Return the images in an answer, in base64, and the suffix of their files."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except msgspec.MsgspecError:
        return [], ""
    calls = [call for call in answer.output if call.type == "image_generation_call" and call.result]
    called = (call.result or "" for call in calls)
    candidates: Iterable[str] = (*(entry.b64_json for entry in answer.data), *called, *answer.images, answer.image)
    output_format = calls[0].output_format if calls else answer.output_format
    return [image for image in candidates if image], {"jpeg": "jpg"}.get(output_format, output_format)
