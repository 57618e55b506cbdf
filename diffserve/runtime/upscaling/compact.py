"""The compact upscaler of Real-ESRGAN (Wang et al., 2021, arXiv 2107.10833): convolutions at low resolution only."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from diffserve.models.upscalers import CompactShape


class Compact(nn.Module):
    """Convolutions at the input's resolution, a pixel shuffle, and the enlarged input added to the result.

    Names and shapes of the tensors are those of published files ("SRVGG compact"). Attribute ``receptive_px``: input
    pixels on each side of a pixel that its result depends on.
    """

    def __init__(self, shape: CompactShape) -> None:
        super().__init__()
        self.shape = shape
        features = shape.features
        layers: list[nn.Module] = [nn.Conv2d(shape.channels, features, 3, padding=1), self._activation()]
        for _ in range(shape.num_convs):
            layers += [nn.Conv2d(features, features, 3, padding=1), self._activation()]
        layers.append(nn.Conv2d(features, shape.channels * shape.scale**2, 3, padding=1))
        self.body = nn.ModuleList(layers)
        self.scale = shape.scale
        self.receptive_px = shape.num_convs + 2
        self.multiple_px = 1

    def _activation(self) -> nn.Module:
        return nn.PReLU(self.shape.features) if self.shape.has_slopes else nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Enlarge images (B, channels, h, w) in 0..1 to (B, channels, scale h, scale w)."""
        hidden = x
        for layer in self.body:
            hidden = layer(hidden)
        return F.pixel_shuffle(hidden, self.scale) + F.interpolate(x, scale_factor=float(self.scale), mode="nearest")
