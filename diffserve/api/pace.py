"""How fast work gets done: measured over the time in which there was any. No torch.

Work is counted in UNet rows of the model's native size, pixels included: a row of twice the pixels counts as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

COST_MEMORY: Final = 0.97
"""Weight of what was known of a call's cost, for each new call."""
MEMORY_S: Final = 15.0
"""Work older than this counts for less and less."""
LEAST_S: Final = 0.1
"""So long must have been worked before a pace is told."""
PAUSE_TIMES: Final = 10.0
PAUSE_S: Final = 1.0
"""A duration above ``PAUSE_S`` and ``PAUSE_TIMES`` the usual one is a pause of the process, unless two follow one
another."""


class PauseDetector:
    """Tells a pause of the process (SIGSTOP, a frozen container, a suspended machine) from work that became slow."""

    def __init__(self) -> None:
        self._was_long = False

    def is_pause(self, seconds: float, usual_s: float) -> bool:
        """Whether a duration is a pause and must not be measured. The second long duration in a row is slow work."""
        is_long = seconds > max(PAUSE_S, PAUSE_TIMES * usual_s)
        is_pause = is_long and not self._was_long
        self._was_long = is_long
        return is_pause


class Pace:
    """Work per second of one worker. ``clock`` in seconds; from :meth:`rest` to :meth:`begin` time does not count.

    Nor does a pause of the workers: a gap between two reports of work that is far longer than the usual gap.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._work = 0.0
        self._seconds = 0.0
        self._squares = 0.0  # of the gaps between reports of work, for the mean gap weighted by time
        self._gap_s = 0.0  # since the last report of work, times the workers
        self._pauses = PauseDetector()
        self._since_s: float | None = None
        self._num_workers = 1

    @property
    def per_s(self) -> float | None:
        """Work done in a second; ``None`` while nothing is known."""
        return self._work / self._seconds if self._work > 0.0 and self._seconds >= LEAST_S else None

    def begin(self, num_workers: int = 1) -> None:
        """There is work from now on, for so many at once; where there was already, it may be for more or fewer."""
        if self._since_s is None:
            self._since_s = self._clock()
        else:
            self._extend_gap()
        self._num_workers = num_workers

    def rest(self) -> None:
        """There is none any more."""
        if self._since_s is not None:
            self._extend_gap()
            self._count(0.0)
        self._since_s = None

    def did(self, work: float) -> None:
        """Report ``work`` that was done since the last report."""
        if self._since_s is None:
            return
        self._extend_gap()
        if work > 0.0:
            self._count(work)

    def _extend_gap(self) -> None:
        assert self._since_s is not None
        now_s = self._clock()
        self._gap_s += max(0.0, now_s - self._since_s) * self._num_workers
        self._since_s = now_s

    def _count(self, work: float) -> None:
        """Add ``work`` and the gap before it, but no pause."""
        gap_s, self._gap_s = self._gap_s, 0.0
        usual_s = self._squares / self._seconds if self._seconds >= LEAST_S else math.inf
        # images of one step report at once: the tiny gaps between them are no evidence against a pause
        is_step = gap_s > 0.5 * usual_s or math.isinf(usual_s)
        if is_step and self._pauses.is_pause(gap_s, usual_s):
            gap_s = usual_s
        decay = math.exp(-gap_s / (MEMORY_S * self._num_workers))
        self._work = decay * self._work + work
        self._seconds = decay * self._seconds + gap_s
        self._squares = decay * self._squares + gap_s * gap_s

    def seconds(self, work: float, num_workers: int = 1) -> float | None:
        """How long ``work`` takes so many at this pace; ``None`` while nothing is known."""
        return None if self.per_s is None else work / (self.per_s * num_workers)


class TokenCost:
    """Seconds of a call as ``fixed_s + per_token_s * tokens``, by least squares that forgets slowly."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0
        self._pauses = PauseDetector()

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record that a call of ``num_tokens`` tokens took ``seconds``, unless the process paused in it."""
        fixed_s, per_token_s = self.line
        usual_s = fixed_s + per_token_s * num_tokens if self._weight else math.inf
        if self._pauses.is_pause(seconds, usual_s):
            return
        for name, value in (
            ("_weight", 1.0),
            ("_tokens", num_tokens),
            ("_squares", num_tokens**2),
            ("_seconds", seconds),
            ("_products", num_tokens * seconds),
        ):
            setattr(self, name, COST_MEMORY * getattr(self, name) + value)

    @property
    def line(self) -> tuple[float, float]:
        """(fixed_s, per_token_s), neither below 0; zeros when nothing is known."""
        if not self._weight:
            return 0.0, 0.0
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_tokens**2
        if variance < 1e-9 * max(1.0, mean_tokens**2):
            return 0.0, mean_s / max(mean_tokens, 1.0)
        slope = (self._products / self._weight - mean_tokens * mean_s) / variance
        slope = min(max(slope, 0.0), mean_s / max(mean_tokens, 1.0))
        return mean_s - slope * mean_tokens, slope

    def max_tokens(self, time_s: float) -> int | None:
        """How many tokens should fit into ``time_s``, at least 1; None when it is not known, or without a limit."""
        fixed_s, per_token_s = self.line
        if per_token_s <= 0.0:
            return None
        return max(1, int((time_s - fixed_s) / per_token_s))
