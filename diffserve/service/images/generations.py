"""``POST /v1/images/generations``, and how to cancel it: read, check, paint, deliver; stop when the client is gone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.config import ServeConfig
from diffserve.errors import DiffserveError, EngineUnavailable, NumericalError
from diffserve.logs import reason_of
from diffserve.service.admission import Admission, Ticket, work_of
from diffserve.service.drain import Gate
from diffserve.service.engine.client import EngineClient
from diffserve.service.http.bodies import show
from diffserve.service.http.errors import HttpError, error_of, told
from diffserve.service.http.streams import Events, EventStreamResponse
from diffserve.service.images.events import ImageEvents
from diffserve.service.images.kept_pictures import KeptPictures, PictureUrls, base_url_of
from diffserve.service.images.painting import CheckedImages, answer, image_entry, plan_painting
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.lifecycle import PATIENCE_S, InFlight, interruption, read_body, warning_headers, work_until
from diffserve.service.models import check_model
from diffserve.service.texts.rewriter_choice import RewriterMode
from diffserve.types import Accepted, Cancelled, Failed, ImageFailed, ImageResult, Painted, Preview, Progress, Queued

P = ParamSpec("P")
T = TypeVar("T")

OUR_CODES: Final = frozenset(kind.default_code for kind in (DiffserveError, NumericalError, EngineUnavailable))
"""Of failures that are not the client's mistake."""

log = logging.getLogger("diffserve.http")


class Generations:
    """The endpoint with what it stands on. Pictures are encoded in threads, as many at a time as there are cores."""

    def __init__(
        self,
        engine: EngineClient,
        config: ServeConfig,
        gate: Gate,
        admission: Admission,
        *,
        rewriter: RewriterMode,
        pictures: KeptPictures | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._gate = gate
        self._admission = admission
        self._rewriter: RewriterMode = rewriter
        self._pictures = pictures
        self._in_flight = InFlight()
        self._encoders = asyncio.Semaphore(os.cpu_count() or 1)

    async def create(self, request: Request) -> Response:
        """Answer one request; every error is a DiffserveError."""
        with ExitStack() as stack:
            stack.enter_context(self._gate.inside())
            client = stack.enter_context(self._admission.clients.known(request))
            self._admission.images.check(client)
            body = await read_body(request, GenerateBody)
            info = self._engine.info
            if info is None:
                raise EngineUnavailable("the engine is loading its model; please try again in a moment.")
            check_model(body.model, info, self._engine.text_info)
            painting = plan_painting(
                body, info, self._config, request.state.request_id, client=client, rewriter=self._rewriter
            )
            work = work_of(painting.request, info)
            ticket = stack.enter_context(self._admission.images.entered(client, work, painting.request.num_images))
            interrupted = stack.enter_context(interruption(request))
            stack.enter_context(self._in_flight.listed(painting.request.request_id, interrupted))
            limit_s = self._config.request_timeout_s + PATIENCE_S
            urls = self._urls(painting, request)
            if painting.is_stream:
                headers = warning_headers(list(painting.warnings))
                return await EventStreamResponse(
                    self._events(painting, urls, ticket), interrupted, stack.pop_all(), limit_s=limit_s, headers=headers
                ).opened()
            return await work_until(interrupted, self._answer(painting, urls, ticket), limit_s=limit_s)

    async def cancel(self, request: Request) -> Response:
        """End the request whose id stands in the address; its lanes are free at the next step."""
        request_id = str(request.path_params["request_id"])
        if not await self._in_flight.cancel(request_id):
            raise HttpError(
                404, f"no request {show(request_id)} is being painted; it may be over.", code="request_not_found"
            )
        return JSONResponse({"id": request_id, "object": "image.generation", "status": "cancelled"})

    def _urls(self, painting: CheckedImages, request: Request) -> PictureUrls | None:
        if self._pictures is None or not painting.has_urls:
            return None
        return PictureUrls(self._pictures, base_url_of(request, self._config.public_url))

    async def _answer(self, painting: CheckedImages, urls: PictureUrls | None, ticket: Ticket) -> Response:
        warnings = list(painting.warnings)
        results: list[ImageResult] = []
        entries: dict[int, dict[str, Any]] = {}
        async with self._engine.submit(painting.request).watched(ticket.watch) as job:
            async for event in job:
                match event:
                    case Accepted():
                        warnings += event.warnings
                    case Painted():
                        results.append(event.result)
                        entry = await self._in_thread(image_entry, painting, event.result, urls)
                        entries[event.result.image_index] = entry
                    case ImageFailed():
                        warnings.append(f"image {event.image_index} failed: {_blamed(event)}")
                    case Failed():
                        raise error_of(event)
                    case Cancelled():
                        raise EngineUnavailable("the request was cancelled by the server.")
        if not results:
            raise DiffserveError("the engine finished without a picture.")
        said = (text for result in results for text in result.warnings)
        warnings = list(dict.fromkeys([*warnings, *said, *(urls.warnings if urls else [])]))
        data = [entries[index] for index in sorted(entries)]
        content = await asyncio.to_thread(answer, painting, results, data, warnings)
        return Response(content, headers=warning_headers(warnings), media_type="application/json")

    async def _events(self, painting: CheckedImages, urls: PictureUrls | None, ticket: Ticket) -> Events:
        events, warnings = ImageEvents(painting, urls), list(painting.warnings)
        async with self._engine.submit(painting.request).watched(ticket.watch) as job:
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
    """What the caller is told. The log gets the code, and of a mistake of ours the reason; never what was asked for."""
    facts = {"request_id": event.request_id, "image_index": event.image_index, "code": event.code}
    if event.code in OUR_CODES:
        log.error("image failed", extra=facts | {"reason": reason_of(event.message)})
    else:
        log.warning("image failed", extra=facts)
    return told(event)
