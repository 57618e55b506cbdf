"""``/v1/batches``: OpenAI's batch API; many requests in one file that run when no interactive request waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from fastapi import FastAPI, Query
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import InvalidRequest
from diffserve.media.client_slots import ClientSlots
from diffserve.service.http.bodies import Body, show
from diffserve.service.http.errors import HttpError
from diffserve.service.http.routing import After, Order, error_responses
from diffserve.service.images.image_store import base_url_of
from diffserve.service.lifecycle import read_body
from diffserve.service.stored.batch_runner import BatchRunner
from diffserve.service.stored.files import list_response, no_file
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import BATCHES, LISTINGS
from diffserve.store.batch_input import InputCheck, path_of
from diffserve.store.batches import Batch, Batches
from diffserve.store.database import PageSelection
from diffserve.store.files import File, Files

TIMES: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
MAX_METADATA: Final = 16
MAX_CHECKS: Final = 4
"""Input files that are checked at a time, one of each client."""


class BatchBody(Body):
    """The body of ``POST /v1/batches``."""

    model_config = ConfigDict(title="CreateBatchRequest")
    hints: ClassVar[dict[str, str]] = {
        "input_file_id": "upload a file with the purpose batch first",
        "endpoint": "give the endpoint of all lines, such as /v1/images/generations",
        "completion_window": "give 24h",
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"output_expires_after"})

    input_file_id: Annotated[str, Field(description="ID of a file with the purpose batch: one JSON object per line.")]
    endpoint: Annotated[str, Field(description="Endpoint of all lines, such as /v1/images/generations.")]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None


class BatchRoutes:
    """Routes of ``batches``, which ``runner`` runs; ``endpoints`` returns the allowed paths of lines."""

    def __init__(
        self,
        app: FastAPI,
        batches: Batches,
        files: Files,
        owners: Owners,
        runner: BatchRunner,
        endpoints: Callable[[], list[str]],
    ) -> None:
        self._batches = batches
        self._files = files
        self._owners = owners
        self._runner = runner
        self._endpoints = endpoints
        self._checks = ClientSlots(MAX_CHECKS)
        app.get("/v1/batches", summary="List batches")(self.list_batches)
        app.get("/v1/batches/{batch_id}", summary="Describe a batch")(self.retrieve)
        cancel = app.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch", responses=error_responses(409))
        cancel(self.cancel)

    async def create(self, request: Request) -> Response:
        """Create a batch.

        A file that is invalid as a whole is refused. A file with invalid lines creates a failed batch with
        ``errors``. Errors in the body of a line are written to the error file.
        """
        owner = self._owners.of(request)
        body = await read_body(request, BatchBody)
        endpoint, allowed = path_of(body.endpoint), self._endpoints()
        if endpoint not in allowed:
            message = f"endpoint is {show(body.endpoint)}; batches support {', '.join(allowed)}."
            raise InvalidRequest(message, param="endpoint")
        file = await LISTINGS.run(self._files.get, owner, body.input_file_id)
        if file is None:
            raise no_file(body.input_file_id)
        if file.purpose != "batch":
            message = f"the purpose of {file.id} is {file.purpose!r}; upload it with the purpose 'batch'."
            raise InvalidRequest(message, param="input_file_id")
        check = await self._check_input(file, endpoint)
        about = (owner, endpoint, file.id, check.num_lines, body.metadata or {}, check.problems)
        batch = await LISTINGS.run(self._batches.add, *about, base_url_of(request, ""))
        self._runner.wake()
        return JSONResponse(batch_object(batch))

    async def list_batches(
        self,
        request: Request,
        after: After = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
    ) -> Response:
        """List the batches of the key, page by page."""
        page = await LISTINGS.run(self._batches.page, self._owners.of(request), PageSelection(limit, after, order))
        return list_response(page, batch_object)

    async def retrieve(self, request: Request, batch_id: str) -> Response:
        """Answer with the state of a batch."""
        return JSONResponse(batch_object(await self._batch_of(request, batch_id)))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """Cancel a batch; finished lines stay in its files. Repeating the call is allowed."""
        batch = await self._batch_of(request, batch_id)
        moved = await LISTINGS.run(self._batches.move, batch.id, "cancelling", of=("validating", "in_progress"))
        if moved is None or moved.status not in ("cancelling", "cancelled"):
            message = f"{batch.id} is {batch.status if moved is None else moved.status}; there is nothing to cancel."
            raise HttpError(409, message, code="batch_over")
        self._runner.stop(batch.id)
        return JSONResponse(batch_object(moved))

    async def _batch_of(self, request: Request, name: str) -> Batch:
        owner = self._owners.of(request)
        batch = await LISTINGS.run(self._batches.get, name)
        if batch is None or batch.owner != owner:
            raise HttpError(404, f"you have no batch {show(name)}.", code="batch_not_found")
        return batch

    async def _check_input(self, file: File, endpoint: str) -> InputCheck:
        """Check the input ``file`` in slices, one file of each client at a time; return the finished check."""
        async with self._checks.taken(file.owner):
            await LISTINGS.run(self._files.require_share, file.owner)
            try:
                opened = await BATCHES.run(self._files.open, file)
            except FileNotFoundError:
                raise no_file(file.id) from None
            with opened:
                check = InputCheck(opened, endpoint)
                while await BATCHES.run(check.check_slice):
                    pass
        return check


def batch_object(batch: Batch) -> dict[str, Any]:
    """Return OpenAI's object for ``batch``."""
    errors = {"object": "list", "data": [msgspec.structs.asdict(problem) for problem in batch.problems]}
    has_output, has_errors = (batch.is_over and num_bytes > 0 for num_bytes in (batch.output_bytes, batch.error_bytes))
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors if errors["data"] else None,
        "input_file_id": batch.input_file,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file if has_output else None,
        "error_file_id": batch.error_file if has_errors else None,
        "created_at": int(batch.created_s),
        "expires_at": int(batch.expires_s),
        **{f"{name}_at": int(batch.times[name]) if name in batch.times else None for name in TIMES},
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "metadata": batch.metadata or None,
    }
