"""The heartbeat: ticks are counted and timed by the thread that runs them, and read by the one that answers pings.

A tick that never ends is told from one that is long by what ticks took so far. No torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

TICKS_KEPT: Final = 1000
TIMES_USUAL: Final = 10.0
USUAL_SHARE: Final = 0.99


class Pulse:
    """How the main thread gets on.

    num_ticks     ticks that ended
    least_s       a tick is never thought to hang before so many seconds
    """

    def __init__(self, least_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_ticks = 0
        self.least_s = least_s
        self._clock = clock
        self._trial_s = 0.0
        self._usual: deque[float] = deque(maxlen=TICKS_KEPT)  # seconds of a tick at scale 1
        self._running: tuple[float, float] | None = None  # since when, at what scale; replaced whole

    @property
    def running_s(self) -> float:
        """Seconds that the running tick has taken, 0 between two."""
        running = self._running
        return 0.0 if running is None else self._clock() - running[0]

    @property
    def patience_s(self) -> float:
        """Seconds after which the running tick counts as hanging: ``least_s``, or ten times what 99 of 100 ticks took,
        or ten times the trial picture; for work of a larger scale as much more."""
        running = self._running
        scale = 1.0 if running is None else running[1]
        usual = sorted(tuple(self._usual))
        usual_s = usual[int(USUAL_SHARE * (len(usual) - 1))] if usual else 0.0
        return max(self.least_s, TIMES_USUAL * scale * max(usual_s, self._trial_s))

    @contextmanager
    def ticking(self, scale: float = 1.0) -> Iterator[None]:
        """For the length of a tick; ``scale``: how much more it may take than one at the model's own size."""
        started_s = self._clock()
        self._running = started_s, max(1.0, scale)
        try:
            yield
        finally:
            self._running = None
            self._usual.append((self._clock() - started_s) / max(1.0, scale))
            self.num_ticks += 1

    @contextmanager
    def trial(self) -> Iterator[None]:
        """For the length of the trial picture, which is not forgotten as ticks are."""
        started_s = self._clock()
        yield
        self._trial_s = self._clock() - started_s
