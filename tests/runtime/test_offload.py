"""Weights that rest in main memory or on disk: the same bytes, and no more memory than a layer needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from diffserve import DiffusionParams, Engine, GenerationRequest
from diffserve.api.errors import ConfigError
from diffserve.engine.loading import load_languages
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.runtime import DiffusionModel, choose_device, load_model
from diffserve.runtime.language import load_language_model
from diffserve.runtime.loading import placement
from diffserve.runtime.precision import RESTS
from diffserve.settings.config import EngineConfig, TextSettings
from diffserve.settings.layers import load_settings
from tests.runtime.language import tiny

OFFLOADS = ("auto", "cpu", "disk")
ROOT = Path(__file__).resolve().parents[2]
SLOW = pytest.mark.slow


def networks(model: DiffusionModel) -> dict[str, Any]:
    parts = {f"text_encoder_{n}": encoder.network for n, encoder in enumerate(model.text.encoders)}
    return {**parts, "unet": model.unet.network, "vae": model.vae.network}


def held_bytes(network: Any) -> int:
    """Return the bytes of the parameters that are not on the meta device."""
    return sum(tensor.nbytes for tensor in network.parameters() if not tensor.is_meta)


def pictures(model: str | Path, mode: str) -> list[bytes]:
    """Two pictures of different samplers and steps, painted together: unguided, a row each."""
    engine = Engine.from_pretrained(
        model, device="cpu", dtype="float32", config=EngineConfig(offload=mode, cache_dir="", max_rows=2)
    )
    cases = [("a red fox", "ddim", 1), ("two apples, a castle at night", "euler_a", 2)]
    ways = [
        DiffusionParams(sampler=sampler, num_steps=num_steps, guidance_scale=1.0) for _, sampler, num_steps in cases
    ]
    requests = [
        GenerationRequest(prompt=prompt, seed=seed, diffusion=how)
        for seed, ((prompt, *_), how) in enumerate(zip(cases, ways, strict=True))
    ]
    return [result.image.tobytes() for result in engine.generate(requests)]


@pytest.mark.slow
def test_pictures_of_the_embedded_model_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pictures("embedded", "none")
    assert pictures("embedded", "disk") == expected
    small_machine(monkeypatch, num_bytes=30_000_000)
    assert pictures("embedded", "auto") == expected


def small_machine(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Weights get ``num_bytes`` of main memory, whatever there is."""
    monkeypatch.setattr(placement, "max_memory", lambda choice: {"cpu": num_bytes})


@pytest.mark.parametrize(
    ("kind", "modes"),
    [("sd15", OFFLOADS), pytest.param("sd2", ["cpu"], marks=SLOW), pytest.param("sdxl", ["auto", "disk"], marks=SLOW)],
)
def test_every_family_gives_the_same_bytes(
    kind: str, modes: Sequence[str], tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = pictures(tiny_model(kind), "none")
    small_machine(monkeypatch, num_bytes=200_000)
    for mode in modes:
        assert pictures(tiny_model(kind), mode) == expected, mode


class Watch(TorchFunctionMode):
    """Writes down, at every product and convolution, how many bytes of weights ``model`` holds, in all its networks."""

    def __init__(self, model: DiffusionModel) -> None:
        super().__init__()
        self.networks = networks(model).values()
        self.held: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, F.embedding, torch.conv2d):
            self.held.append(sum(map(held_bytes, self.networks)))
        return func(*args, **(kwargs or {}))


def use_all(model: DiffusionModel) -> None:
    """One call of each network."""
    model.text.encode("a fox", width_px=128, height_px=128)
    latents = torch.zeros(1, model.vae.latent_channels, 16, 16)
    width = model.unet.network.config.cross_attention_dim
    model.unet.predict(latents, torch.tensor([500.0]), torch.zeros(1, 77, width))
    model.vae.decode(latents)


@pytest.mark.slow
def test_on_disk_nothing_is_held_between_calls_and_one_layer_during_them() -> None:
    profile = msgspec.structs.replace(load_settings(model="embedded", env={}).model, probe=False)
    model = load_model("embedded", device="cpu", dtype="float32", offload="disk", profile=profile)
    with Watch(model) as watch:
        use_all(model)
    parts = [part for network in networks(model).values() for part in network.modules()]
    largest = max(sum(tensor.nbytes for tensor in part.parameters(recurse=False)) for part in parts)
    total_bytes = sum(entry.weights_bytes for entry in model.memory_report())
    assert len(watch.held) > 100
    assert 0 < min(watch.held) <= max(watch.held) <= largest < total_bytes / 10
    assert sum(map(held_bytes, networks(model).values())) == 0


PEAK = """
import os, sys, threading
from pathlib import Path
def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if "RssAnon" in line)
from diffserve.runtime.loading.library_imports import import_lean
assert import_lean()
from diffserve.runtime import load_model
from tests.runtime.test_offload import use_all
import diffserve.engine.image.engine, torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer
torch.set_num_threads(1)
load_model("embedded", device="meta")  # all that is imported
def peak(mode):
    before, seen, is_over = held(), [], threading.Event()
    def watch():
        while not is_over.wait(0.002):
            seen.append(held())
    thread = threading.Thread(target=watch)
    thread.start()
    model = load_model("embedded", device="cpu", dtype="float32", offload=mode)
    use_all(model)
    seen.append(held())
    is_over.set()
    thread.join()
    print(max(seen) - before, flush=True)
for mode in sys.argv[1:]:
    child = os.fork()
    if not child:
        peak(mode)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, mode
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much of a process is its own")
def test_on_disk_the_process_needs_less_memory_by_much_of_the_weights() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PEAK, "disk", "none"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, cwd=ROOT).stdout
    on_disk_kib, in_memory_kib = map(int, output.split())
    files = [
        file for part in ("unet", "vae", "text_encoder") for file in EMBEDDED_DIRECTORY.glob(f"{part}/*.safetensors")
    ]
    weights_kib = 2 * sum(file.stat().st_size for file in files) / 1024  # 16 bits there, 32 here
    assert on_disk_kib < in_memory_kib - 0.7 * weights_kib


def test_a_map_keeps_what_fits_and_leaves_the_rest_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 40_000_000
    small_machine(monkeypatch, num_bytes=room)
    model = load_model("embedded", device="cpu", dtype="float32", offload="auto")
    resident_model = load_model("embedded", device="cpu", dtype="float32")
    unet = held_bytes(model.unet.network)
    assert 0 < unet <= room < held_bytes(resident_model.unet.network)
    assert set(model.unet.network.hf_device_map.values()) == {"cpu", "disk"}
    assert held_bytes(model.vae.network) == held_bytes(resident_model.vae.network)  # it fits, so no hook is in its way
    assert not hasattr(model.vae.network, "hf_device_map")


def test_memory_that_weights_may_take_is_a_share_of_what_is_free() -> None:
    import psutil

    free = psutil.virtual_memory().available
    allowed = placement.max_memory(choose_device("cpu", "float32", "auto"))
    assert set(allowed) == {"cpu"}
    assert 0.5 * free < allowed["cpu"] < 0.9 * free


def test_hooks_bring_weights_from_main_memory(tiny_model: Callable[[str], Path]) -> None:
    """Add the hooks that ``dispatch`` adds on a GPU, since nothing moves on a CPU."""
    plain = load_model(tiny_model("sd15"), device="cpu", dtype="float32").unet.network
    resting = load_model(tiny_model("sd15"), device="cpu", dtype="float32").unet.network
    weights = {name: tensor.detach() for name, tensor in resting.named_parameters()}
    readers = {name: tensor.clone for name, tensor in weights.items()}
    placement.dispatch(resting, {"": "disk"}, readers, "cpu")
    assert held_bytes(resting) == 0
    arguments = (torch.randn(2, 4, 8, 8), torch.tensor([10.0, 700.0]))
    contexts = torch.randn(2, 7, plain.config.cross_attention_dim)
    with torch.inference_mode():
        expected, got = (network(*arguments, encoder_hidden_states=contexts).sample for network in (plain, resting))
    assert torch.equal(expected, got)


def test_overflow_in_16_bits_is_mended_with_weights_on_disk(tiny_model: Callable[[str], Path]) -> None:
    """A decode in float32 between two in float16 leaves the latter as it was."""
    model = load_model(tiny_model("sd15"), device="cpu", dtype="float16", offload="disk")
    runner, latents = model.vae, torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    before = runner.decode(latents)
    with runner._in_float32():
        wide = runner.decode(latents)
    assert (wide != before).any()
    assert abs(wide.astype(int) - before).max() < 8
    assert (runner.decode(latents) == before).all()


@pytest.mark.parametrize("mode", OFFLOADS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_language_models_give_the_same_logits(
    kind: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.save(tmp_path / kind, kind)
    ids = tiny.random_ids(20, seed=0)
    plain = load_language_model(directory, device="cpu", dtype="float32")
    small_machine(monkeypatch, num_bytes=1000)
    resting = load_language_model(directory, device="cpu", dtype="float32", offload=mode)
    assert torch.equal(plain.plain_logits(ids), resting.plain_logits(ids))
    assert plain.info.weights_bytes == resting.info.weights_bytes
    assert held_bytes(resting.network) == 0


def test_studio_s_language_models_rest_as_the_settings_say() -> None:
    (model,) = load_languages(TextSettings(model="embedded", dtype="float32"), "cpu", offload="disk")
    assert held_bytes(model.network) == 0
    assert "on disk until a layer runs" in model.info.choice_reason


@pytest.mark.parametrize("mode", OFFLOADS)
def test_the_choice_is_reported(mode: str) -> None:
    assert choose_device("cpu", "float32", mode).reason.endswith(f"as configured; {RESTS[mode]}.")
    assert "rest" not in choose_device("cpu", "float32").reason


def test_wrong_values_name_themselves_and_the_way_out() -> None:
    with pytest.raises(ConfigError, match="offload is 'gpu'; choose one of none, auto, cpu, disk"):
        choose_device("cpu", "float32", "gpu")
    with pytest.raises(ConfigError, match="offload is 'gpu'; choose one of none, auto, cpu, disk"):
        EngineConfig(offload="gpu")
    with pytest.raises(ConfigError, match=r"'disk' with dtype int8.*set offload to none, or choose a dtype of float32"):
        load_model("embedded", device="cpu", dtype="int8", offload="disk")
