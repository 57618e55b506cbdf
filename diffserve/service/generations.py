"""``POST /v1/images/generations``, and how to cancel it: read, check, paint, deliver; stop when the client is gone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.config import ServeConfig
from diffserve.errors import DiffserveError, EngineUnavailable
from diffserve.service.bodies import show
from diffserve.service.engine_client import EngineClient
from diffserve.service.errors import HttpError, error_of, told
from diffserve.service.exchange import PATIENCE_S, interruption, read_body, warning_headers, work_until
from diffserve.service.gate import Gate
from diffserve.service.image_events import ImageEvents
from diffserve.service.in_flight import InFlight
from diffserve.service.models import check_model
from diffserve.service.painting import Painting, answer, image_entry, plan_painting
from diffserve.service.rewriter_choice import RewriterMode
from diffserve.service.schemas import GenerateBody
from diffserve.service.streams import Events, EventStreamResponse
from diffserve.types import Accepted, Cancelled, Failed, ImageFailed, ImageResult, Painted, Preview, Progress, Queued

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("diffserve.http")


class Generations:
    """The endpoint with what it stands on. Pictures are encoded in threads, as many at a time as there are cores."""

    def __init__(self, engine: EngineClient, config: ServeConfig, gate: Gate, *, rewriter: RewriterMode) -> None:
        self._engine = engine
        self._config = config
        self._gate = gate
        self._rewriter: RewriterMode = rewriter
        self._in_flight = InFlight()
        self._encoders = asyncio.Semaphore(os.cpu_count() or 1)

    async def create(self, request: Request) -> Response:
        """Answer one request; every error is a DiffserveError."""
        with ExitStack() as stack:
            stack.enter_context(self._gate.inside())
            body = await read_body(request, GenerateBody)
            info = self._engine.info
            if info is None:
                raise EngineUnavailable("the engine is loading its model; please try again in a moment.")
            check_model(body.model, info, self._engine.text_info)
            painting = plan_painting(body, info, self._config, request.state.request_id, rewriter=self._rewriter)
            interrupted = stack.enter_context(interruption(request))
            stack.enter_context(self._in_flight.listed(painting.request.request_id, interrupted))
            limit_s = self._config.request_timeout_s + PATIENCE_S
            if painting.is_stream:
                headers = warning_headers(list(painting.warnings))
                return await EventStreamResponse(
                    self._events(painting), interrupted, stack.pop_all(), limit_s=limit_s, headers=headers
                ).opened()
            return await work_until(interrupted, self._answer(painting), limit_s=limit_s)

    async def cancel(self, request: Request) -> Response:
        """End the request whose id stands in the address; its lanes are free at the next step."""
        request_id = str(request.path_params["request_id"])
        if not await self._in_flight.cancel(request_id):
            raise HttpError(
                404, f"no request {show(request_id)} is being painted; it may be over.", code="request_not_found"
            )
        return JSONResponse({"id": request_id, "object": "image.generation", "status": "cancelled"})

    async def _answer(self, painting: Painting) -> Response:
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
                        entries[event.result.image_index] = await self._in_thread(image_entry, painting, event.result)
                    case ImageFailed():
                        warnings.append(f"image {event.image_index} failed: {_blamed(event)}")
                    case Failed():
                        raise error_of(event)
                    case Cancelled():
                        raise EngineUnavailable("the request was cancelled by the server.")
        if not results:
            raise DiffserveError("the engine finished without a picture.")
        warnings = list(dict.fromkeys([*warnings, *(text for result in results for text in result.warnings)]))
        data = [entries[index] for index in sorted(entries)]
        content = await asyncio.to_thread(answer, painting, results, data, warnings)
        return Response(content, headers=warning_headers(warnings), media_type="application/json")

    async def _events(self, painting: Painting) -> Events:
        events, warnings = ImageEvents(painting), list(painting.warnings)
        async with self._engine.submit(painting.request) as job:
            async for event in job:
                chunk: bytes | None = None
                match event:
                    case Accepted():
                        warnings += event.warnings
                        chunk = events.accepted(event) if painting.has_progress else None
                    case Queued():
                        chunk = events.queued(event) if painting.has_progress else None
                    case Progress():
                        chunk = events.progressed(event) if painting.has_progress else None
                    case Preview():
                        chunk = await self._in_thread(events.partial, event)
                    case Painted():
                        said = list(dict.fromkeys([*warnings, *event.result.warnings]))
                        chunk = await self._in_thread(events.completed, event.result, said)
                    case ImageFailed():
                        _blamed(event)
                        chunk = events.image_failed(event)
                    case Failed():
                        raise error_of(event)
                    case Cancelled():
                        raise EngineUnavailable("the request was cancelled by the server.")
                if chunk is not None:
                    yield chunk

    async def _in_thread(self, encode: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        async with self._encoders:
            return await asyncio.to_thread(encode, *arguments, **named)


def _blamed(event: ImageFailed) -> str:
    """What the caller is told; the log keeps the rest."""
    log.error("image failed", extra={"request_id": event.request_id, "reason": event.message})
    return told(event)
