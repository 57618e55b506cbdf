"""Gated layers by two products: the same outputs, also with adapters, and diffusers' own layer for compilers."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffserve.disk_cache import DiskCache
from diffserve.runtime import DiffusionModel
from diffserve.runtime.loading.components import build_unet
from diffserve.runtime.low_rank import RowLoRAs, adaptable, adapting, random_set
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.unet.compiled import Packages
from diffserve.runtime.unet.layers import HalvedLinear, use_halved_gates
from diffserve.runtime.unet.unet import UNetRunner
from tests.runtime.conftest import LoadTiny


def inputs(model: DiffusionModel) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 8, 8, generator=generator)
    return latents, torch.tensor([40, 900]), torch.randn(2, 77, model.unet.network.config.cross_attention_dim)


def halved(model: DiffusionModel) -> DiffusionModel:
    """Return ``model`` with a copy of its UNet whose gated layers compute two products."""
    network = copy.deepcopy(model.unet.network)
    use_halved_gates(network)
    unet = UNetRunner(network, device=model.device, dtype=model.dtype)
    return replace(model, unet=unet)


def gated(network: nn.Module) -> list[Any]:
    return [module for module in network.modules() if hasattr(module, "proj") and isinstance(module.proj, nn.Linear)]


def test_two_products_give_the_output_of_one_but_for_rounding_with_and_without_hooks(tiny: LoadTiny) -> None:
    model = tiny("sd15")
    other, arguments = halved(model), inputs(model)
    assert {type(layer.proj) for layer in gated(other.unet.network)} == {HalvedLinear}
    assert HalvedLinear not in {type(module) for module in model.unet.network.modules()}
    expected, output = model.unet.predict(*arguments), other.unet.predict(*arguments)
    assert torch.allclose(output, expected, atol=1e-5)
    handles = [layer.proj.register_forward_hook(lambda *_: None) for layer in gated(other.unet.network)]
    assert torch.equal(other.unet.predict(*arguments), output), "hooks change the way and not the bytes"
    for handle in handles:
        handle.remove()


def test_adapters_change_both_halves(tiny: LoadTiny) -> None:
    model = tiny("sd15")
    other, arguments = halved(model), inputs(model)
    outputs: list[torch.Tensor] = []
    for candidate in (model, other):
        layers = [layer for name, layer in adaptable(candidate.unet.network).items() if "ff.net.0" in name]
        assert layers
        rows = RowLoRAs([random_set(layers, 16, torch.empty(0))] * 2)
        with adapting(rows):
            outputs.append(candidate.unet.predict(*arguments))
    assert torch.allclose(outputs[0], outputs[1], atol=1e-4)
    assert not torch.allclose(outputs[0], model.unet.predict(*arguments), atol=1e-2)


def test_compilers_see_the_layer_of_diffusers(tiny: LoadTiny, tmp_path: Path) -> None:
    model = tiny("sd15")
    other = halved(model)
    assert Packages(other, DiskCache(tmp_path)).identity == Packages(model, DiskCache(tmp_path)).identity
    layer = gated(other.unet.network)[0]
    tokens = torch.randn(1, 4, layer.proj.in_features)
    operations = [str(node.target) for node in torch.export.export(layer, (tokens,)).graph.nodes]
    assert operations.count("aten.linear.default") == 1


def test_gates_are_halved_on_cuda_only_and_not_in_a_quantized_unet(tiny: LoadTiny) -> None:
    config = dict(tiny("sd15").unet.network.config)
    for kind, dtype, is_halved in (
        ("cuda", "bfloat16", True),
        ("cuda", "int8_dynamic", False),
        ("cpu", "bfloat16", False),
    ):
        choice = DeviceChoice(torch.device(kind), dtype, torch.bfloat16, "")
        network = build_unet(config, "a test", choice)
        kinds = {type(layer.proj) for layer in gated(network)}
        assert kinds == {HalvedLinear if is_halved else nn.Linear}
