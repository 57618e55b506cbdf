"""Measures of pictures, and the only place in ``diffserve.experiments`` that loads torch, where one of them needs it.

    feature_network   a fixed network of random filters, whose features sets of pictures are compared in
    fidelity          how near one picture is to another: latent RMSE, PSNR, SSIM
    set_distance      how near one set of pictures is to another: Frechet distance and KID

SSIM, Frechet distance and KID are torchmetrics' own; the network is ours, since every trained one would have to be
downloaded.
"""
