"""``POST /v1/images/generations``, and how to cancel it: read, check, paint, deliver; stop when the client is gone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.config import ServeConfig
from diffserve.errors import DiffserveError, EngineUnavailable, NumericalError
from diffserve.logs import reason_of
from diffserve.service.admission import Admission, Backlog, Ticket, work_of
from diffserve.service.endpoint import Endpoint, Place
from diffserve.service.engine.client import EngineClient
from diffserve.service.http.bodies import show
from diffserve.service.http.errors import HttpError, told
from diffserve.service.http.streams import Events
from diffserve.service.images.events import ImageEvents
from diffserve.service.images.kept_pictures import KeptPictures, PictureUrls, base_url_of
from diffserve.service.images.painting import CheckedImages, answer, image_entry, plan_painting
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.lifecycle import Gate, json_response
from diffserve.service.models import check_model
from diffserve.service.texts.schemas import RewriterMode
from diffserve.types import Accepted, ImageFailed, ImageResult, Painted, Preview, Progress, Queued

P = ParamSpec("P")
T = TypeVar("T")

OUR_CODES: Final = frozenset(kind.default_code for kind in (DiffserveError, NumericalError, EngineUnavailable))
"""Of failures that are not the client's mistake."""

log = logging.getLogger("diffserve.http")


class Generations(Endpoint[GenerateBody, CheckedImages]):
    """The endpoint. Pictures are encoded in threads, as many at a time as there are cores."""

    body = GenerateBody
    ending = b""

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
        super().__init__(engine, config, gate, admission)
        self._rewriter: RewriterMode = rewriter
        self._pictures = pictures
        self._encoders = asyncio.Semaphore(os.cpu_count() or 1)

    @property
    def _backlog(self) -> Backlog:
        return self._admission.images

    async def _check(self, body: GenerateBody, request: Request, client: str) -> tuple[CheckedImages, Place]:
        info = self._engine.info
        if info is None:
            raise EngineUnavailable("the engine is loading its model; please try again in a moment.")
        check_model(body.model, info, self._engine.text_info)
        painting = plan_painting(
            body, info, self._config, request.state.request_id, client=client, rewriter=self._rewriter
        )
        if self._pictures is not None and painting.has_urls:
            urls = PictureUrls(self._pictures, base_url_of(request, self._config.public_url))
            painting = msgspec.structs.replace(painting, urls=urls)
        work = work_of(painting.request, info)
        return painting, self._backlog.entered(client, work, painting.request.num_images)

    async def cancel(self, request: Request) -> Response:
        """End the request whose id stands in the address; its lanes are free at the next step."""
        request_id = str(request.path_params["request_id"])
        if not await self._in_flight.cancel(request_id):
            raise HttpError(
                404, f"no request {show(request_id)} is being painted; it may be over.", code="request_not_found"
            )
        return JSONResponse({"id": request_id, "object": "image.generation", "status": "cancelled"})

    async def _answer(self, painting: CheckedImages, ticket: Ticket) -> Response:
        warnings = list(painting.warnings)
        results: list[ImageResult] = []
        entries: dict[int, dict[str, Any]] = {}
        async with self._engine.submit(painting.request, ticket.watch) as job:
            async for event in job:
                match event:
                    case Accepted():
                        warnings += event.warnings
                    case Painted():
                        results.append(event.result)
                        entry = await self._in_thread(image_entry, painting, event.result)
                        entries[event.result.image_index] = entry
                    case ImageFailed():
                        warnings.append(f"image {event.image_index} failed: {_blamed(event)}")
        if not results:
            raise DiffserveError("the engine finished without a picture.")
        said = (text for result in results for text in result.warnings)
        warnings = list(dict.fromkeys([*warnings, *said, *painting.url_warnings]))
        data = [entries[index] for index in sorted(entries)]
        content = await asyncio.to_thread(answer, painting, results, data, warnings)
        return json_response(content, warnings)

    async def _events(self, painting: CheckedImages, ticket: Ticket) -> Events:
        events, warnings = ImageEvents(painting), list(painting.warnings)
        async with self._engine.submit(painting.request, ticket.watch) as job:
            async for event in job:
                chunk: bytes | None = None
                match event:
                    case Accepted():  # the first: with the id, by which the request can be cancelled
                        warnings += event.warnings
                        chunk = events.progress(step=0, queue_position=event.queue_position, seed=event.seed)
                    case Queued():
                        chunk = events.progress(step=0, queue_position=event.queue_position)
                    case Progress():
                        chunk = events.progressed(event)
                    case Preview():
                        chunk = await self._in_thread(events.partial, event)
                    case Painted():
                        said = list(dict.fromkeys([*warnings, *event.result.warnings]))
                        chunk = await self._in_thread(events.completed, event.result, said)
                    case ImageFailed():
                        _blamed(event)
                        chunk = events.image_failed(event)
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
