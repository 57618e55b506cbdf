"""How sure a measured mean is: the percentile bootstrap (Efron 1979), over groups where values belong together."""

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
    """``hits`` of ``count``, and the 95 % interval of their share, from ``low`` to ``high`` in 0..1."""

    hits: int
    count: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Hits over count, 0..1."""
        return self.hits / self.count

    def __str__(self) -> str:
        interval = f"{100 * self.low:.0f}..{100 * self.high:.0f} %"
        return f"{100 * self.share:.0f} % ({self.hits} of {self.count}; 95 % interval {interval})"


def bootstrap_interval(
    values: Sequence[float], groups: Sequence[Hashable] | None = None, *, level: float = LEVEL, seed: int = 0
) -> tuple[float, float]:
    """The interval of the mean of ``values`` by resampling them, or whole groups of them, ``NUM_RESAMPLES`` times.

    ``groups`` names for each value what it shares with others, such as its prompt: four pictures of one prompt are not
    four independent draws. Where all groups have one mean, both ends are that mean.

    Raises :class:`InvalidRequest` without values, for another number of groups than of values, and for a level that is
    not between 0 and 1.
    """
    if not values:
        raise InvalidRequest("there is no interval of the mean of no values; measure at least one.")
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
    """The share of ``hits`` with its bootstrap interval of 95 %.

    Where all are hits, or none is, resampling shows no spread at all; the far end is then three over the number of
    groups, the rule of three (Hanley and Lippman-Hand 1983). One group alone is resampled by its values.

    Raises :class:`InvalidRequest` as :func:`bootstrap_interval` does.
    """
    groups = groups if groups is not None and len(set(groups)) > 1 else None
    low, high = bootstrap_interval([float(hit) for hit in hits], groups, seed=seed)
    if all(hits) or not any(hits):
        reach = min(1.0, 3 / (len(hits) if groups is None else len(set(groups))))
        low, high = (1 - reach, 1.0) if all(hits) else (0.0, reach)
    return Share(sum(map(bool, hits)), len(hits), low, high)
