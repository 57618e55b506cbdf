"""int8 weights: torchao's weight-only quantisation, one scale for each output row, applied one layer at a time."""

from __future__ import annotations

import torch
from torch import nn

from diffserve.errors import ConfigError
from diffserve.runtime.loading.quiet import import_quietly


def quantise_linear(layer: nn.Module) -> None:
    """Replace ``layer.weight`` (out, in) by int8 values and a scale per output row; arithmetic stays in its float
    dtype.

    Raises ConfigError when torchao is not installed.
    """
    try:
        quantize = import_quietly("torchao.quantization", "quantize_")
        config = import_quietly("torchao.quantization", "Int8WeightOnlyConfig")
    except ImportError as error:
        raise ConfigError(
            "dtype is int8, which needs torchao: pip install torchao, or choose another dtype."
        ) from error
    quantize(layer, config(set_inductor_config=False))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes that ``tensor`` really holds; for a quantised weight the sum of its parts."""
    names = getattr(tensor, "tensor_data_names", None)
    if names is None:
        return tensor.numel() * tensor.element_size()
    parts = [getattr(tensor, name) for name in names]
    return sum(tensor_bytes(part) for part in parts)
