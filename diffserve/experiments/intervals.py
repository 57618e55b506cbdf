"""Confidence intervals of means by the percentile bootstrap (Efron 1979), optionally over groups of values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from diffserve.api.errors import InvalidRequest

LEVEL = 0.95
NUM_RESAMPLES = 4000
CHUNK = 250  # resamples drawn at a time, so that memory stays small


@dataclass(frozen=True)
class Share:
    """A share of ``hits`` in ``count`` with its 95 % interval from ``low`` to ``high`` in 0..1."""

    hits: int
    count: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Hits divided by count, in 0..1."""
        return self.hits / self.count

    def __str__(self) -> str:
        interval = f"{100 * self.low:.0f}..{100 * self.high:.0f} %"
        return f"{100 * self.share:.0f} % ({self.hits} of {self.count}; 95 % interval {interval})"


def bootstrap_interval(
    values: Sequence[float], groups: Sequence[Hashable] | None = None, *, level: float = LEVEL, seed: int = 0
) -> tuple[float, float]:
    """Compute the bootstrap interval of the mean of ``values`` with ``NUM_RESAMPLES`` resamples.

    Args:
        values: The measured values.
        groups: Group of each value, such as its prompt, if values of one group are not independent. Groups are
            resampled as units. If all groups have the same mean, both ends are that mean.
        level: Confidence level.
        seed: Seed of the resampling.

    Returns:
        Lower and upper end of the interval.

    Raises:
        InvalidRequest: There are no values, the number of groups differs from that of values, or the level is not
            between 0 and 1.
    """
    if not values:
        raise InvalidRequest("no values have no interval of their mean; measure at least one.")
    if groups is not None and len(groups) != len(values):
        raise InvalidRequest(f"{len(groups)} groups for {len(values)} values; give one for each.")
    if not 0 < level < 1:
        raise InvalidRequest(f"the level {level} is not between 0 and 1; 0.95 is usual.")
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(group, len(numbers)) for group in (range(len(values)) if groups is None else groups)]
    sums, counts = np.bincount(index, weights=values), np.bincount(index).astype(np.float64)  # of each group
    rng, means = np.random.default_rng(seed), []
    for _ in range(0, NUM_RESAMPLES, CHUNK):
        times = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=CHUNK)
        means.append((times @ sums) / (times @ counts))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def share_of(hits: Sequence[bool], groups: Sequence[Hashable] | None = None, *, seed: int = 0) -> Share:
    """Compute the share of ``hits`` with its 95 % bootstrap interval.

    If all or none are hits, resampling shows no spread. The interval then follows the rule of three (Hanley and
    Lippman-Hand 1983): its width is three divided by the number of groups. A single group is resampled by its values.

    Raises:
        InvalidRequest: As for :func:`bootstrap_interval`.
    """
    groups = groups if groups is not None and len(set(groups)) > 1 else None
    low, high = bootstrap_interval([float(hit) for hit in hits], groups, seed=seed)
    if all(hits) or not any(hits):
        width = min(1.0, 3 / (len(hits) if groups is None else len(set(groups))))
        low, high = (1 - width, 1.0) if all(hits) else (0.0, width)
    return Share(sum(map(bool, hits)), len(hits), low, high)
