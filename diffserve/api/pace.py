"""Measurement of processing speed, over the time in which there was work.

Work is counted in UNet rows at the native size of the model: a row with twice the pixels counts as two. This module
does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

COST_MEMORY: Final = 0.97
"""Factor by which each new call reduces the weight of earlier calls."""
MEMORY_S: Final = 15.0
"""Time constant of forgetting: after this time, work counts 1/e."""
LEAST_S: Final = 0.1
"""Working time that must be measured before a speed is known."""
PAUSE_TIMES: Final = 10.0
PAUSE_S: Final = 1.0
"""A duration above ``PAUSE_S`` and ``PAUSE_TIMES`` times the usual one is a pause, unless two follow each other."""


class PauseDetector:
    """Distinguishes a pause of the process (SIGSTOP, a frozen container, a suspended machine) from slow work."""

    def __init__(self) -> None:
        self._was_long = False

    def is_pause(self, seconds: float, usual_s: float) -> bool:
        """Return whether a duration is a pause, which must not be measured.

        The second long duration in a row counts as slow work.
        """
        is_long = seconds > max(PAUSE_S, PAUSE_TIMES * usual_s)
        is_pause = is_long and not self._was_long
        self._was_long = is_long
        return is_pause


class Pace:
    """Speed of one worker. Idle time, from :meth:`rest` to :meth:`begin`, does not count.

    A gap between two reports of work that is far longer than usual is a pause of the workers and does not count either.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create a measurement without data.

        Args:
            clock: Returns the time in seconds.
        """
        self._clock = clock
        self._work = 0.0
        self._seconds = 0.0
        self._squares = 0.0  # sum of squared gaps between reports, for the time-weighted mean gap
        self._gap_s = 0.0  # worker seconds since the last report of work
        self._pauses = PauseDetector()
        self._since_s: float | None = None
        self._num_workers = 1

    @property
    def per_s(self) -> float | None:
        """Work per second and worker; ``None`` while unknown."""
        return self._work / self._seconds if self._work > 0.0 and self._seconds >= LEAST_S else None

    def begin(self, num_workers: int = 1) -> None:
        """Start counting time for ``num_workers`` workers, or change their number."""
        if self._since_s is None:
            self._since_s = self._clock()
        else:
            self._extend_gap()
        self._num_workers = num_workers

    def pause(self) -> None:
        """Stop counting time: there is no more work."""
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
        """Add ``work`` and the gap before it, unless the gap is a pause."""
        gap_s, self._gap_s = self._gap_s, 0.0
        usual_s = self._squares / self._seconds if self._seconds >= LEAST_S else math.inf
        # Images of one step report together; the tiny gaps between them must not reset the pause detector.
        is_step = gap_s > 0.5 * usual_s or math.isinf(usual_s)
        if is_step and self._pauses.is_pause(gap_s, usual_s):
            gap_s = usual_s
        decay = math.exp(-gap_s / (MEMORY_S * self._num_workers))
        self._work = decay * self._work + work
        self._seconds = decay * self._seconds + gap_s
        self._squares = decay * self._squares + gap_s * gap_s

    def seconds(self, work: float, num_workers: int = 1) -> float | None:
        """Return how long ``work`` takes ``num_workers`` workers; ``None`` while unknown."""
        return None if self.per_s is None else work / (self.per_s * num_workers)


class TokenCost:
    """Cost of a call as ``fixed_s + per_token_s * tokens``, a least-squares fit with exponential forgetting."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0
        self._pauses = PauseDetector()

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record that a call of ``num_tokens`` tokens took ``seconds``. Pauses of the process are ignored."""
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
        """The fit (fixed_s, per_token_s), neither below 0; zeros while unknown."""
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
        """Return how many tokens fit into ``time_s``, at least 1; ``None`` if unknown or unlimited."""
        fixed_s, per_token_s = self.line
        if per_token_s <= 0.0:
            return None
        return max(1, int((time_s - fixed_s) / per_token_s))
