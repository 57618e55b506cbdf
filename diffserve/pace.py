"""How fast work gets done: measured over the time in which there was any. No torch.

Work is counted in UNet rows of the model's native size, pixels included: a row of twice the pixels counts as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

MEMORY_S: Final = 15.0
"""Work older than this counts for less and less."""
LEAST_S: Final = 0.1
"""So long must have been worked before a pace is told."""


class Pace:
    """Work per second. ``clock`` in seconds; between :meth:`rest` and :meth:`begin` time does not count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._work = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    @property
    def per_s(self) -> float | None:
        """Work done in a second; ``None`` while nothing is known."""
        return self._work / self._seconds if self._work > 0.0 and self._seconds >= LEAST_S else None

    def begin(self) -> None:
        """There is work from now on; nothing happens when there was already."""
        if self._since_s is None:
            self._since_s = self._clock()

    def rest(self) -> None:
        """There is none any more."""
        self.did(0.0)
        self._since_s = None

    def did(self, work: float) -> None:
        """So much was done since the last word of it."""
        if self._since_s is None:
            return
        now_s = self._clock()
        elapsed_s, self._since_s = max(0.0, now_s - self._since_s), now_s
        kept = math.exp(-elapsed_s / MEMORY_S)
        self._work = kept * self._work + work
        self._seconds = kept * self._seconds + elapsed_s

    def seconds(self, work: float) -> float | None:
        """How long ``work`` takes at this pace; ``None`` while nothing is known."""
        return None if self.per_s is None else work / self.per_s
