"""Layers with int8 weights: float arithmetic, int8 with a scale per token, and int8 with measured ranges.

Every layer stays an instance of ``nn.Linear`` or ``nn.Conv2d``, with an int8 parameter ``weight`` and a float32 buffer
``weight_scales`` per output. torchao's uncompiled dynamic layers took 1.5 to 4 times as long as bfloat16 on a CPU;
these take 0.3 to 1.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffserve.runtime.unet.layers import RowLinear

INT8_MOST: Final = 127
CUBLAS_ROWS: Final = 17
"""cuBLAS's int8 product needs more than 16 rows."""
CUBLAS_MULTIPLE: Final = 8
"""Numbers of inputs and outputs must be multiples of this for the kernel."""
LEAST: Final = 1e-30
"""Smallest scale, above zero so that a token of zeros stays zero."""


class Int8DynamicLinear(nn.Linear):
    """Linear layer with int8 weights, one scale per output, and int8 activations with one scale per token.

    (LLM.int8's vector-wise scheme, Dettmers et al. 2022, without outliers.) Integers are summed exactly, so a token's
    output does not depend on the other rows of the call.
    """

    weight_scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_features) in the dtype of ``input`` (..., in_features)."""
        tokens = input.reshape(-1, self.in_features)
        reach = tokens.abs().amax(dim=-1, keepdim=True).float().clamp_min(LEAST)  # (T, 1)
        values = torch.mul(tokens, INT8_MOST / reach).round_().to(torch.int8)
        output = int8_product(values, self.weight) * self.weight_scales
        output.mul_(reach / INT8_MOST)
        if self.bias is not None:
            output += self.bias
        return output.to(input.dtype).view(*input.shape[:-1], self.out_features)


def int8_product(values: Tensor, weight: Tensor) -> Tensor:
    """Return the int32 product (T, out) of int8 (T, in) and (out, in); on a GPU rows of zeros are added if needed."""
    num_rows = values.shape[0]
    if values.device.type != "cpu" and num_rows < CUBLAS_ROWS:
        values = torch.cat([values, values.new_zeros((CUBLAS_ROWS - num_rows, values.shape[1]))])
    return torch._int_mm(values, weight.t())[:num_rows]


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values shaped as ``weight``, and float32 scales (out,): each output's largest value is 127."""
    scales = weight.flatten(1).abs().amax(dim=1).float().clamp_min(LEAST) / INT8_MOST
    values = (weight.float() / scales.view(-1, *[1] * (weight.ndim - 1))).round_()
    return values.to(torch.int8), scales


def from_int8(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantized values in ``dtype``."""
    return values.to(dtype).mul_(scales.view(-1, *[1] * (values.ndim - 1)).to(dtype))


def weight_in_float32(layer: nn.Module) -> Tensor | None:
    """Return the weight of ``layer`` in float32, dequantized if it has 8 bits.

    ``None`` if its values are not accessible: packed for oneDNN, or offloaded.
    """
    weight = layer.get_parameter("weight").detach()
    if weight.is_meta or isinstance(layer, Int8StaticLinear | Int8StaticConv2d):
        return None
    scales = layer._buffers.get("weight_scales")
    return weight.float() if scales is None else from_int8(weight, scales, torch.float32)


def become(layer: nn.Module, kind: type[nn.Module], weight: tuple[Tensor, Tensor]) -> None:
    """Turn ``layer`` into a ``kind`` with the weight and scales of ``to_int8``."""
    values, scales = weight
    layer.weight = nn.Parameter(values, requires_grad=False)
    layer.register_buffer("weight_scales", scales)
    layer.__class__ = kind


class InputRange(NamedTuple):
    """Smallest and largest measured input of a layer, including 0."""

    low: float
    high: float

    @property
    def scale(self) -> float:
        """Size of each of the 255 steps."""
        return max(self.high - self.low, LEAST) / 255

    @property
    def zero(self) -> int:
        """Code of 0, in 0..255."""
        return round(-self.low / self.scale)


class Int8WeightLinear(nn.Linear):
    """Linear layer with int8 weights whose arithmetic is in the dtype of its input."""

    weight_scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_features) in the dtype of ``input`` (..., in_features)."""
        if input.dtype == torch.float16:  # an unscaled sum of products may overflow in it
            return F.linear(input, from_int8(self.weight, self.weight_scales, input.dtype), self.bias)
        # scales stay in float32: with bfloat16 ones Inductor's pattern for such products fails to compile
        output = F.linear(input, self.weight.to(input.dtype)) * self.weight_scales
        return (output if self.bias is None else output + self.bias).to(input.dtype)


class Int8WeightRowLinear(RowLinear, Int8WeightLinear):
    """``Int8WeightLinear`` for one vector per row, which a CPU computes for sixteen rows at a time."""


class Int8WeightConv2d(nn.Conv2d):
    """Convolution with int8 weights whose arithmetic is in the dtype of its input."""

    weight_scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, out, h, w) in the dtype of ``input`` (B, in, h, w)."""
        output: Tensor = self._conv_forward(input, from_int8(self.weight, self.weight_scales, input.dtype), self.bias)
        return output


class Int8StaticLinear(nn.Linear):
    """Linear layer with int8 weights, one scale per output, and int8 activations in a measured range.

    Values outside the range are clipped.
    """

    weight_scales: Tensor
    shift: Tensor  # contribution of the activations' zero, plus bias, float32 (out,)
    range: InputRange

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_features) in the dtype of ``input`` (..., in_features)."""
        codes = to_codes(input.reshape(-1, self.in_features), self.range, signed=True)
        output = int8_product(codes, self.weight) * self.weight_scales
        return output.add_(self.shift).to(input.dtype).view(*input.shape[:-1], self.out_features)


class Int8StaticConv2d(nn.Conv2d):
    """Convolution in int8 by oneDNN on a CPU, with activations in a measured range.

    ``weight`` has the shape and no memory; ``packed`` has the values.
    """

    weight_scales: Tensor
    weight_zeros: Tensor
    bias_32: Tensor | None
    packed: Tensor
    range: InputRange

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, out, h, w) in the dtype of ``input`` (B, in, h, w)."""
        output: Tensor = torch.ops.onednn.qconv_pointwise(
            to_codes(input, self.range, signed=False),
            self.range.scale,
            self.range.zero,
            self.packed,
            self.weight_scales,
            self.weight_zeros,
            self.bias_32,
            list(self.stride),
            list(self.padding),
            list(self.dilation),
            self.groups,
            1.0,
            0,
            input.dtype,
            "none",
            [],
            "",
        )
        return output


def to_codes(activations: Tensor, input_range: InputRange, *, signed: bool) -> Tensor:
    """Return ``activations`` as uint8 codes, rounded half up; with ``signed`` as int8, less 128."""
    codes = (
        torch.mul(activations.float(), 1 / input_range.scale)
        .add_(input_range.zero + 0.5)
        .clamp_(0, 255)
        .to(torch.uint8)
    )
    return codes.bitwise_xor_(128).view(torch.int8) if signed else codes


def hold_int8_weight(layer: nn.Module) -> None:
    """Quantize the weight of ``layer``, linear or a convolution, to int8; its arithmetic stays in a float dtype."""
    kind: type[nn.Module] = Int8WeightConv2d
    if isinstance(layer, nn.Linear):
        kind = Int8WeightRowLinear if isinstance(layer, RowLinear) else Int8WeightLinear
    become(layer, kind, to_int8(layer.get_parameter("weight").detach()))


def become_static(layer: nn.Module, input_range: InputRange) -> None:
    """Convert ``layer`` from ``hold_int8_weight`` to int8 products with inputs in ``input_range``."""
    values, scales = layer.get_parameter("weight").detach(), layer.get_buffer("weight_scales")
    bias = layer._parameters.get("bias")
    layer.__dict__["range"] = input_range
    if isinstance(layer, nn.Linear):
        shift = values.sum(dim=1, dtype=torch.int32) * scales * (input_range.scale * (128 - input_range.zero))
        become(layer, Int8StaticLinear, (values, scales * input_range.scale))
        layer.register_buffer("shift", shift if bias is None else shift + bias.float())
        return
    assert isinstance(layer, nn.Conv2d)
    sizes = [list(side) for side in (layer.stride, layer.padding, layer.dilation)]
    packed = torch.ops.onednn.qconv_prepack(
        values, scales, input_range.scale, input_range.zero, *sizes, layer.groups, None
    )
    become(layer, Int8StaticConv2d, (values.to("meta"), scales))
    layer.register_buffer("packed", packed)
    layer.register_buffer("weight_zeros", torch.zeros(len(scales), dtype=torch.int64))
    layer.register_buffer("bias_32", None if bias is None else bias.float())
