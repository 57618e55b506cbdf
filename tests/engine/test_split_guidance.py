"""Guided pictures whose two rows are painted by two processes are the same bytes as whole ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from diffserve.config import EngineConfig
from diffserve.engine import Engine
from diffserve.engine.image.second_device import SecondDevice, contexts_of, tensors_of
from diffserve.errors import ConfigError, DeviceLost
from diffserve.runtime import load_model
from diffserve.runtime.exchange import TensorHead, pack, unpack
from diffserve.runtime.unet.cross_attention import KeysValues, Pair
from diffserve.types import GenerationRequest
from tests.device import DEVICE
from tests.engine.pipelines import asked
from tests.engine.test_determinism import content

MakeSplit = Callable[..., tuple[Engine, Engine, SecondDevice]]


@pytest.fixture
def make_split(tiny_model: Callable[[str], Path]) -> Iterator[MakeSplit]:
    """``make_split(kind)``: an engine as usual, and one that paints unconditional rows in a second process."""
    made: list[Engine] = []

    def make(kind: str, **config: object) -> tuple[Engine, Engine, SecondDevice]:
        model = load_model(tiny_model(kind), dtype="float32", device=DEVICE)
        for split_guidance in ("", "cpu"):
            settings = EngineConfig(max_rows=8, cache_dir="", split_guidance=split_guidance, **config)  # type: ignore[arg-type]
            made.append(Engine(model, settings))  # without packages, which give other bytes and are not used when split
        second = made[-1].runners.second
        assert second is not None
        return made[-2], made[-1], second

    yield make
    for engine in made:
        engine.close()
        engine.check_integrity()


def pictures(kind: str) -> list[GenerationRequest]:
    """Guided in several ways, and one that is not."""
    first = asked(kind, "euler_a", seed=1, num_steps=3, guidance_scale=5.0, prompt="the red fox")
    partly = asked(kind, "heun", seed=2, num_steps=3, guidance_scale=7.5)
    partly = replace(partly, diffusion=replace(partly.diffusion, guidance_interval=(0.3, 1.0)))
    return [
        replace(first, num_images=2, negative_prompt="dog"),
        partly,
        asked(kind, "dpmpp_2m", seed=3, num_steps=4, guidance_scale=1.0),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "attention"), [("sd15", "paged"), ("sdxl", "paged"), ("sdxl", "plain")])
def test_split_pictures_are_whole_ones_byte_for_byte(make_split: MakeSplit, kind: str, attention: str) -> None:
    whole, split, second = make_split(kind, cross_attention=attention)
    expected = [content(result) for result in whole.generate(pictures(kind))]
    assert [content(result) for result in split.generate(pictures(kind))] == expected
    calls = [call for tick in split.trace for call in tick.calls]
    parts = [{row.part for row in call.rows} for call in calls]
    assert {"cond"} in parts
    assert {"uncond"} in parts
    assert {"cond", "uncond"} not in parts
    before_bytes = second.sent_bytes
    [alone] = split.generate(replace(pictures(kind)[1], request_id="alone"))
    assert content(alone) == expected[2]
    assert second.sent_bytes > before_bytes


@pytest.mark.slow
def test_a_call_that_fails_there_is_made_here_and_a_lost_device_ends_the_engine(make_split: MakeSplit) -> None:
    whole, split, second = make_split("sd15")
    model = split.model
    cells = torch.zeros((1, model.unet.latent_channels, 8, 8))
    text = model.text.encode("a fox", "", width_px=64, height_px=64).cond[None]
    good = model.unet.call(cells, torch.ones(1), text)
    bad = good._replace(contexts=text[..., 1:].clone())
    num_threads = torch.get_num_threads()  # sums differ with it
    failed, went_well = second.begin(bad, num_threads), second.begin(good, num_threads)
    assert failed.result() is None
    answer = went_well.result()
    assert answer is not None
    assert torch.equal(answer, model.unet.predict(cells, torch.ones(1), text))

    expected = [content(result) for result in whole.generate(pictures("sd15")[:1])]
    begin = second.begin
    second.begin = lambda call, num_threads: begin(call._replace(timesteps=call.timesteps.repeat(3)), num_threads)  # type: ignore[method-assign]
    assert [content(result) for result in split.generate(pictures("sd15")[:1])] == expected
    del second.begin

    events = split.stream(asked("sd15", "ddim", seed=4, num_steps=50))
    next(events)
    os.kill(second._process.pid, signal.SIGKILL)
    with pytest.raises(DeviceLost, match="unconditional rows, is gone"):
        list(events)
    split.tick()  # what was given up gives its place back


def test_tensors_travel_as_they_are() -> None:
    layers = (Pair(torch.randn(2, 3, 4), torch.randn(2, 3, 4).bfloat16()),)
    mask = torch.tensor([[True, False, True]])
    column = torch.randn(1, 15)[:, 3]  # contiguous by its word, with a stride of 15
    for contexts in (KeysValues(layers, mask), KeysValues(layers), torch.randn(2, 5).half().T, column):
        tensors = tensors_of(contexts)
        found = unpack([TensorHead.of(tensor) for tensor in tensors], pack(tensors))
        again = contexts_of(found)
        assert type(again) is type(contexts)
        for one, other in zip(tensors_of(again), tensors, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    with pytest.raises(ValueError, match="3 bytes came for tensors of 12"):
        unpack([TensorHead("float32", (3,))], torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no tensor that travels"):
        unpack([TensorHead("object", (3,))], torch.zeros(3, dtype=torch.uint8))


def test_a_second_device_that_is_not_there_is_named(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(tiny_model("sd15"), dtype="float32", device=DEVICE)
    with pytest.raises(ConfigError, match=r"split_guidance.*'cuda:7'"):
        Engine(model, EngineConfig(split_guidance="cuda:7"))
