"""Measures of pictures that need torch, and the only place in ``diffserve.experiments`` that loads it.

    feature_network   a fixed network of random filters, whose features sets of pictures are compared in
    fidelity          how near one picture is to another: latent RMSE, PSNR, SSIM
    set_distance      how near one set of pictures is to another: Frechet distance and KID

PSNR, SSIM, Frechet distance and KID are torchmetrics' own; the network is ours, since every trained one would have to
be downloaded.
"""

from diffserve.experiments.metrics.feature_network import NUM_FEATURES, FeatureNetwork
from diffserve.experiments.metrics.fidelity import Fidelity, fidelity
from diffserve.experiments.metrics.set_distance import frechet_distance, kernel_distance

__all__ = ["NUM_FEATURES", "FeatureNetwork", "Fidelity", "fidelity", "frechet_distance", "kernel_distance"]
