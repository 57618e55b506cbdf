"""What the service knows of whatever paints: one face, whether an engine stands behind it, several, or a cluster.

``engine/client.py`` is one engine process that is restarted when it is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, Self, TypeVar

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
    Failed,
    ImageFailed,
    ModelInfo,
    Painted,
    Preview,
    Progress,
    Queued,
    ServedModel,
)
from diffserve.service.http.errors import error_of
from diffserve.service.metrics import Metrics
from diffserve.settings.config import Settings

LAST = (*TERMINAL, *TEXT_TERMINAL, *REWRITE_TERMINAL, *EMBEDDING_TERMINAL, *STAGE_TERMINAL)
"""Events after which there are no more of a request."""

HOW_FAR = (Progress, Queued)
"""Events that nobody reads who waits for the whole of it."""

E = TypeVar("E")
Watch = Callable[[object], None]


class Job(Generic[E]):
    """A submitted request as an asynchronous iterator of its events, the terminal one last.

    Iterating raises what the engine refuses it with (InvalidRequest, QueueFull), what it failed at, or that it was
    cancelled or the engine is lost (EngineUnavailable). Leaving its ``async with`` block early cancels the request:
    ``cancel`` is told its id, also where it is over. ``watch`` is told of every event when it comes, however slowly
    they are read; one that ``is_whole`` is read without those that tell how far it is.
    """

    def __init__(
        self, request: Asks[E], cancel: Callable[[str], None], watch: Watch | None = None, *, is_whole: bool = False
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.kind = request.kind
        self._cancel = cancel
        self._events: asyncio.Queue[E | DiffserveError] = asyncio.Queue()
        self._watch = watch
        self.was_interrupted = False
        self._is_whole = is_whole
        self._since_s = time.monotonic()
        self._has_preview = False
        self._steps: dict[int, int] = {}  # by picture, of those that are on their way

    def waited_for_preview_s(self, event: object) -> float | None:
        """Seconds since it was submitted, for the first preview of it; else ``None``."""
        if self._has_preview or not isinstance(event, Preview):
            return None
        self._has_preview = True
        return time.monotonic() - self._since_s

    def wasted_by(self, event: object) -> tuple[str, int]:
        """Why steps led to no picture because of ``event``, and how many; ``None``: its client is gone."""
        match event:
            case Progress(image_index=index, step_index=step):
                self._steps[index] = step
            case Painted(result=result):
                self._steps.pop(result.image_index, None)
            case ImageFailed(image_index=index):
                return "failed", self._steps.pop(index, 0)
            case Failed(code=code):
                return "deadline" if code == DeadlineExceeded.default_code else "failed", self._all_steps()
            case DiffserveError():
                return "lost", self._all_steps()
            case Cancelled() | None:
                return "cancelled", self._all_steps()
            case _:
                pass
        return "", 0

    def _all_steps(self) -> int:
        num_steps = sum(self._steps.values())
        self._steps.clear()
        return num_steps

    def feed(self, event: E | DiffserveError) -> None:
        """Take the next event, or the error that ends the job."""
        if self._watch is not None:
            self._watch(event)
        if not (self._is_whole and isinstance(event, HOW_FAR)):
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
            if isinstance(event, LAST):
                return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel(self.request_id)


class Engines(Protocol):
    """Whatever paints. Made within a running event loop, started once, and stopped once."""

    @property
    def settings(self) -> Settings:
        """What it was started with."""

    @property
    def info(self) -> ModelInfo | None:
        """The first model; ``None`` until the first engine is up."""

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """The language model beside it; ``None`` until then, and where there is none."""

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Every image model that requests may name, the first one first; none until the first engine is up."""

    @property
    def metrics(self) -> Metrics:
        """What the answers showed, over all engines."""

    @property
    def failed(self) -> asyncio.Future[DiffserveError]:
        """Resolves to the error for which no further engine is started."""

    @property
    def is_ready(self) -> bool:
        """Whether a request handed over now would be painted."""

    @property
    def retry_after_s(self) -> float:
        """While there is no engine: seconds until there should be one, 1 at least."""

    @property
    def num_ready(self) -> int:
        """How many engines work side by side now."""

    def require_ready(self) -> None:
        """EngineUnavailable, with when to come back, unless a request handed over now would be painted."""

    def start(self) -> None:
        """Start the first engines and watch over them."""

    async def stop(self) -> None:
        """End the engines; whatever they still hold ends in EngineUnavailable."""

    def submit(self, request: Asks[E], watch: Watch | None = None, *, is_whole: bool = False) -> Job[E]:
        """Hand ``request`` to an engine. EngineUnavailable while there is none.

        ``is_whole``: nobody hears of it before it is over. Where its engine is lost, another may then begin it anew,
        as long as nothing came of it that cannot come twice: ``watch`` and the job may hear of its first events again.
        Its job raises InvalidRequest where nothing is loaded that could do it.
        """

    def interrupt(self, request_id: str) -> None:
        """End a request for images early: its job goes on with the unfinished pictures. Ignored where it is over."""

    def look_again(self, name: str) -> None:
        """Have the files of a model looked at again that could not be read. EngineUnavailable without an engine."""

    async def num_requests(self) -> int:
        """How many requests are in the engines, by their own books. EngineUnavailable without an engine."""

    async def trace(self) -> list[list[str]]:
        """Per recent UNet call, the request id of every row. EngineUnavailable without an engine."""

    async def stats(self) -> EngineStats | None:
        """The engines' numbers as of a moment ago, as one; ``None`` before the first tick. EngineUnavailable without
        an engine.
        """


def refuse_unready(engines: Engines) -> None:
    """EngineUnavailable, with when to come back, unless ``engines`` are ready."""
    if not engines.is_ready:
        raise EngineUnavailable(
            "the engine is not ready: it is loading its model; please try again in a moment.",
            retry_after_s=engines.retry_after_s,
        )
