"""Fair sharing of UNet work and latent slots between clients and between the two priorities (no torch).

``FairShare`` is start-time fair queueing (Goyal et al. 1996) between the clients of one priority. ``PriorityShare``
runs interactive images first, guarantees batch images a share of the work, and limits saturating clients.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from diffserve.api.types import PRIORITIES, Priority
from diffserve.engine.image.policy import TickCosts, TickLoad
from diffserve.engine.image.task import ImageTask, LiveRequest
from diffserve.engine.records import Stage

Order = Callable[[ImageTask], float]
Line = tuple[str, Priority]
"""A client and a priority: images of one line wait in one queue."""

BATCH_SHARE: Final = 0.1
"""Guaranteed share of the work for batch images while there is work of both priorities."""

MAX_SLOWDOWN: Final = 1.4
"""Factor by which rows of saturating clients may make the ticks of other clients longer."""

SATURATING_CLIENT_WEIGHT: Final = 3.0
"""Factor on the work charged to a saturating client while other clients ask for less than a tick.

Fewer than half of the ticks are its own: the gaps between two requests of the others and the rest of the tick in which
they arrive are its own, too.
"""

MAX_REMEMBERED_CLIENTS: Final = 1024


class FairShare:
    """Virtual clocks of the clients that have live requests.

    The clock of a client advances by the work done for it, divided by its share. Images run in order of their tags::

        tag = clock of its client + work of the images before it of the same client + its remaining work

    The order within a client is the scheduler's, so a single client is served in exactly that order. A client with one
    image comes before all but the first image of a client with eighty. A client that arrives, or comes back, starts at
    ``now``, the clock of the client that was served first, so idle time earns no credit and no client starves.

    Args:
        max_lead: How far a clock may get ahead of ``now`` by rows that run together with another client's: the capacity
            that the other client could not use.
    """

    def __init__(self, max_lead: float) -> None:
        self.now = 0.0
        self._max_lead = max_lead
        self._clocks: dict[str, float] = {}
        self._num_live = Counter[str]()
        self._shares: dict[str, float] = {}
        self._leader: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether any client has a live request."""
        return bool(self._num_live)

    def join(self, client: str, share: float = 1.0) -> None:
        """Add a live request of ``client``, which gets ``share`` times the work of a client with a share of 1."""
        self._shares[client] = share
        if not self._num_live[client]:
            self._clocks[client] = max(self._clocks.get(client, self.now), self.now)
        self._num_live[client] += 1

    def leave(self, client: str) -> None:
        """Remove a request of ``client``; its clock is dropped once it is not ahead of other clients."""
        self._num_live[client] -= 1
        if self._num_live[client]:
            return
        del self._num_live[client], self._shares[client]
        if self._clocks[client] <= self.now:
            del self._clocks[client]
        if not self._num_live:
            self._clocks.clear()
            self.now = 0.0
        elif len(self._clocks) > len(self._num_live) + MAX_REMEMBERED_CLIENTS:
            self._clocks = {name: clock for name, clock in self._clocks.items() if name in self._num_live}

    def copy(self) -> FairShare:
        """Return an independent copy for a simulation."""
        copied = FairShare(self._max_lead)
        copied.now, copied._leader = self.now, self._leader
        copied._clocks, copied._num_live = self._clocks.copy(), self._num_live.copy()
        copied._shares = self._shares.copy()
        return copied

    def in_order(self, tasks: Iterable[ImageTask], order: Order) -> list[ImageTask]:
        """Sort ``tasks`` by their tags; ``order`` is the key within a client, the smallest first."""
        of_client: dict[str, list[ImageTask]] = {}
        for task in sorted(tasks, key=order):
            of_client.setdefault(task.live.client, []).append(task)
        if len(of_client) < 2:
            return [task for client_tasks in of_client.values() for task in client_tasks]
        tagged: list[tuple[float, float, int, ImageTask]] = []
        for client, client_tasks in of_client.items():
            tag, share = self._start_tag(client, client_tasks[0]), self._shares[client]
            for task in client_tasks:
                tag += task.cost_left / share
                tagged.append((tag, order(task), len(tagged), task))
        return [task for *_, task in sorted(tagged)]

    def in_turn(self, tasks: Iterable[ImageTask]) -> list[ImageTask]:
        """Sort ``tasks`` round robin over the clients, in each round the client with the smallest clock first."""
        num_ranked = Counter[str]()
        ranked: list[tuple[int, float, int, ImageTask]] = []
        for index, task in enumerate(tasks):
            client = task.live.client
            ranked.append((num_ranked[client], self._clocks[client], index, task))
            num_ranked[client] += 1
        return [task for *_, task in sorted(ranked)]

    def _start_tag(self, client: str, first: ImageTask) -> float:
        """Return the clock of ``client``, after limiting its credit to its next image, ``first``."""
        self._clocks[client] = max(self._clocks[client], self.now - first.cost_left / self._shares[client])
        return self._clocks[client]

    def set_leader(self, client: str) -> None:
        """Record that ``client`` is served first in this tick, and other clients only by the rows it leaves free."""
        self._leader = client
        self.now = max(self.now, self._clocks[client])

    def charge(self, client: str, cost: float) -> None:
        """Advance the clock of ``client`` by ``cost`` of work."""
        clock, cost = self._clocks[client], cost / self._shares[client]
        limit = math.inf if client == self._leader else max(clock, self.now + self._max_lead)
        self._clocks[client] = min(clock + cost, limit)


class PriorityShare:
    """Fair shares of both priorities, and the work that batch images are owed.

    Interactive images go first, and batch images fill the rows that they leave free. Rows or calls that batch images
    could not share are owed to them up to ``BATCH_SHARE``; once work is owed, batch images lead a tick and interactive
    images fill it. Work of a client at one priority does not count at the other.

    Filling a tick makes it longer. Next to interactive images of other clients, a *saturating* line (batch images, or a
    client that could fill the tick alone) therefore gets only so many rows that the tick takes ``MAX_SLOWDOWN`` times
    as long, and its work counts ``SATURATING_CLIENT_WEIGHT`` times.

    Args:
        max_lead: See :class:`FairShare`.
    """

    def __init__(self, max_lead: float) -> None:
        self._shares: dict[Priority, FairShare] = {name: FairShare(max_lead) for name in PRIORITIES}
        self._owed = 0.0
        self._saturating: set[Line] = set()  # lines limited in the latest tick

    def copy(self, newcomers: Iterable[LiveRequest] = (), *, owes_batch: bool = True) -> PriorityShare:
        """Return a copy for a simulation, which ``newcomers`` have joined.

        Args:
            newcomers: Requests that are not queued yet.
            owes_batch: Whether the copy keeps the work owed to batch images.
        """
        copied = PriorityShare(0.0)
        copied._owed, copied._saturating = self._owed if owes_batch else 0.0, self._saturating
        copied._shares = {name: share.copy() for name, share in self._shares.items()}
        for live in newcomers:
            copied.join(live)
        return copied

    def join(self, live: LiveRequest) -> None:
        """Add a live request."""
        self._shares[live.request.priority].join(live.client, live.request.share)

    def leave(self, live: LiveRequest) -> None:
        """Remove a request that is over."""
        self._shares[live.request.priority].leave(live.client)

    def in_order(self, tasks: Iterable[ImageTask], order: Order) -> list[ImageTask]:
        """Sort ``tasks`` into the order in which they are to run; ``order`` is the key within a client."""
        parts = zip(self._shares.values(), self._split(tasks), strict=True)
        interactive, batch = (share.in_order(part, order) for share, part in parts)
        return [*batch, *interactive] if self._owed > 0.0 else [*interactive, *batch]

    def limit_saturating_clients(
        self,
        tasks: Sequence[ImageTask],
        ready: Iterable[ImageTask],
        costs: TickCosts,
        num_waiting: Callable[[], Mapping[Line, int]],
    ) -> list[ImageTask]:
        """Drop images of saturating lines that would slow the tick more than ``MAX_SLOWDOWN``.

        Args:
            tasks: The images of the tick, all of one group.
            ready: All images that could run, in any order.
            costs: The measured costs of UNet calls.
            num_waiting: Returns the number of images without a slot, by line.
        """
        group, first = tasks[0].group, tasks[0].live.line
        same_group = [task for task in ready if task.group == group]
        self._saturating = set()
        if first[1] == "batch" or all(task.live.line == first for task in same_group):
            return list(tasks)
        max_rows, rows = sum(task.rows_now for task in tasks), Counter[Line]()
        for task in same_group:
            rows[task.live.line] += task.rows_now
        waiting = num_waiting()
        saturating = {
            line for line, num_rows in rows.items() if num_rows + waiting.get(line, 0) >= max_rows or line[1] == "batch"
        }
        if not saturating or saturating == rows.keys():
            return list(tasks)
        self._saturating = saturating
        load, selected, num_rows = TickLoad(costs), list[ImageTask](), 0
        for task in same_group:
            if task.live.line not in saturating and num_rows + task.rows_now <= max_rows:
                selected.append(task)
                load.add(task)
                num_rows += task.rows_now
        limit_s = MAX_SLOWDOWN * load.seconds()
        for index, task in enumerate(tasks):
            fits = task.live.line in saturating and num_rows + task.rows_now <= max_rows
            if fits and (index == 0 or load.seconds(task) <= limit_s):
                selected.append(task)
                load.add(task)
                num_rows += task.rows_now
        return selected

    def in_turn(self, tasks: Iterable[ImageTask]) -> list[ImageTask]:
        """Sort ``tasks``: interactive images first, within a priority round robin over the clients."""
        parts = zip(self._shares.values(), self._split(tasks), strict=True)
        return [task for share, part in parts for task in share.in_turn(part)]

    def start_tick(self, tasks: Sequence[ImageTask]) -> None:
        """Record the images of a tick: the leading client of each priority, and the work owed to batch images."""
        parts = self._split(tasks)
        for share, part in zip(self._shares.values(), parts, strict=True):
            if part:
                share.set_leader(part[0].live.client)
        work, batch_work = (sum(task.cost_now for task in part) for part in (tasks, parts[1]))
        owed_work = self._owed + BATCH_SHARE * work - batch_work
        # batch work that used idle capacity is paid back by at most one tick
        self._owed = max(owed_work, -work) if all(share.is_active for share in self._shares.values()) else 0.0

    def charge(self, task: ImageTask, cost: float) -> None:
        """Charge ``cost`` of work to the client of ``task``."""
        weight = SATURATING_CLIENT_WEIGHT if task.live.line in self._saturating else 1.0
        self._shares[task.live.request.priority].charge(task.live.client, weight * cost)

    @staticmethod
    def _split(tasks: Iterable[ImageTask]) -> tuple[list[ImageTask], list[ImageTask]]:
        parts: dict[Priority, list[ImageTask]] = {name: [] for name in PRIORITIES}
        for task in tasks:
            parts[task.live.request.priority].append(task)
        return parts["interactive"], parts["batch"]


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


class SlotQueue:
    """Assigns slots to waiting images in fair order; the lowest free slot comes first, so that pools stay small.

    Args:
        max_slots: Slots that any client may hold.
        max_per_tick: Images that may get a slot in one tick.
        share: The fair shares of clients and priorities.

    Attributes:
        num_reserved: Further slots for clients that hold none, so that one client cannot keep the others out.
    """

    def __init__(self, max_slots: int, max_per_tick: int, share: PriorityShare) -> None:
        self.num_slots = max_slots
        self.num_reserved = 1 + max_slots // SLOTS_PER_RESERVED_SLOT
        self.waiting = ImageQueue()
        self._free = list(range(self.num_slots + self.num_reserved))  # a heap
        self._max_per_tick = max_per_tick
        self._share = share
        self._holders: dict[ImageTask, int] = {}  # arrival numbers, in order of admission
        self._arrivals = itertools.count()

    @property
    def num_free(self) -> int:
        """Free slots that any client may take."""
        return max(0, len(self._free) - self.num_reserved)

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
            num_left = len(self._free)
            limit = SLOTS_PER_FREE_SLOT * num_left if self.num_free else min(1, num_left)
            heads = [task for task in self.waiting.heads(order) if num_held[task.live.line] < limit]
            heads = [task for task in heads if self._is_allowed(task, num_batch)]
            if not heads:
                return
            if len(heads) > 1:
                heads = [task for task in self._share.in_order((*self._holders, *heads), order) if task.slot is None]
            task, arrival = self.waiting.take(heads[0].live.line)
            task.slot = heapq.heappop(self._free)
            self._holders[task] = arrival
            num_held[task.live.line] += 1
            num_batch += task.live.request.priority == "batch"
            yield task

    def _is_allowed(self, task: ImageTask, num_batch: int) -> bool:
        """Return whether ``task`` may take a slot while ``num_batch`` batch images hold one."""
        if task.live.request.priority == "interactive" or not num_batch:
            return True
        return self.num_free > int(RESERVED_SLOT_FRACTION * self.num_slots)

    def postpone(self, task: ImageTask, key: float) -> None:
        """Return ``task`` to its old position in the queue and free its slot."""
        arrival = self._holders[task]
        self.release(task)
        self.waiting.add(task, key, arrival)

    def release(self, task: ImageTask) -> None:
        """Free the slot of ``task``, if it has one."""
        if task.slot is not None:
            del self._holders[task]
            heapq.heappush(self._free, task.slot)
            task.slot = None

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every slot is either free or held, and only once."""
        slots = [*self._free, *(task.slot for task in self._holders)]
        expected_slots = range(self.num_slots + self.num_reserved)
        assert Counter(slots) == Counter(expected_slots), f"slots are lost or held twice: {sorted(self._free)} are free"
