"""Rewriter: turns wishes into prompts with a TextEngine, without a thread of its own.

A wish is one or two text requests: the likeliest prompt, and prompts drawn at random that share pages with it. ::

    submit(RewriteRequest) --> submit(TextRequest) x 1..2      tick() --> feed(events) --> RewriteEvents, other events
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property

import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.api.rewrite_types import (
    REWRITE_TERMINAL,
    Rewrite,
    RewriteEvent,
    RewriteFinished,
    RewriteRequest,
)
from diffserve.api.text_types import TEXT_TERMINAL, TextDelta, TextEvent, TextFinished, TextRequest
from diffserve.api.types import Cancelled, Failed, RewriteOptions
from diffserve.engine.base_engine import TickLoop
from diffserve.engine.text import TextEngine
from diffserve.rewriting.grammar import caption_constraint
from diffserve.rewriting.job import RewriteJob
from diffserve.rewriting.judging import Judge, TextWindow
from diffserve.rewriting.prompt_builder import PromptBuilder
from diffserve.rewriting.style import Style, load_style, style_for_family
from diffserve.runtime.decoding import TokenConstraint


class Rewriter(TickLoop[RewriteRequest, RewriteEvent]):
    """Rewrites wishes for an image model that reads ``window``, by the language model of ``texts``. Thread-safe.

    A server calls ``submit`` and ``cancel``, and passes the events of every tick to ``feed``. ``rewrite``, ``answer``
    and ``stream`` tick in the calling thread.

    Args:
        texts: The text engine.
        style: The style of requests that name none.
        window: The text window of the image model.
        max_entropy: Mean nats per token above which the model counts as unsure; ``None``: as the style says.
        follows: Whether prompts for image models of another family are written in the style that suits them best.

    Raises:
        ConfigError: The model has no chat template.
        InvalidRequest: The style is unknown.
    """

    terminal = REWRITE_TERMINAL

    def __init__(
        self,
        texts: TextEngine,
        *,
        style: str,
        window: TextWindow,
        max_entropy: float | None = None,
        follows: bool = False,
    ) -> None:
        super().__init__()
        self.texts = texts
        self._follows = follows
        self.window = window
        self._max_entropy = max_entropy
        self._load_style = cache(load_style)
        self._prompt_builder = PromptBuilder(texts.model.tokenizer, texts.info.model_id)
        self.style = self._load_style(style)
        self._constraint_of(self.style)
        self._jobs: dict[str, RewriteJob] = {}  # these three guarded by the lock of the mail
        self._job_of_text: dict[str, RewriteJob | None] = {}  # None: abandoned
        self._other_events: list[TextEvent] = []

    def options_for(self, options: RewriteOptions, family: str) -> RewriteOptions:
        """Return ``options`` with the style of ``family`` where they name no style."""
        if options.style is not None or not self._follows:
            return options
        return msgspec.structs.replace(options, style=style_for_family(family))

    # The verbs ----------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Rewrites accepted and not yet over."""
        return len(self._jobs)

    @property
    def has_work(self) -> bool:
        """Whether a tick would do or deliver something."""
        return bool(self._jobs or self._outbox)

    def cancel(self, request_id: str) -> bool:
        """Cancel a rewrite; a later ``feed`` reports it. Return False if it is not live."""
        job = self._jobs.get(request_id)
        return job is not None and any([self.texts.cancel(text_id) for text_id in job.first_indices])

    def feed(self, events: Iterable[TextEvent]) -> tuple[list[RewriteEvent], list[TextEvent]]:
        """Return rewrite events for ``events`` of the text engine, and the events of other texts."""
        with self._lock:
            self._sort(events)
            other_events, self._other_events = self._other_events, []
            return self._take_mail(), other_events

    # Convenient ways ----------------------------------------------------------------------------------------------

    def rewrite(self, wish: str, num_prompts: int = 1, options: RewriteOptions | None = None) -> tuple[Rewrite, ...]:
        """Rewrite one prompt and wait. Raises the errors of ``answer``."""
        request = RewriteRequest(wish=wish, num_prompts=num_prompts, options=options or RewriteOptions())
        return self.answer([request])[0].rewrites

    def answer(self, requests: Sequence[RewriteRequest]) -> list[RewriteFinished]:
        """Rewrite prompts concurrently, even more than may be queued, and return their answers in order.

        Raises the errors of ``submit`` except QueueFull, and for a failed prompt DeadlineExceeded, NumericalError,
        InvalidRequest or DiffserveError.
        """
        return [history[-1] for history in self._answer(requests) if isinstance(history[-1], RewriteFinished)]

    def stream(self, request: RewriteRequest) -> Iterator[RewriteEvent]:
        """Yield the events of a rewrite up to the terminal one; closing the iterator cancels it."""
        return self._watch(request)

    # Jobs ---------------------------------------------------------------------------------------------------------

    def _constraint_of(self, style: Style) -> TokenConstraint | None:
        """Return the token constraint of ``style``, which takes a while to build; ``None`` without a constraint."""
        return self._captions if style.answer.language == "captions" else None

    @cached_property
    def _captions(self) -> TokenConstraint:
        return caption_constraint(self.texts.model.tokenizer, self.texts.model.end_ids)

    def submit_for(self, request: RewriteRequest, window: TextWindow) -> str:
        """Submit ``request`` for an image model that reads ``window``."""
        return self._enter(request, is_followed=False, window=window)

    def _enter(self, request: RewriteRequest, *, is_followed: bool, window: TextWindow | None = None) -> str:
        window = window or self.window
        style = self.style if request.options.style is None else self._load_style(request.options.style)
        text_requests = self._prompt_builder.text_requests(request, style, window)
        constraint = self._constraint_of(style)
        max_entropy = style.answer.max_entropy if self._max_entropy is None else self._max_entropy
        first_of = {text_request.request_id: index for index, text_request in enumerate(text_requests)}
        job = RewriteJob(request, Judge(style, window, max_entropy), self.texts.info.model_id, first_of)
        with self._lock:
            if request.request_id in self._jobs:
                raise InvalidRequest(f"request_id {request.request_id!r} is already in use.", param="request_id")
            self._jobs[request.request_id] = job
            self._job_of_text.update(dict.fromkeys(first_of, job))
            if is_followed:
                self._mailboxes[request.request_id] = deque()
        for at, text_request in enumerate(text_requests):
            try:
                self.texts.submit(text_request, constraint=constraint)
            except DiffserveError:
                self._leave(job, unsubmitted=text_requests[at:])
                self._mailboxes.pop(request.request_id, None)
                raise
        return request.request_id

    def _leave(self, job: RewriteJob, unsubmitted: Sequence[TextRequest] = ()) -> None:
        """Drop ``job``; its texts are cancelled and their later events ignored."""
        with self._lock:
            del self._jobs[job.request.request_id]
            for text_request in unsubmitted:
                del self._job_of_text[text_request.request_id]
            for text_id in job.first_indices:
                if text_id in self._job_of_text:
                    self._job_of_text[text_id] = None
                    self.texts.cancel(text_id)

    def _tick_once(self) -> None:
        """Run a tick of the text engine; events of other requests are stored for ``feed``."""
        events = self.texts.tick()
        with self._lock:
            self._sort(events)

    def _sort(self, events: Iterable[TextEvent]) -> None:
        for event in events:
            if event.request_id not in self._job_of_text:
                self._other_events.append(event)
                continue
            job = self._job_of_text[event.request_id]
            if isinstance(event, TEXT_TERMINAL):
                del self._job_of_text[event.request_id]
            if job is not None:
                self._deliver(self._rewrite_events(job, event))

    def _rewrite_events(self, job: RewriteJob, event: TextEvent) -> Iterator[RewriteEvent]:
        match event:
            case TextDelta():
                yield from job.show(event)
            case TextFinished():
                job.answers[event.request_id] = event
                if job.is_over:
                    self._leave(job)
                    yield job.finish()
            case Failed(code=code, message=message, param=param):
                self._leave(job)
                yield Failed(request_id=job.request.request_id, code=code, message=message, param=param)
            case Cancelled():
                self._leave(job)
                yield Cancelled(request_id=job.request.request_id)
            case _:
                pass
