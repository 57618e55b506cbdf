"""What a call of the network costs by the number of its tokens: learnt while running."""

from __future__ import annotations

from typing import Final

MEMORY: Final = 0.97
"""Weight of what was known, for each new call."""


class TokenCost:
    """Seconds of a call as ``fixed_s + per_token_s * tokens``, by least squares that forgets slowly."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A call of ``num_tokens`` tokens took ``seconds``."""
        for name, value in (
            ("_weight", 1.0),
            ("_tokens", num_tokens),
            ("_squares", num_tokens**2),
            ("_seconds", seconds),
            ("_products", num_tokens * seconds),
        ):
            setattr(self, name, MEMORY * getattr(self, name) + value)

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
