"""How many replicas there should be: as many as the work asks for that is queued, and will be when one has started;
fewer only after a while.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from diffserve.cluster.config import ClusterConfig

MOST_IDLE: Final = 10.0
"""So many times ``idle_s`` a replica that took long to start is kept at most."""


class Scaler:
    """Decides, and remembers how the queue grew, and since when fewer would have been enough."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._enough_since_s: float | None = None
        self._before: deque[tuple[float, float]] = deque()

    def wanted(self, cost: float, num_held: int, *, start_s: float, now_s: float, is_starting: bool = False) -> int:
        """Replicas to hold while ``cost`` (UNet rows of the native size) is queued and ``num_held`` are held.

        ``start_s``: seconds that one takes to start, as measured. By so much a queue that grows is foreseen; and a
        replica that took long to start is kept for longer, since to be without it costs as much, up to ten times
        ``idle_s``: a start on a machine that was busy may have taken minutes. ``is_starting``: none of those held is
        ready yet, and somebody waits for the first.
        """
        replicas, scaling = self._config.replicas, self._config.scaling
        asked = math.ceil((cost + self._growth(cost, start_s, now_s)) / scaling.rows_per_replica)
        wanted = min(replicas.max, max(replicas.min, asked))
        if wanted >= num_held or is_starting:
            self._enough_since_s = None
            return max(wanted, num_held)
        if self._enough_since_s is None:
            self._enough_since_s = now_s
        if now_s - self._enough_since_s < max(scaling.idle_s, min(start_s, MOST_IDLE * scaling.idle_s)):
            return num_held
        self._enough_since_s = now_s
        return num_held - 1

    def _growth(self, cost: float, start_s: float, now_s: float) -> float:
        """By how much the queue will have grown in ``start_s``: as in the last ``start_s``, of whose halves the slower
        counts twice, so that many requests at once are not taken for a beginning.
        """
        before = self._before
        before.append((now_s, cost))
        while len(before) > 1 and before[1][0] <= now_s - start_s:
            before.popleft()
        first_s, first = before[0]
        if start_s <= 0.0 or first_s > now_s - start_s:
            return 0.0
        half = next(one for told_s, one in reversed(before) if told_s <= now_s - start_s / 2)
        return 2.0 * max(0.0, min(cost - half, half - first))
