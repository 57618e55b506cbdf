"""Queues of texts: fair order among clients, admission and preemption. No torch.

A request gets its turn once, on arrival, so that later requests cannot delay it without limit::

    starts   where its client's last request ends, or at ``now``, whichever is later
    ends     so many tokens further as it may take, by its client's share
    turn     where it starts; of batch work ``BATCH_LATER`` tokens further

``now`` is the start of the latest request that has begun (start-time fair queueing, Goyal et al. 1996). So the first
request of a client comes before the second of another. Batch work is only overtaken by requests that start within
``BATCH_LATER`` tokens after it, so it cannot starve.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Container, Iterator
from typing import ClassVar, Final

from diffserve.engine.records import Stage
from diffserve.engine.text.pages import SequencePages
from diffserve.engine.text.task import LiveText, Sequence, TextTask

BATCH_LATER: Final = 16_384.0

MOST_REMEMBERED: Final = 1024


class Turns:
    """End of the last request of each client, by priority."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ends: dict[tuple[str, str], float] = {}

    def join(self, live: LiveText) -> None:
        """Assign the turn of ``live``."""
        request = live.request
        width = request.params.num_beams if request.params.num_beams > 1 else request.num_texts
        tokens = len(live.prompt_ids) + width * request.params.max_tokens
        live.starts, live.turn = self.of(live)
        self._ends[live.line] = live.starts + tokens / request.share
        if len(self._ends) > MOST_REMEMBERED:
            self._ends = {line: end for line, end in self._ends.items() if end > self.now}

    def of(self, live: LiveText) -> tuple[float, float]:
        """Return the start and the turn that ``live`` would get now."""
        starts = max(self.now, self._ends.get(live.line, 0.0))
        return starts, starts + BATCH_LATER * (live.request.priority == "batch")

    def advance(self, live: LiveText) -> None:
        """Advance the clock when ``live`` begins."""
        self.now = max(self.now, live.starts)

    def reset(self) -> None:
        """Clear the state when no request is live."""
        self.now = 0.0
        self._ends.clear()


Planned = Container[TextTask]


class TaskQueue(Collection[TextTask]):
    """Texts in the order in which they came in, each marked with ``stage``."""

    stage: ClassVar[Stage]

    def __init__(self, pages: SequencePages) -> None:
        self.pages = pages
        self._tasks: dict[TextTask, None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task: object) -> bool:
        return task in self._tasks

    def __iter__(self) -> Iterator[TextTask]:
        return iter(tuple(self._tasks))

    def add(self, task: TextTask) -> None:
        """Add ``task`` and set its stage."""
        task.stage = self.stage
        self._tasks[task] = None

    def remove(self, task: TextTask) -> None:
        """Remove ``task`` if present."""
        self._tasks.pop(task, None)


class RunningQueue(TaskQueue):
    """Texts that hold pages; ``num_preempted`` counts preemptions."""

    stage = Stage.RUNNING

    def __init__(self, pages: SequencePages, waiting: WaitingQueue) -> None:
        super().__init__(pages)
        self.num_preempted = 0
        self._waiting = waiting

    def grow(self, task: TextTask, planned: Planned) -> bool:
        """Room for the last token of each sequence of ``task``; False when it cannot be had now."""
        return all(self.make_room(task, sequence, sequence.num_tokens, planned) for sequence in task.sequences)

    def make_room(self, task: TextTask, sequence: Sequence, end: int, planned: Planned) -> bool:
        """Reserve pages up to token ``end``, preempting later texts that are not in ``planned``."""
        while not self.pages.reserve(sequence, end):
            if not self._reclaim(task, planned):
                return False
        return True

    def open(self, task: TextTask, sequence: Sequence, planned: Planned) -> bool:
        """Open pages of a sequence, preempting later texts that are not in ``planned``."""
        while not self.pages.open(sequence, task.live.request.cache_salt):
            if not self._reclaim(task, planned):
                return False
        return True

    def close_drafts(self) -> bool:
        """Release all pages of the draft model; returns False if there were none."""
        sequences = [sequence for task in self._tasks for sequence in task.sequences]
        return any([self.pages.close_draft(sequence) for sequence in sequences])

    def _reclaim(self, task: TextTask, planned: Planned) -> bool:
        if self.close_drafts():
            return True
        later = [
            other
            for other in self._tasks
            if other.order > task.order and other not in planned and other.sequences[0].unread is None
        ]
        if not later:
            return False
        self._preempt(max(later, key=lambda other: other.order))
        return True

    def _preempt(self, task: TextTask) -> None:
        self.pages.close(task)
        self.remove(task)
        self._waiting.add(task)
        self.num_preempted += 1


MAX_LOOKED_AT = 32
"""Of those that could profit from waiting, so many are passed over for others in one tick."""


class WaitingQueue(TaskQueue):
    """Texts without pages; a preemption keeps the order of arrival."""

    stage = Stage.WAITING

    def candidates(self, running: Collection[TextTask]) -> Iterator[TextTask]:
        """Yield texts to admit, except those whose prompt another text is computing."""
        for task in heapq.nsmallest(MAX_LOOKED_AT, self._tasks, key=lambda task: task.order):
            if not self._is_being_computed(task, running):
                yield task

    def may_enter(self, task: TextTask, running: Collection[TextTask]) -> bool:
        """Whether each running text could still get one more logical page after ``task`` has its pages.

        Otherwise admitting ``task`` would soon cause a preemption.
        """
        if not running:
            return True
        salt = task.live.request.cache_salt
        growth = self.pages.num_pages(1) * sum(len(other.sequences) for other in running)
        available = self.pages.pool.num_available - growth
        need = sum(self.pages.num_pages(sequence.num_tokens) for sequence in task.sequences)
        if need <= available:
            return True
        num_cached_pages = sum(
            self.pages.num_pages(self.pages.num_cached(sequence, salt)) for sequence in task.sequences
        )
        return need - num_cached_pages <= available

    def _is_being_computed(self, task: TextTask, running: Collection[TextTask]) -> bool:
        """Whether a text that runs is about to file logical pages that ``task`` would otherwise compute once more."""
        sequence, salt = task.sequences[0], task.live.request.cache_salt
        ids = sequence.row.token_ids
        num_cached: int | None = None
        for other in running:
            ahead = other.sequences[0]
            if other.live.request.cache_salt != salt or ahead.num_pending <= 1:
                continue
            shared = self.pages.shared_tokens(ids, ahead.row.token_ids)
            if shared <= ahead.num_computed:
                continue
            if num_cached is None:
                num_cached = self.pages.num_cached(sequence, salt)
            if shared > num_cached:
                return True
        return False
