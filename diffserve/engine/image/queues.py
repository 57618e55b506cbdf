"""Fair share: in which order the images of several clients get on. No torch.

Every client has a clock of its own. It moves by the work done for that client, and an image runs the earlier the
smaller its tag is::

    tag = its client's clock + what that client has before it + what it still needs

What a client has before an image is said by the scheduler's own order (shortest first, with ageing). So one client
alone is served in just that order; a client with one image comes before everything but the first of one with eighty;
and among clients with one image each the shortest comes first.

``now`` is the clock of whoever is served first. A client that comes, or comes back, starts there: nobody saves up by
staying away. A client that is served last stays behind on its clock, so newcomers come after it sooner or later, and
nobody starves. (Start-time fair queueing, Goyal et al. 1996, with tags that follow what is left.) For a client with a
share of its own, work counts by that share's part.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final

from diffserve.api.types import Priority
from diffserve.engine.image.task import ImageTask
from diffserve.engine.records import Stage

Order = Callable[[ImageTask], float]
Line = tuple[str, Priority]

LANES_PER_LANE_LEFT: Final = 7
"""A client may take another lane while it holds fewer than so many for each that is left."""

MOST_REMEMBERED: Final = 1024


class FairShare:
    """The clocks of those who have something to paint.

    forgiven  how far a client's clock may get ahead of ``now`` beside others that are served first: that is room which
              nobody else could use
    """

    def __init__(self, forgiven: float) -> None:
        self.now = 0.0
        self._forgiven = forgiven
        self._clocks: dict[str, float] = {}
        self._num_live = Counter[str]()
        self._shares: dict[str, float] = {}
        self._leader: str | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody has a live request."""
        return bool(self._num_live)

    def join(self, client: str, share: float = 1.0) -> None:
        """Another request of ``client`` is live, who gets ``share`` times what others do."""
        self._shares[client] = share
        if not self._num_live[client]:
            self._clocks[client] = max(self._clocks.get(client, self.now), self.now)
        self._num_live[client] += 1

    def leave(self, client: str) -> None:
        """A request of ``client`` is over. Whoever has none left is forgotten as soon as that is fair to the others."""
        self._num_live[client] -= 1
        if self._num_live[client]:
            return
        del self._num_live[client], self._shares[client]
        if self._clocks[client] <= self.now:
            del self._clocks[client]
        if not self._num_live:
            self._clocks.clear()
            self.now = 0.0
        elif len(self._clocks) > len(self._num_live) + MOST_REMEMBERED:
            self._clocks = {name: clock for name, clock in self._clocks.items() if name in self._num_live}

    def copy(self) -> FairShare:
        """One to play with."""
        made = FairShare(self._forgiven)
        made.now, made._leader = self.now, self._leader
        made._clocks, made._num_live, made._shares = self._clocks.copy(), self._num_live.copy(), self._shares.copy()
        return made

    def in_order(self, tasks: Iterable[ImageTask], order: Order) -> list[ImageTask]:
        """``tasks`` as they are to run. ``order``: the order within a client, the smallest first."""
        of_client: dict[str, list[ImageTask]] = {}
        for task in sorted(tasks, key=order):
            of_client.setdefault(task.live.client, []).append(task)
        if len(of_client) < 2:
            return [task for own in of_client.values() for task in own]
        tagged: list[tuple[float, float, int, ImageTask]] = []
        for client, own in of_client.items():
            tag, share = self._start(client, own[0]), self._shares[client]
            for task in own:
                tag += task.cost_left / share
                tagged.append((tag, order(task), len(tagged), task))
        return [task for *_, task in sorted(tagged)]

    def in_turn(self, tasks: Iterable[ImageTask]) -> list[ImageTask]:
        """The first of every client, then the second of every client, and so on; of each the one least served first."""
        seen = Counter[str]()
        ranked: list[tuple[int, float, int, ImageTask]] = []
        for place, task in enumerate(tasks):
            client = task.live.client
            ranked.append((seen[client], self._clocks[client], place, task))
            seen[client] += 1
        return [task for *_, task in sorted(ranked)]

    def _start(self, client: str, first: ImageTask) -> float:
        """The clock of ``client``, whose next image is ``first``; what it was owed beyond that image is forgotten."""
        self._clocks[client] = max(self._clocks[client], self.now - first.cost_left / self._shares[client])
        return self._clocks[client]

    def led_by(self, client: str) -> None:
        """``client`` is served first in this tick, the others beside it."""
        self._leader = client
        self.now = max(self.now, self._clocks[client])

    def charge(self, client: str, cost: float) -> None:
        """``cost`` of work was done for ``client``."""
        clock, cost = self._clocks[client], cost / self._shares[client]
        most = math.inf if client == self._leader else max(clock, self.now + self._forgiven)
        self._clocks[client] = min(clock + cost, most)


class ImageQueue:
    """Entries are (key, number, task): the smallest key of a line is its next, and what came first among equals."""

    def __init__(self) -> None:
        self._lines: dict[Line, list[tuple[float, int, ImageTask]]] = {}

    def __iter__(self) -> Iterator[ImageTask]:
        return (task for heap in self._lines.values() for _, _, task in heap if _waits(task))

    def add(self, task: ImageTask, key: float, number: int) -> None:
        """Let ``task`` wait; ``number`` in the order of arrival."""
        heapq.heappush(self._lines.setdefault(task.live.line, []), (key, number, task))

    def heads(self, order: Order) -> list[ImageTask]:
        """The next image of every line that has one; those who left meanwhile are forgotten.

        order  the keys as of now, none smaller than when its image was added
        """
        for line, heap in list(self._lines.items()):
            while heap and (not _waits(heap[0][2]) or order(heap[0][2]) > heap[0][0]):
                key, number, task = heapq.heappop(heap)
                if _waits(task):
                    heapq.heappush(heap, (max(key, order(task)), number, task))
            if not heap:
                del self._lines[line]
        return [heap[0][2] for heap in self._lines.values()]

    def take(self, line: Line) -> tuple[ImageTask, int]:
        """The next image of ``line``, which waits no more, and its number."""
        _, number, task = heapq.heappop(self._lines[line])
        return task, number


def _waits(task: ImageTask) -> bool:
    return task.stage is Stage.WAITING and task.lane is None


class LaneTable:
    """``num_lanes`` lanes, each free or held by one owner. The lowest free lane is given first, so pools stay small.

    ``num_kept`` more are for those alone who hold none, so that whoever has all the others keeps nobody out.
    """

    def __init__(self, num_lanes: int, *, num_kept: int = 0) -> None:
        self.num_lanes = num_lanes
        self.num_kept = num_kept
        self._free = list(range(num_lanes + num_kept))
        self._owners: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        """Lanes that anybody may have."""
        return max(0, self.num_left - self.num_kept)

    @property
    def num_left(self) -> int:
        """Lanes nobody holds, with those that are kept."""
        return len(self._free)

    @property
    def owners(self) -> dict[int, Hashable]:
        """A copy of lane -> owner."""
        return dict(self._owners)

    def allocate(self, owner: Hashable) -> int | None:
        """Give ``owner`` the lowest free lane, or ``None`` when all are held, with those that are kept."""
        if not self._free:
            return None
        lane = heapq.heappop(self._free)
        self._owners[lane] = owner
        return lane

    def free(self, lane: int) -> None:
        """Take ``lane`` back. Freeing a lane nobody holds is a bug and raises ``KeyError``."""
        del self._owners[lane]
        heapq.heappush(self._free, lane)

    def check_integrity(self) -> None:
        """Free + used = total and no lane is both; ``AssertionError`` tells what is wrong."""
        free, used = set(self._free), set(self._owners)
        assert len(free) == len(self._free), f"a lane is twice in the free list: {sorted(self._free)}"
        assert not free & used, f"lanes {sorted(free & used)} are both free and held"
        lost = set(range(self.num_lanes + self.num_kept)) - free - used
        assert not lost, f"lanes lost: {sorted(lost)}"
