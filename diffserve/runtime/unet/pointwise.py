"""1x1 convolutions as matrix products: the same arithmetic, and on a CPU the same bytes on any number of threads.

In float32 oneDNN sums a 1x1 convolution in an order that depends on the number of threads (seen on AVX-512); a matrix
product was seen not to, and takes as long. So the engine may change the number between two calls.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Pointwise(nn.Conv2d):
    """A 1x1 convolution of stride 1 without padding."""

    def forward(self, input: Tensor) -> Tensor:
        """(B, out, h, w) of (B, in, h, w)."""
        num_rows, channels, height, width = input.shape
        output = torch.matmul(self.weight.view(-1, channels), input.reshape(num_rows, channels, height * width))
        if self.bias is not None:
            output = output + self.bias.view(1, -1, 1)
        return output.view(num_rows, -1, height, width)


def use_pointwise(network: nn.Module) -> int:
    """Turn every convolution of ``network`` that is one into a ``Pointwise``; how many there were."""
    found = [module for module in network.modules() if type(module) is nn.Conv2d and _is_pointwise(module)]
    for module in found:
        module.__class__ = Pointwise
    return len(found)


def _is_pointwise(module: nn.Conv2d) -> bool:
    return (module.kernel_size, module.stride, module.padding, module.groups) == ((1, 1), (1, 1), (0, 0), 1)
