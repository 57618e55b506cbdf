"""How sure a distance between two sets of pictures is: Frechet distance and KID over resampled prompts. numpy alone.

The prompt is what is drawn again: with it go its painted pictures and its reference pictures together. Both distances
of a resample come from sums over each prompt's pictures, so that hundreds of resamples cost seconds. A Frechet distance
is biased upwards, more so in resamples, which repeat prompts, and KID is averaged over other pairs here than in the
metrics library; intervals are therefore moved by the mean of the replicates to where the distance itself is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_SET_RESAMPLES = 400
CHUNK_ROWS = 512


def resamples(num_prompts: int, count: int = NUM_SET_RESAMPLES, seed: int = 0) -> Floats:
    """(count, num_prompts): how often each prompt is drawn; the same for every cell, so that differences are paired."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=count).astype(np.float64)


@dataclass(frozen=True)
class Moments:
    """A set of features (N, D) summed by prompt: pictures (P,), sums (P, D), and sums of squares (P, D, D)."""

    counts: Floats
    sums: Floats
    squares: Floats

    @classmethod
    def of(cls, features: NDArray[np.float32], prompts: Sequence[int], num_prompts: int) -> Moments:
        """``prompts`` gives each picture's prompt."""
        index = np.asarray(prompts)
        groups = [features[index == prompt].astype(np.float64) for prompt in range(num_prompts)]
        return cls(
            np.array([len(group) for group in groups], dtype=np.float64),
            np.stack([group.sum(axis=0) for group in groups]),
            np.stack([group.T @ group for group in groups]),
        )

    def normal(self, times: Floats) -> tuple[Floats, Floats]:
        """Mean (D,) and unbiased covariance (D, D) when prompt p is taken ``times[p]`` times."""
        total = times @ self.counts
        mean = times @ self.sums / total
        square = np.tensordot(times, self.squares, axes=1)
        return mean, (square - total * np.outer(mean, mean)) / (total - 1)


def frechet_replicates(painted: Moments, references: Sequence[tuple[Floats, Floats]], times: Floats) -> Floats:
    """(R,) squared Frechet distances; ``references`` are the means and covariance roots of :func:`reference_roots`.

    |m - n|^2 + tr(A) + tr(B) - 2 tr((B^1/2 A B^1/2)^1/2) (Dowson and Landau 1982).
    """
    found = []
    for drawn, (other_mean, other_root) in zip(times, references, strict=True):
        mean, covariance = painted.normal(drawn)
        inner = np.linalg.eigvalsh(other_root @ covariance @ other_root)
        shared = float(np.sqrt(np.clip(inner, 0, None)).sum())
        offset = float(np.square(mean - other_mean).sum())
        found.append(offset + float(np.trace(covariance)) + float(np.square(other_root).sum()) - 2 * shared)
    return np.array(found)


def reference_roots(reference: Moments, times: Floats) -> list[tuple[Floats, Floats]]:
    """For each resample the reference's mean and the square root of its covariance; shared by all cells."""
    return [(mean, _root(covariance)) for mean, covariance in (reference.normal(drawn) for drawn in times)]


def _root(covariance: Floats) -> Floats:
    values, vectors = np.linalg.eigh(covariance)
    root: Floats = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    return root


@dataclass(frozen=True)
class KernelSums:
    """Sums of the kernel (x . y / D + 1)^3 over pairs of pictures, by their prompts, and how many pairs: (P, P) each.

    Only pictures of different prompts are paired. So no picture meets itself or its copy in a resample, and two sets of
    the same prompts, which are not independent, are compared as if they were.
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
        """Between two sets; of one set alone without ``other``."""
        one_hot = np.eye(num_prompts)
        rows, columns = one_hot[np.asarray(prompts)], one_hot[np.asarray(other[1] if other else prompts)]
        mine = features.astype(np.float64)
        theirs = other[0].astype(np.float64) if other else mine
        sums = np.zeros((num_prompts, num_prompts))
        for start in range(0, len(mine), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            kernel = (mine[part] @ theirs.T / mine.shape[1] + 1) ** 3
            sums += rows[part].T @ (kernel @ columns)
        pairs = rows.T.sum(axis=1)[:, None] * columns.T.sum(axis=1)[None]
        np.fill_diagonal(sums, 0)
        np.fill_diagonal(pairs, 0)
        return cls(sums, pairs)

    def means(self, times: Floats) -> Floats:
        """(R,) mean over all pairs when prompt p is taken ``times[r, p]`` times."""
        sums: Floats = np.einsum("rp,pq,rq->r", times, self.sums, times, optimize=True)
        pairs: Floats = np.einsum("rp,pq,rq->r", times, self.pairs, times, optimize=True)
        found: Floats = sums / np.maximum(pairs, 1)
        return found


def kernel_replicates(painted: KernelSums, between: KernelSums, reference: KernelSums, times: Floats) -> Floats:
    """(R,) unbiased squared MMD (Gretton et al. 2012, equation 3) over pairs of different prompts."""
    return painted.means(times) + reference.means(times) - 2 * between.means(times)
