"""The bootstrap of set distances: its sums give the distances themselves, and its copies are honest."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from diffserve.experiments.intervals import (
    Floats,
    KernelSums,
    Moments,
    frechet_replicates,
    kernel_replicates,
    reference_roots,
    resamples,
)
from diffserve.experiments.metrics.set_distance import frechet_distance, kernel_distance

PROMPTS, EACH, DRAWN = 12, 3, 5
RNG = np.random.default_rng(0)
PAINTED = RNG.normal(0.3, 1.2, size=(PROMPTS * EACH, 6)).astype(np.float32)
REFERENCE = RNG.normal(size=(PROMPTS * DRAWN, 6)).astype(np.float32)
OF_PAINTED = [index for index in range(PROMPTS) for _ in range(EACH)]
OF_REFERENCE = [index for index in range(PROMPTS) for _ in range(DRAWN)]


def frechet(times: Floats) -> Floats:
    roots = reference_roots(Moments.of(REFERENCE, OF_REFERENCE, PROMPTS), times)
    return frechet_replicates(Moments.of(PAINTED, OF_PAINTED, PROMPTS), roots, times)


def kernel(times: Floats) -> Floats:
    between = KernelSums.of(PAINTED, OF_PAINTED, PROMPTS, (REFERENCE, OF_REFERENCE))
    painted, reference = (
        KernelSums.of(PAINTED, OF_PAINTED, PROMPTS),
        KernelSums.of(REFERENCE, OF_REFERENCE, PROMPTS),
    )
    return kernel_replicates(painted, between, reference, times)


def repeated(features: NDArray[np.float32], prompts: list[int], times: Floats) -> NDArray[np.float32]:
    return np.concatenate([features[np.array(prompts) == p] for p, n in enumerate(times) for _ in range(int(n))])


def test_every_prompt_once_gives_the_distance_of_the_library() -> None:
    once = np.ones((1, PROMPTS))
    assert frechet(once)[0] == pytest.approx(frechet_distance(REFERENCE, PAINTED), rel=1e-5)


def test_a_resample_gives_the_distance_of_the_pictures_it_names() -> None:
    times = resamples(PROMPTS, 3, seed=1)
    for drawn, actual in zip(times, frechet(times), strict=True):
        expected = frechet_distance(repeated(REFERENCE, OF_REFERENCE, drawn), repeated(PAINTED, OF_PAINTED, drawn))
        assert actual == pytest.approx(expected, rel=1e-4)


def kid_kernel(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float((a.astype(np.float64) @ b / len(a) + 1) ** 3)


def mean_over_other_prompts(
    x: NDArray[np.float32], of_x: list[int], y: NDArray[np.float32], of_y: list[int], times: Floats
) -> float:
    """Pair by pair, each as often as its prompts are drawn."""
    total, count = 0.0, 0.0
    for a, p in zip(x, of_x, strict=True):
        for b, q in zip(y, of_y, strict=True):
            if p != q:
                total += times[p] * times[q] * kid_kernel(a, b)
                count += times[p] * times[q]
    return total / count


def test_kernel_replicates_are_the_mmd_over_pairs_of_different_prompts() -> None:
    times = resamples(PROMPTS, 2, seed=3)
    for drawn, actual in zip(times, kernel(times), strict=True):
        expected = (
            mean_over_other_prompts(PAINTED, OF_PAINTED, PAINTED, OF_PAINTED, drawn)
            + mean_over_other_prompts(REFERENCE, OF_REFERENCE, REFERENCE, OF_REFERENCE, drawn)
            - 2 * mean_over_other_prompts(PAINTED, OF_PAINTED, REFERENCE, OF_REFERENCE, drawn)
        )
        assert actual == pytest.approx(expected, rel=1e-9)


def test_kernel_replicates_of_many_prompts_are_near_the_kid_of_the_library() -> None:
    rng = np.random.default_rng(5)
    indices = list(range(300))
    painted, reference = (rng.normal(mean, 1, size=(300, 6)).astype(np.float32) for mean in (0.6, 0.0))
    replicates = kernel_replicates(
        KernelSums.of(painted, indices, 300),
        KernelSums.of(painted, indices, 300, (reference, indices)),
        KernelSums.of(reference, indices, 300),
        np.ones((1, 300)),
    )
    assert replicates[0] == pytest.approx(kernel_distance(reference, painted), rel=0.01)


def test_resampling_does_not_move_kid() -> None:
    """Copies that met themselves would draw it up by the kernel of each picture with itself."""
    spread = kernel(resamples(PROMPTS, 2000, seed=2))
    assert abs(spread.mean() - kernel(np.ones((1, PROMPTS)))[0]) < 0.2 * spread.std()


def test_resamples_draw_as_many_prompts_as_there_are_and_the_same_ones_for_everybody() -> None:
    times = resamples(PROMPTS)
    assert (times.sum(axis=1) == PROMPTS).all()
    assert np.array_equal(times, resamples(PROMPTS))


def test_the_spread_of_replicates_is_that_of_fresh_samples() -> None:
    rng = np.random.default_rng(7)
    prompts = list(range(80))
    fresh = []
    for _ in range(60):
        painted = rng.normal(0.5, 1, size=(80, 3)).astype(np.float32)
        fresh.append(frechet_distance(REFERENCE_NORMAL, painted))
    roots = reference_roots(Moments.of(REFERENCE_NORMAL, list(range(80)) * 10, 80), np.ones((400, 80)))
    replicates = frechet_replicates(Moments.of(painted, prompts, 80), roots, resamples(80))
    assert 0.6 < replicates.std() / np.std(fresh) < 1.6


REFERENCE_NORMAL = np.random.default_rng(8).normal(size=(800, 3)).astype(np.float32)
