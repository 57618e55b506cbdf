"""One model over several devices: where its parts go, that nothing is mixed on the way, and the same pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import remove_hook_from_module  # type: ignore[import-untyped]
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from diffserve import DiffusionParams, Engine, GenerationRequest
from diffserve.api.errors import ConfigError, InsufficientMemory
from diffserve.cli import doctor
from diffserve.engine.image import room
from diffserve.engine.image.room import Room
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.loading import placement
from diffserve.runtime.loading.placement import part_bytes, spread_over
from diffserve.runtime.low_rank import RowLoRAs, adaptable, random_set
from diffserve.runtime.unet.controlnet import random_residuals
from diffserve.runtime.unet.random_rows import random_inputs
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings

SIZES = {"text": 2, "unet": 10, "vae": 1, "else": 0}
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device_map", "rooms", "expected"),
    [
        ("auto", (13, 20), ({"a": 2}, {"a": 10}, {"a": 1})),
        ("auto", (12, 20), ({"b": 2}, {"a": 10}, {"b": 1})),
        ("balanced", (13, 20), ({"b": 2}, {"a": 10}, {"b": 1})),
        ("balanced", (20, 2), ({"a": 2}, {"a": 10}, {"a": 1})),
        ("auto", (8, 8), ({"b": 2}, {"a": 7, "b": 6}, {"a": 1})),
        ("balanced", (8, 8), ({"b": 2}, {"a": 5, "b": 6}, {"a": 1})),
        ("balanced", (4, 30), ({"b": 2}, {"a": 4, "b": 27}, {"b": 1})),
    ],
)
def test_parts_go_whole_where_there_is_room_and_a_unet_that_is_too_large_is_split(
    device_map: str, rooms: tuple[int, int], expected: tuple[dict[str, int], ...]
) -> None:
    placement = spread_over(SIZES, dict(zip("ab", rooms, strict=True)), device_map)
    assert tuple(dict(part) for part in placement) == expected


def test_parts_next_to_the_unet_are_counted_and_missing_room_is_reported_by_device() -> None:
    assert dict(spread_over(SIZES | {"else": 4}, {"a": 13, "b": 20}, "balanced").unet) == {"a": 5, "b": 17}
    gib = {part: size << 30 for part, size in SIZES.items()}
    with pytest.raises(InsufficientMemory) as refused:
        spread_over(gib, {"cuda:0": 6 << 30, "cuda:1": 6 << 30}, "balanced")
    message = refused.value.message
    assert "(GiB: text 2.00, unet 10.00, vae 1.00)" in message
    assert "6.00 on cuda:0, 6.00 on cuda:1" in message
    assert "offload to auto" in message


def test_wrong_values_name_themselves_and_the_way_out() -> None:
    with pytest.raises(ConfigError, match="device_map is 'even'; choose one of none, auto, balanced"):
        EngineConfig(device_map="even")
    with pytest.raises(ConfigError, match="device_map is 'auto' and offload 'cpu'; give one of them"):
        EngineConfig(device_map="auto", offload="cpu")
    with pytest.raises(ConfigError, match="omit devices or device_map"):
        load_settings(env={"DIFFSERVE_SERVE_DEVICES": "cpu,cpu", "DIFFSERVE_ENGINE_DEVICE_MAP": "auto"})
    with pytest.raises(ConfigError, match="torch finds only one device, cpu; it spreads a model over several GPUs"):
        load_model("embedded", device="cpu", dtype="float32", device_map="balanced")


def test_auto_leaves_a_single_device_as_it_is(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(tiny_model("sd15"), device="cpu", dtype="float32", device_map="auto")
    assert model.device == torch.device("cpu")


@contextmanager
def two_devices(monkeypatch: pytest.MonkeyPatch, rooms: tuple[int, int]) -> Iterator[None]:
    """Return main memory under two names, with this many bytes for weights each."""
    devices = (torch.device("cpu"), torch.device("cpu", 1))
    free = dict(zip(devices, rooms, strict=True))
    monkeypatch.setattr(placement, "devices_of", lambda choice: devices)
    monkeypatch.setattr(placement, "free_bytes", lambda device: int(free[device] / placement.WEIGHTS_SHARE) + 1)
    yield
    monkeypatch.undo()


def room_of(model: Path, share: float) -> tuple[int, int]:
    """Return the room per device for ``share`` of the UNet and the other parts of the model."""
    parts = part_bytes(load_model(model, device="meta", dtype="float32").memory_report())
    each = int(share * parts["unet"]) + parts["text"]
    return each, each


def pictures(engine: Engine) -> list[bytes]:
    """Generate images with several samplers, guided and unguided, in one batch."""
    ways = [DiffusionParams(sampler="ddim", num_steps=2), DiffusionParams(sampler="euler_a", num_steps=2, clip_skip=2)]
    ways.append(DiffusionParams(num_steps=2, guidance_scale=1.0))
    requests = [GenerationRequest(prompt="a (red:1.3) fox", seed=seed, diffusion=how) for seed, how in enumerate(ways)]
    return [result.image.tobytes() for result in engine.generate(requests)]


class MixedPlacesError(AssertionError):
    """An operation was given tensors of two devices."""


class TwoPlaces(TorchFunctionMode):
    """A mode that tracks on which of two simulated devices each tensor is; both are main memory.

    Results are on the device of their inputs, and only ``to`` moves a tensor. Tensors that were never moved fit both.
    """

    def __init__(self, model: DiffusionModel) -> None:
        super().__init__()
        self.num_moves = 0
        for network in [model.unet.network, *(encoder.network for encoder in model.text.encoders)]:
            for part in network.modules():
                hook = getattr(part, "_hf_hook", None)
                for parameter in part.parameters():
                    if hook is not None or not hasattr(parameter, "place"):
                        parameter.place = torch.device("cpu") if hook is None else hook.execution_device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places = {leaf.place for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "place")}
        if func == torch.Tensor.device.__get__ and places:
            return places.pop()
        output = func(*args, **kwargs)
        if func == torch.Tensor.to:
            devices = [
                torch.device(argument)
                for argument in (*args[1:], *kwargs.values())
                if isinstance(argument, (str, torch.device))
            ]
            if devices:
                self.num_moves += bool(places - set(devices))
                output = output.clone() if output is args[0] else output
                places = set(devices)
        if len(places) > 1:
            raise MixedPlacesError(f"{func} of {places}")
        for leaf in tree_leaves(output) if places else ():
            if isinstance(leaf, torch.Tensor):
                leaf.place = next(iter(places))  # type: ignore[attr-defined]
        return output


def in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch, cross_attention: Any) -> Engine:
    """Return a model on two devices: its text encoders and much of its UNet are on the second."""
    config = EngineConfig(cache_dir="", max_rows=2, cross_attention=cross_attention, device_map="balanced")
    first, second = room_of(path, 0.7)
    with two_devices(monkeypatch, (first, 2 * second)):
        return Engine.from_pretrained(path, config=config, device="cpu", dtype="float32")


@pytest.mark.parametrize("kind", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cross_attention", ["paged", "plain"])
def test_nothing_is_mixed_on_the_way_and_pictures_are_the_same_bytes(
    kind: str, cross_attention: Any, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(kind)
    config = EngineConfig(cache_dir="", max_rows=2, cross_attention=cross_attention)
    expected = pictures(Engine.from_pretrained(path, config=config, device="cpu", dtype="float32"))
    engine = in_pieces(path, monkeypatch, cross_attention)
    choice, unet = engine.model.choice, engine.model.unet
    assert choice.spread is not None
    assert len(choice.spread.unet) == 2
    assert choice.spread.text[0][0] == "cpu:1"
    assert not choice.is_unet_whole
    assert unet.shallow is None
    assert "text on cpu:1, unet on cpu and cpu:1" in choice.reason
    hooked = [name for name, part in unet.network.named_modules() if hasattr(part, "_hf_hook")]
    assert 0 < len(hooked) < 40, "blocks, and not every layer"
    with TwoPlaces(engine.model) as places:
        assert pictures(engine) == expected
        assert places.num_moves > 0
        rows = random_inputs(engine.model, (64, 64, 77), 2)
        with torch.inference_mode():
            pages = unet.cross_attention.keys_values(rows.pop("contexts"))
        adapters = [random_set(adaptable(unet.network).values(), 16, torch.empty(0)) for _ in range(2)]
        residuals = random_residuals(unet.network, (8, 8), range(2), torch.empty(0))
        unet.predict(**rows, contexts=pages, loras=RowLoRAs(adapters), residuals=residuals)


def test_room_is_what_the_fullest_device_has_and_the_doctor_tells_of_each(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_model("sd15")
    engine = in_pieces(path, monkeypatch, "plain")
    free = {"cpu": 900, "cpu:1": 700}
    monkeypatch.setattr(room, "free_bytes", lambda device: free[str(device)])
    assert Room(engine.model, EngineConfig(), 2, time.monotonic).rows(GroupKey(64, 64, 77)) == 1
    free |= {"cpu": 1 << 40, "cpu:1": 1 << 40}
    assert Room(engine.model, EngineConfig(), 2, time.monotonic).rows(GroupKey(64, 64, 77)) >= 2
    env = {"ENGINE_DEVICE_MAP": "balanced", "MODEL_DEVICE": "cpu", "MODEL_DTYPE": "float32"}
    settings = load_settings(model=str(path), env={f"DIFFSERVE_{name}": value for name, value in env.items()})
    with two_devices(monkeypatch, room_of(path, 0.7)):
        doctor.run(settings)
    output = " ".join(capsys.readouterr().out.split())
    for line in (
        "text, maximum on cpu",
        "unet, maximum on cpu ",
        "unet, maximum on cpu:1",
        "free on cpu:1",
    ):
        assert line in output


def test_without_what_brings_them_over_devices_would_be_mixed(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = in_pieces(tiny_model("sd15"), monkeypatch, "plain")
    with TwoPlaces(engine.model) as places:
        for part in engine.model.unet.network.modules():
            if hasattr(part, "_hf_hook"):
                remove_hook_from_module(part)
        rows = random_inputs(engine.model, (64, 64, 77), 2)
        with pytest.raises(MixedPlacesError):
            engine.model.unet.predict(**rows)
        assert places.num_moves == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are wanted")
@pytest.mark.parametrize("cross_attention", ["paged", "plain"])
def test_two_gpus_paint_what_one_does(
    cross_attention: Any, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make = tiny_model("sdxl"), partial(Engine.from_pretrained, device="cuda", dtype="float32")
    config = EngineConfig(cache_dir="", max_rows=2, cross_attention=cross_attention)
    expected = pictures(make(path, config=config))
    each, _ = room_of(path, 0.7)
    monkeypatch.setattr(placement, "free_bytes", lambda device: int(each / placement.WEIGHTS_SHARE) + 1)
    config = EngineConfig(cache_dir="", max_rows=2, cross_attention=cross_attention, device_map="balanced")
    engine = make(path, config=config)
    assert {parameter.device for parameter in engine.model.unet.network.parameters()} == {FIRST, SECOND}
    for image, other in zip(pictures(engine), expected, strict=True):
        apart = [abs(a - b) for a, b in zip(image, other, strict=True)]
        assert sum(apart) / len(apart) < 1.0
