"""TextScheduler: decides which tokens each tick computes, which requests wait, and which are preempted.

All tokens a sequence still has to compute are pending: first the whole prompt, one token while decoding, prompt and
output after a preemption. A tick's tokens go to

1. decoding texts, one token for each sequence, those that waited longest first;
2. chunks of pending prompts, in the order of ``Turns``; a quarter of the tick is reserved for them;
3. new texts, in the same order, while there are pages for all their known tokens;
4. drafts, with what is left.

When a sequence cannot grow, texts that came later are preempted (``RunningQueue``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from diffserve.api.text_types import TextConfig, TextEvent
from diffserve.engine.records import FailureReason, Scheduler, Stage
from diffserve.engine.text.outputs import DraftPolicy, TextOutputs
from diffserve.engine.text.pages import RunningQueue, SequencePages, Turns, WaitingQueue
from diffserve.engine.text.task import LiveText, ScheduledTokens, TextOutcome, TextPlan, TextTask
from diffserve.runtime.language import LanguageModel

RESERVED_PART = 8
BATCH_RESERVED_PART = 4
"""Divisors of ``max_sequences``: the parts reserved for clients without running texts, and kept free of batch work."""

PREFILL_SHARE = 4
"""Divisor of a tick's tokens: the part reserved for prompts when any are pending."""


class TextScheduler(Scheduler[LiveText, TextEvent]):
    """Owns the waiting texts, which have no pages, and the running texts."""

    product = "text"

    def __init__(
        self, config: TextConfig, pages: SequencePages, model: LanguageModel, draft_model: LanguageModel | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.pages = pages
        self.drafts = DraftPolicy(config, pages, draft_model)
        self.progress = TextOutputs(pages, self.drafts, model)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.waiting = WaitingQueue(pages)
        self.running = RunningQueue(pages, self.waiting)
        self._turns = Turns()
        self._arrivals = itertools.count()

    @property
    def num_running(self) -> int:
        """Sequences that hold pages, or will as soon as their prompt is computed."""
        return sum(width_of(task) for task in self.running)

    @property
    def num_decoding(self) -> int:
        """Number of sequences that need one token computed to choose the next."""
        return sum(len(task.sequences) for task in self.running if task.is_decoding)

    def add(self, live: LiveText) -> None:
        """Queue a checked request."""
        live.arrival = next(self._arrivals)
        if not self.live:
            self._turns.reset()
        self._turns.join(live)
        self.live[live.request_id] = live
        self.waiting.add(live.tasks[0])

    def is_before(self, task: TextTask, newcomer: LiveText) -> bool:
        """Whether the prompt of ``task`` is computed before that of ``newcomer``, which is not queued yet."""
        return task.stage is Stage.RUNNING or task.live.turn <= self._turns.of(newcomer)[1]

    def plan(self, max_tokens: int, *, admits: bool = True) -> TextPlan:
        """Choose at most ``max_tokens`` tokens for this tick, all with pages; ``admits`` is as in ``TickBudget``."""
        self.num_ticks += 1
        pieces: dict[TextTask, list[ScheduledTokens]] = {}
        wants_prefill = bool(self.waiting) or any(not task.is_decoding for task in self.running)
        num_reserved = max_tokens // PREFILL_SHARE if wants_prefill else 0
        left = num_reserved + self._plan_decoding(max_tokens - num_reserved, pieces)
        left = self._plan_prefill(left, pieces)
        if admits:
            left = self._plan_newcomers(left, pieces)
        for planned in pieces.values():
            if left > 0 and planned[0].task.is_decoding:
                left -= sum(self.drafts.extend(piece, left) for piece in planned)
        return TextPlan(tuple(piece for planned in pieces.values() for piece in planned))

    def apply(self, plan: TextPlan, outcome: TextOutcome, now_s: float) -> list[TextEvent]:
        """Advance all texts by the tick's outcome, release finished ones, and return the events."""
        events = self._fail(outcome)
        self._computed(plan, now_s)
        for task in plan.tasks:
            if task.stage is Stage.RUNNING:
                self._start_followers(task, outcome)
        return events + self._apply_choices(outcome, now_s)

    # Tokens that are read a tick later ----------------------------------------------------------------------------

    def may_go_unread(self, outcome: TextOutcome) -> bool:
        """Whether the next tick can be planned before this one's chosen tokens are read from the device.

        This holds for all texts of the tick or for none. While pages are scarce all tokens are read, because a
        preempted text must have no unread token.
        """
        if len(outcome.unread) != 1 or outcome.choices or outcome.forks or outcome.failures:
            return False
        ((tasks, _),) = outcome.unread
        is_roomy = self.pages.pool.num_available >= self.pages.num_pages(1) * self.num_running
        no_search = all(task.search is None for task in self.running)
        return is_roomy and no_search and all(self.drafts.may_go_unread(task, self.num_ticks) for task in tasks)

    def go_unread(self, plan: TextPlan, outcome: TextOutcome, now_s: float) -> bool:
        """Advance all texts by one token that is still on the device; returns False if no text needs it any more."""
        self._computed(plan, now_s)
        ((tasks, token_choices),) = outcome.unread
        running = [(task, line) for line, task in enumerate(tasks) if task.stage is Stage.RUNNING]
        for task, line in running:
            task.sequences[0].unread = token_choices.tokens[line : line + 1]
        return bool(running)

    def apply_read(self, outcome: TextOutcome, now_s: float) -> list[TextEvent]:
        """Finish ``apply`` after the tokens were read; tokens of finished texts are dropped."""
        return self._fail(outcome) + self._apply_choices(outcome, now_s)

    def _fail(self, outcome: TextOutcome) -> list[TextEvent]:
        events: list[TextEvent] = []
        for task, failure in outcome.failures.items():
            if task.stage is not Stage.DONE:
                events += self.give_up(task.live, failure)
        return events

    def _computed(self, plan: TextPlan, now_s: float) -> None:
        for piece in plan.pieces:
            if piece.task.stage is Stage.RUNNING:
                self.progress.mark_computed(piece, now_s)

    def _apply_choices(self, outcome: TextOutcome, now_s: float) -> list[TextEvent]:
        events: list[TextEvent] = []
        for task in [*outcome.choices, *outcome.forks]:
            if task.stage is Stage.RUNNING:
                task.last_tick = self.num_ticks
                events += self.progress.apply_choices(task, outcome, now_s)
                events += self._leave_if_done(task, now_s)
        return events

    def give_up(self, live: LiveText, failure: FailureReason) -> list[TextEvent]:
        """Fail a request; does nothing if it is over already."""
        if live.request_id not in self.live:
            return []
        self._drop(live)
        return [failure.of(live.request_id)]

    def check_integrity(self, *, other_pages: int = 0) -> None:
        """Raise AssertionError unless each page belongs to a running text and each live text is in exactly one place.

        ``other_pages`` is the number of pages of the model's tenant that have other owners.
        """
        self.pages.check_integrity(list(self.running), other_pages=other_pages)
        places = [*self.running, *self.waiting]
        assert len(set(places)) == len(places), "a text runs and waits"
        living = {task for live in self.live.values() for task in live.tasks if task.stage is not Stage.DONE}
        following = {task for task in living if task.stage is Stage.FOLLOWING}
        assert set(places) | following == living, "a text is lost, or queued although gone"
        assert not any(live.is_over for live in self.live.values()), "a finished request is still live"

    # The parts of a plan ------------------------------------------------------------------------------------------

    def _plan_decoding(self, max_tokens: int, pieces: dict[TextTask, list[ScheduledTokens]]) -> int:
        """Plan one token for each decoding sequence, at least of one text, and return the number of tokens left."""
        left = max_tokens
        for task in sorted(self.running, key=lambda task: (task.last_tick, task.order)):
            fits = len(task.sequences) <= left or not pieces
            if task.stage is Stage.RUNNING and task.is_decoding and fits and self.running.grow(task, pieces):
                pieces[task] = [
                    ScheduledTokens(task, sequence, sequence.num_computed, sequence.num_tokens)
                    for sequence in task.sequences
                ]
                left -= len(task.sequences)
        return max(left, 0)

    def _plan_prefill(self, max_tokens: int, pieces: dict[TextTask, list[ScheduledTokens]]) -> int:
        left = max_tokens
        for task in sorted(self.running, key=lambda task: task.order):
            if left > 0 and task.stage is Stage.RUNNING and not task.is_decoding:
                left -= self._plan_chunks(task, left, pieces)
        return left

    def _plan_newcomers(self, max_tokens: int, pieces: dict[TextTask, list[ScheduledTokens]]) -> int:
        left, reserved = max_tokens, 0
        for task in self.waiting.candidates(self.running):
            if left < 1:
                break
            if width_of(task) > self._room_for(task, reserved):
                reserved = reserved or (width_of(task) if task.live.request.priority == "interactive" else 0)
                continue
            if not self._start(task):
                break
            left -= self._plan_chunks(task, left, pieces)
        return left

    def _room_for(self, task: TextTask, reserved: int) -> int:
        """Return the number of sequences like those of ``task`` that may start, with ``reserved`` ones kept free.

        A client without running texts may exceed ``max_sequences`` by a part. Batch work leaves a part of it free.
        """
        max_sequences, running_by_line = self.config.max_sequences, Counter(other.live.line for other in self.running)
        room = max_sequences - self.num_running - reserved
        if not running_by_line[task.live.line]:
            return room + max_sequences // RESERVED_PART
        return room - max_sequences // BATCH_RESERVED_PART if task.live.request.priority == "batch" else room

    def _plan_chunks(self, task: TextTask, max_tokens: int, pieces: dict[TextTask, list[ScheduledTokens]]) -> int:
        """Plan a chunk of the pending tokens of ``task``, at most ``max_tokens``, and return its number of tokens.

        After a preemption beams are computed one after another, up to their last token, so that each finds the cached
        pages of the earlier ones. The last tokens are computed in one tick for all beams.
        """
        withheld = 1 if len(task.sequences) > 1 else 0
        for sequence in task.sequences:
            if sequence.table is None and not self.running.open(task, sequence, pieces):
                return 0
            end = sequence.num_computed + min(max_tokens, sequence.num_pending - withheld)
            if end > sequence.num_computed:
                if not self.running.make_room(task, sequence, end, pieces):
                    return 0
                pieces[task] = [ScheduledTokens(task, sequence, sequence.num_computed, end)]
                return end - sequence.num_computed
        return 0

    def _start(self, task: TextTask) -> bool:
        """Pages for the first sequence of ``task``; further beams follow."""
        sequence, salt = task.sequences[0], task.live.request.cache_salt
        if not self.waiting.may_enter(task, self.running):
            return False
        has_pages = self.pages.open(sequence, salt)
        if not has_pages and self.running.close_drafts():
            has_pages = self.pages.open(sequence, salt)
        if not has_pages:
            return False
        self.waiting.remove(task)
        self.running.add(task)
        self._turns.advance(task.live)
        if task.live.cached_tokens is None:
            task.live.cached_tokens = sequence.num_computed
            self.num_cached_tokens += sequence.num_computed
            self.num_prompt_tokens += len(task.live.prompt_ids)
        return True

    # Ends ----------------------------------------------------------------------------------------------------------

    def _start_followers(self, task: TextTask, outcome: TextOutcome) -> None:
        """Start the other texts of the request on the pages of its computed prompt."""
        if task not in outcome.choices or len(task.choices):
            return
        for follower in task.live.followers:
            if follower in outcome.choices:
                self.pages.follow(follower.sequences[0], task.sequences[0])
                self.running.add(follower)

    def _leave_if_done(self, task: TextTask, now_s: float) -> Iterator[TextEvent]:
        if task.stage is not Stage.DONE:
            return
        self._release(task)
        if task.live.is_over and task.live.request_id in self.live:
            del self.live[task.live.request_id]
            yield self.progress.finished(task.live, now_s)

    def _drop(self, live: LiveText) -> None:
        del self.live[live.request_id]
        for task in live.tasks:
            self._release(task)

    def _release(self, task: TextTask) -> None:
        """Release the pages of ``task`` and remove it from all queues; every exit goes through here."""
        self.pages.close(task)
        self.waiting.remove(task)
        self.running.remove(task)
        task.stage = Stage.DONE


def width_of(task: TextTask) -> int:
    """Sequences that ``task`` runs side by side, those that follow it included."""
    following = len(task.live.followers) if task.text_index == 0 else 0
    return max(task.live.request.params.num_beams, 1 + following)
