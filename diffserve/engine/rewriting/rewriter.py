"""Rewriter: wishes in, prompts out, by the texts of a TextEngine. It has no thread and never waits.

One wish is one or two text requests: the likeliest prompt, and those drawn at random, which share its beginning in the
page pool. ::

    submit(RewriteRequest) --> submit(TextRequest) x 1..2      tick() --> feed(events) --> RewriteEvents, other events
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from diffserve.engine.rewriting.asking import Asker, Question
from diffserve.engine.rewriting.job import Job
from diffserve.engine.rewriting.judging import Judge
from diffserve.engine.rewriting.language import caption_constraint
from diffserve.engine.rewriting.style import Style, load_style
from diffserve.engine.rewriting.window import TextWindow
from diffserve.engine.text import TextEngine
from diffserve.engine.text.engine import ERROR_OF_CODE
from diffserve.errors import DiffserveError, InvalidRequest, QueueFull
from diffserve.rewrite_types import (
    REWRITE_TERMINAL,
    Rewrite,
    RewriteEvent,
    RewriteFinished,
    RewriteRequest,
)
from diffserve.runtime.decoding import TokenConstraint
from diffserve.text_types import TEXT_TERMINAL, TextDelta, TextEvent, TextFinished
from diffserve.types import Cancelled, Failed, RewriteOptions


class Rewriter:
    """Rewrites wishes for an image model that reads ``window``, by the language model of ``texts``.

    style        the name of the style used where a request names none
    max_entropy  mean nats a token above which the model counts as unsure; None: as the style says

    A server calls ``submit`` and ``cancel``, and hands every tick's events to ``feed``. ``rewrite``, ``answer`` and
    ``stream`` tick in the calling thread. Safe to call from any thread.

    Raises ConfigError when the model has no chat template, InvalidRequest for a style that is not there.
    """

    def __init__(self, texts: TextEngine, *, style: str, window: TextWindow, max_entropy: float | None = None) -> None:
        self.texts = texts
        self.window = window
        self._max_entropy = max_entropy
        self._styles: dict[str, Style] = {}
        self._constraint: TokenConstraint | None = None
        self._asker = Asker(texts.core.model.tokenizer, texts.info.model_id)
        self.style = self._style(style)
        if self.style.answer.language == "captions":
            self._caption_constraint()
        self._lock = threading.RLock()
        self._pumping = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._job_of_text: dict[str, Job | None] = {}  # None: nobody waits for it any more
        self._mailboxes: dict[str, deque[RewriteEvent]] = {}
        self._kept: tuple[list[RewriteEvent], list[TextEvent]] = ([], [])

    # The verbs ----------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Rewrites accepted and not yet over."""
        with self._lock:
            return len(self._jobs)

    def submit(self, request: RewriteRequest) -> str:
        """Ask for a rewrite and return its id.

        Raises InvalidRequest (a style that is not there, a wish too long for the model, an id in use), QueueFull,
        EngineUnavailable; then nothing is left behind.
        """
        style = self._style(request.options.style) if request.options.style is not None else self.style
        questions = list(self._asker.questions(request, style, self.window))
        constraint = self._caption_constraint() if style.answer.language == "captions" else None
        first_of = {question.request.request_id: question.first_index for question in questions}
        job = Job(request, self._judge(style), self.texts.info.model_id, first_of)
        self._enter(job)
        for at, question in enumerate(questions):
            try:
                self.texts.submit(question.request, constraint=constraint)
            except DiffserveError:
                self._leave(job, unasked=questions[at:])
                raise
        return request.request_id

    def cancel(self, request_id: str) -> bool:
        """Give a rewrite up; a later ``feed`` tells so. False when it is not (or no longer) live."""
        with self._lock:
            job = self._jobs.get(request_id)
        return job is not None and any([self.texts.cancel(text_id) for text_id in job.questions])

    def feed(self, events: Iterable[TextEvent]) -> tuple[list[RewriteEvent], list[TextEvent]]:
        """What ``events`` of the text engine mean for rewrites, and those that are about other texts."""
        with self._lock:
            told, others = self._kept
            self._kept = ([], [])
            self._sort(events, told, others)
            return told, others

    # Convenient ways ----------------------------------------------------------------------------------------------

    def rewrite(self, wish: str, num_prompts: int = 1, options: RewriteOptions | None = None) -> tuple[Rewrite, ...]:
        """Rewrite one wish and wait. Raises what ``answer`` raises."""
        request = RewriteRequest(wish=wish, num_prompts=num_prompts, options=options or RewriteOptions())
        return self.answer([request])[0].rewrites

    def answer(self, requests: Sequence[RewriteRequest]) -> list[RewriteFinished]:
        """Rewrite wishes side by side and wait: one answer for each, in order; more than may wait at once, too.

        Raises what ``submit`` raises (but QueueFull), and for one that failed DeadlineExceeded, NumericalError,
        InvalidRequest or DiffserveError.
        """
        opened: list[str] = []
        try:
            for request in requests:
                opened.append(self._open_in_turn(request))
            ends = [list(self._follow(request_id))[-1] for request_id in opened]
        finally:
            for request_id in opened:
                self._close(request_id)
        return [finished_or_raise(end) for end in ends]

    def stream(self, request: RewriteRequest) -> Iterator[RewriteEvent]:
        """Rewrite and watch: the events up to the terminal one. Closing the iterator cancels the rewrite."""
        request_id = self._open(request)
        try:
            yield from self._follow(request_id)
        finally:
            self._close(request_id)

    # Styles -------------------------------------------------------------------------------------------------------

    def _style(self, name: str) -> Style:
        if name not in self._styles:
            self._styles[name] = load_style(name)
        return self._styles[name]

    def _judge(self, style: Style) -> Judge:
        most = style.answer.max_entropy if self._max_entropy is None else self._max_entropy
        return Judge(style, self.window, most)

    def _caption_constraint(self) -> TokenConstraint:
        if self._constraint is None:
            model = self.texts.core.model
            self._constraint = caption_constraint(model.tokenizer, model.end_ids)
        return self._constraint

    # Jobs ---------------------------------------------------------------------------------------------------------

    def _enter(self, job: Job) -> None:
        with self._lock:
            request_id = job.request.request_id
            if request_id in self._jobs:
                raise InvalidRequest(f"request_id {request_id!r} is already being rewritten.", param="request_id")
            self._jobs[request_id] = job
            self._job_of_text.update(dict.fromkeys(job.questions, job))

    def _leave(self, job: Job, unasked: Sequence[Question] = ()) -> None:
        """Forget ``job``: its texts are cancelled, and what they still say is dropped."""
        with self._lock:
            del self._jobs[job.request.request_id]
            for question in unasked:
                del self._job_of_text[question.request.request_id]
            for text_id in job.questions:
                if text_id in self._job_of_text:
                    self._job_of_text[text_id] = None
                    self.texts.cancel(text_id)

    def _sort(self, events: Iterable[TextEvent], told: list[RewriteEvent], others: list[TextEvent]) -> None:
        for event in events:
            if event.request_id not in self._job_of_text:
                others.append(event)
                continue
            job = self._job_of_text[event.request_id]
            if isinstance(event, TEXT_TERMINAL):
                del self._job_of_text[event.request_id]
            for news in () if job is None else self._told(job, event):
                self._mailboxes.get(news.request_id, told).append(news)

    def _told(self, job: Job, event: TextEvent) -> Iterator[RewriteEvent]:
        match event:
            case TextDelta():
                yield from job.shown(event)
            case TextFinished():
                job.answers[event.request_id] = event
                if job.is_over:
                    self._leave(job)
                    yield job.finished()
            case Failed(code=code, message=message, param=param):
                self._leave(job)
                yield Failed(request_id=job.request.request_id, code=code, message=message, param=param)
            case Cancelled():
                self._leave(job)
                yield Cancelled(request_id=job.request.request_id)
            case _:
                pass

    # Following ----------------------------------------------------------------------------------------------------

    def _open(self, request: RewriteRequest) -> str:
        """Submit, and from now on keep the events of ``request`` for ``_follow``."""
        with self._lock:
            self._mailboxes[request.request_id] = deque()
        try:
            return self.submit(request)
        except DiffserveError:
            with self._lock:
                del self._mailboxes[request.request_id]
            raise

    def _open_in_turn(self, request: RewriteRequest) -> str:
        """The same, ticking for as long as the waiting room is full."""
        while True:
            try:
                return self._open(request)
            except QueueFull:
                self._pump()

    def _follow(self, request_id: str) -> Iterator[RewriteEvent]:
        """Events as they come, ticking while there are none."""
        mailbox = self._mailboxes[request_id]
        while True:
            while not mailbox:
                self._pump(mailbox)
            event = mailbox.popleft()
            yield event
            if isinstance(event, REWRITE_TERMINAL):
                return

    def _pump(self, mailbox: Collection[RewriteEvent] = ()) -> None:
        """Tick once, unless another thread filled ``mailbox`` meanwhile; what is for others waits for ``feed``."""
        with self._pumping:
            if not mailbox:
                events = self.texts.tick()
                with self._lock:
                    self._sort(events, *self._kept)

    def _close(self, request_id: str) -> None:
        """Nobody follows any more: what is still live is cancelled, and its pages are free when this returns."""
        if self.cancel(request_id):
            self._pump()
        with self._lock:
            self._mailboxes.pop(request_id, None)


def finished_or_raise(event: RewriteEvent) -> RewriteFinished:
    """The answer, or the error that a ``Failed`` or ``Cancelled`` event stands for."""
    if isinstance(event, RewriteFinished):
        return event
    if isinstance(event, Failed):
        blamed = InvalidRequest if event.param is not None else DiffserveError
        raise ERROR_OF_CODE.get(event.code, blamed)(event.message, param=event.param, code=event.code)
    raise DiffserveError(f"rewrite {event.request_id} was cancelled.", code="cancelled")
