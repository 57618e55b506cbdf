"""torchmetrics, imported without what transformers has to say about image processors that nobody asked for."""

from __future__ import annotations

from diffserve.runtime.loading.library_imports import hushed

with hushed("transformers"):
    from torchmetrics.functional.image import structural_similarity_index_measure
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

__all__ = [
    "FrechetInceptionDistance",
    "KernelInceptionDistance",
    "structural_similarity_index_measure",
]
