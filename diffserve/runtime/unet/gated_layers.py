"""The gated feed-forward layers of a UNet on a GPU: two products in place of one whose output is cut in two.

diffusers' ``GEGLU`` (Shazeer, 2020, arXiv 2002.05202) cuts the output of one product into a value and a gate. Each half
is strided, and the elementwise kernels of torch take several times as long for strided tensors: on an H200 GELU and the
product with the gate take 40 of the 287 ms of a call of 16 rows of SDXL. Two products of half the size give contiguous
halves. Compilers fuse these operations themselves, so they see diffusers' own layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class HalvedLinear(nn.Linear):
    """A linear layer whose two halves of outputs are products of their own, so that each is contiguous."""

    compiled_name = nn.Linear.__name__

    def halves(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second half of the outputs (..., out / 2) of ``input`` (..., in)."""
        weights = self.weight.chunk(2)
        biases = (None, None) if self.bias is None else self.bias.chunk(2)
        first, second = (F.linear(input, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        return first, second

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out) of (..., in), with the bytes of ``halves``."""
        if torch.compiler.is_compiling():
            return super().forward(input)
        return torch.cat(self.halves(input), dim=-1)


def use_halved_gates(network: nn.Module) -> None:
    """Replace the ``GEGLU`` layers of ``network`` in place by layers that compute value and gate by two products.

    Their outputs differ from those of diffusers' layer by the rounding of the products only.
    """
    layers = [module for module in network.modules() if type(module).__name__ == "GEGLU"]
    halved = _halved(type(layers[0])) if layers else nn.Module
    for layer in layers:
        if type(layer.proj) is nn.Linear:
            layer.proj.__class__ = HalvedLinear
            layer.__class__ = halved


def _halved(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``GEGLU``, which is imported only with a UNet. It has the name by which others know it."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Return (..., out) of ``hidden_states`` (..., in)."""
        if type(self.proj) is not HalvedLinear or torch.compiler.is_compiling():
            output: Tensor = base.forward(self, hidden_states)
            return output
        if self.proj._forward_hooks:  # of adapters, and of sums of layers, which are given the whole output
            value, gate = (half.contiguous() for half in self.proj(hidden_states).chunk(2, dim=-1))
        else:
            value, gate = self.proj.halves(hidden_states)
        result: Tensor = value.mul_(F.gelu(gate))
        return result

    return type(base.__name__, (base,), {"forward": forward})
