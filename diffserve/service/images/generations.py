"""``POST /v1/images/generations``, and how to cancel it: read, check, paint, deliver; stop when the client is gone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, ParamSpec, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import (
    DiffserveError,
    EngineUnavailable,
    ModelLoadError,
    ModerationBlocked,
    NumericalError,
)
from diffserve.api.types import Accepted, ImageFailed, ImageResult, Painted, Preview, Progress, Queued
from diffserve.client.on_behalf import HEADER as ON_BEHALF
from diffserve.client.on_behalf import asker_in
from diffserve.logs import reason_of
from diffserve.media.decoders import Decoder, shared_decoders
from diffserve.service.admission import Admission, Backlog, Ticket, share_of, work_of
from diffserve.service.endpoint import Endpoint, Place
from diffserve.service.engine.engines import Engines
from diffserve.service.http.bodies import show
from diffserve.service.http.errors import HttpError, told
from diffserve.service.http.middleware import TEXT_BODY_BYTES, too_long
from diffserve.service.http.streams import Events
from diffserve.service.images.answers import answer, image_entry
from diffserve.service.images.encoding_turns import EncodingTurns
from diffserve.service.images.events import ImageEvents, Teller
from diffserve.service.images.kept_pictures import KeptPictures, PictureUrls, base_url_of
from diffserve.service.images.painting import CheckedImages, Start, plan_painting
from diffserve.service.images.picture_checks import PictureChecks
from diffserve.service.images.remembering import PictureHistory
from diffserve.service.images.repeating import read_repeated
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.lifecycle import (
    PARSE_IN_THREAD_BYTES,
    Gate,
    json_response,
    owner_of,
    read_body,
    read_json,
    while_connected,
)
from diffserve.service.models import find_model, refused_fields
from diffserve.service.texts.schemas import RewriterMode
from diffserve.service.threads import ANSWERS
from diffserve.settings.config import ServeConfig

P = ParamSpec("P")
T = TypeVar("T")

OUR_CODES: Final = frozenset(kind.default_code for kind in (DiffserveError, NumericalError, EngineUnavailable))
"""Of failures that are not the client's mistake."""

MARKED: Final = "watermark: false changes nothing; the server's configuration alone can leave it out (--no-watermark)."
WITHHELD: Final = "partial pictures are withheld: the safety filter of this server judges finished ones."

log = logging.getLogger("diffserve.http")


class PaintedImages(NamedTuple):
    """The pictures of a request in order, each with its entry in an answer, and what the caller should know."""

    results: list[ImageResult]
    entries: list[dict[str, Any]]
    warnings: list[str]


class Generations(Endpoint[GenerateBody, CheckedImages]):
    """The endpoint. Pictures are encoded in threads, as many at a time as there are cores, small ones first."""

    body = GenerateBody
    ending = b""
    events: ClassVar[str] = "image_generation"
    """What the events of a stream are called by."""

    def __init__(
        self,
        engine: Engines,
        config: ServeConfig,
        gate: Gate,
        admission: Admission,
        *,
        rewriter: RewriterMode,
        checks: PictureChecks,
        pictures: KeptPictures | None = None,
        history: PictureHistory | None = None,
        beside: Generations | None = None,
    ) -> None:
        """``checks``: what pictures pass on their way.

        ``beside``: an endpoint whose requests and these are cancelled at one address, and encoded in one queue.
        """
        super().__init__(engine, config, gate, admission)
        self._rewriter: RewriterMode = rewriter
        self._pictures = pictures
        self._history = history
        self._checks = checks
        self._encoders, self._decoders = EncodingTurns(os.cpu_count() or 1), shared_decoders()
        if beside is not None:
            self._in_flight, self._encoders = beside._in_flight, beside._encoders

    @property
    def _backlog(self) -> Backlog:
        return self._admission.images

    async def _check(self, body: GenerateBody, request: Request, client: str) -> tuple[CheckedImages, Place]:
        try:
            info = find_model(body.model, self._engine.models, self._engine.text_info)
        except ModelLoadError:
            self._engine.retry_load(body.model or "")
            raise
        with_pictures = self._with_pictures(body)
        await self._checks.files.fill(request, *with_pictures)
        await self._checks.fetcher.fill(*with_pictures)
        body, start = await self._start(body, request, client)
        plan = partial(
            plan_painting, body, info, self._config, request.state.request_id,
            client=client, share=share_of(request), rewriter=self._rewriter, start=start,
        )  # fmt: skip
        if body.controlnets or start is not None:
            painting = await self._decoded(request, client, lambda decoder: plan(reader=decoder))
        else:
            painting = plan()
        painting = await self._checked(painting, body, request)
        if self._pictures is not None and painting.has_urls:
            urls = PictureUrls(self._pictures, base_url_of(request, self._config.public_url))
            painting = msgspec.structs.replace(painting, urls=urls)
        work = work_of(painting.request, info, self._engine.info)
        asked = painting.request
        return painting, self._backlog.entered(client, work, asked.num_painted, priority=asked.priority)

    def _refused(self, model: str | None) -> list[str]:
        """Return the fields that ``model`` does not take; none where there is no such model."""
        try:
            info = find_model(model, self._engine.models, self._engine.text_info)
        except DiffserveError:
            return []
        return refused_fields(info, keeps_latents=True)

    async def _read_json(self, request: Request) -> GenerateBody:
        """Read a JSON body, whose ``infotext`` fills what it leaves out."""
        data = await read_json(request)
        if b'"infotext"' not in data:
            return await read_body(request, self.body)
        names = [model.name for model in self._engine.models]
        return await ANSWERS.run(read_repeated, self.body, data, names, self._refused)

    async def _read(self, request: Request) -> GenerateBody:
        body = await self._read_json(request)
        in_pictures = sum(len(one.image) for one in body.controlnets or ())
        if len(await request.body()) - in_pictures > TEXT_BODY_BYTES:
            raise too_long(TEXT_BODY_BYTES)
        return body

    async def _checked(self, painting: CheckedImages, body: GenerateBody, request: Request) -> CheckedImages:
        """``painting`` with what its pictures pass before they leave. Raises what the prompt is refused with.

        Pictures of the way are withheld where there is a filter: it knows finished ones.
        """
        marks, safety = self._checks.marks, self._checks.safety
        if body.watermark is False and marks.has_watermark:
            if asker_in(request.headers.get(ON_BEHALF)) is None:
                painting = msgspec.structs.replace(painting, warnings=(*painting.warnings, MARKED))
            else:  # the page in this process, which measures
                marks = marks.without_watermark()
        asked = painting.request
        if safety is not None:
            with self._traced(asked.request_id, "safety"):
                await self._in_thread(0, safety.check_texts, self._texts(painting, body))
            if asked.preview_every:
                asked = msgspec.structs.replace(asked, preview_every=0)
                painting = msgspec.structs.replace(painting, warnings=(*painting.warnings, WITHHELD))
        history = None if self._history is None else self._history.of(request)
        return msgspec.structs.replace(
            painting, events=self.events, request=asked, marks=marks, safety=safety, history=history
        )

    def _texts(self, painting: CheckedImages, body: GenerateBody) -> dict[str, str]:
        """Return every text of ``body`` that reaches a text encoder, by the name of its field."""
        return painting.request.texts

    def _with_pictures(self, body: GenerateBody) -> tuple[BaseModel, ...]:
        """What of ``body`` may hold pictures, or addresses of such."""
        return (body,)

    async def _start(self, body: GenerateBody, request: Request, client: str) -> tuple[GenerateBody, Start | None]:
        """Return ``body``, and the picture that it starts from, where it does."""
        return body, None

    async def _decoded(self, request: Request, client: str, read: Callable[[Decoder], T]) -> T:
        """Return ``read(decoder)`` when it is the turn of ``client``; it ends when ``request`` is hung up."""
        return await while_connected(request, self._decoders.run(client, read))

    async def cancel(self, request: Request) -> Response:
        """End the request whose id stands in the address; its lanes are free at the next step."""
        request_id = str(request.path_params["request_id"])
        if not await self._in_flight.cancel(request_id, owner_of(request)):
            raise _not_in_flight(request_id)
        return JSONResponse({"id": request_id, "object": "image.generation", "status": "cancelled"})

    async def interrupt(self, request: Request) -> Response:
        """End the request whose id is in the address early; its own answer has the unfinished pictures."""
        request_id = str(request.path_params["request_id"])
        if not self._in_flight.has(request_id, owner_of(request)):
            raise _not_in_flight(request_id)
        self._engine.interrupt(request_id)
        return JSONResponse({"id": request_id, "object": "image.generation", "status": "interrupted"})

    async def _answer(self, painting: CheckedImages, ticket: Ticket) -> Response:
        painted = await self.painted(painting, ticket)
        if sum(len(entry["b64_json"]) for entry in painted.entries) <= PARSE_IN_THREAD_BYTES:
            return json_response(answer(painting, *painted), painted.warnings)
        content = await ANSWERS.run(answer, painting, *painted)
        return json_response(content, painted.warnings)

    async def painted(self, painting: CheckedImages, ticket: Ticket) -> PaintedImages:
        """All pictures of a request, once they are there. Raises what went wrong where there is none."""
        warnings = list(painting.warnings)
        results: list[ImageResult] = []
        entries: dict[int, dict[str, Any]] = {}
        blocked: ModerationBlocked | None = None
        async with self._engine.submit(painting.request, ticket.watch, is_whole=True) as job:
            async for event in job:
                match event:
                    case Accepted():
                        warnings += event.warnings
                    case Painted():
                        try:
                            entry = await self._encoded(painting, event.result, image_entry, painting, event.result)
                        except ModerationBlocked as error:
                            blocked = error
                            warnings.append(f"image {event.result.image_index} was withheld: {error.message}")
                            continue
                        results.append(event.result)
                        entries[event.result.image_index] = entry
                    case ImageFailed():
                        warnings.append(f"image {event.image_index} failed: {_blamed(event)}")
        if not results:
            raise blocked or DiffserveError("the engine finished without a picture.")
        said = (text for result in results for text in result.warnings)
        warnings = list(dict.fromkeys([*warnings, *said, *painting.url_warnings]))
        results.sort(key=lambda result: result.image_index)
        return PaintedImages(results, [entries[index] for index in sorted(entries)], warnings)

    def _events(self, painting: CheckedImages, ticket: Ticket) -> Events:
        return self.told(painting, ticket, ImageEvents(painting))

    async def told(self, painting: CheckedImages, ticket: Ticket, events: Teller) -> Events:
        """What ``events`` makes of everything that happens to a request. Raises what went wrong."""
        warnings = list(painting.warnings)
        blocked: ModerationBlocked | None = None
        num_told = 0
        async with self._engine.submit(painting.request, ticket.watch) as job:
            async for event in job:
                chunk: bytes | None = None
                match event:
                    case Accepted():  # the first: with the id, by which the request can be cancelled
                        warnings += event.warnings
                        chunk = events.queued(event, seed=event.seed)
                    case Queued():
                        chunk = events.queued(event)
                    case Progress():
                        chunk = events.progressed(event)
                    case Preview():
                        chunk = await self._in_thread(painting.num_pixels, events.partial, event)
                    case Painted():
                        said = list(dict.fromkeys([*warnings, *event.result.warnings]))
                        try:
                            chunk = await self._encoded(painting, event.result, events.completed, event.result, said)
                            num_told += 1
                        except ModerationBlocked as error:
                            blocked = error
                            if painting.request.num_images > 1:
                                chunk = events.image_failed(_withheld(event.result, error))
                    case ImageFailed():
                        _blamed(event)
                        chunk = events.image_failed(event)
                if chunk is not None:
                    yield chunk
        if blocked is not None and not num_told:
            raise blocked

    async def _encoded(
        self,
        painting: CheckedImages,
        result: ImageResult,
        encode: Callable[P, T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        """The same of a finished picture, its safety filter asked before."""
        own = {"diffserve.image_index": result.image_index}
        with self._traced(result.request_id, "image_encode", **own):
            return await self._in_thread(painting.num_pixels, encode, *arguments, **named)

    @contextmanager
    def _traced(self, request_id: str, name: str, **told: int) -> Iterator[None]:
        """The block is a span within that of the request, where there are traces."""
        traces, started_ns = self._engine.metrics.traces, time.time_ns()
        try:
            yield
        finally:
            if traces is not None:
                traces.beside(request_id, name, started_ns, **told)

    async def _in_thread(self, num_pixels: int, encode: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        async with self._encoders.taken(num_pixels):
            return await ANSWERS.run(encode, *arguments, **named)


def _not_in_flight(request_id: str) -> HttpError:
    message = f"no request {show(request_id)} is being painted; it may be over."
    return HttpError(404, message, code="request_not_found")


def _withheld(result: ImageResult, error: ModerationBlocked) -> ImageFailed:
    """What is told of a picture that nobody shall see."""
    return ImageFailed(
        request_id=result.request_id, image_index=result.image_index, code=error.code, message=error.message
    )


def _blamed(event: ImageFailed) -> str:
    """What the caller is told. The log gets the code, and of a mistake of ours the reason; never what was asked for."""
    facts = {"request_id": event.request_id, "image_index": event.image_index, "code": event.code}
    if event.code in OUR_CODES:
        log.error("image failed", extra=facts | {"reason": reason_of(event.message)})
    else:
        log.warning("image failed", extra=facts)
    return told(event)
