"""Images without a lane, by client, each client's in its own order. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from diffserve.engine.task import ImageTask, Stage


class WaitingRoom:
    """Entries are (key, number, task): the smallest key of a client is its next, and what came first among equals."""

    def __init__(self) -> None:
        self._of_client: dict[str, list[tuple[float, int, ImageTask]]] = {}

    def __iter__(self) -> Iterator[ImageTask]:
        return (task for heap in self._of_client.values() for _, _, task in heap if _waits(task))

    def add(self, task: ImageTask, key: float, number: int) -> None:
        """Let ``task`` wait; ``number`` in the order of arrival."""
        heapq.heappush(self._of_client.setdefault(task.live.client, []), (key, number, task))

    def heads(self) -> list[ImageTask]:
        """The next image of every client that has one; those who left meanwhile are forgotten."""
        for client, heap in list(self._of_client.items()):
            while heap and not _waits(heap[0][2]):
                heapq.heappop(heap)
            if not heap:
                del self._of_client[client]
        return [heap[0][2] for heap in self._of_client.values()]

    def take(self, client: str) -> tuple[ImageTask, int]:
        """The next image of ``client``, which waits no more, and its number."""
        _, number, task = heapq.heappop(self._of_client[client])
        return task, number


def _waits(task: ImageTask) -> bool:
    return task.stage is Stage.WAITING and task.lane is None
