"""Studio: pictures, texts and rewritten prompts from one process, one page pool and one loop.

A tick is one call of the language model or one step of the images: whose turn it is, ``TimeShare`` says. ::

    submit_text ──────────────────────► TextEngine ──┐
    submit_rewrite ──────► Rewriter ──► TextEngine   ├── tick ──► events
    submit ──► WishRoom ─► Rewriter ──► TextEngine   │
      └──────────┴────────────────────► Engine ──────┘
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from diffserve.config import EngineConfig, Settings, TextSettings
from diffserve.engine.device_health import raise_if_sticky
from diffserve.engine.engine import Engine
from diffserve.engine.metrics import page_stats
from diffserve.engine.task import Failure
from diffserve.engine.text import TextEngine, TickBudget
from diffserve.engine.time_share import TimeShare
from diffserve.engine.wishes import WishRoom
from diffserve.engine_stats import EngineStats, PageStats
from diffserve.errors import DiffserveError, EngineUnavailable, InvalidRequest
from diffserve.rewrite_types import REWRITE_TERMINAL, RewriteEvent, RewriteRequest
from diffserve.runtime.kv import PagePool
from diffserve.text_types import TEXT_TERMINAL, LanguageModelInfo, TextEvent, TextRequest
from diffserve.types import TERMINAL, Cancelled, Event, Failed, GenerationRequest, ModelInfo, ModelProfile

if TYPE_CHECKING:
    from diffserve.engine.rewriting import Rewriter

AnyEvent = Event | TextEvent | RewriteEvent
LAST = (*TERMINAL, *TEXT_TERMINAL, *REWRITE_TERMINAL)

logger = logging.getLogger(__name__)


class Side(enum.Enum):
    """Who does the work of a request."""

    IMAGES = "images"
    TEXTS = "texts"


class Studio:
    """An image engine, and beside it a language model and a rewriter, or neither. Safe to call from any thread.

    A server calls ``submit``, ``submit_text``, ``submit_rewrite``, ``cancel`` and, in a loop, ``tick``. Every event of
    a request is delivered exactly once, by ``tick``. Nothing that happens to one side ends the other: a tick that
    raises costs the requests of its side, and the studio goes on.

    engine, texts  with one page pool between them
    rewriter       by ``texts``; None where that model cannot follow instructions
    time_share     see ``config.TextSettings``
    """

    def __init__(
        self,
        engine: Engine,
        texts: TextEngine | None = None,
        rewriter: Rewriter | None = None,
        *,
        time_share: float = TextSettings().time_share,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        self.texts = texts
        self.rewriter = rewriter
        self.share = TimeShare(time_share)
        self._clock = clock
        self._wishes = WishRoom(engine, rewriter, clock)
        self._lock = threading.Lock()  # guards the two below
        self._live: dict[str, Side] = {}
        self._outbox: deque[AnyEvent] = deque()
        self._ticking = threading.Lock()  # one tick at a time
        self._is_draining = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Studio:
        """Load what ``settings`` name. Raises what ``load`` raises."""
        return cls.load(settings.model, settings.engine, settings.text)

    @classmethod
    def load(cls, model: ModelProfile, engine: EngineConfig, text: TextSettings) -> Studio:
        """Load an image model and, where ``text`` names one, a language model, onto one page pool.

        Raises ModelNotFound, ModelLoadError or ConfigError.
        """
        from diffserve.engine.studio_parts import load_parts

        return cls(*load_parts(model, engine, text), time_share=text.time_share)

    # What it is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """The image model."""
        return self.engine.info

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """The language model, None where there is none."""
        return None if self.texts is None else self.texts.info

    @property
    def pool(self) -> PagePool | None:
        """The pages of both sides, None where there are none."""
        return self.engine.pool if self.texts is None else self.texts.core.pool

    @property
    def has_work(self) -> bool:
        """Whether a tick would do or deliver something."""
        return bool(self._outbox) or self._wants_images or self._wants_texts

    @property
    def num_live(self) -> int:
        """Requests accepted and not yet over."""
        return len(self._live)

    def stats(self) -> EngineStats:
        """A snapshot for the metrics."""
        return EngineStats(
            num_live=self.num_live,
            num_wishes=len(self._wishes),
            images=self.engine.stats(),
            share=self.share.stats(),
            texts=None if self.texts is None else self.texts.stats(),
            pages=self._page_stats(),
        )

    # The verbs ----------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> str:
        """Queue pictures, with ``rewriting`` after their prompt was rewritten, and return the request's id.

        Raises InvalidRequest, QueueFull, EngineUnavailable (draining).
        """
        with self._entering(request.request_id, Side.IMAGES):
            if request.rewriting is None:
                return self.engine.submit(request)
            self._wishes.submit(request)
        self._post(self._wishes.release())
        return request.request_id

    def submit_text(self, request: TextRequest) -> str:
        """The same for texts; InvalidRequest where there is no language model."""
        if self.texts is None:
            raise no_language_model()
        with self._entering(request.request_id, Side.TEXTS):
            return self.texts.submit(request)

    def submit_rewrite(self, request: RewriteRequest) -> str:
        """The same for a wish; InvalidRequest where there is no language model that follows instructions."""
        if self.rewriter is None:
            raise no_language_model() if self.texts is None else no_rewriter(self.texts.info.model_id)
        with self._entering(request.request_id, Side.TEXTS):
            return self.rewriter.submit(request)

    def cancel(self, request_id: str) -> bool:
        """Give a request up; what it holds is free before its side goes on. False when it is not live (any more)."""
        if request_id not in self._live:
            return False
        if self._wishes.cancel(request_id):
            self._post([Cancelled(request_id=request_id)])
            return True
        if self._live.get(request_id) is Side.IMAGES:
            return self.engine.cancel(request_id)
        is_rewrite = self.rewriter is not None and self.rewriter.cancel(request_id)
        return is_rewrite or (self.texts is not None and self.texts.cancel(request_id))

    def tick(self) -> list[AnyEvent]:
        """One call of the language model or one step of the images, and what happened; cheap when there is no work.

        An image whose rewriting ends in this tick is with the engine when it returns.
        """
        with self._ticking:
            if self._wants_texts and (self.share.is_texts_turn or not self._wants_images):
                self._guarded(Side.TEXTS, self._write)
            elif self._wants_images:
                self._guarded(Side.IMAGES, self._paint)
            self._post(self._wishes.release())
        with self._lock:
            events = list(self._outbox)
            self._outbox.clear()
        return events

    def events(self) -> Iterator[AnyEvent]:
        """Tick while there is work and yield what happens."""
        while self.has_work:
            yield from self.tick()

    def drain(self) -> list[AnyEvent]:
        """Take no more requests, finish those accepted, return the remaining events."""
        self._is_draining = True
        return list(self.events())

    def warm_up(self) -> None:
        """Pay once, before the first request, for what the first calls of every network cost."""
        from diffserve.engine.studio_parts import warm_up

        warm_up(self)

    def study(self) -> bool:
        """Use an idle moment, of one UNet call; False where there is nothing to do with it."""
        return self.engine.study()

    def check_integrity(self) -> None:
        """No page, lane, image or text is lost; AssertionError or PoolIntegrityError says what is wrong."""
        with self._ticking:
            self.engine.check_integrity()
            if self.texts is not None:
                self.texts.check_integrity()
            self._wishes.check_integrity()

    # Turns --------------------------------------------------------------------------------------------------------

    @property
    def _wants_images(self) -> bool:
        return self.engine.has_work or self._wishes.has_ready

    @property
    def _wants_texts(self) -> bool:
        return self.texts is not None and self.texts.has_work

    def _page_stats(self) -> PageStats | None:
        with self._ticking:
            return None if self.pool is None else page_stats(self.pool.stats())

    def _write(self) -> None:
        """One call of the language model: as large as it likes, or what a step of the images earns.

        While an image waits for pages, no text is let in before it.
        """
        assert self.texts is not None
        is_shared = self._wants_images
        budget = TickBudget()
        if is_shared:
            lets_in = self.share.lets_in and not self.engine.waits_for_pages
            budget = TickBudget(time_s=self.share.call_s, admits=lets_in)
        started_s = self._clock()
        told: list[TextEvent] = self.texts.tick(budget)
        if self.rewriter is not None:
            rewritten, told = self.rewriter.feed(told)
            self._post([event for event in rewritten if not self._wishes.told(event)])
        self._post(told)
        if is_shared:
            self.share.wrote(self._clock() - started_s, has_moved=self.texts.last_tick is not None)

    def _paint(self) -> None:
        """One step of the images."""
        is_shared = self._wants_texts
        started_s = self._clock()
        self._post([self._wishes.dressed(event) for event in self.engine.tick()])
        tick = self.engine.last_tick
        has_moved = tick is not None and bool(tick.num_rows or tick.num_decoded)
        self.share.painted(self._clock() - started_s, has_moved=has_moved, is_shared=is_shared)

    def _guarded(self, side: Side, turn: Callable[[], None]) -> None:
        """Take a turn. One that raises, which is a mistake of ours, costs the requests of its side."""
        try:
            turn()
        except Exception as error:
            raise_if_sticky(error)
            logger.error("a tick of the %s failed as a whole", side.value, exc_info=error)
            self._give_up(side, Failure(DiffserveError.default_code, f"a tick raised {type(error).__name__}: {error}"))

    def _give_up(self, side: Side, failure: Failure) -> None:
        """Everybody of ``side`` has failed. Raises when the books do not balance after that."""
        code, message, param = failure
        lost = [request_id for request_id, owner in list(self._live.items()) if owner is side]
        if side is Side.TEXTS:
            assert self.texts is not None
            self.texts.fail_all(failure)
            self._wishes.give_up_rewriting()
        else:
            self.engine.fail_all(failure)
            lost = [request_id for request_id in lost if not self._wishes.holds(request_id)]
        self._post([Failed(request_id=name, code=code, message=message, param=param) for name in lost])
        if self.pool is not None:
            self.pool.check_integrity()

    # Books --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _entering(self, request_id: str, side: Side) -> Iterator[None]:
        """``request_id`` is live from here on, unless it is refused inside."""
        with self._lock:
            if self._is_draining:
                raise EngineUnavailable("the engine is finishing its work and takes no more requests.")
            if request_id in self._live:
                raise InvalidRequest(f"request_id {request_id!r} is already in use.", param="request_id")
            self._live[request_id] = side
        try:
            yield
        except BaseException:
            with self._lock:
                self._live.pop(request_id, None)
            raise

    def _post(self, events: Sequence[AnyEvent]) -> None:
        """Deliver with the next tick; a request that is over, or was given up, has no more to say."""
        with self._lock:
            for event in events:
                if event.request_id in self._live:
                    self._outbox.append(event)
                    if isinstance(event, LAST):
                        del self._live[event.request_id]


def no_language_model() -> InvalidRequest:
    """The error of a text where there is nobody to write it."""
    return InvalidRequest(
        "no language model is loaded; start the server with [text] model set to a directory.", param="model"
    )


def no_rewriter(model_id: str) -> InvalidRequest:
    """The error of a wish where the language model takes no instructions."""
    return InvalidRequest(
        f"the language model {model_id!r} has no chat template and cannot rewrite; "
        "set [text] model to the directory of an instruct model.",
        param="model",
    )
