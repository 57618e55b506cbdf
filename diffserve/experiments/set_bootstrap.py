"""Bootstrap of Frechet distance and KID over resampled prompts, using only numpy.

Generated and reference images of a prompt are resampled together. Sums per prompt make hundreds of resamples cheap.
Frechet distances are biased upwards, more so in resamples, and KID is averaged over other pairs than in torchmetrics,
so the caller centers the replicates on the measured distance.
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
