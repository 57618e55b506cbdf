"""Measures of pictures agree with their formulas, written here once more, and see what they are meant to see."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from scipy.linalg import sqrtm
from scipy.ndimage import gaussian_filter
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from diffserve.experiments.metrics.fidelity import BEST_PSNR_DB, latent_rmse, psnr_db, ssim
from diffserve.experiments.metrics.set_distance import NUM_FEATURES, FeatureNetwork, frechet_distance, kernel_distance
from diffserve.world.render import render
from diffserve.world.scenes import scenes

PICTURES = [render(scene) for scene in islice(scenes(77, held_out=True), 96)]
GOLDEN = (-4.40558, -1.85689, 1.27304, 0.28443, -0.29413, -0.41435, -1.00560, -1.05506)


def blurred(picture: NDArray[np.uint8], radius: float) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(radius)))


def noisy(picture: NDArray[np.uint8], spread: float) -> NDArray[np.uint8]:
    noise = np.random.default_rng(0).normal(0, spread, picture.shape)
    return np.clip(np.rint(picture + noise), 0, 255).astype(np.uint8)


def wang_ssim(image: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Equation 13 of Wang et al. 2004 with a Gaussian window of 11 x 11, edges mirrored, colour by colour."""

    def local(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(gaussian_filter(values, 1.5, axes=(0, 1), radius=5, mode="mirror"))

    x, y = image.astype(np.float64), other.astype(np.float64)
    mean_x, mean_y = local(x), local(y)
    var_x, var_y, both = local(x * x) - mean_x**2, local(y * y) - mean_y**2, local(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    top = (2 * mean_x * mean_y + c1) * (2 * both + c2)
    return float((top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


@pytest.mark.parametrize("index", range(4))
def test_ssim_is_that_of_wang_and_others(index: int) -> None:
    for other in (blurred(PICTURES[index], 1.5), noisy(PICTURES[index], 12), PICTURES[index + 10]):
        actual = ssim(PICTURES[index], other)
        assert actual == pytest.approx(wang_ssim(PICTURES[index], other), abs=5e-4)


def test_psnr_and_latent_rmse_are_their_formulas() -> None:
    picture, other = PICTURES[0], noisy(PICTURES[0], 9)
    squares = np.square(picture.astype(np.float64) - other)
    latents = np.random.default_rng(1).normal(size=(8, 16, 16)).astype(np.float32)
    assert psnr_db(picture, other) == pytest.approx(10 * np.log10(255**2 / squares.mean()))
    assert psnr_db(picture / 255, other / 255, peak=1.0) == pytest.approx(psnr_db(picture, other))
    assert latent_rmse(latents, latents + np.float32(0.25)) == pytest.approx(0.25, rel=1e-6)


def test_a_difference_of_one_grey_level_everywhere_is_48_decibels() -> None:
    grey = np.full((16, 16, 3), 100, dtype=np.uint8)
    assert psnr_db(grey, grey + np.uint8(1)) == pytest.approx(48.1308, abs=1e-3)


def test_equal_pictures_are_as_near_as_can_be_written() -> None:
    assert psnr_db(PICTURES[0], PICTURES[0]) == BEST_PSNR_DB
    assert ssim(PICTURES[0], PICTURES[0]) == pytest.approx(1.0, abs=1e-3)


def to_batch(pictures: list[NDArray[np.uint8]]) -> torch.Tensor:
    """Return images (B, 3, H, W) float32 in 0..255."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float()


def test_psnr_and_ssim_are_those_of_torchmetrics() -> None:
    for other in (blurred(PICTURES[1], 1.5), noisy(PICTURES[1], 12), PICTURES[11]):
        peak = PeakSignalNoiseRatio(data_range=255.0)
        structure = StructuralSimilarityIndexMeasure(data_range=255.0)
        images, other_images = to_batch([PICTURES[1]]), to_batch([other])
        assert psnr_db(PICTURES[1], other) == pytest.approx(float(peak(images, other_images)), abs=1e-4)
        assert ssim(PICTURES[1], other) == pytest.approx(float(structure(images, other_images)), abs=1e-4)


def test_pictures_that_cannot_be_compared_are_refused() -> None:
    for measure in (psnr_db, ssim):
        with pytest.raises(ValueError, match="cannot compare images of shapes"):
            measure(PICTURES[0], PICTURES[0][:64])
    small = PICTURES[0][:8, :8]
    with pytest.raises(ValueError, match="11 pixels"):
        ssim(small, small)


def with_moments(
    mean: NDArray[np.float64], covariance: NDArray[np.float64], count: int, seed: int
) -> NDArray[np.float32]:
    """Return a sample with exactly this mean and unbiased covariance."""
    raw = np.random.default_rng(seed).normal(size=(count, len(mean)))
    raw -= raw.mean(axis=0)
    factor = np.linalg.cholesky(np.cov(raw.T))
    shaped: NDArray[np.float32] = (raw @ np.linalg.inv(factor).T @ np.linalg.cholesky(covariance).T + mean).astype("f4")
    return shaped


def test_frechet_distance_of_axis_aligned_normals_is_the_closed_form() -> None:
    variances, other = np.array([1.0, 4.0, 0.25]), np.array([9.0, 1.0, 0.25])
    shift = np.array([0.5, -1.0, 2.0])
    actual = frechet_distance(
        with_moments(np.zeros(3), np.diag(variances), 50, 0), with_moments(shift, np.diag(other), 80, 1)
    )
    expected = np.square(shift).sum() + np.square(np.sqrt(variances) - np.sqrt(other)).sum()
    assert actual == pytest.approx(expected, rel=1e-4)


def test_frechet_distance_of_any_normals_is_that_of_a_matrix_root() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.normal(size=(40, 6)) @ rng.normal(size=(6, 6)) + rng.normal(size=6) for _ in range(2))
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    root = np.real(sqrtm(cov_a @ cov_b))
    expected = np.square(a.mean(axis=0) - b.mean(axis=0)).sum() + np.trace(cov_a + cov_b - 2 * root)
    assert frechet_distance(a.astype("f4"), b.astype("f4")) == pytest.approx(expected, rel=1e-4)


def unbiased_mmd(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Equation 3 of Gretton et al. 2012 with KID's kernel, pair by pair."""

    def kernel(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
        return float((a @ b / len(a) + 1) ** 3)

    def within(z: NDArray[np.float64]) -> float:
        return sum(kernel(a, b) for i, a in enumerate(z) for j, b in enumerate(z) if i != j) / (len(z) * (len(z) - 1))

    return within(x) + within(y) - 2 * sum(kernel(a, b) for a in x for b in y) / (len(x) * len(y))


def test_kid_of_sets_of_one_size_is_the_unbiased_mmd() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(24, 5)), rng.normal(0.4, 1.3, size=(24, 5))
    assert kernel_distance(x.astype("f4"), y.astype("f4")) == pytest.approx(unbiased_mmd(x, y), rel=1e-5)


def test_kid_of_a_larger_reference_is_near_the_unbiased_mmd_and_the_same_every_time() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(96, 5)), rng.normal(0.8, 1.0, size=(48, 5))
    torch.manual_seed(1)
    first = kernel_distance(x.astype("f4"), y.astype("f4"))
    state = torch.random.get_rng_state()
    assert first == kernel_distance(x.astype("f4"), y.astype("f4"))
    assert torch.equal(state, torch.random.get_rng_state())
    assert first == pytest.approx(unbiased_mmd(x, y), rel=0.1)


def test_a_set_of_one_picture_has_no_distance() -> None:
    vector = np.zeros((1, 4), dtype=np.float32)
    for distance in (frechet_distance, kernel_distance):
        with pytest.raises(ValueError, match="two or more"):
            distance(vector, np.zeros((5, 4), dtype=np.float32))


@pytest.fixture(scope="module")
def network() -> FeatureNetwork:
    return FeatureNetwork()


def test_the_feature_network_is_the_same_everywhere(network: FeatureNetwork) -> None:
    ramp = np.arange(64 * 64 * 3, dtype=np.uint32).reshape(64, 64, 3).astype(np.uint8)
    features = network.features(ramp)
    assert features.shape == (NUM_FEATURES,)
    assert np.array_equal(features, FeatureNetwork().features(ramp))
    assert features[:8] == pytest.approx(GOLDEN, abs=1e-3)


def test_features_do_not_depend_on_the_size_of_a_large_picture_much(network: FeatureNetwork) -> None:
    large = np.repeat(np.repeat(PICTURES[0], 2, axis=0), 2, axis=1)
    assert network.features(large) == pytest.approx(network.features(PICTURES[0]), abs=1e-4)


def test_distances_of_stored_features_are_those_of_torchmetrics_on_images(network: FeatureNetwork) -> None:
    reference, worse = PICTURES[:48], [blurred(picture, 0.7) for picture in PICTURES[48:]]
    features = [np.stack([network.features(picture) for picture in pictures]) for pictures in (reference, worse)]
    frechet = FrechetInceptionDistance(feature=network)
    with pytest.warns(UserWarning, match="will save all extracted features"):
        kernel = KernelInceptionDistance(feature=network, subsets=50, subset_size=48)
    for metric in (frechet, kernel):
        for start in range(0, 48, 16):  # streamed
            metric.update(torch.from_numpy(np.stack(reference[start : start + 16])), real=True)
            metric.update(torch.from_numpy(np.stack(worse[start : start + 16])), real=False)
    assert frechet_distance(*features) == pytest.approx(float(frechet.compute()), abs=1e-4)
    assert kernel_distance(*features) == pytest.approx(float(kernel.compute()[0]), rel=1e-4, abs=1e-4)


def test_identical_sets_are_at_no_distance(network: FeatureNetwork) -> None:
    features = np.stack([network.features(picture) for picture in PICTURES])
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-4)
    assert latent_rmse(features, features) == 0
    unbiased = unbiased_mmd(features.astype(np.float64), features.astype(np.float64))
    assert kernel_distance(features, features) == pytest.approx(unbiased, abs=1e-4), "unbiased, so just below 0"
    assert -0.2 < unbiased < 0


@pytest.mark.slow
def test_distances_grow_with_blur_and_with_noise(network: FeatureNetwork) -> None:
    reference = np.stack([network.features(picture) for picture in PICTURES])

    def distance(pictures: list[NDArray[np.uint8]]) -> tuple[float, float]:
        features = np.stack([network.features(picture) for picture in pictures])
        return frechet_distance(reference, features), kernel_distance(reference, features)

    for worse in (
        [[blurred(picture, radius) for picture in PICTURES] for radius in (0.5, 1.0, 3.0)],
        [[noisy(picture, spread) for picture in PICTURES] for spread in (3, 8, 25)],
    ):
        distances = [distance(pictures) for pictures in worse]
        assert distances[0][0] < distances[1][0] < distances[2][0]
        assert distances[0][1] < distances[1][1] < distances[2][1]
        assert distances[0][0] > 5 * abs(distance(PICTURES)[0])
