"""Image metrics; the only package in ``diffserve.experiments`` that imports torch.

feature_network   fixed network of random filters, because trained networks would need a download
fidelity          distance between two images: latent RMSE, PSNR, SSIM (torchmetrics)
set_distance      distance between two sets of images: Frechet distance and KID (torchmetrics)
"""
