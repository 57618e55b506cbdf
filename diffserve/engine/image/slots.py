"""Latent slots: the queue of images that wait for one, the table of slots, and the choice of the next image."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Final

from diffserve.engine.image.fair_share import Line, Order, PriorityShare
from diffserve.engine.image.task import ImageTask
from diffserve.engine.records import Stage

SLOTS_PER_FREE_SLOT: Final = 7
"""A client may take another slot while it holds fewer than this many for each slot that is free."""

SLOTS_PER_RESERVED_SLOT: Final = 8
"""One slot, and one more for each of this many, is reserved beyond ``max_lanes`` for clients that hold none."""

RESERVED_SLOT_FRACTION: Final = 0.25
"""Fraction of the unreserved slots that batch images leave free, unless no batch image holds a slot."""


class ImageQueue:
    """Images that wait for a slot: one heap for each line, ordered by key and then by arrival."""

    def __init__(self) -> None:
        self._heaps: dict[Line, list[tuple[float, int, ImageTask]]] = {}

    def __iter__(self) -> Iterator[ImageTask]:
        return (task for heap in self._heaps.values() for _, _, task in heap if _is_waiting(task))

    def add(self, task: ImageTask, key: float, arrival: int) -> None:
        """Add ``task``; ``arrival`` is its number in the order of arrival."""
        heapq.heappush(self._heaps.setdefault(task.live.line, []), (key, arrival, task))

    def heads(self, order: Order) -> list[ImageTask]:
        """Return the next image of every line, after dropping images that no longer wait.

        Args:
            order: Returns the current key of an image, never smaller than when the image was added.
        """
        for line, heap in list(self._heaps.items()):
            while heap and (not _is_waiting(heap[0][2]) or order(heap[0][2]) > heap[0][0]):
                key, arrival, task = heapq.heappop(heap)
                if _is_waiting(task):
                    heapq.heappush(heap, (max(key, order(task)), arrival, task))
            if not heap:
                del self._heaps[line]
        return [heap[0][2] for heap in self._heaps.values()]

    def take(self, line: Line) -> tuple[ImageTask, int]:
        """Remove the next image of ``line`` and return it with its arrival number."""
        _, arrival, task = heapq.heappop(self._heaps[line])
        return task, arrival


def _is_waiting(task: ImageTask) -> bool:
    return task.stage is Stage.WAITING and task.slot is None


class SlotTable:
    """Slots, each free or held by one owner; the lowest free slot is allocated first, so that pools stay small.

    Args:
        num_slots: Slots that any client may hold.
        num_reserved: Further slots for clients that hold none, so that one client cannot keep the others out.
    """

    def __init__(self, num_slots: int, *, num_reserved: int = 0) -> None:
        self.num_slots = num_slots
        self.num_reserved = num_reserved
        self._free = list(range(num_slots + num_reserved))
        self._owners: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        """Free slots that any client may take."""
        return max(0, self.num_left - self.num_reserved)

    @property
    def num_left(self) -> int:
        """Free slots, the reserved ones included."""
        return len(self._free)

    @property
    def owners(self) -> dict[int, Hashable]:
        """A copy of the mapping from slot to owner."""
        return dict(self._owners)

    def allocate(self, owner: Hashable) -> int | None:
        """Give ``owner`` the lowest free slot, reserved ones included, or return ``None`` if none is free."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._owners[slot] = owner
        return slot

    def free(self, slot: int) -> None:
        """Take ``slot`` back; ``KeyError`` if it is free already."""
        del self._owners[slot]
        heapq.heappush(self._free, slot)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every slot is either free or held, and only once."""
        free, used = set(self._free), set(self._owners)
        assert len(free) == len(self._free), f"a slot is twice in the free list: {sorted(self._free)}"
        assert not free & used, f"slots {sorted(free & used)} are both free and held"
        missing = set(range(self.num_slots + self.num_reserved)) - free - used
        assert not missing, f"slots lost: {sorted(missing)}"


class SlotQueue:
    """Assigns slots to waiting images in fair order.

    Args:
        max_slots: Slots that any client may hold.
        max_per_tick: Images that may get a slot in one tick.
        share: The fair shares of clients and priorities.
    """

    def __init__(self, max_slots: int, max_per_tick: int, share: PriorityShare) -> None:
        self.table = SlotTable(max_slots, num_reserved=1 + max_slots // SLOTS_PER_RESERVED_SLOT)
        self.waiting = ImageQueue()
        self._max_per_tick = max_per_tick
        self._share = share
        self._holders: dict[ImageTask, int] = {}  # arrival numbers, in order of admission
        self._arrivals = itertools.count()

    @property
    def holders(self) -> tuple[ImageTask, ...]:
        """Images that hold a slot, in order of admission."""
        return tuple(self._holders)

    def add(self, task: ImageTask, key: float) -> None:
        """Queue a new image with its current ``key``."""
        self.waiting.add(task, key, next(self._arrivals))

    def assign(self, order: Order) -> Iterator[ImageTask]:
        """Assign slots to the next images and yield these; ``order`` is the key within a client."""
        num_held = Counter(task.live.line for task in self._holders)
        num_batch = sum(task.live.request.priority == "batch" for task in self._holders)
        for _ in range(self._max_per_tick):
            num_left = self.table.num_left
            limit = SLOTS_PER_FREE_SLOT * num_left if self.table.num_free else min(1, num_left)
            heads = [task for task in self.waiting.heads(order) if num_held[task.live.line] < limit]
            heads = [task for task in heads if self._is_allowed(task, num_batch)]
            if not heads:
                return
            if len(heads) > 1:
                heads = [task for task in self._share.in_order((*self._holders, *heads), order) if task.slot is None]
            task, arrival = self.waiting.take(heads[0].live.line)
            task.slot = self.table.allocate(task)
            self._holders[task] = arrival
            num_held[task.live.line] += 1
            num_batch += task.live.request.priority == "batch"
            yield task

    def _is_allowed(self, task: ImageTask, num_batch: int) -> bool:
        """Return whether ``task`` may take a slot while ``num_batch`` batch images hold one."""
        if task.live.request.priority == "interactive" or not num_batch:
            return True
        return self.table.num_free > int(RESERVED_SLOT_FRACTION * self.table.num_slots)

    def postpone(self, task: ImageTask, key: float) -> None:
        """Return ``task`` to its old position in the queue and free its slot."""
        assert task.slot is not None
        self.table.free(task.slot)
        task.slot = None
        self.waiting.add(task, key, self._holders.pop(task))

    def release(self, task: ImageTask) -> None:
        """Free the slot of ``task``, if it has one."""
        if task.slot is not None:
            self.table.free(task.slot)
            self._holders.pop(task)
            task.slot = None

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the table and the images that hold a slot agree."""
        self.table.check_integrity()
        holders = {task.slot: task for task in self._holders}
        assert holders == self.table.owners, "the slot table and the images in flight disagree"
