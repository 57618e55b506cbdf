"""Layers that multiply in 8 bits: int8 with a scale for each token, int8 with measured scales, float8 with a scale for
each row.

Every layer keeps its class's face (a linear layer stays an ``nn.Linear``) and holds its weight as the parameter
``weight``, an int8 or float8 tensor, beside ``weight_scales``, one float32 for each output. torchao offers the same
arithmetic, but writes every intermediate of its quantisation to memory unless a compiler fuses it: not compiled its
dynamic layers took 1.5 to 4 times as long as bfloat16 on a CPU where these take 0.3 to 1.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

INT8_MOST: Final = 127
FLOAT8: Final = torch.float8_e4m3fn
FLOAT8_MOST: Final = 448.0
CUBLAS_ROWS: Final = 17
"""cuBLAS's int8 product wants more than 16 rows."""
CUBLAS_MULTIPLE: Final = 8
"""And inputs and outputs in multiples of so many; its float8 product in multiples of 16."""
SCALED_MULTIPLE: Final = 16
LEAST: Final = 1e-30
"""Scales are above zero, so that a token of zeros stays one."""


class Int8DynamicLinear(nn.Linear):
    """A linear layer with int8 weights, a scale for each output, whose activations become int8 with a scale for each
    token (LLM.int8's vector-wise scheme, Dettmers et al. 2022, without outliers).

    Integers are summed exactly, so a token's output does not depend on who shares the call.
    """

    weight_scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in the dtype of ``input``."""
        tokens = input.reshape(-1, self.in_features)
        reach = tokens.abs().amax(dim=-1, keepdim=True).float().clamp_min(LEAST)  # (T, 1)
        values = torch.mul(tokens, INT8_MOST / reach).round_().to(torch.int8)
        output = int8_product(values, self.weight) * self.weight_scales
        output.mul_(reach / INT8_MOST)
        if self.bias is not None:
            output += self.bias
        return output.to(input.dtype).view(*input.shape[:-1], self.out_features)


class Float8Linear(nn.Linear):
    """A linear layer in float8 (e4m3), a scale for each output and for each token: row-wise scaling, which wants a GPU
    of compute capability 9.0 (Hopper) for its kernel; elsewhere torch emulates it, if at all."""

    weight_scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in the dtype of ``input``."""
        tokens = input.reshape(-1, self.in_features)
        scales = tokens.abs().amax(dim=-1, keepdim=True).float().clamp_min(LEAST) / FLOAT8_MOST  # (T, 1)
        values = torch.div(tokens, scales).clamp_(-FLOAT8_MOST, FLOAT8_MOST).to(FLOAT8)
        output = torch._scaled_mm(
            values,
            self.weight.t(),
            scale_a=scales,
            scale_b=self.weight_scales.unsqueeze(0),
            out_dtype=torch.bfloat16,
        )
        if self.bias is not None:
            output = output + self.bias
        return output.to(input.dtype).view(*input.shape[:-1], self.out_features)


def int8_product(values: Tensor, weight: Tensor) -> Tensor:
    """int32 (T, out) of int8 (T, in) and (out, in); rows of zeros are added where a GPU wants more."""
    num_rows = values.shape[0]
    if values.device.type != "cpu" and num_rows < CUBLAS_ROWS:
        values = torch.cat([values, values.new_zeros((CUBLAS_ROWS - num_rows, values.shape[1]))])
    return torch._int_mm(values, weight.t())[:num_rows]


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values shaped as ``weight``, and float32 scales (out,), the largest of each output at 127."""
    scales = weight.flatten(1).abs().amax(dim=1).float().clamp_min(LEAST) / INT8_MOST
    values = (weight.float() / scales.view(-1, *[1] * (weight.ndim - 1))).round_()
    return values.to(torch.int8), scales


def to_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8 values shaped as ``weight`` (out, in), and float32 scales (out,), the largest of each output at 448."""
    scales = weight.abs().amax(dim=1).float().clamp_min(LEAST) / FLOAT8_MOST
    values = (weight.float() / scales[:, None]).clamp_(-FLOAT8_MOST, FLOAT8_MOST)
    return values.to(FLOAT8), scales


def become(layer: nn.Module, kind: type[nn.Module], weight: tuple[Tensor, Tensor]) -> None:
    """Turn ``layer`` into a ``kind`` with the weight and scales of ``to_int8`` or ``to_float8``."""
    values, scales = weight
    layer.weight = nn.Parameter(values, requires_grad=False)
    layer.register_buffer("weight_scales", scales)
    layer.__class__ = kind
