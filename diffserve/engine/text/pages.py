"""Pages of texts, and the queues of texts with and without pages: fair order, admission and preemption."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Container, Iterable, Iterator
from typing import ClassVar, Final

from diffserve.engine.records import Stage
from diffserve.engine.text.task import LiveText, Sequence, TextTask
from diffserve.runtime.kv import PagePool, PageTable, PoolBusy


class SequencePages:
    """Pages of texts in ``pool``, for the model's tenant and, if there is a draft model, for ``draft_tenant``.

    Draft pages are optional: if there is no room for them, a text goes on without a draft.
    """

    def __init__(self, pool: PagePool, tenant: str, draft_tenant: str | None = None) -> None:
        self.pool = pool
        self.tenant = tenant
        self.draft_tenant = draft_tenant
        self._page_tokens = pool.plan(tenant).spec.page_tokens

    def num_pages(self, num_tokens: int) -> int:
        """Pages of a sequence of ``num_tokens`` tokens that shares nothing."""
        return self.pool.num_pages_for(self.tenant, num_tokens)

    def most_pages(self, num_prompt_tokens: int, num_tokens: int, num_beams: int) -> int:
        """Return the largest number of pages of a text or beam search of ``num_tokens`` tokens.

        Beams share the full logical pages of the prompt.
        """
        shared = self.num_pages(num_prompt_tokens // self._page_tokens * self._page_tokens)
        return shared + num_beams * (self.num_pages(num_tokens) - shared)

    def num_cached(self, sequence: Sequence, salt: bytes) -> int:
        """Leading tokens that ``open`` would find now."""
        return self.pool.num_cached(self.tenant, sequence.row.token_ids, salt)

    def shared_tokens(self, token_ids: list[int], other_ids: list[int]) -> int:
        """Return the number of tokens on leading full logical pages that the first sequence may take from the other."""
        count, step = 0, self._page_tokens
        limit = min(len(token_ids) - 1, len(other_ids))
        while count + step <= limit and token_ids[count : count + step] == other_ids[count : count + step]:
            count += step
        return count

    def open(self, sequence: Sequence, salt: bytes) -> bool:
        """Open pages for all tokens so far, cached ones included; returns False, unchanged, if there are too few."""
        ids = sequence.row.token_ids
        try:
            sequence.table, sequence.num_computed = self.pool.open(self.tenant, ids, salt, reserve=len(ids))
        except PoolBusy:
            return False
        return True

    def reserve(self, sequence: Sequence, end: int) -> bool:
        """Reserve pages for tokens up to ``end``; returns False, with nothing changed, without free pages."""
        assert sequence.table is not None
        try:
            self.pool.reserve(sequence.table, end, start=sequence.num_computed)
        except PoolBusy:
            return False
        return True

    def reserve_draft(self, sequence: Sequence, end: int, salt: bytes) -> bool:
        """Reserve draft pages up to token ``end``, in a new table if needed; returns False without free pages."""
        assert self.draft_tenant is not None
        try:
            if sequence.draft_table is None:
                ids = sequence.row.token_ids
                table, num_cached = self.pool.open(self.draft_tenant, ids, salt, reserve=end)
                sequence.draft_table, sequence.num_draft_computed = table, num_cached
            else:
                self.pool.reserve(sequence.draft_table, end, start=sequence.num_draft_computed)
        except PoolBusy:
            return False
        return True

    def settle(self, sequence: Sequence) -> None:
        """Drop the tokens of rejected drafts, and index the full logical pages for reuse."""
        ids, table = sequence.row.token_ids, sequence.table
        assert table is not None
        if table.num_tokens > sequence.num_tokens:
            self.pool.truncate(table, sequence.num_computed)
        if sequence.num_computed // self._page_tokens > len(table.keys):
            self.pool.commit(table, ids[: sequence.num_computed])
        draft = sequence.draft_table
        if draft is not None:
            sequence.num_draft_computed = min(sequence.num_draft_computed, sequence.num_computed)
            self.pool.truncate(draft, min(draft.num_tokens, sequence.num_draft_computed))
            if sequence.num_draft_computed // draft.plan.spec.page_tokens > len(draft.keys):
                self.pool.commit(draft, ids[: sequence.num_draft_computed])

    def follow(self, follower: Sequence, leader: Sequence) -> None:
        """Give ``follower`` the pages of its tokens, all of which ``leader`` has computed."""
        assert leader.table is not None
        follower.num_computed = follower.num_tokens
        follower.table = self.pool.fork(leader.table, follower.num_computed)

    def rearrange(self, task: TextTask, parents: tuple[int, ...]) -> None:
        """Replace the beams of ``task`` by those of its search: beam i continues old beam ``parents[i]``."""
        assert task.search is not None
        old, taken = task.sequences, set[int]()
        beams = []
        for row, parent in zip(task.search.rows, parents, strict=True):
            table = old[parent].table
            assert table is not None
            beams.append(Sequence(row, self.pool.fork(table) if parent in taken else table, old[parent].num_computed))
            taken.add(parent)
        for index, sequence in enumerate(old):
            if index not in taken and sequence.table is not None:
                self.pool.close(sequence.table)
        task.sequences = beams

    def close(self, task: TextTask) -> None:
        """Release all pages of ``task``. Indexed pages may be reused later."""
        for sequence in task.sequences:
            self.close_draft(sequence)
            if sequence.table is not None:
                self.pool.close(sequence.table)
            sequence.table, sequence.num_computed = None, 0

    def close_draft(self, sequence: Sequence) -> bool:
        """Release the draft model's pages; returns False if there were none."""
        if sequence.draft_table is None:
            return False
        self.pool.close(sequence.draft_table)
        sequence.draft_table, sequence.num_draft_computed = None, 0
        return True

    def check_integrity(self, tasks: list[TextTask], *, other_pages: int = 0) -> None:
        """Check that the pages of both tenants are those of ``tasks``, and ``other_pages`` of the model's tenant.

        Raises AssertionError or PoolIntegrityError.
        """
        self.pool.check_integrity()
        stats = self.pool.stats().tenants
        holders = [sequence for task in tasks for sequence in task.sequences]
        expected_pages = {self.tenant: other_pages + _num_pages(sequence.table for sequence in holders)}
        if self.draft_tenant is not None:
            expected_pages[self.draft_tenant] = _num_pages(sequence.draft_table for sequence in holders)
        for tenant, count in expected_pages.items():
            assert count == stats[tenant].held_pages, f"tenant {tenant!r} holds pages that nobody owns"
        for task in tasks:
            has_pages = task.sequences[0].table is not None
            assert has_pages == (task.stage is Stage.RUNNING), f"{task.live.request_id}: pages and stage disagree"


def _num_pages(tables: Iterable[PageTable | None]) -> int:
    return len({page for table in tables if table is not None for logical in table.pages for page in logical})


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
