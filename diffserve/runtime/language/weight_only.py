"""int8 and int4 weights of a language model. Arithmetic stays in the device's float dtype.

int8: one scale for each output. int4: groups of weights with a scale and a zero each, where a kernel
exists. On CUDA that is torchao's tile-packed format; torchao 0.18 has none for CPUs, torch itself has one (bfloat16
activations), which is used directly.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from diffserve.api.errors import ConfigError
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.runtime.precision import INT8, DeviceChoice, choose_device
from diffserve.runtime.quantized_layers import hold_int8_weight
from diffserve.settings.config import DTYPE_ALIASES, TEXT_DTYPES

logger = logging.getLogger(__name__)

INT4: Final = "int4"
GROUP_WEIGHTS: Final = 32
CPU_ROWS: Final = 16
"""The CPU kernel packs output rows by so many."""


def compute_choice(device: str, dtype: str, offload: str = "none") -> DeviceChoice:
    """``choose_device``, which also knows int4. Raises ConfigError where the platform has no int4 kernel."""
    if DTYPE_ALIASES.get(dtype, dtype) not in TEXT_DTYPES:
        supported = ", ".join(TEXT_DTYPES)
        raise ConfigError(f"dtype is {dtype!r}, which no language model has; choose one of {supported}.", param="dtype")
    if dtype != INT4:
        return choose_device(device, dtype, offload)
    choice = choose_device(device, "bfloat16", offload)
    problem = int4_problem(choice.device)
    if problem:
        raise ConfigError(f"dtype is int4, and {problem}; choose int8, bfloat16 or auto.", param="dtype")
    return replace(choice, dtype=INT4, reason=choice.reason.replace("bfloat16", "int4 weights, bfloat16 arithmetic"))


def int4_problem(device: torch.device) -> str | None:
    """Return why int4 does not work on ``device``, by a test with one small layer; None if it works."""
    layer = nn.Linear(256, 32, bias=False, dtype=torch.bfloat16, device=device)
    hidden = torch.ones(2, 256, dtype=torch.bfloat16, device=device)
    try:
        with torch.inference_mode():
            expected = layer(hidden)
            error = (_int4_linear(layer)(hidden) - expected).abs().max() / expected.abs().max()
    except (ImportError, RuntimeError, AssertionError, NotImplementedError, AttributeError) as problem:
        return f"{device} has no kernel for it ({str(problem).splitlines()[0][:120]})"
    return None if error < 0.5 else f"the kernel of {device} is wrong by {float(error):.0%}"


def quantize_network(network: nn.Module, choice: DeviceChoice) -> None:
    """Quantize the weights of every linear layer but the output head to ``choice.dtype`` on ``choice.device``.

    The head often shares the embedding's weights, and its error would directly affect the logits.
    """
    if choice.dtype not in (INT8, INT4):
        return
    head = network.get_output_embeddings()  # type: ignore[operator] # a PreTrainedModel
    _transpose_conv1d(network)
    network.to(choice.device)
    left: list[str] = []
    for name, layer in list(network.named_modules()):
        if type(layer) is not nn.Linear or layer is head:
            continue
        if choice.dtype == INT8:
            hold_int8_weight(layer)
        elif layer.in_features % GROUP_WEIGHTS == 0 and layer.out_features % CPU_ROWS == 0:
            network.set_submodule(name, _int4_linear(layer))
        else:
            left.append(f"{name} ({layer.in_features} x {layer.out_features})")
    if left:
        logger.warning(
            "not in int4, which needs inputs in multiples of %d and outputs in multiples of %d: %s",
            GROUP_WEIGHTS,
            CPU_ROWS,
            ", ".join(left),
        )


def _transpose_conv1d(network: nn.Module) -> None:
    """GPT-2 keeps its linear layers transposed, as ``Conv1D``: make them ``nn.Linear``."""
    conv1d = import_quietly("transformers.pytorch_utils", "Conv1D")
    for name, layer in list(network.named_modules()):
        if isinstance(layer, conv1d):
            linear = nn.Linear(layer.nx, layer.nf, bias=True, device="meta")
            linear.weight = nn.Parameter(layer.weight.T.contiguous(), requires_grad=False)
            linear.bias = layer.bias
            network.set_submodule(name, linear)


def _int4_linear(layer: nn.Linear) -> nn.Module:
    if layer.weight.device.type == "cpu":
        return CpuInt4Linear(layer)
    quantize = import_quietly("torchao.quantization", "quantize_")
    config = import_quietly("torchao.quantization", "Int4WeightOnlyConfig")
    packed = nn.Sequential(layer)
    quantize(
        packed,
        config(group_size=GROUP_WEIGHTS, int4_packing_format="tile_packed_to_4d", set_inductor_config=False),
    )
    return packed[0]


class CpuInt4Linear(nn.Module):
    """Linear layer of 4-bit weights in groups of ``GROUP_WEIGHTS`` inputs, by torch's CPU kernel.

    weight = (q - 8) * scale + zero, q in 0..15. Inputs and outputs are bfloat16.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        groups = layer.weight.detach().float().reshape(layer.out_features, -1, GROUP_WEIGHTS)  # (out, G, 32)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp_min(1e-8)
        codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32).reshape(layer.out_features, -1)
        both = torch.cat([scale, low + 8 * scale], dim=-1).transpose(0, 1)  # (G, out, 2)
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
        self.register_buffer("scales", both.to(torch.bfloat16).contiguous())
        self.bias = layer.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), bfloat16."""
        flat = hidden.reshape(-1, self.in_features)
        output: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.packed, GROUP_WEIGHTS, self.scales)
        output = output.reshape(*hidden.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias
