"""Devices that are not NVIDIA's: code that a CPU can run in their place, with float64 forbidden where they lack it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.random_models import save_hollow_model
from diffserve.api.errors import ConfigError
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine import Engine
from diffserve.runtime import accelerators, choose_device
from diffserve.runtime.accelerators import compute_capability, float64_device, has_float64
from diffserve.runtime.decoding.sampling_state import invert
from diffserve.runtime.memory import free_bytes, give_memory_back
from diffserve.runtime.philox import Draw, normals
from diffserve.runtime.precision import hardware_name
from diffserve.runtime.text.encoding import weigh
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings

META = torch.device("meta")
ATEN = torch.ops.aten
PAIRS = 200_000


class WithoutFloat64(TorchDispatchMode):
    """Treats the meta device as one without float64, such as MPS, and copies ones from it to main memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func.overloadpacket is ATEN._to_copy and args[0].is_meta and str(device) == "cpu":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func.overloadpacket is ATEN.copy_ and not args[0].is_meta and args[1].is_meta:
            return args[0]
        output = func(*args, **kwargs)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.dtype == torch.float64:
                raise TypeError(f"{func} makes float64 on a device that has none")
        return output


@pytest.fixture
def meta_without_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(accelerators, "has_float64", lambda device: device != META)
    with WithoutFloat64():  # type: ignore[no-untyped-call]
        yield


@pytest.mark.usefixtures("meta_without_float64")
def test_the_guard_raises_on_float64() -> None:
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(2, device=META).double()


@pytest.mark.usefixtures("meta_without_float64")
def test_prompt_weights_tokens_and_device_noise_need_no_float64_on_the_device() -> None:
    assert weigh(torch.zeros(7, 8, device=META, dtype=torch.float16), [1.3] * 7).dtype == torch.float16
    assert invert(torch.zeros(3, 50, device=META), [0.1, 0.5, 0.9]).device == META
    assert normals([Draw(1, 0), Draw(2, 3)], 12, META).shape == (2, 12)


@pytest.mark.usefixtures("meta_without_float64")
def test_images_are_painted_from_the_first_tick_to_the_last_without_float64_on_the_device(tmp_path: Path) -> None:
    path = save_hollow_model("tiny-random", tmp_path, dtype=torch.float16)
    config = EngineConfig(max_rows=8, deterministic=False)
    engine = Engine.from_pretrained(str(path), device="meta", dtype="float16", config=config)
    for seed, sampler in enumerate(("ddim", "euler_a", "dpmpp_2m", "lcm", "unipc")):
        settings = DiffusionParams(
            sampler=sampler, num_steps=4, noise_source="device", guidance_rescale=0.5, cache_interval=1 + seed % 2
        )
        engine.submit(GenerationRequest(prompt="a (red:1.3) fox", seed=seed, diffusion=settings, preview_every=2))
    with torch.inference_mode():
        while engine.has_work:
            engine.tick()
    assert engine.stats().num_painted == 5


def test_dropping_float64_from_prompt_weighting_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, new_mean = torch.randn(2, PAIRS, generator=generator)
    assert torch.equal(mean / new_mean, (mean.double() / new_mean.double()).float())
    hidden = torch.randn(77, 64, generator=generator) + 0.3
    weights = torch.rand(77, generator=generator) + 0.5
    weighted = hidden * weights[:, None]
    expected = weighted * (hidden.mean().double() / weighted.mean().double()).float()
    assert torch.equal(weigh(hidden, weights.tolist()), expected)


@pytest.mark.parametrize(
    ("mean", "new_mean"), [(1.0, -1.0), (-1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (1e-30, -1e-30), (1e-4, 1e-4)]
)
def test_prompt_weighting_leaves_a_mean_alone_that_is_small_or_changes_sign(mean: float, new_mean: float) -> None:
    spread = torch.tensor([1.0, -1.0]) * (1.0 if abs(mean) < 0.5 else 0.0)
    hidden = (spread + mean)[:, None]
    weights = [new_mean / mean if mean and abs(mean) >= 0.5 else 1.25] * 2
    assert torch.equal(weigh(hidden, weights), hidden * torch.tensor(weights)[:, None])


@pytest.mark.parametrize(
    ("kind", "has_fp64", "place"), [("mps", False, "cpu"), ("xpu", False, "cpu"), ("xpu", True, "xpu")]
)
def test_float64_is_computed_on_the_cpu_where_the_device_has_none(
    monkeypatch: pytest.MonkeyPatch, kind: str, has_fp64: bool, place: str
) -> None:
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=has_fp64))
    assert float64_device(torch.device(kind)).type == place
    assert has_float64(torch.device("cpu"))
    assert has_float64(torch.device("cuda"))


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, count: int = 2) -> list[str]:
    """Make torch find ``count`` devices of ``kind`` and no others, and return the calls of their module."""
    calls: list[str] = []
    module = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: count,
        get_device_name=lambda device: f"a {kind}",
        memory_reserved=lambda device: 300,
        memory_allocated=lambda device: 100,
        mem_get_info=lambda device: (1000, 5000),
        empty_cache=lambda: calls.append("empty_cache"),
    )
    absent = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)

    def get_device_module(device: Any) -> Any:
        return module if torch.device(device).type == kind else absent

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hardware_name.cache_clear()
    return calls


def test_an_intel_gpu_is_found_named_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend(monkeypatch, "xpu")
    choice = choose_device()
    assert (choice.device, choice.dtype) == (torch.device("xpu", 0), "float16")
    assert "xpu (a xpu) was found" in choice.reason
    assert choose_device("xpu:1").device == torch.device("xpu", 1)
    assert hardware_name(torch.device("xpu", 1)) == "a xpu"
    assert free_bytes(choice.device) == 1000 + 300 - 100
    give_memory_back(choice.device)
    assert calls == ["empty_cache"]
    with pytest.raises(ConfigError, match=r"device is 'xpu:2', but torch finds 2 XPU device\(s\) here"):
        choose_device("xpu:2")


def test_memory_of_an_apple_gpu_is_what_metal_recommends_less_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 900)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 250)
    assert free_bytes(torch.device("mps")) == 650


def test_rocm_devices_are_not_taken_for_gpus_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI200 reports 9.0, as an H100 does."""
    pretend(monkeypatch, "cuda")
    assert compute_capability(torch.device("cuda", 0)) == (9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert compute_capability(torch.device("cuda", 0)) is None
    assert choose_device("cuda").dtype == "float16"


def test_a_server_takes_engines_on_xpu_devices() -> None:
    assert load_settings(env={"DIFFSERVE_SERVE_DEVICES": "xpu:0,xpu:1"}).serve.devices == ("xpu:0", "xpu:1")
