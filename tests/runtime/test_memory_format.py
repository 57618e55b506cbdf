"""The memory format of a UNet is measured once with an injected timer, fixed where bytes are promised, and kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from diffserve.disk_cache import DiskCache
from diffserve.engine import Engine
from diffserve.engine.image import runner
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.controlnet_store import ControlNetStore
from diffserve.runtime.unet import memory_format
from diffserve.runtime.unet.compiled import Packages
from diffserve.runtime.unet.memory_format import faster_format, has_choice, set_memory_format
from diffserve.settings.config import EngineConfig
from tests.engine.controlnets import with_folder, write_folder
from tests.runtime.conftest import LoadTiny


def formats(network: nn.Module) -> set[str]:
    """Return the memory formats of the 3x3 convolutions of ``network``."""
    weights = [part.weight for part in network.modules() if isinstance(part, nn.Conv2d) and part.kernel_size == (3, 3)]
    names = (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last))
    return {name for weight in weights for name, layout in names if weight.is_contiguous(memory_format=layout)}


def timer(network: nn.Module, seconds: dict[str, float]) -> Callable[[Callable[[], object]], float]:
    """Return a timer that makes the call and returns the seconds of the network's current memory format."""

    def measure(run: Callable[[], object]) -> float:
        run()
        [name] = formats(network)
        return seconds[name]

    return measure


@pytest.fixture
def model(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> DiffusionModel:
    """Return a model on the CPU that is treated like one on CUDA."""
    monkeypatch.setattr(memory_format, "has_choice", lambda model: True)
    return load_model(tiny_model("sd15"), dtype="bfloat16", device="cpu")


@pytest.mark.parametrize("fastest", ["contiguous", "channels_last"])
def test_the_faster_format_is_measured_logged_once_and_kept_for_the_next_start(
    model: DiffusionModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, fastest: str
) -> None:
    caplog.set_level("INFO", "diffserve.runtime.unet.memory_format")
    network, cache = model.unet.network, DiskCache(tmp_path)
    seconds = {"contiguous": 0.002, "channels_last": 0.002} | {fastest: 0.001}
    set_memory_format(model, "auto", cache, timer(network, seconds))
    assert (formats(network), model.unet.memory_format) == ({fastest}, fastest)
    [record] = caplog.records
    assert record.getMessage().startswith(f"the UNet's convolutions are stored {fastest.replace('_', ' ')}: a call")

    def measure(run: Callable[[], object]) -> float:
        raise AssertionError("a choice that is kept was measured again")

    set_memory_format(model, "contiguous", cache, measure)
    assert formats(network) == {"contiguous"}
    set_memory_format(model, "auto", cache, measure)
    assert formats(network) == {fastest}


def test_channels_last_is_used_only_where_it_saves_clearly_and_other_work_disturbs_both(model: DiffusionModel) -> None:
    network = model.unet.network
    assert faster_format(network, lambda: None, timer(network, {"contiguous": 1.0, "channels_last": 0.96}))[0] == (
        "contiguous"
    )
    slow_at_first = iter([2.0, 1.0, 0.9, 1.0])
    name, measured = faster_format(network, lambda: None, lambda run: next(slow_at_first))
    assert (name, measured) == ("contiguous", {"contiguous": 0.9, "channels_last": 1.0})
    assert formats(network) == {"contiguous"}


def test_the_format_changes_no_weight_and_the_output_only_by_rounding(model: DiffusionModel) -> None:
    network = model.unet.network
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    outputs: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 4, 8, 8, generator=generator), torch.tensor([40, 900]), torch.randn(2, 77, 64)

    def measure(run: Callable[[], object]) -> float:
        outputs.append(model.unet.predict(*inputs))
        return 1.0

    faster_format(network, lambda: None, measure)
    assert float((outputs[1] - outputs[0]).norm() / outputs[0].norm()) < 0.02
    assert all(torch.equal(before[name], weight) for name, weight in network.named_parameters())
    assert not any(weight.is_inference() for weight in network.parameters()), "they could not be compiled"


def test_without_memory_for_the_measured_call_the_format_is_contiguous(model: DiffusionModel, tmp_path: Path) -> None:
    def measure(run: Callable[[], object]) -> float:
        raise torch.OutOfMemoryError("no memory for 8 rows")

    set_memory_format(model, "auto", DiskCache(tmp_path), measure)
    assert formats(model.unet.network) == {"contiguous"}


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        ({"deterministic": True}, "contiguous"),
        ({"deterministic": False}, "auto"),
        ({"deterministic": True, "memory_format": "channels_last"}, "channels_last"),
        ({"deterministic": False, "memory_format": "contiguous"}, "contiguous"),
    ],
)
def test_where_bytes_are_promised_nothing_is_measured(
    tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, config: dict[str, object], setting: str
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(runner, "set_memory_format", lambda model, setting, cache: settings.append(setting))
    Engine(tiny("sd15"), EngineConfig(cache_dir="", compile="off", **config))  # type: ignore[arg-type]
    assert settings == [setting]


def test_on_a_cpu_and_in_float32_there_is_no_choice(tiny: LoadTiny) -> None:
    loaded = tiny("sd15")
    assert not has_choice(loaded)
    on_cuda = replace(loaded.choice, device=torch.device("cuda"))
    assert not has_choice(replace(loaded, choice=on_cuda))
    assert has_choice(replace(loaded, choice=replace(on_cuda, compute_dtype=torch.float16)))
    elsewhere = replace(on_cuda, compute_dtype=torch.float16, offload="cpu")
    assert not has_choice(replace(loaded, choice=elsewhere))


def test_a_controlnet_is_stored_like_its_unet(model: DiffusionModel, tmp_path: Path) -> None:
    model = with_folder(model, write_folder(tmp_path, model.unet.network))
    for name in ("channels_last", "contiguous"):
        set_memory_format(model, name, DiskCache(None))
        shelf = ControlNetStore(model, 1 << 30)
        assert formats(shelf.take(next(iter(shelf.folder.usable()))).network) == {name}


def test_packages_of_one_format_are_not_loaded_by_a_network_in_another(model: DiffusionModel, tmp_path: Path) -> None:
    """The strides of the weights are part of the compiled code."""
    identities = set()
    for name in ("contiguous", "channels_last"):
        set_memory_format(model, name, DiskCache(None))
        identities.add(Packages(model, DiskCache(tmp_path)).identity)
    assert len(identities) == 2
