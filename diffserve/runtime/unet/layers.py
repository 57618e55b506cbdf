"""Replacement layers of a UNet: steady ones for a CPU, and GEGLU layers with contiguous halves for CUDA.

Steady layers round the same for any number of threads or rows.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS_TOGETHER: Final = 16


class Pointwise(nn.Conv2d):
    """A 1x1 convolution of stride 1 without padding, as a matrix product: the same arithmetic.

    In float32 oneDNN sums a 1x1 convolution in an order that depends on the number of threads (measured on AVX-512); a
    matrix product does not, and takes as long. So the engine may change the number between two calls.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, out, h, w) of ``input`` (B, in, h, w)."""
        num_rows: Any = input.shape[0]
        if isinstance(num_rows, torch.SymInt):  # a compiler has its own kernel
            return super().forward(input)
        channels, height, width = input.shape[1:]
        output = torch.matmul(self.weight.view(-1, channels), input.reshape(num_rows, channels, height * width))
        if self.bias is not None:
            output = output + self.bias.view(1, -1, 1)
        return output.view(num_rows, -1, height, width)


class RowLinear(nn.Linear):
    """A linear layer of one vector per row (of its timestep, for example), padded to a multiple of sixteen rows.

    A product with a single vector is summed in another order than one with several. In 16 bits that changes one number
    in ten thousand, too few for a trial to find reliably.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return (R, out) of ``input`` (R, in); tokens (R, T, in) and a symbolic number of rows take the usual path."""
        num_rows: Any = input.shape[0]
        if input.ndim != 2 or isinstance(num_rows, torch.SymInt):
            return super().forward(input)
        parts = [F.pad(part, (0, 0, 0, ROWS_TOGETHER - len(part))) for part in input.split(ROWS_TOGETHER)]
        return torch.cat([super(RowLinear, self).forward(part) for part in parts])[: len(input)]


def use_steady_layers(network: nn.Module, dtype: torch.dtype) -> None:
    """Replace layers of ``network``, which computes in ``dtype``, by steady ones; results differ by rounding only."""
    for name, module in network.named_modules():
        if dtype == torch.float32 and type(module) is nn.Conv2d and _is_pointwise(module):
            module.__class__ = Pointwise
        if type(module) is nn.Linear and name.rpartition(".")[2] in ("time_emb_proj", "linear_1", "linear_2"):
            module.__class__ = RowLinear


def _is_pointwise(module: nn.Conv2d) -> bool:
    return (module.kernel_size, module.stride, module.padding, module.groups) == ((1, 1), (1, 1), (0, 0), 1)


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
    """Return a subclass of ``GEGLU`` with its name; diffusers, which defines it, is imported only with a UNet."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Return (..., out) of ``hidden_states`` (..., in)."""
        if type(self.proj) is not HalvedLinear or torch.compiler.is_compiling():
            output: Tensor = base.forward(self, hidden_states)
            return output
        if self.proj._forward_hooks:  # hooks of adapters and layer sums need the complete output
            value, gate = (half.contiguous() for half in self.proj(hidden_states).chunk(2, dim=-1))
        else:
            value, gate = self.proj.halves(hidden_states)
        result: Tensor = value.mul_(F.gelu(gate))
        return result

    return type(base.__name__, (base,), {"forward": forward})
