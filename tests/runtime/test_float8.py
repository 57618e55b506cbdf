"""float8 layers: close to bfloat16, and written so that a compiler fuses the scaling into the layer before them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffserve.config import EngineConfig
from diffserve.disk_cache import DiskCache
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.float8 import FLOAT8_MAX, Float8Linear, to_float8
from diffserve.runtime.quantisation import quantise_layer, schemes
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.unet.compiled import FlatUNet, Packages
from diffserve.runtime.unet.random_rows import random_call
from tests.device import DEVICE
from tests.hardware import needs_float8
from tests.tiny_models import ONE_LEVEL

compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
UNET_TOLERANCE = 0.1
"""Largest relative error (in the norm) of a tiny random UNet's output against bfloat16."""


class FeedForward(nn.Module):
    """Layer norm, GEGLU and the residual, as in a transformer block of a UNet, with two projections of one input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.values, self.gates = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (B, tokens, width)."""
        normed = self.norm(hidden)
        output: Tensor = self.out(self.values(normed) * F.gelu(self.gates(normed)))
        return hidden + output


def feed_forward(width: int = 64) -> tuple[nn.Module, Tensor]:
    """A block in bfloat16 with float8 layers, and its input."""
    torch.manual_seed(7)
    block = FeedForward(width).to(DEVICE, torch.bfloat16).requires_grad_(False).eval()
    for layer in (block.values, block.gates, block.out):
        quantise_layer(layer, "float8")
    return block, torch.randn(2, 32, width).to(DEVICE, torch.bfloat16)


def in_float8(path: Path) -> DiffusionModel:
    """The model at ``path`` in bfloat16 with a UNet in float8, whose product a CPU emulates."""
    model = load_model(path, dtype="bfloat16", device=DEVICE)
    network = model.unet.network
    for name in schemes(network, "float8"):
        quantise_layer(network.get_submodule(name), "float8")
    return replace(model, choice=replace(model.choice, dtype="float8"))


def test_a_value_that_rounds_above_the_largest_float8_stays_finite() -> None:
    weight = torch.rand(64, 4096, generator=torch.Generator().manual_seed(1)) * 1e3
    values, scales = to_float8(weight)
    assert values.float().isfinite().all()
    assert (values.float().abs().amax(dim=1) == FLOAT8_MAX).all()
    assert ((values.float() * scales[:, None] - weight).abs() <= 0.0625 * weight + scales[:, None] * 2**-9).all()


def test_the_product_gets_row_major_tokens_from_the_transposed_image_of_a_single_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Float8Linear(64, 32)
    values, scales = to_float8(layer.weight.detach())
    layer.weight = torch.nn.Parameter(values, requires_grad=False)
    layer.register_buffer("weight_scales", scales)
    strides: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def scaled_mm(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        strides.append((left.stride(), right.stride()))
        return torch.zeros(len(left), right.shape[1], dtype=options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for num_rows in (1, 2):
        image = torch.randn(num_rows, 64, 8, 8)
        layer(image.permute(0, 2, 3, 1).reshape(num_rows, 64, 64))  # as ``Transformer2DModel`` does
    assert strides == [((64, 1), (1, 64))] * 2


@needs_float8
def test_a_unet_in_float8_comes_near_bfloat16(tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model("sd15")
    generator = torch.Generator().manual_seed(0)
    inputs: tuple[Any, ...] = (
        torch.randn(2, 4, 8, 8, generator=generator),
        torch.tensor([40, 900]),
        torch.randn(2, 77, 64, generator=generator),
    )
    exact = load_model(path, dtype="bfloat16", device=DEVICE).unet.predict(*inputs)
    quantized = in_float8(path)
    assert any(isinstance(layer, Float8Linear) for layer in quantized.unet.network.modules())
    output = quantized.unet.predict(*inputs)
    assert float((output - exact).norm() / exact.norm()) < UNET_TOLERANCE


@compiles
def test_a_float8_layer_is_exported_as_ordinary_operations_and_one_product() -> None:
    block, hidden = feed_forward()
    graph = torch.export.export(block, (hidden,)).graph
    operations = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert operations.count("aten._scaled_mm.default") == 3
    assert {name.partition(".")[0] for name in operations} == {"aten"}, "a custom operation is not fused"
    assert not [name for name in operations if "item" in name or "local_scalar" in name]


@needs_float8
@compiles
@pytest.mark.slow
def test_inductor_fuses_the_scaling_into_the_layers_before_the_product() -> None:
    from torch._inductor.utils import run_and_get_code

    block, hidden = feed_forward()
    with torch.no_grad():
        expected = block(hidden).float()
        output, codes = run_and_get_code(torch.compile(block, fullgraph=True), hidden)
    kernels = re.findall(r"^ +(?:cpp_fused_\w+|triton_\w+\.run|extern_kernels\.\w+)\(", "\n".join(codes), re.MULTILINE)
    fused = [name for name in kernels if "extern" not in name]
    assert len(kernels) - len(fused) == 3
    assert len(fused) == 3, "layer norm and scaling; GEGLU and scaling; the residual"
    assert float((output.float() - expected).norm() / expected.norm()) < 0.02


@needs_float8
@compiles
@pytest.mark.slow
def test_a_package_of_a_float8_unet_computes_with_the_weights_of_the_network(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = in_float8(tiny_model(ONE_LEVEL))
    packages = Packages(model, DiskCache(tmp_path))
    assert packages.reason is None
    conditioner = make_conditioner(model, EngineConfig(), is_exact=True)
    with torch.no_grad():
        call = random_call(model, (64, 64, 77), 2, conditioner)
        package = packages.load(packages.compile(call), 2)
        for _ in range(2):
            expected = FlatUNet(model.unet.network, call)(*call.tensors).float()
            output = package(call.tensors).float()
            assert float((output - expected).norm() / expected.norm()) < UNET_TOLERANCE
            model.unet.network.conv_out.weight.mul_(-3.0)
