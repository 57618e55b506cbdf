"""Crowd: the texts that run, and who gives way when one of them cannot grow.

First all pages of the draft model go, then those of the text that came last: it waits to be computed anew. A text
never takes pages from one that came before it, so the oldest always finishes; and never from one that has a piece in
the tick that is being planned.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from diffserve.engine.text.pages import SequencePages
from diffserve.engine.text.task import Sequence, Stage, TextTask
from diffserve.engine.text.waiting import WaitingRoom

Planned = Container[TextTask]


class Crowd:
    """In the order in which they were let in. ``num_preempted`` counts since birth."""

    def __init__(self, pages: SequencePages, waiting: WaitingRoom) -> None:
        self.pages = pages
        self.num_preempted = 0
        self._waiting = waiting
        self._tasks: dict[TextTask, None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task: object) -> bool:
        return task in self._tasks

    def __iter__(self) -> Iterator[TextTask]:
        return iter(tuple(self._tasks))

    def add(self, task: TextTask) -> None:
        """``task`` has pages and runs."""
        task.stage = Stage.RUNNING
        self._tasks[task] = None

    def remove(self, task: TextTask) -> None:
        """``task`` runs no more; nothing happens when it did not."""
        self._tasks.pop(task, None)

    def grow(self, task: TextTask, planned: Planned) -> bool:
        """Room for the last token of each sequence of ``task``; False when it cannot be had now."""
        return all(self.make_room(task, sequence, sequence.num_tokens, planned) for sequence in task.sequences)

    def make_room(self, task: TextTask, sequence: Sequence, end: int, planned: Planned) -> bool:
        """Reserve up to token ``end``, at the expense of those who came later and are not in ``planned``."""
        while not self.pages.reserve(sequence, end):
            if not self._reclaim(task, planned):
                return False
        return True

    def open(self, task: TextTask, sequence: Sequence, planned: Planned) -> bool:
        """The same for pages of a sequence that has none."""
        while not self.pages.open(sequence, task.live.request.cache_salt):
            if not self._reclaim(task, planned):
                return False
        return True

    def close_drafts(self) -> bool:
        """Give back all pages of the draft model; False when there were none."""
        sequences = [sequence for task in self._tasks for sequence in task.sequences]
        return any([self.pages.close_draft(sequence) for sequence in sequences])

    def _reclaim(self, task: TextTask, planned: Planned) -> bool:
        if self.close_drafts():
            return True
        later = [other for other in self._tasks if other.order > task.order and other not in planned]
        if not later:
            return False
        self._preempt(max(later, key=lambda other: other.order))
        return True

    def _preempt(self, task: TextTask) -> None:
        self.pages.close(task)
        self.remove(task)
        task.stage = Stage.WAITING
        self._waiting.add(task)
        self.num_preempted += 1
