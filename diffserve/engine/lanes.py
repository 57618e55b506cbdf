"""Who holds which lane. A lane is a row of the latent pool; this is its ledger, without the tensors."""

from __future__ import annotations

import heapq
from collections.abc import Hashable


class LaneTable:
    """``num_lanes`` lanes, each free or held by one owner. The lowest free lane is given first, so pools stay small."""

    def __init__(self, num_lanes: int) -> None:
        self.num_lanes = num_lanes
        self._free = list(range(num_lanes))
        self._owners: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        """Lanes nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Lanes held by an image."""
        return len(self._owners)

    @property
    def owners(self) -> dict[int, Hashable]:
        """A copy of lane -> owner."""
        return dict(self._owners)

    def allocate(self, owner: Hashable) -> int | None:
        """Give ``owner`` the lowest free lane, or ``None`` when all are held."""
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
        """free + used = total and no lane is both; ``AssertionError`` tells what is wrong."""
        free, used = set(self._free), set(self._owners)
        assert len(free) == len(self._free), f"a lane is twice in the free list: {sorted(self._free)}"
        assert not free & used, f"lanes {sorted(free & used)} are both free and held"
        lost = set(range(self.num_lanes)) - free - used
        assert not lost, f"lanes lost: {sorted(lost)}"
