"""Distances between two sets of images, computed by torchmetrics from stored features.

Only the features of images are stored, so the metric classes get an identity network.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diffserve.runtime.loading.library_imports import hushed

with hushed("transformers"):  # it logs irrelevant messages about image processors at import
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

MAX_SUBSET = 1000
NUM_SUBSETS = 50
SUBSET_SEED = 5

Features = NDArray[np.float32]


class _IdentityNetwork(nn.Module):
    """Identity network for features that are already computed."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def frechet_distance(reference: Features, painted: Features) -> float:
    """Compute the squared Frechet distance between normal distributions fitted to features (N, D) and (M, D).

    The distance of Heusel et al. 2017 in any feature space. It is biased upwards for few images, so only sets of equal
    size are comparable.
    """
    _check(reference, painted)
    metric = FrechetInceptionDistance(feature=_IdentityNetwork(reference.shape[1]))
    metric.update(torch.from_numpy(np.array(reference, dtype=np.float64)), real=True)
    metric.update(torch.from_numpy(np.array(painted, dtype=np.float64)), real=False)
    return max(0.0, float(metric.compute()))


def kernel_distance(reference: Features, painted: Features) -> float:
    """Compute KID: unbiased squared MMD with the kernel (x . y / D + 1)^3 between features (N, D) and (M, D).

    Follows Binkowski et al. 2018: the mean over ``NUM_SUBSETS`` pairs of random subsets, which are the same in every
    call. The result can be slightly negative.
    """
    _check(reference, painted)
    size = min(len(reference), len(painted), MAX_SUBSET)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")  # it warns that all features are kept, which is intended
        metric = KernelInceptionDistance(
            feature=_IdentityNetwork(reference.shape[1]), subsets=NUM_SUBSETS, subset_size=size
        )
        torch.manual_seed(SUBSET_SEED)
        metric.update(torch.from_numpy(np.array(reference, dtype=np.float64)), real=True)
        metric.update(torch.from_numpy(np.array(painted, dtype=np.float64)), real=False)
        mean, _ = metric.compute()
    return float(mean)


def _check(reference: Features, painted: Features) -> None:
    if min(len(reference), len(painted)) < 2:
        raise ValueError(f"sets of {len(reference)} and {len(painted)} images have no distance; use two or more")
