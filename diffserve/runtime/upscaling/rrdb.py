"""RRDB, the network of ESRGAN (Wang et al., 2018, arXiv 1809.00219) and of Real-ESRGAN (arXiv 2107.10833)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffserve.models.upscalers import RrdbShape

SLOPE: Final = 0.2
RESIDUAL_SCALE: Final = 0.2


class DenseBlock(nn.Module):
    """Five convolutions, each of which reads the block's input and the results of all earlier ones."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        for index in range(5):
            width = features if index == 4 else growth
            self.add_module(f"conv{index + 1}", nn.Conv2d(features + index * growth, width, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus a fifth of the last convolution; shapes (B, features, h, w) do not change."""
        parts = [x]
        *inner, last = self.children()
        for conv in inner:
            parts.append(F.leaky_relu(conv(torch.cat(parts, dim=1)), SLOPE))
        result: Tensor = x + RESIDUAL_SCALE * last(torch.cat(parts, dim=1))
        return result


class ResidualInResidual(nn.Module):
    """Three dense blocks with a skip connection."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        self.rdb1 = DenseBlock(features, growth)
        self.rdb2 = DenseBlock(features, growth)
        self.rdb3 = DenseBlock(features, growth)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus a fifth of the blocks' result; shapes (B, features, h, w) do not change."""
        result: Tensor = x + RESIDUAL_SCALE * self.rdb3(self.rdb2(self.rdb1(x)))
        return result


class Rrdb(nn.Module):
    """Residual dense blocks at low resolution, then doublings by nearest neighbor with a convolution each.

    Tensors have the names of Real-ESRGAN's files, except that doublings are ``conv_up.0``, ``conv_up.1``, ...
    ``receptive_px``: input pixels on each side of a pixel that its result depends on. ``multiple_px``: height and width
    of the input are multiples of it.
    """

    def __init__(self, shape: RrdbShape) -> None:
        super().__init__()
        self.shape = shape
        features = shape.features
        self.conv_first = nn.Conv2d(shape.channels * shape.fold**2, features, 3, padding=1)
        self.body = nn.Sequential(*(ResidualInResidual(features, shape.growth) for _ in range(shape.num_blocks)))
        self.conv_body = nn.Conv2d(features, features, 3, padding=1)
        self.conv_up = nn.ModuleList(nn.Conv2d(features, features, 3, padding=1) for _ in range(shape.num_doublings))
        self.conv_hr = nn.Conv2d(features, features, 3, padding=1)
        self.conv_last = nn.Conv2d(features, shape.channels, 3, padding=1)
        self.scale = shape.scale
        self.receptive_px = shape.fold * (15 * shape.num_blocks + 5)
        self.multiple_px = shape.fold

    def forward(self, x: Tensor) -> Tensor:
        """Enlarge images (B, channels, h, w) in 0..1 to (B, channels, scale h, scale w)."""
        first = self.conv_first(F.pixel_unshuffle(x, self.shape.fold))
        hidden = first + self.conv_body(self.body(first))
        for conv in self.conv_up:
            hidden = F.leaky_relu(conv(F.interpolate(hidden, scale_factor=2.0, mode="nearest")), SLOPE)
        result: Tensor = self.conv_last(F.leaky_relu(self.conv_hr(hidden), SLOPE))
        return result
