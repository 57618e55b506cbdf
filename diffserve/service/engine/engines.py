"""The interface between the HTTP service and whatever runs its requests.

``EngineClient`` (one engine process) and ``ReplicaPool`` (several processes, or replicas on Ray) implement it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, Self, TypeVar, cast

from msgspec.structs import replace

from diffserve.api import ipc
from diffserve.api.embedding_types import EMBEDDING_TERMINAL
from diffserve.api.engine_stats import EngineStats
from diffserve.api.errors import DeadlineExceeded, DiffserveError, EngineUnavailable, InvalidRequest
from diffserve.api.rewrite_types import REWRITE_TERMINAL
from diffserve.api.stage_types import STAGE_TERMINAL
from diffserve.api.text_types import TEXT_TERMINAL, LanguageModelInfo
from diffserve.api.types import (
    TERMINAL,
    Asks,
    Cancelled,
    Captured,
    Failed,
    GenerationRequest,
    ImageFailed,
    ImageFinished,
    ModelInfo,
    Preview,
    Progress,
    Queued,
    ServedModel,
)
from diffserve.api.upscale_types import UPSCALE_TERMINAL
from diffserve.service.http.errors import error_of
from diffserve.service.metrics import Metrics
from diffserve.settings.config import Settings

FINAL_EVENTS = (*TERMINAL, *TEXT_TERMINAL, *REWRITE_TERMINAL, *EMBEDDING_TERMINAL, *UPSCALE_TERMINAL, *STAGE_TERMINAL)
"""Types of the last event of a request."""

END_OF_JOB = (*FINAL_EVENTS, DiffserveError)
"""Types after which a job is fed nothing more."""

PROGRESS_EVENTS = (Progress, Queued)
"""Types of events that are not read by callers that wait for the complete result."""

E = TypeVar("E")
Watch = Callable[[object], None]
OnCapture = Callable[[bytes], None]


class Job(Generic[E]):
    """A submitted request: an asynchronous iterator of its events that ends with the terminal one.

    Iterating raises InvalidRequest or QueueFull if the engine refuses the request, the error at which it failed, and
    EngineUnavailable if it was cancelled or its engine is lost. Leaving the ``async with`` block cancels the request.
    """

    def __init__(
        self,
        request: Asks[E],
        cancel: Callable[[str], None],
        watch: Watch | None = None,
        *,
        is_whole: bool = False,
        on_capture: OnCapture | None = None,
    ) -> None:
        """Create a job that is fed by its engine.

        Args:
            request: The submitted request.
            cancel: Called with the request id at the end of the ``async with`` block, also after the last event.
            watch: Called with every event when it arrives, independently of the reader.
            is_whole: The reader waits for the complete result: ``PROGRESS_EVENTS`` are not queued for it.
            on_capture: Called with every captured state of the images; neither the reader nor ``watch`` gets these.
        """
        self.request = request
        self.request_id = request.request_id
        self.kind = request.kind
        self._cancel = cancel
        self._events: asyncio.Queue[E | DiffserveError] = asyncio.Queue()
        self._watch = watch
        self._on_capture = on_capture
        self.was_interrupted = False
        self._is_whole = is_whole
        self._submitted_s = time.monotonic()
        self._has_preview = False
        self._unfinished_steps: dict[int, int] = {}  # steps done, by the index of an unfinished image

    def record(self, event: ipc.AnyEvent | DiffserveError, metrics: Metrics) -> None:
        """Count ``event``, or the error that ends the job, in ``metrics``."""
        if isinstance(event, DiffserveError):
            metrics.ended(self.kind, "lost" if isinstance(event, EngineUnavailable) else "rejected")
        else:
            metrics.observe(self.kind, event)
        if isinstance(event, Preview) and not self._has_preview:
            self._has_preview = True
            metrics.observe_first_preview(time.monotonic() - self._submitted_s)
        reason, num_steps = self.wasted_steps(event)
        if num_steps:
            metrics.wasted(reason, num_steps)

    def record_cancel(self, metrics: Metrics) -> None:
        """Count in ``metrics`` that the client left before the end."""
        metrics.ended(self.kind, "cancelled")
        metrics.wasted(*self.wasted_steps(None))

    def wasted_steps(self, event: object) -> tuple[str, int]:
        """Return the steps that ``event`` makes useless.

        Args:
            event: An event or error of this request; ``None`` if its client left.

        Returns:
            The reason ("cancelled", "deadline", "failed" or "lost") and the number of steps; "" and 0 if no step is
            wasted.
        """
        match event:
            case Progress(image_index=index, step_index=step):
                self._unfinished_steps[index] = step
            case ImageFinished(result=result):
                self._unfinished_steps.pop(result.image_index, None)
            case ImageFailed(image_index=index):
                return "failed", self._unfinished_steps.pop(index, 0)
            case Failed(code=code):
                return "deadline" if code == DeadlineExceeded.default_code else "failed", self._pop_steps()
            case DiffserveError():
                return "lost", self._pop_steps()
            case Cancelled() | None:
                return "cancelled", self._pop_steps()
            case _:
                pass
        return "", 0

    def _pop_steps(self) -> int:
        num_steps = sum(self._unfinished_steps.values())
        self._unfinished_steps.clear()
        return num_steps

    def feed(self, event: E | DiffserveError) -> None:
        """Take the next event, or the error that ends the job."""
        if isinstance(event, Captured):
            if self._on_capture is not None:
                self._on_capture(event.data)
            return
        if self._watch is not None:
            self._watch(event)
        if not (self._is_whole and isinstance(event, PROGRESS_EVENTS)):
            self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[E]:
        while True:
            event = await self._events.get()
            if isinstance(event, DiffserveError):
                raise event
            if isinstance(event, Failed):
                raise error_of(event)
            if isinstance(event, Cancelled) and self.was_interrupted:
                message = "the request was interrupted before its first step."
                raise InvalidRequest(message, param="request_id", code="cancelled")
            if isinstance(event, Cancelled):
                raise EngineUnavailable("the request was cancelled by the server.")
            yield event
            if isinstance(event, FINAL_EVENTS):
                return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel(self.request_id)


class EngineHost(Protocol):
    """The common interface of a single supervised engine and of a pool of them."""

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """Description of the language model; ``None`` until the first engine is ready, or without such a model."""

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Image models that requests may name, the default one first; empty until the first engine is ready."""

    @property
    def failed(self) -> asyncio.Future[DiffserveError]:
        """Future with the error for which the engines are no longer restarted."""

    @property
    def is_ready(self) -> bool:
        """Whether an engine would start a request now."""

    @property
    def retry_after_s(self) -> float:
        """Expected seconds until an engine is ready, at least 1."""

    def start(self) -> None:
        """Start the engines and supervise them."""

    async def stop(self) -> None:
        """Stop the engines; their unfinished requests end in EngineUnavailable."""

    def interrupt(self, request_id: str) -> None:
        """End an image request early with its unfinished images; ignored if it has ended."""

    def retry_load(self, name: str) -> None:
        """Read the files of a model that failed to load again; raise EngineUnavailable if no engine is ready."""

    async def num_requests(self) -> int:
        """Return the number of requests that the engines count; raise EngineUnavailable if no engine is ready."""

    async def trace(self) -> list[list[str]]:
        """Return the request id of every row of the recent UNet calls; raise EngineUnavailable without an engine."""

    async def stats(self) -> EngineStats | None:
        """Return the sum of the engines' statistics; ``None`` before the first tick.

        Raises:
            EngineUnavailable: No engine is ready.
        """


class Engines(EngineHost, Protocol):
    """One or more engines behind the HTTP service, created in a running event loop, started and stopped once."""

    @property
    def settings(self) -> Settings:
        """Settings that the engines were started with."""

    @property
    def info(self) -> ModelInfo | None:
        """Description of the first image model; ``None`` until the first engine is ready."""

    @property
    def metrics(self) -> Metrics:
        """Metrics of the events of all engines."""

    @property
    def num_ready(self) -> int:
        """Number of engines that are ready."""

    def require_ready(self) -> None:
        """Raise EngineUnavailable, with the time for a retry, if no engine is ready."""

    def submit(
        self,
        request: Asks[E],
        watch: Watch | None = None,
        *,
        is_whole: bool = False,
        on_capture: OnCapture | None = None,
    ) -> Job[E]:
        """Hand a request to an engine.

        Args:
            request: The request.
            watch: Called with every event when it arrives.
            is_whole: The caller waits for the complete result. If the engine is lost before the first output, another
                engine may then restart the request: ``watch`` gets the first events again.
            on_capture: Called every ``[serve] checkpoint_every_s`` with the state of the unfinished images, from which
                another request continues them (``GenerationRequest.resume_from``).

        Returns:
            The job. It raises InvalidRequest if no loaded model can do the request.

        Raises:
            EngineUnavailable: No engine is ready.
        """


def capturing(request: Asks[E], settings: Settings) -> Asks[E]:
    """Return ``request``, if it is for images, with the capture interval of ``settings``."""
    if not isinstance(request, GenerationRequest):
        return request
    return cast(Asks[E], replace(request, capture_every_s=settings.serve.checkpoint_every_s))


def refuse_unready(engines: Engines) -> None:
    """Raise EngineUnavailable, with the time for a retry, if ``engines`` are not ready."""
    if not engines.is_ready:
        raise EngineUnavailable(
            "the engine is not ready: it is loading its model; please try again in a moment.",
            retry_after_s=engines.retry_after_s,
        )
