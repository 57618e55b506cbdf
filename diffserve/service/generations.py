"""``POST /v1/images/generations``: read, check, paint, deliver; stop when the client is gone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from diffserve.config import ServeConfig
from diffserve.errors import DeadlineExceeded, DiffserveError, EngineUnavailable
from diffserve.service.engine_client import EngineClient
from diffserve.service.errors import HttpError, error_of, told
from diffserve.service.gate import Gate
from diffserve.service.models import check_model
from diffserve.service.painting import Painting, answer, image_entry, plan_painting
from diffserve.service.schemas import GenerateBody, parse_body
from diffserve.types import Accepted, Cancelled, Failed, ImageFailed, ImageResult, Painted

BODY_TIMEOUT_S = 60.0
PARSE_IN_THREAD_BYTES = 256 * 1024
PATIENCE_S = 30.0  # beyond the engine's own deadline: for encoding, and for an engine that hangs
CLIENT_CLOSED_REQUEST = 499

log = logging.getLogger("diffserve.http")


class Generations:
    """The endpoint with what it stands on. Pictures are encoded in threads, as many at a time as there are cores."""

    def __init__(self, engine: EngineClient, config: ServeConfig, gate: Gate) -> None:
        self._engine = engine
        self._config = config
        self._gate = gate
        self._encoders = asyncio.Semaphore(os.cpu_count() or 1)

    async def __call__(self, request: Request) -> Response:
        """Answer one request; every error is a DiffserveError."""
        with self._gate.inside():
            check_json(request)
            body = await read_body(request)
            info = self._engine.info
            if info is None:
                raise EngineUnavailable("the engine is loading its model; please try again in a moment.")
            check_model(body.model, info)
            painting = plan_painting(body, info, self._config, request.state.request_id)
            try:
                async with asyncio.timeout(self._config.request_timeout_s + PATIENCE_S):
                    return await while_connected(request, self._paint(painting))
            except TimeoutError:
                raise DeadlineExceeded("the engine does not answer; please try again later.") from None

    async def _paint(self, painting: Painting) -> Response:
        warnings = list(painting.warnings)
        results: list[ImageResult] = []
        entries: dict[int, dict[str, Any]] = {}
        async with self._engine.submit(painting.request) as job:
            async for event in job:
                match event:
                    case Accepted():
                        warnings += event.warnings
                    case Painted():
                        results.append(event.result)
                        entries[event.result.image_index] = await self._encode(painting, event.result)
                    case ImageFailed():
                        log.error("image failed", extra={"request_id": event.request_id, "reason": event.message})
                        warnings.append(f"image {event.image_index} failed: {told(event)}")
                    case Failed():
                        raise error_of(event)
                    case Cancelled():
                        raise EngineUnavailable("the request was cancelled by the server.")
        if not results:
            raise DiffserveError("the engine finished without a picture.")
        warnings += [text for result in results for text in result.warnings]
        warnings = list(dict.fromkeys(warnings))
        data = [entries[index] for index in sorted(entries)]
        content = await asyncio.to_thread(answer, painting, results, data, warnings)
        headers = {"x-diffserve-warnings": header_text(warnings)} if warnings else None
        return Response(content, headers=headers, media_type="application/json")

    async def _encode(self, painting: Painting, result: ImageResult) -> dict[str, Any]:
        async with self._encoders:
            return await asyncio.to_thread(image_entry, painting, result)


def check_json(request: Request) -> None:
    """Only JSON that says so: a foreign page cannot send that type without the browser asking us first."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(
            415, "the body must be JSON, with the header Content-Type: application/json.", code="unsupported_media_type"
        )


async def read_body(request: Request) -> GenerateBody:
    """The checked body; a long one is parsed in a thread."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await request.body()
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s.", code="body_timeout") from None
    except ClientDisconnect:
        raise hung_up() from None
    if len(data) > PARSE_IN_THREAD_BYTES:
        return await asyncio.to_thread(parse_body, data)
    return parse_body(data)


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer that ``work`` gives; the work is cancelled as soon as the client hangs up."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise hung_up()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def hung_up() -> HttpError:
    """What is said to nobody, for the log's sake."""
    return HttpError(CLIENT_CLOSED_REQUEST, "the client hung up.", code="client_closed_request")


def header_text(warnings: list[str]) -> str:
    """``warnings`` as one header value: printable ASCII, within 1000 characters."""
    text = " | ".join(warnings).encode("ascii", "backslashreplace").decode("ascii")
    return "".join(c if c.isprintable() else " " for c in text)[:1000]
