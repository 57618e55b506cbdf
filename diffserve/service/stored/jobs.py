"""``/v1/jobs``: single requests that survive restarts; the answer is kept and fetched later."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import secrets
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.addresses import prefix_of
from diffserve.service.http.bodies import Body, check_finite, parse, show, show_name
from diffserve.service.http.errors import HttpError
from diffserve.service.http.forms import Form, is_form, json_fields, read_form
from diffserve.service.http.middleware import json_limit, too_long
from diffserve.service.http.openapi import IDEMPOTENCY_KEY
from diffserve.service.http.outgoing import OutgoingClient
from diffserve.service.http.routing import After, Order, error_responses
from diffserve.service.http.streams import Events, EventStreamResponse
from diffserve.service.images.image_store import base_url_of
from diffserve.service.images.schemas import MAX_PICTURES
from diffserve.service.lifecycle import (
    Draining,
    in_thread_if_long,
    interruption,
    read_body,
    read_json,
    warning_headers,
)
from diffserve.service.models import Offer
from diffserve.service.stored.background import early_answer_of, refuse_early_answers
from diffserve.service.stored.files import list_response
from diffserve.service.stored.idempotency import KEY_REUSED, REPLAYED, Idempotency, check_key, key_reused
from diffserve.service.stored.job_runner import UNKNOWN, JobRunner, Outlook
from diffserve.service.stored.owners import Owners
from diffserve.service.stored.webhooks import MAX_URL_CHARS, check_url
from diffserve.service.threads import ANSWERS, FILES, LISTINGS
from diffserve.store.batch_input import path_of
from diffserve.store.database import PageSelection
from diffserve.store.jobs import Job, JobFilter, Jobs, Status

DEFAULT_TIMEOUT_S: Final = 24 * 3600.0
LOOK_EVERY_S: Final = 1.0
STREAM_S: Final = 24 * 3600.0
MAX_IDS: Final = 1000
"""IDs in one request that cancels jobs."""
RESPOND_ASYNC: Final = "respond-async"
PREFERENCE_APPLIED: Final = "Preference-Applied"
PREFER: Final = {
    "name": "Prefer",
    "in": "header",
    "description": "respond-async: answer 202 with a job (see /v1/jobs) that does the work.",
    "schema": {"type": "string"},
}
ACCEPTED_HEADERS: Final = {
    "Location": {"description": "Path of the job.", "schema": {"type": "string"}},
    PREFERENCE_APPLIED: {"schema": {"type": "string", "const": RESPOND_ASYNC}},
}
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,63}")


class OutputBody(BaseModel):
    """Destination of the result of a job, in addition to ``GET /v1/jobs/{id}/result``."""

    model_config = ConfigDict(strict=True, extra="forbid", title="JobOutput")

    put_url: Annotated[
        str,
        Field(
            min_length=1,
            max_length=MAX_URL_CHARS,
            description="Presigned https URL (S3, GCS, MinIO) to which the answer of a successful job is PUT.",
        ),
    ]


class JobBody(Body):
    """The body of ``POST /v1/jobs``."""

    model_config = ConfigDict(title="CreateJobRequest")
    hints: ClassVar[dict[str, str]] = {
        "endpoint": "give the path of a request, such as /v1/images/generations",
        "body": "give the JSON body of that request as an object",
    }

    endpoint: Annotated[str, Field(max_length=200, description="Path of the request, such as /v1/images/generations.")]
    body: Annotated[dict[str, Any], Field(description="JSON body of the request; stream must be false.")]
    timeout_s: Annotated[
        float | None,
        Field(
            ge=1, le=7 * 24 * 3600, description="Seconds within which it must begin, else it expires; a day if unset."
        ),
    ] = None
    output: OutputBody | None = None


class CancelJobsBody(Body):
    """The body of ``POST /v1/jobs/cancel``."""

    model_config = ConfigDict(title="CancelJobsRequest")

    ids: (
        Annotated[
            list[Annotated[str, Field(max_length=200)]],
            Field(min_length=1, max_length=MAX_IDS, description="Only jobs with these IDs."),
        ]
        | None
    ) = None
    status: (
        Annotated[
            list[Literal["queued", "running", "paused"]], Field(min_length=1, description="Only jobs in these states.")
        ]
        | None
    ) = None
    endpoint: Annotated[str, Field(max_length=200, description="Only jobs of this path.")] | None = None


class JobRoutes:
    """Routes of ``jobs``, which ``runner`` runs.

    ``offers`` are the bodies of the endpoints that a job may call; ``uploads`` sends results to other servers.
    """

    def __init__(
        self,
        app: FastAPI,
        jobs: Jobs,
        owners: Owners,
        runner: JobRunner,
        offers: Mapping[str, Offer],
        uploads: OutgoingClient,
    ) -> None:
        self._jobs = jobs
        self._owners = owners
        self._runner = runner
        self._offers = offers
        self._uploads = uploads
        path = "/v1/jobs/{job_id}"
        app.get("/v1/jobs", summary="List jobs")(self.list_jobs)
        app.get(path, summary="Describe a job")(self.retrieve)
        app.get(f"{path}/result", summary="The answer of a finished job", responses=error_responses(409))(self.result)
        stream: dict[int | str, dict[str, Any]] = {
            200: {"content": {"text/event-stream": {}}},
            204: {"description": "The job is finished and Last-Event-ID is its last event."},
        }
        app.get(f"{path}/events", summary="States of a job as it enters them", responses=stream)(self.events)
        app.post(f"{path}/cancel", summary="Cancel a job", responses=error_responses(409))(self.cancel)
        app.post(f"{path}/pause", summary="Hold back a job", responses=error_responses(409))(self.pause)
        app.post(f"{path}/resume", summary="Continue a paused job", responses=error_responses(409))(self.resume)
        app.post(f"{path}/retry", summary="Run a job again", responses=error_responses(409))(self.retry)
        app.delete(path, summary="Delete a finished job", responses=error_responses(409))(self.delete)

    async def create(self, request: Request) -> Response:
        """Create a job. The answer has the status 202 and is sent after the job is on the disk."""
        return await self._create(request, f"job_{secrets.token_hex(16)}")

    async def put(self, request: Request) -> Response:
        """Create the job with this ID, or answer with the one that exists if its endpoint and body are the same."""
        name = str(request.path_params["job_id"])
        if not _ID.fullmatch(name):
            rule = "must be 1 to 64 letters, digits, dashes or underscores, starting with a letter or digit"
            raise InvalidRequest(f"the ID of a job {rule}, got {show(name)}.", param="id")
        return await self._create(request, name)

    async def _create(self, request: Request, name: str) -> Response:
        owner = self._owners.of(request)
        body = await read_body(request, JobBody)
        endpoint = self._known_path(body.endpoint)
        if endpoint not in self._offers:
            message = f"endpoint is {show(body.endpoint)}; jobs support {', '.join(sorted(self._offers))}."
            raise InvalidRequest(message, param="endpoint")
        check_finite(body.body)  # encoding would turn NaN into null
        content = msgspec.json.encode(body.body)
        max_bytes = json_limit(endpoint, sys.maxsize)
        if len(content) > max_bytes:
            raise too_long(max_bytes)
        refuse_early_answers(content, "jobs do not stream but have events", "a job runs in the background")
        output = {"base_url": base_url_of(request, "")}
        if body.output is not None:
            check_url(self._uploads, body.output.put_url, "output.put_url", "upload_hosts")
            output |= {"put_url": body.output.put_url, "status": "waiting"}
        timeout_s = body.timeout_s or DEFAULT_TIMEOUT_S
        try:
            job, is_new = await self._add(owner, name, endpoint, content, output, timeout_s)
        except InvalidRequest as error:
            if error.code == "job_exists":
                raise HttpError(409, error.message, code="job_exists") from None
            raise
        response = await self._response(job, 202 if is_new else 200)
        response.headers.update(warning_headers(body.warnings))
        return response

    async def _add(
        self,
        owner: str,
        name: str,
        endpoint: str,
        content: bytes,
        output: dict[str, str],
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> tuple[Job, bool]:
        """Check the body ``content`` and add the job; return it and whether it is new."""
        if b'"infotext"' not in content:  # it may fill in required fields when the job runs
            await in_thread_if_long(content, parse, self._offers[endpoint].body, content)
        added = await LISTINGS.run(self._jobs.add, owner, name, endpoint, content.decode(), timeout_s, output)
        self._runner.wake()
        return added

    async def begin(self, request: Request, endpoint: str, idempotency: Idempotency | None) -> Response | None:
        """Create a job from a request for ``endpoint`` with the preference ``respond-async``.

        A retry with the same ``Idempotency-Key`` gets the same job, also after a restart; a direct request with it is
        refused.

        Args:
            request: The request.
            endpoint: Its path.
            idempotency: The answers of direct requests by their ``Idempotency-Key``; None if it has none.

        Returns:
            The answer, or None if the request must be answered directly: a stream, a background response, or without
            storage for its client.

        Raises:
            HttpError: A request with its ``Idempotency-Key`` was answered directly.
        """
        owner = self._owners.owner(request)
        if owner is None:
            return None
        content = await self._body_of(request, endpoint)
        if early_answer_of(content).is_requested:
            return None
        if idempotency is not None:
            await idempotency.refuse_answered(request)
        name = _keyed_name(request, endpoint) or f"job_{secrets.token_hex(16)}"
        try:
            job, is_new = await self._add(owner, name, endpoint, content, {"base_url": base_url_of(request, "")})
        except InvalidRequest as error:
            raise (key_reused() if error.code == "job_exists" else error) from None
        response = await self._response(job, 202)
        response.headers["Location"] = f"{prefix_of(request.scope)}/v1/jobs/{job.id}"
        response.headers[PREFERENCE_APPLIED] = RESPOND_ASYNC
        if not is_new:
            response.headers[REPLAYED] = "true"
        return response

    async def refuse_begun(self, request: Request, endpoint: str) -> None:
        """Refuse the ``Idempotency-Key`` of a request that is answered directly if a job has been created with it.

        Raises:
            HttpError: There is such a job.
        """
        owner, name = self._owners.owner(request), _keyed_name(request, endpoint)
        if owner is not None and name and await LISTINGS.run(self._jobs.get, owner, name) is not None:
            message = (
                f"this {IDEMPOTENCY_KEY} began the job {name}; send Prefer: {RESPOND_ASYNC} again, or use a new key."
            )
            raise HttpError(422, message, code=KEY_REUSED)

    async def _body_of(self, request: Request, endpoint: str) -> bytes:
        """Return the body of a request as JSON; the files of a form are fields in base64."""
        body = self._offers[endpoint].body
        if is_form(request) and hasattr(body, "with_uploads"):
            form = await read_form(request, max_files=MAX_PICTURES + 1)
            for name in form.files.keys() - body.model_fields.keys():
                raise InvalidRequest(f"{show_name(name)} is not a file field.", param=show_name(name))
            return await ANSWERS.run(_form_as_json, body, form)
        data = await read_json(request)
        return await in_thread_if_long(data, _compact, body, data)

    async def list_jobs(
        self,
        request: Request,
        after: After = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
        status: Annotated[list[Status] | None, Query(description="Only these states; may be repeated.")] = None,
        endpoint: Annotated[str, Query(max_length=200, description="Only jobs of this path.")] = "",
        prefix: Annotated[str, Query(max_length=64, description="Only jobs whose ID begins with this.")] = "",
    ) -> Response:
        """List the jobs of the key, page by page."""
        selection = PageSelection(limit, after, order)
        job_filter = JobFilter(tuple(status or ()), self._known_path(endpoint), prefix)
        page = await LISTINGS.run(self._jobs.page, self._owners.of(request), selection, job_filter)
        outlooks = await self._runner.outlooks(page[0]) if page else {}
        return list_response(page, lambda job: job_object(job, outlooks[job.number]))

    async def retrieve(self, request: Request, job_id: str) -> Response:
        """Answer with the state of a job."""
        return await self._response(await self._job_of(request, job_id))

    async def result(self, request: Request, job_id: str) -> Response:
        """Answer with status and body that the request itself would have had."""
        job = await self._job_of(request, job_id)
        if not job.result_status:
            message = f"{job.id} is {job.status} and has no result{f': {job.error}' if job.error else '.'}"
            raise HttpError(409, message, code="no_result")
        try:
            body = await FILES.run(self._jobs.result, job)
        except FileNotFoundError:
            raise HttpError(404, f"the result of {job.id} was removed.", code="result_not_found") from None
        return Response(body, job.result_status, media_type="application/json")

    async def events(self, request: Request, job_id: str) -> Response:
        """Stream the states of a job until it is over; after ``Last-Event-ID`` only the later ones.

        After the last state of a finished job the answer is 204, which ends the reconnections of browsers.
        """
        job = await self._job_of(request, job_id)
        last = request.headers.get("last-event-id", "0")
        if not (last.isascii() and last.isdigit() and len(last) < 10):
            raise InvalidRequest(f"Last-Event-ID is {show(last)}; give the id of an event of this job.")
        if job.is_over and int(last) >= len(job.entered):
            return Response(status_code=204)
        with ExitStack() as stack:
            interrupted = stack.enter_context(interruption(request))
            events = self._stream(job, int(last))
            return await EventStreamResponse(events, interrupted, stack.pop_all(), limit_s=STREAM_S).opened()

    async def _stream(self, job: Job, num_sent: int) -> Events:
        sent_progress: float | None = 0.0
        while True:
            changed = self._runner.changed
            entered = job.entered
            for index, (status, at) in enumerate(entered[num_sent:], start=num_sent + 1):
                data = {"type": f"job.{status}", "id": job.id, "status": status, "at": at}
                if index == len(entered):
                    data["job"] = job_object(job, (await self._runner.outlooks([job]))[job.number])
                yield f"id: {index}\nevent: job.{status}\n".encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"
            num_sent = max(num_sent, len(entered))
            if job.is_over:
                return
            outlook = (await self._runner.outlooks([job]))[job.number] if job.status == "running" else UNKNOWN
            if outlook.progress not in (None, sent_progress):
                sent_progress = outlook.progress
                data = {"type": "job.progress", "id": job.id, "status": job.status, **outlook._asdict()}
                yield b"event: job.progress\ndata: " + msgspec.json.encode(data) + b"\n\n"
            if self._runner.is_stopping:
                raise Draining("the server is shutting down; the job continues when it is back.")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await changed.wait()
            current = await LISTINGS.run(self._jobs.get, job.owner, job.id)
            if current is None:
                raise _not_found(job.id)
            job = current

    async def cancel(self, request: Request, job_id: str) -> Response:
        """Cancel a job; one that runs is stopped within a step. The call can be repeated."""
        job = await self._job_of(request, job_id)
        cancelled = await LISTINGS.run(self._jobs.cancel, job.owner, job.id)
        if cancelled is None:
            raise _not_found(job.id)
        if cancelled.status != "cancelled":
            message = f"{job.id} is {cancelled.status}; there is nothing to cancel."
            raise HttpError(409, message, code="job_over")
        self._runner.stop(cancelled)
        return await self._response(cancelled)

    async def cancel_many(self, request: Request) -> Response:
        """Cancel all unfinished jobs that the body selects; the call can be repeated."""
        owner = self._owners.of(request)
        body = await read_body(request, CancelJobsBody)
        if body.ids is None and body.status is None:
            message = 'ids and status are missing; give the IDs of the jobs to cancel, or states, such as ["queued"].'
            raise InvalidRequest(message, param="ids", code="missing_required_parameter")
        job_filter = JobFilter(tuple(body.status or ()), self._known_path(body.endpoint or ""))
        cancelled = await LISTINGS.run(self._jobs.cancel_many, owner, body.ids, job_filter)
        for job in cancelled:
            self._runner.stop(job)
        ids = [job.id for job in cancelled]
        not_cancelled = [name for name in dict.fromkeys(body.ids or ()) if name not in set(ids)]
        return JSONResponse({"object": "job.cancellation", "cancelled": ids, "not_cancelled": not_cancelled})

    async def pause(self, request: Request, job_id: str) -> Response:
        """Hold back a queued or running job; one that runs is stopped and later continues from its captured state."""
        job = await self._job_of(request, job_id)
        paused = await LISTINGS.run(self._jobs.pause, job.owner, job.id)
        if paused is None:
            raise _not_found(job.id)
        if paused.status != "paused":
            message = f"{job.id} is {paused.status}; only a queued or running job can be paused."
            raise HttpError(409, message, code="job_over")
        self._runner.stop(paused)
        return await self._response(paused)

    async def resume(self, request: Request, job_id: str) -> Response:
        """Return a paused job to its place in the queue."""
        job = await self._job_of(request, job_id)
        resumed = await LISTINGS.run(self._jobs.resume, job.owner, job.id)
        if resumed is None:
            raise _not_found(job.id)
        if job.status != "paused" or resumed.is_over:
            message = f"{job.id} is {resumed.status}; only a paused job can be resumed."
            raise HttpError(409, message, code="job_not_paused")
        self._runner.wake()
        return await self._response(resumed)

    async def retry(self, request: Request, job_id: str) -> Response:
        """Run a job again that failed, expired or was cancelled; its result is removed."""
        job = await self._job_of(request, job_id)
        queued = await LISTINGS.run(self._jobs.retry, job.owner, job.id, job.expires_s - job.created_s)
        if queued is None:
            raise _not_found(job.id)
        if job.status not in ("failed", "cancelled", "expired"):
            message = f"{job.id} is {job.status}; only a job that failed, expired or was cancelled can run again."
            raise HttpError(409, message, code="job_not_failed")
        self._runner.wake()
        return await self._response(queued)

    async def delete(self, request: Request, job_id: str) -> Response:
        """Delete a finished job with its result."""
        job = await self._job_of(request, job_id)
        if not job.is_over:
            raise HttpError(409, f"{job.id} is {job.status}; cancel it first.", code="job_running")
        await FILES.run(self._jobs.delete, job)
        return JSONResponse({"id": job.id, "object": "job", "deleted": True})

    def _known_path(self, endpoint: str) -> str:
        """Return ``endpoint``, with ``/v1`` if only that path has jobs."""
        return path_of(endpoint) if endpoint and endpoint not in self._offers else endpoint

    async def _response(self, job: Job, status: int = 200) -> Response:
        outlooks = await self._runner.outlooks([job])
        return JSONResponse(job_object(job, outlooks[job.number]), status_code=status)

    async def _job_of(self, request: Request, name: str) -> Job:
        job = await LISTINGS.run(self._jobs.get, self._owners.of(request), name)
        if job is None:
            raise _not_found(name)
        return job


def job_object(job: Job, outlook: Outlook = UNKNOWN) -> dict[str, Any]:
    """Return the API's object for ``job``."""
    code, _, message = job.error.partition(": ")
    times = dict(job.entered)
    return {
        "id": job.id,
        "object": "job",
        "endpoint": job.endpoint,
        "prompt": job.prompt,
        "status": job.status,
        "error": {"code": code, "message": message} if job.error else None,
        "attempts": job.attempts,
        **outlook._asdict(),
        "created_at": int(job.created_s),
        "expires_at": int(job.expires_s),
        "started_at": int(times["running"]) if "running" in times else None,
        "finished_at": int(times[job.status]) if job.is_over else None,
        "has_result": job.result_status > 0,
        "output": _output_object(job),
    }


def _output_object(job: Job) -> dict[str, Any] | None:
    """Return the state of an upload, without the query of its URL, which contains a signature."""
    if "put_url" not in job.output:
        return None
    url, error = job.output["put_url"].partition("?")[0], job.output.get("error")
    return {"put_url": url, "status": job.output["status"], "error": error or None}


def _keyed_name(request: Request, endpoint: str) -> str:
    """Return the ID of the job of a request with an ``Idempotency-Key``; "" without one."""
    keys = request.headers.getlist(IDEMPOTENCY_KEY)
    if not keys:
        return ""
    digest = hashlib.sha256(f"{endpoint}\0{check_key(keys)}".encode()).hexdigest()
    return f"job_{digest[:32]}"


def prefers_async(request: Request) -> bool:
    """Return whether the client prefers an answer before the work is done (RFC 7240)."""
    preferences = ",".join(request.headers.getlist("prefer")).split(",")
    return any(preference.partition(";")[0].strip().lower() == RESPOND_ASYNC for preference in preferences)


def _compact(kind: type[Body], data: bytes) -> bytes:
    """Return the JSON object ``data`` without spaces."""
    try:
        return msgspec.json.encode(msgspec.json.decode(data, type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        parse(kind, data)  # reports the error in one sentence
        raise


def _form_as_json(kind: type[Body], form: Form[bytes]) -> bytes:
    files = {name: [base64.b64encode(data).decode() for data in uploads] for name, uploads in form.files.items()}
    fields = {name: texts[0] if len(texts) == 1 else texts for name, texts in files.items()}
    return msgspec.json.encode(json_fields(kind, form.fields) | fields)


def _not_found(name: str) -> HttpError:
    return HttpError(404, f"you have no job {show(name)}.", code="job_not_found")
