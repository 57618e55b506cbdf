"""Texts without pages, and when it is worth letting one in."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from diffserve.engine.text.pages import SequencePages
from diffserve.engine.text.task import TextTask

MAX_LOOKED_AT = 32
"""Of those that could profit from waiting, so many are passed over for others in one tick."""


class WaitingRoom:
    """In order of arrival, which a preemption does not change."""

    def __init__(self, pages: SequencePages) -> None:
        self.pages = pages
        self._tasks: dict[TextTask, None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[TextTask]:
        return iter(self._tasks)

    def add(self, task: TextTask) -> None:
        """Let ``task`` wait."""
        self._tasks[task] = None

    def remove(self, task: TextTask) -> None:
        """``task`` waits no more; nothing happens when it did not."""
        self._tasks.pop(task, None)

    def candidates(self, running: Collection[TextTask]) -> Iterator[TextTask]:
        """Those to be let in now, the next first; without those whose prompt somebody is just computing."""
        for task in heapq.nsmallest(MAX_LOOKED_AT, self._tasks, key=lambda task: task.order):
            if not self._is_being_computed(task, running):
                yield task

    def may_enter(self, task: TextTask, running: Collection[TextTask]) -> bool:
        """Whether, after ``task`` has its pages, everybody who runs could still take one more sheet.

        Without such room its coming in would soon push somebody out.
        """
        if not running:
            return True
        salt = task.live.request.cache_salt
        growth = self.pages.num_pages(1) * sum(len(other.sequences) for other in running)
        available = self.pages.pool.num_available - growth
        need = sum(self.pages.num_pages(sequence.num_tokens) for sequence in task.sequences)
        if need <= available:
            return True
        found = sum(self.pages.num_pages(self.pages.num_cached(sequence, salt)) for sequence in task.sequences)
        return need - found <= available

    def _is_being_computed(self, task: TextTask, running: Collection[TextTask]) -> bool:
        """Whether a text that runs is about to file sheets that ``task`` would otherwise compute once more."""
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
