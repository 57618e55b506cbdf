"""Distances between two sets of images in a fixed feature network of random filters, without a trained network.

Random convolutions separate generators about as well on images other than photographs (Naeem et al., ICML 2020,
"Reliable Fidelity and Diversity Metrics for Generative Models", R64). The weights come from numpy's frozen legacy
stream, so they are the same on every machine. torchmetrics computes the distances from stored features.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from diffserve.runtime.loading.library_imports import hushed

with hushed("transformers"):  # it logs irrelevant messages about image processors at import
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

NUM_FEATURES = 64
NETWORK_VERSION = 1
"""Increment this when the features change, so that stored features are not mixed."""

CHANNELS = (16, 32, 64)
MEAN_LOG_ENERGY = (-4.25, -4.96, -5.83)  # of a channel over rendered scenes, after each convolution
SPREAD = 1.65  # three standard deviations of it, which scales features for KID's kernel
FLOOR = 1e-4  # negligible energy: about one gray level of contrast
MAX_SIDE_PX = 128
SEED = 20_061

MAX_SUBSET = 1000
NUM_SUBSETS = 50
SUBSET_SEED = 5

Features = NDArray[np.float32]


class FeatureNetwork(nn.Module):
    """Maps images (B, H, W, 3) uint8 to features (B, NUM_FEATURES) float32.

    Images with a side above ``MAX_SIDE_PX`` are averaged down first. Each of three 3 x 3 convolutions is followed by
    ReLU, the energy of every channel, and halving. The first filters sum to zero per color, so they respond to edges
    and textures and not to flat color, which varies more between scenes than between samplers. Logarithms of the
    energies weigh faint textures by relative change.

    Frechet distances in units of that between two clean sets (256 rendered scenes against 768): blur of 0.7 pixels 37,
    noise of 4 gray levels 6, an object missing in every tenth image 10, 5 % brighter 1.7.
    """

    num_features = NUM_FEATURES  # required by torchmetrics

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.RandomState(SEED)  # its stream never changes (NEP 19)
        widths = (3, *CHANNELS)
        for index, (into, out) in enumerate(zip(widths, CHANNELS, strict=False)):
            filters = rng.standard_normal((out, into, 3, 3))
            if index == 0:
                filters -= filters.mean(axis=(2, 3), keepdims=True)
            filters *= np.sqrt(2) / np.linalg.norm(filters.reshape(out, -1), axis=1)[:, None, None, None]
            self.register_buffer(f"filters_{index}", torch.from_numpy(filters).float())
        mixing = np.linalg.qr(rng.standard_normal((sum(CHANNELS), NUM_FEATURES)))[0]
        self.register_buffer("mixing", torch.from_numpy(mixing).float())

    @torch.inference_mode()
    def forward(self, pictures: Tensor) -> Tensor:
        """Compute features (B, NUM_FEATURES) of ``pictures`` (B, H, W, 3) uint8."""
        x = _shrink(pictures.permute(0, 3, 1, 2).float() / 127.5 - 1)
        energies = []
        for index in range(len(CHANNELS)):
            x = F.relu(F.conv2d(x, self.get_buffer(f"filters_{index}"), padding=1))
            energy = (x.square().mean(dim=(2, 3)) + FLOOR).log()
            energies.append((energy - MEAN_LOG_ENERGY[index]) / SPREAD)
            x = F.avg_pool2d(x, 2)
        return torch.cat(energies, dim=1) @ self.get_buffer("mixing")

    def features(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Compute features (NUM_FEATURES,) of one image (H, W, 3) uint8, independent of other images."""
        picture = torch.from_numpy(np.array(pixels, copy=True))  # no batch, because batches may round differently
        features: NDArray[np.float32] = self(picture[None])[0].numpy()
        return features


def _shrink(images: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    scale = MAX_SIDE_PX / max(height, width)
    if scale >= 1:
        return images
    return F.interpolate(images, size=(round(height * scale), round(width * scale)), mode="area")


class _IdentityNetwork(nn.Module):
    """Identity network for metric classes, because only the features of images are stored."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def frechet_distance(reference: Features, generated: Features) -> float:
    """Compute the squared Frechet distance between normal distributions fitted to features (N, D) and (M, D).

    The distance of Heusel et al. 2017 in any feature space. It is biased upwards for few images, so only sets of equal
    size are comparable.
    """
    _check(reference, generated)
    metric = FrechetInceptionDistance(feature=_IdentityNetwork(reference.shape[1]))
    _update(metric, reference, generated)
    return max(0.0, float(metric.compute()))


def kernel_distance(reference: Features, generated: Features) -> float:
    """Compute KID: unbiased squared MMD with the kernel (x . y / D + 1)^3 between features (N, D) and (M, D).

    Follows Binkowski et al. 2018: the mean over ``NUM_SUBSETS`` pairs of random subsets, which are the same in every
    call. The result can be slightly negative.
    """
    _check(reference, generated)
    size = min(len(reference), len(generated), MAX_SUBSET)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")  # it warns that all features are kept, which is intended
        metric = KernelInceptionDistance(
            feature=_IdentityNetwork(reference.shape[1]), subsets=NUM_SUBSETS, subset_size=size
        )
        torch.manual_seed(SUBSET_SEED)
        _update(metric, reference, generated)
        mean, _ = metric.compute()
    return float(mean)


def _update(
    metric: FrechetInceptionDistance | KernelInceptionDistance, reference: Features, generated: Features
) -> None:
    metric.update(torch.from_numpy(np.array(reference, dtype=np.float64)), real=True)
    metric.update(torch.from_numpy(np.array(generated, dtype=np.float64)), real=False)


def _check(reference: Features, generated: Features) -> None:
    if min(len(reference), len(generated)) < 2:
        raise ValueError(f"sets of {len(reference)} and {len(generated)} images cannot be compared; use two or more")
