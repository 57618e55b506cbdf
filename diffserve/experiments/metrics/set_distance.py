"""How near one set of pictures is to another, by torchmetrics, from features that were taken before.

Pictures are measured once and forgotten; only their features are kept. So the metric classes are given a network that
passes features through.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diffserve.runtime.loading.library_imports import hushed

with hushed("transformers"):  # it has something to say about image processors that nobody asked for
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

MAX_SUBSET = 1000
NUM_SUBSETS = 50
SUBSET_SEED = 5

Features = NDArray[np.float32]


class _AsTheyAre(nn.Module):
    """Features in, the same features out."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def frechet_distance(reference: Features, painted: Features) -> float:
    """Squared Frechet distance between the normal distributions fitted to two sets of features (N, D) and (M, D).

    Heusel et al. 2017, whatever the network. Biased upwards when there are few pictures: compare equal numbers only.
    """
    _check(reference, painted)
    metric = FrechetInceptionDistance(feature=_AsTheyAre(reference.shape[1]))
    metric.update(torch.from_numpy(np.array(reference, dtype=np.float64)), real=True)
    metric.update(torch.from_numpy(np.array(painted, dtype=np.float64)), real=False)
    return max(0.0, float(metric.compute()))


def kernel_distance(reference: Features, painted: Features) -> float:
    """KID: unbiased squared MMD with the kernel (x . y / D + 1)^3 between features (N, D) and (M, D).

    Binkowski et al. 2018: the mean over ``NUM_SUBSETS`` pairs of random subsets, the same ones every time. It may be a
    little below zero.
    """
    _check(reference, painted)
    size = min(len(reference), len(painted), MAX_SUBSET)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")  # that it keeps all features, which is what we want
        metric = KernelInceptionDistance(feature=_AsTheyAre(reference.shape[1]), subsets=NUM_SUBSETS, subset_size=size)
        torch.manual_seed(SUBSET_SEED)
        metric.update(torch.from_numpy(np.array(reference, dtype=np.float64)), real=True)
        metric.update(torch.from_numpy(np.array(painted, dtype=np.float64)), real=False)
        mean, _ = metric.compute()
    return float(mean)


def _check(reference: Features, painted: Features) -> None:
    if min(len(reference), len(painted)) < 2:
        raise ValueError(f"sets of {len(reference)} and {len(painted)} pictures have no distance; take two or more")
