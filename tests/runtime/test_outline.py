"""A UNet without weights compiles to a package that serves the real network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diffserve.disk_cache import DiskCache
from diffserve.runtime import choose_for, load_model
from diffserve.runtime.loading import components
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.unet import compiled
from diffserve.runtime.unet.compiled import FlatUNet, Packages
from diffserve.runtime.unet.outline import load_outline
from diffserve.runtime.unet.random_rows import random_call
from diffserve.settings.config import EngineConfig
from tests.tiny_models import ONE_LEVEL

SHAPE = (64, 64, 77)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_outline_has_the_shapes_of_the_network_in_the_memory_of_one_parameter(
    tiny_model: Callable[[str], Path], dtype: str
) -> None:
    path = tiny_model(ONE_LEVEL)
    model = load_model(path, dtype=dtype, device="cpu")
    choice = choose_for(path, "cpu", dtype, "none", None)
    outline = load_outline(path, choice, profile=model.profile, channels_last=True)
    network = outline.unet.network
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in model.unet.network.named_parameters()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in network.named_parameters()} == expected
    assert len({tensor.untyped_storage().data_ptr() for tensor in network.parameters()}) == 1
    assert len({tensor.data_ptr() for tensor in network.parameters()}) == len(expected)
    num_bytes = network.conv_in.weight.untyped_storage().nbytes()
    assert num_bytes < sum(tensor.nbytes for tensor in network.parameters()) / 2
    assert network.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch, about itself
def test_a_package_compiled_without_weights_computes_with_those_of_the_network(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "openvino_version", lambda: None)
    monkeypatch.setattr(compiled, "MOST_BAKED_BYTES", 0)  # as on a GPU, packages hold no weights
    monkeypatch.setattr(components, "use_steady_layers", lambda *_: None)  # nor has a GPU layers made for CPUs
    path = tiny_model(ONE_LEVEL)
    model = load_model(path, dtype="float32", device="cpu")
    channels_last = model.unet.network.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    choice = choose_for(path, "cpu", "float32", "none", None)
    outline = load_outline(path, choice, profile=model.profile, channels_last=channels_last)
    cache, config = DiskCache(tmp_path), EngineConfig(cache_dir="")
    with torch.no_grad():
        package = Packages(outline, cache).compile(
            random_call(outline, SHAPE, 1, make_conditioner(outline, config, is_exact=True))
        )
        packages = Packages(model, cache)
        call = random_call(model, SHAPE, 1, make_conditioner(model, config, is_exact=True))
        assert packages.path(call.kind, 1) == package, "an engine looks for the package elsewhere"
        got = packages.load(package, 1)(call.tensors)
        assert torch.allclose(got, FlatUNet(model.unet.network, call)(*call.tensors), atol=1e-4)
