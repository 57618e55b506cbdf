"""Bootstrap intervals: of means, optionally over groups of values, and of distances between sets of images.

Means use the percentile bootstrap (Efron 1979). For Frechet distance and KID, generated and reference images of a
prompt are resampled together, and sums per prompt make hundreds of resamples cheap. Frechet distances are biased
upwards, more so in resamples, and KID pairs other images than torchmetrics, so callers center the replicates.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffserve.api.errors import InvalidRequest

LEVEL = 0.95
NUM_RESAMPLES = 4000
CHUNK = 250  # resamples drawn at a time, so that memory stays small
Floats = NDArray[np.float64]

NUM_SET_RESAMPLES = 400
CHUNK_ROWS = 512


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


def widen_equal(low: float, high: float, num_groups: int) -> tuple[float, float]:
    """Widen the interval of a mean difference of matches if all groups are equal, by the rule of three.

    Resampling equal values shows no spread, but a difference in 3 / N of N groups may have been missed.
    """
    width = min(1.0, 3 / num_groups) if low == high else 0.0
    return low - width, high + width


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
        raise InvalidRequest("the mean of no values has no interval; measure at least one.")
    if groups is not None and len(groups) != len(values):
        raise InvalidRequest(f"{len(groups)} groups for {len(values)} values; give one group per value.")
    if not 0 < level < 1:
        raise InvalidRequest(f"the level {level} is not between 0 and 1; a common level is 0.95.")
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


def resamples(num_prompts: int, count: int = NUM_SET_RESAMPLES, seed: int = 0) -> Floats:
    """Draw (count, num_prompts) multiplicities of prompts, the same for every cell so that differences are paired."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=count).astype(np.float64)


@dataclass(frozen=True)
class Moments:
    """Features (N, D) summed by prompt: image counts (P,), sums (P, D) and sums of outer products (P, D, D)."""

    counts: Floats
    sums: Floats
    squares: Floats

    @classmethod
    def of(cls, features: NDArray[np.float32], prompts: Sequence[int], num_prompts: int) -> Moments:
        """Sum ``features`` by prompt, where ``prompts`` holds the prompt index of each image."""
        index = np.asarray(prompts)
        groups = [features[index == prompt].astype(np.float64) for prompt in range(num_prompts)]
        return cls(
            np.array([len(group) for group in groups], dtype=np.float64),
            np.stack([group.sum(axis=0) for group in groups]),
            np.stack([group.T @ group for group in groups]),
        )

    def normal(self, times: Floats) -> tuple[Floats, Floats]:
        """Return mean (D,) and unbiased covariance (D, D) if prompt p occurs ``times[p]`` times."""
        total = times @ self.counts
        mean = times @ self.sums / total
        square = np.tensordot(times, self.squares, axes=1)
        return mean, (square - total * np.outer(mean, mean)) / (total - 1)


def frechet_replicates(painted: Moments, references: Sequence[tuple[Floats, Floats]], times: Floats) -> Floats:
    """Compute squared Frechet distances (R,) of resamples.

    The distance is |m - n|^2 + tr(A) + tr(B) - 2 tr((B^1/2 A B^1/2)^1/2) (Dowson and Landau 1982).

    Args:
        painted: Moments of the generated images.
        references: Means and covariance roots from :func:`reference_roots`.
        times: Multiplicities of prompts (R, P).
    """
    distances = []
    for multiplicities, (other_mean, other_root) in zip(times, references, strict=True):
        mean, covariance = painted.normal(multiplicities)
        inner = np.linalg.eigvalsh(other_root @ covariance @ other_root)
        shared = float(np.sqrt(np.clip(inner, 0, None)).sum())
        offset = float(np.square(mean - other_mean).sum())
        distances.append(offset + float(np.trace(covariance)) + float(np.square(other_root).sum()) - 2 * shared)
    return np.array(distances)


def reference_roots(reference: Moments, times: Floats) -> list[tuple[Floats, Floats]]:
    """Compute the reference's mean and the square root of its covariance for each resample, to share between cells."""
    return [
        (mean, _root(covariance)) for mean, covariance in (reference.normal(multiplicities) for multiplicities in times)
    ]


def _root(covariance: Floats) -> Floats:
    values, vectors = np.linalg.eigh(covariance)
    root: Floats = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    return root


@dataclass(frozen=True)
class KernelSums:
    """Sums of the kernel (x . y / D + 1)^3 over pairs of images by prompt, and pair counts, both (P, P).

    Only images of different prompts are paired. An image is therefore never paired with itself or its copy in a
    resample, and two sets of the same prompts can be compared like independent sets.
    """

    sums: Floats
    pairs: Floats

    @classmethod
    def of(
        cls,
        features: NDArray[np.float32],
        prompts: Sequence[int],
        num_prompts: int,
        other: tuple[NDArray[np.float32], Sequence[int]] | None = None,
    ) -> KernelSums:
        """Compute the sums between two sets, or within one set if ``other`` is ``None``."""
        one_hot = np.eye(num_prompts)
        rows, columns = one_hot[np.asarray(prompts)], one_hot[np.asarray(other[1] if other else prompts)]
        left = features.astype(np.float64)
        right = other[0].astype(np.float64) if other else left
        sums = np.zeros((num_prompts, num_prompts))
        for start in range(0, len(left), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            kernel = (left[part] @ right.T / left.shape[1] + 1) ** 3
            sums += rows[part].T @ (kernel @ columns)
        pairs = rows.T.sum(axis=1)[:, None] * columns.T.sum(axis=1)[None]
        np.fill_diagonal(sums, 0)
        np.fill_diagonal(pairs, 0)
        return cls(sums, pairs)

    def means(self, times: Floats) -> Floats:
        """Return the mean over all pairs (R,) if prompt p occurs ``times[r, p]`` times in resample r."""
        sums: Floats = np.einsum("rp,pq,rq->r", times, self.sums, times, optimize=True)
        pairs: Floats = np.einsum("rp,pq,rq->r", times, self.pairs, times, optimize=True)
        means: Floats = sums / np.maximum(pairs, 1)
        return means


def kernel_replicates(painted: KernelSums, between: KernelSums, reference: KernelSums, times: Floats) -> Floats:
    """Compute unbiased squared MMD (R,) over pairs of different prompts (Gretton et al. 2012, equation 3)."""
    return painted.means(times) + reference.means(times) - 2 * between.means(times)
