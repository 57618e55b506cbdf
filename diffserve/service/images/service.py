"""The image service: plans image requests, runs them, and streams their events; all image endpoints share one."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final, NamedTuple, ParamSpec, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request

from diffserve.api.errors import DiffserveError, EngineUnavailable, ModelLoadError, ModerationBlocked, NumericalError
from diffserve.api.types import Accepted, ImageFailed, ImageFinished, ImageResult, ModelInfo, Preview, Progress, Queued
from diffserve.client.on_behalf import HEADER as ON_BEHALF
from diffserve.client.on_behalf import asker_in
from diffserve.logs import reason_of
from diffserve.media import images
from diffserve.media.decoders import ImageDecoder, ImageReader, shared_decoders
from diffserve.media.provenance import Marks
from diffserve.models.upscalers import UpscalerFolders
from diffserve.service.admission import Resumed, Ticket, work_of
from diffserve.service.endpoint import ServiceContext
from diffserve.service.engine.capture_files import CaptureFiles
from diffserve.service.http.addresses import share_of
from diffserve.service.http.outgoing import OutgoingClient
from diffserve.service.http.streams import Events
from diffserve.service.images.fetching import Fetcher
from diffserve.service.images.image_history import HistoryWriter, ImageHistory
from diffserve.service.images.image_store import ImageStore, ImageUrls, base_url_of
from diffserve.service.images.inputs import Start, read_start
from diffserve.service.images.openai_encoder import Collector, EventEncoder, image_entry
from diffserve.service.images.plan import ImagePlan, plan_images
from diffserve.service.images.schemas import GenerateBody, StartBody
from diffserve.service.lifecycle import while_connected
from diffserve.service.models import find_model, refused_fields
from diffserve.service.safety import Safety
from diffserve.service.stored.files import FilePictures
from diffserve.service.texts.schemas import RewriterMode
from diffserve.service.threads import ANSWERS, EncodingQueue
from diffserve.settings.config import Settings

P = ParamSpec("P")
T = TypeVar("T")

FETCHES_AT_ONCE: Final = 8
"""Images that are fetched from their addresses at the same time."""

SERVER_ERROR_CODES: Final = frozenset(kind.default_code for kind in (DiffserveError, NumericalError, EngineUnavailable))
"""Codes of failures that the client did not cause."""

WATERMARK_STAYS: Final = (
    "watermark: false has no effect; only the server's configuration can disable it (--no-watermark)."
)
NO_IMAGE: Final = "the engine finished without an image."

log = logging.getLogger("diffserve.http")


class ImageChecks(NamedTuple):
    """Processing of received and generated images, created once per server.

    Attributes:
        fetcher: Downloads images that requests name by URL.
        marks: Watermark and metadata of generated images.
        safety: Filter of prompts and finished images; None: no filter.
        files: Finds images that requests name by the id of an uploaded file.
    """

    fetcher: Fetcher
    marks: Marks
    safety: Safety | None = None
    files: FilePictures = FilePictures(None, None)

    @classmethod
    def of(cls, settings: Settings) -> ImageChecks:
        """Create the checks of a configuration; takes as long as loading the safety filter.

        Raises:
            ConfigError: A setting cannot be used.
        """
        client = OutgoingClient(settings.serve.fetch_hosts, at_once=FETCHES_AT_ONCE)
        return cls(Fetcher(client), Marks.of(settings.serve), Safety.of(settings))

    def stop(self) -> None:
        """Stop the safety filter."""
        if self.safety is not None:
            self.safety.stop()


class ImageService:
    """Plans and runs image requests; one is shared by all image endpoints.

    Images are encoded in threads, as many at a time as there are cores, small images first.
    """

    def __init__(
        self,
        context: ServiceContext,
        *,
        rewriter: RewriterMode,
        checks: ImageChecks,
        store: ImageStore | None = None,
        history: ImageHistory | None = None,
    ) -> None:
        """Create the service.

        Args:
            context: Objects of the server that its endpoints share.
            rewriter: Whether prompts are rewritten if a request does not say.
            checks: What images pass on their way in and out.
            store: Stores images for their URLs; None: images have no URLs.
            history: Records images; None: no history.
        """
        self.context = context
        self.engine, self.config = context.engine, context.config
        self._rewriter: RewriterMode = rewriter
        self._checks = checks
        self._store = store
        self._history = history
        self._encoding_queue, self._decoders = EncodingQueue(os.cpu_count() or 1), shared_decoders()

    @property
    def has_filter(self) -> bool:
        """Whether a safety filter judges prompts and finished images."""
        return self._checks.safety is not None

    def model(self, name: str | None) -> ModelInfo:
        """Return the image model of a name; None: the default model.

        Raises:
            ModelNotFound: There is no such model.
            ModelLoadError: The model could not be loaded; the engine tries again.
        """
        try:
            return find_model(name, self.engine.models, self.engine.text_info)
        except ModelLoadError:
            self.engine.retry_load(name or "")
            raise

    def refused_fields(self, name: str | None) -> list[str]:
        """Return the fields of a body that a model does not take; none if there is no such model."""
        try:
            info = find_model(name, self.engine.models, self.engine.text_info)
        except DiffserveError:
            return []
        return refused_fields(info, keeps_latents=True)

    def upscaler_networks(self) -> list[str]:
        """Return the names of the upscaler networks; this reads their folders, so call it in a thread."""
        return list(UpscalerFolders(self.model(None).upscaler_dir).usable())

    def is_world_model(self, name: str | None) -> bool:
        """Return whether a model generates scenes of the embedded model's image world."""
        try:
            return find_model(name, self.engine.models, self.engine.text_info).world is not None
        except DiffserveError:
            return False  # planning the request reports the error

    @property
    def checks(self) -> ImageChecks:
        """Processing of received and generated images."""
        return self._checks

    def urls(self, request: Request) -> ImageUrls | None:
        """Return what creates the URLs of the images of a request; None: images have no URLs."""
        return None if self._store is None else ImageUrls(self._store, base_url_of(request, self.config.public_url))

    def history_writer(self, request: Request) -> HistoryWriter | None:
        """Return the writer for the images of a request; None if they are not recorded."""
        return None if self._history is None else self._history.writer(request)

    async def fill(self, request: Request, *bodies: BaseModel) -> None:
        """Replace ids of uploaded files and URLs in ``bodies`` by images. Raises InvalidRequest."""
        await self._checks.files.fill(request, *bodies)
        await self._checks.fetcher.fill(*bodies)

    async def decode(self, request: Request, client: str, read: Callable[[ImageDecoder], T]) -> T:
        """Return ``read(decoder)``, called in a thread while the client is connected."""
        return await while_connected(request, self._decoders.run(client, read))

    async def read_files(self, request: Request, *bodies: BaseModel) -> None:
        """Put images into ``bodies`` in place of the ids of uploaded files. Raises InvalidRequest."""
        await self._checks.files.fill(request, *bodies)

    async def plan(
        self,
        body: GenerateBody,
        request: Request,
        client: str,
        *,
        sources: tuple[BaseModel, ...] = (),
        start_reader: Callable[[ImageReader], Start] | None = None,
        rewriter: RewriterMode | None = None,
        preview_every: int | None = None,
        warnings: tuple[str, ...] = (),
        texts: dict[str, str] | None = None,
    ) -> ImagePlan:
        """Resolve a body into the plan that every entry point shares.

        Args:
            body: What the client asks for.
            request: The HTTP request; decoding ends when its client disconnects.
            client: The client, for fair scheduling and decoding.
            sources: Further bodies whose file ids and URLs are replaced by images.
            start_reader: Reads the start image; None: it is read from an edit or a variation.
            rewriter: Whether prompts are rewritten if the body does not say; None: as configured.
            preview_every: Steps between previews; None: as the body asks.
            warnings: Further sentences for the client.
            texts: Further texts for the safety filter, by the names of their fields.

        Raises:
            DiffserveError: The request cannot be answered, or the safety filter blocks a text.
        """
        info = self.model(body.model)
        await self.fill(request, body, *sources)
        marks, safety = self._checks.marks, self._checks.safety
        if body.watermark is False and marks.has_watermark:
            if asker_in(request.headers.get(ON_BEHALF)) is None:
                warnings = (WATERMARK_STAYS, *warnings)
            else:  # the Gradio page in this process, for measurements
                marks = marks.without_watermark()
        urls = self.urls(request)
        history = self.history_writer(request)

        def resolve(reader: ImageReader) -> ImagePlan:
            resolved, start = body, None
            if start_reader is not None:
                start = start_reader(reader)
            elif isinstance(body, StartBody):
                resolved, start = read_start(body, reader)
            return plan_images(
                resolved,
                info,
                self.config,
                request.state.request_id,
                client=client,
                share=share_of(request),
                rewriter=self._rewriter if rewriter is None else rewriter,
                start=start,
                reader=reader,
                marks=marks,
                safety=safety,
                urls=urls,
                history=history,
                preview_every=preview_every,
                warnings=warnings,
            )

        reads_files = body.controlnets or body.references or body.template not in (None, "off")
        if reads_files or start_reader is not None or isinstance(body, StartBody):
            plan = await while_connected(request, self._decoders.run(client, resolve))
        else:
            plan = resolve(images)
        if safety is not None:
            with self._traced(plan.request.request_id, "safety"):
                await self.encode_in_thread(0, safety.check_texts, plan.request.texts | (texts or {}))
        captures: CaptureFiles | None = getattr(request.state, "captures", None)
        return plan if captures is None else msgspec.structs.replace(plan, capture_file=captures.next())

    def admit(self, plan: ImagePlan) -> AbstractContextManager[Ticket]:
        """Return the slot of a plan in the backlog; entering it raises QueueFull."""
        request, info = plan.request, self.model(plan.request.model)
        work = work_of(request, info, self.engine.info)
        backlog = self.context.admission.images
        return backlog.entered(request.client, work, request.num_painted, priority=request.priority)

    async def run(self, plan: ImagePlan, ticket: Ticket) -> Collector:
        """Return all images of a plan, encoded as elements of ``data``.

        Raises:
            DiffserveError: The request failed, or no image was generated.
        """
        collector = Collector(plan, partial(image_entry, plan))
        async for _ in self.stream(plan, collector, ticket.watch, is_whole=True):
            pass
        if not collector.results:
            raise DiffserveError(NO_IMAGE)
        return collector

    async def stream(
        self, plan: ImagePlan, encoder: EventEncoder, watch: Callable[[object], None], *, is_whole: bool = False
    ) -> Events:
        """Run a plan and yield its encoded events.

        Args:
            plan: The plan.
            encoder: Encodes the events.
            watch: Receives every event of the engine.
            is_whole: Whether only finished images are wanted, so that the engine sends no other events.

        Raises:
            DiffserveError: The request failed, or the safety filter blocked all images.
        """
        warnings = list(plan.warnings)
        blocked: ModerationBlocked | None = None
        num_completed = 0
        request, file = plan.request, plan.capture_file
        if file is not None:
            request = msgspec.structs.replace(request, resume_from=await file.read())
            if request.resume_from is not None:
                watch(Resumed())
        on_capture = None if file is None else file.keep
        async with self.engine.submit(request, watch, is_whole=is_whole, on_capture=on_capture) as job:
            async for event in job:
                chunk: bytes | None = None
                match event:
                    case Accepted() | Queued():
                        if isinstance(event, Accepted):
                            warnings += event.warnings
                        chunk = encoder.queued(event)
                    case Progress():
                        chunk = encoder.progressed(event)
                    case Preview():
                        chunk = await self.encode_in_thread(plan.num_pixels, encoder.partial, event)
                    case ImageFinished(result=result):
                        try:
                            chunk = await self._encode(plan, encoder, result, warnings)
                            num_completed += 1
                        except ModerationBlocked as error:
                            blocked = error
                            chunk = encoder.withheld(result, error)
                    case ImageFailed():
                        _log_failure(event)
                        chunk = encoder.image_failed(event)
                if chunk is not None:
                    yield chunk
        if blocked is not None and not num_completed:
            raise blocked

    async def _encode(
        self, plan: ImagePlan, encoder: EventEncoder, result: ImageResult, warnings: list[str]
    ) -> bytes | None:
        sentences = list(dict.fromkeys([*warnings, *result.warnings]))
        if not encoder.encodes_images:
            return encoder.completed(result, sentences)
        with self._traced(result.request_id, "image_encode", **{"diffserve.image_index": result.image_index}):
            return await self.encode_in_thread(plan.num_pixels, encoder.completed, result, sentences)

    async def encode_in_thread(
        self, num_pixels: int, encode: Callable[P, T], *arguments: P.args, **keywords: P.kwargs
    ) -> T:
        """Return ``encode(*arguments, **named)``, called in a thread after waiting in the encoding queue."""
        async with self._encoding_queue.slot(num_pixels):
            return await ANSWERS.run(encode, *arguments, **keywords)

    @contextmanager
    def _traced(self, request_id: str, name: str, **attributes: int) -> Iterator[None]:
        """Record the block as a span of the request, if tracing is configured."""
        traces, started_ns = self.engine.metrics.traces, time.time_ns()
        try:
            yield
        finally:
            if traces is not None:
                traces.record_span(request_id, name, started_ns, **attributes)


def _log_failure(event: ImageFailed) -> None:
    """Log the failure of an image; the reason only if the server is at fault, because it may contain the prompt."""
    facts = {"request_id": event.request_id, "image_index": event.image_index, "code": event.code}
    if event.code in SERVER_ERROR_CODES:
        log.error("image failed", extra=facts | {"reason": reason_of(event.message)})
    else:
        log.warning("image failed", extra=facts)
