"""TextEngine: the public face of text generation. Submit, cancel, tick, and the convenient ways to wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from diffserve.engine.task import Failure
from diffserve.engine.text.admission import TextAdmission
from diffserve.engine.text.core import NO_LIMIT, TextCore, draft_tenant
from diffserve.engine.text.mailroom import Mailroom
from diffserve.engine.text.plan import TextTick, TickBudget
from diffserve.errors import (
    DeadlineExceeded,
    DiffserveError,
    EngineUnavailable,
    InvalidRequest,
    NumericalError,
    QueueFull,
)
from diffserve.runtime.decoding import TokenConstraint
from diffserve.runtime.kv import PagePool
from diffserve.runtime.language import LanguageModel, load_language_model
from diffserve.text_types import (
    TEXT_TERMINAL,
    LanguageModelInfo,
    TextAccepted,
    TextConfig,
    TextEvent,
    TextFinished,
    TextRequest,
    TextStats,
)
from diffserve.types import Cancelled, Failed

POOL_BYTES = 256 << 20
ERROR_OF_CODE: dict[str, type[DiffserveError]] = {
    "deadline_exceeded": DeadlineExceeded,
    "numerical_error": NumericalError,
}


class TextEngine:
    """Continues texts in mixed batches. Safe to call from any thread; nothing runs unless somebody ticks.

    ``generate`` and ``stream`` tick in the calling thread. A server calls ``submit``, ``cancel`` and, in a loop,
    ``tick``. Every event is delivered exactly once: to the ``generate`` or ``stream`` that submitted the request, else
    by the next ``tick``.
    """

    def __init__(self, core: TextCore) -> None:
        self.core = core
        self._admission = TextAdmission(core.model, core.pages, core.config)
        self._mail = Mailroom()
        self._ticking = threading.Lock()  # one tick at a time
        self._is_draining = False

    @classmethod
    def from_model(
        cls,
        model: LanguageModel,
        config: TextConfig | None = None,
        *,
        draft_model: LanguageModel | None = None,
        pool_bytes: int = POOL_BYTES,
    ) -> TextEngine:
        """An engine with a pool of its own, of at most ``pool_bytes``. Raises ConfigError when they are too few."""
        page_tokens = (config or TextConfig()).page_tokens
        specs = [model.spec("llm", page_tokens=page_tokens)]
        if draft_model is not None:
            specs.append(draft_model.spec(draft_tenant("llm"), page_tokens=page_tokens))
        pool = PagePool.for_specs(pool_bytes, specs, device=model.device)
        return cls(TextCore(model, pool, config, draft_model=draft_model))

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        draft_path: str | Path | None = None,
        dtype: str = "auto",
        device: str = "auto",
        config: TextConfig | None = None,
        pool_bytes: int = POOL_BYTES,
    ) -> TextEngine:
        """Load a model directory, and a draft model where one is given. Raises what ``load_language_model`` raises."""
        model = load_language_model(path, dtype=dtype, device=device)
        draft = None if draft_path is None else load_language_model(draft_path, dtype=dtype, device=device)
        return cls.from_model(model, config, draft_model=draft, pool_bytes=pool_bytes)

    # What it is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> LanguageModelInfo:
        """What the model can do and where it runs."""
        return self.core.model.info

    @property
    def trace(self) -> tuple[TextTick, ...]:
        """The last ``config.trace_ticks`` ticks: which texts shared a call."""
        return tuple(self.core.trace)

    @property
    def last_tick(self) -> TextTick | None:
        """What the latest tick ran; ``None`` when there was nothing to compute, or no pages to go on."""
        trace = self.core.trace
        return trace[-1] if trace and trace[-1].tick == self.core.scheduler.num_ticks else None

    @property
    def has_work(self) -> bool:
        """Whether a tick would do or deliver something."""
        return self._mail.has_mail or self.core.has_work

    @property
    def num_live(self) -> int:
        """Requests accepted and not yet over."""
        with self._mail.lock:
            return len(self._mail.inbox) + len(self.core.scheduler.live)

    def stats(self) -> TextStats:
        """Counters for the metrics."""
        with self._ticking:
            return self.core.stats()

    # The verbs ----------------------------------------------------------------------------------------------------

    def submit(self, request: TextRequest, *, constraint: TokenConstraint | None = None) -> str:
        """Queue ``request`` and return its id. ``constraint``: which tokens may be said.

        Raises InvalidRequest (PoolTooSmall among them), QueueFull, EngineUnavailable (draining).
        """
        return self._submit(request, constraint, is_followed=False)

    def cancel(self, request_id: str) -> bool:
        """Give a request up; its pages are free before the next call runs. False when it is not (or no longer) live."""
        with self._mail.lock:
            if self._mail.inbox.pop(request_id, None) is not None:
                self._mail.post([Cancelled(request_id=request_id)])
                return True
            return request_id in self.core.scheduler.live and self._mail.cancel(request_id)

    def tick(self, budget: TickBudget = NO_LIMIT) -> list[TextEvent]:
        """Run one engine iteration and return what happened; cheap when there is nothing to do."""
        self._advance(budget)
        return self._mail.take_outbox()

    def fail_all(self, failure: Failure) -> None:
        """Give up everything, after a tick that raised; the next tick tells. Raises when not even that can be done."""
        with self._ticking:
            self._take_inbox()
            for live in tuple(self.core.scheduler.live.values()):
                self._mail.post(self.core.scheduler.fail(live, failure))

    def events(self) -> Iterator[TextEvent]:
        """Tick while there is work and yield what happens."""
        while self.has_work:
            yield from self.tick()

    def drain(self) -> list[TextEvent]:
        """Take no more requests, finish those accepted, return the remaining events."""
        self._is_draining = True
        return list(self.events())

    # Convenient ways ----------------------------------------------------------------------------------------------

    def generate(
        self, request: str | TextRequest | Sequence[TextRequest], *, constraint: TokenConstraint | None = None
    ) -> list[TextFinished]:
        """Continue and wait: one answer for each request, in order. A list may be longer than the waiting room.

        Raises what ``submit`` raises (but QueueFull), and for a request that failed DeadlineExceeded, NumericalError,
        InvalidRequest or DiffserveError.
        """
        if isinstance(request, str):
            request = TextRequest(prompt=request, deltas=False)
        requests = [request] if isinstance(request, TextRequest) else list(request)
        submitted: list[str] = []
        try:
            for one in requests:
                submitted.append(self._submit_in_turn(one, constraint))
            ends = [list(self._follow(request_id))[-1] for request_id in submitted]
        finally:
            self._abandon(submitted)
        return [finished_or_raise(end) for end in ends]

    def stream(self, request: str | TextRequest, *, constraint: TokenConstraint | None = None) -> Iterator[TextEvent]:
        """Continue and watch: the request's events up to its terminal one. Closing the iterator cancels the request."""
        if isinstance(request, str):
            request = TextRequest(prompt=request)
        request_id = self._submit(request, constraint, is_followed=True)
        try:
            yield from self._follow(request_id)
        finally:
            self._abandon([request_id])

    def check_integrity(self) -> None:
        """No page and no text is lost; AssertionError or PoolIntegrityError says what is wrong."""
        with self._ticking:
            self.core.check_integrity()

    # Below the counter --------------------------------------------------------------------------------------------

    def _submit(self, request: TextRequest, constraint: TokenConstraint | None, *, is_followed: bool) -> str:
        self.core.scheduler.drafts.check(request)
        live = self._admission.admit(request, self.core.clock(), constraint)
        request_id = request.request_id
        with self._mail.lock:
            ahead = self._refuse_if_full(request_id)
            if is_followed:
                self._mail.open_mailbox(request_id)
            self._mail.inbox[request_id] = live
            accepted = TextAccepted(
                request_id=request_id,
                seed=live.seed,
                num_texts=request.num_texts,
                num_prompt_tokens=len(live.prompt_ids),
                queue_position=ahead,
            )
            self._mail.post([accepted])
        return request_id

    def _submit_in_turn(self, request: TextRequest, constraint: TokenConstraint | None) -> str:
        """Submit and follow, ticking for as long as the waiting room is full."""
        while True:
            try:
                return self._submit(request, constraint, is_followed=True)
            except QueueFull:
                self._advance(NO_LIMIT)

    def _refuse_if_full(self, request_id: str) -> int:
        """Requests ahead in the waiting room; raises when this one cannot join them."""
        if self._is_draining:
            raise EngineUnavailable("the engine is finishing its work and takes no more requests.")
        running = dict(self.core.scheduler.live)
        if request_id in running or request_id in self._mail.inbox:
            raise InvalidRequest(f"request_id {request_id!r} is already being answered.", param="request_id")
        num_waiting = len(self._mail.inbox) + sum(not live.has_started for live in running.values())
        if num_waiting >= self.core.config.max_waiting:
            raise QueueFull(f"{num_waiting} requests are waiting, which is all this engine holds; try again later.")
        return num_waiting

    def _advance(self, budget: TickBudget) -> None:
        with self._ticking:
            self._tick_once(budget)

    def _tick_once(self, budget: TickBudget = NO_LIMIT) -> None:
        self._take_inbox()
        self._mail.post(self.core.tick(self._mail.take_cancelled, budget))

    def _take_inbox(self) -> None:
        with self._mail.lock:  # a request is always in one of the two places
            for live in self._mail.take_inbox():
                self.core.scheduler.add(live)

    def _follow(self, request_id: str) -> Iterator[TextEvent]:
        """Events of one request as they come, ticking when there are none."""
        while True:
            event = self._mail.next_event(request_id)
            if event is None:
                with self._ticking:  # another thread's tick may have brought news meanwhile
                    event = self._mail.next_event(request_id)
                    if event is None:
                        self._tick_once()
                        continue
            yield event
            if isinstance(event, TEXT_TERMINAL):
                return

    def _abandon(self, request_ids: Sequence[str]) -> None:
        """Nobody follows these any more: what is still live is cancelled, and the news of it dropped."""
        for request_id in request_ids:
            if self.cancel(request_id):
                self._advance(NO_LIMIT)
            self._mail.close_mailbox(request_id)


def finished_or_raise(event: TextEvent) -> TextFinished:
    """The answer, or the error that a ``Failed`` or ``Cancelled`` event stands for."""
    if isinstance(event, TextFinished):
        return event
    if isinstance(event, Failed):
        blamed = InvalidRequest if event.param is not None else DiffserveError
        raise ERROR_OF_CODE.get(event.code, blamed)(event.message, param=event.param, code=event.code)
    raise DiffserveError(f"request {event.request_id} was cancelled.", code="cancelled")
