"""Who holds which lane. A lane is a row of the latent pool; this is its ledger, without the tensors."""

from __future__ import annotations

import heapq
from collections.abc import Hashable


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
    def num_used(self) -> int:
        """Lanes held by an image."""
        return len(self._owners)

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
        """free + used = total and no lane is both; ``AssertionError`` tells what is wrong."""
        free, used = set(self._free), set(self._owners)
        assert len(free) == len(self._free), f"a lane is twice in the free list: {sorted(self._free)}"
        assert not free & used, f"lanes {sorted(free & used)} are both free and held"
        lost = set(range(self.num_lanes + self.num_kept)) - free - used
        assert not lost, f"lanes lost: {sorted(lost)}"
