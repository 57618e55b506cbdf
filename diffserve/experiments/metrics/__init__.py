"""Image metrics; the only package in ``diffserve.experiments`` that imports torch.

fidelity       distance between two images: latent RMSE, PSNR, SSIM (torchmetrics)
set_distance   Frechet distance and KID between two sets of images in a fixed network of random filters (torchmetrics)
"""
