"""DeepCache: between full calls of the UNet only its shallow part runs, image by image at its own rhythm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Event, GenerationRequest, ImageFinished, ImageResult, Picture
from diffserve.engine import Engine
from diffserve.engine.image.admission import full_rows
from diffserve.engine.image.task import UNCOND
from diffserve.runtime.unet.deep_cache import NUM_SKIPS, ShallowPart
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request, load_pipeline, pipeline_latents
from tests.engine.simulated_scheduler import INFO, Simulation, admission, request
from tests.engine.test_out_of_memory import Shortage

PIPELINES = {"sd15": "StableDiffusionPipeline", "sd2": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}
TOLERANCE = 1e-3
FULL, SHALLOW = False, True


def content(result: ImageResult) -> tuple[bytes, bytes]:
    assert result.latents is not None
    return result.latents.data, result.picture.data


def calls_of(engine: Engine) -> Counter[bool]:
    """Rows that mattered by whether they were shallow."""
    counts = Counter[bool]()
    for tick in engine.trace:
        for call in tick.calls:
            counts[call.is_shallow] += len(call.rows)
    return counts


class PlainDeepCache:
    """DeepCache as a plain loop over diffusers' UNet.

    Each interval starts with a full call. The other ``interval - 1`` calls are full calls, too, whose deep features are
    replaced by those of the first call.
    """

    def __init__(self, network: Any, interval: int) -> None:
        self.num_calls = 0
        self._interval = interval
        self._kept: torch.Tensor | None = None
        self._num_skip = network.config.block_out_channels[0]
        network.register_forward_pre_hook(self._count)
        self._entry = network.up_blocks[-1].resnets[-NUM_SKIPS]
        self._entry.register_forward_pre_hook(self._swap)

    def _count(self, _module: Any, _args: Any) -> None:
        self.num_calls += 1

    def _swap(self, _module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *arguments = args
        num_deep = hidden.shape[1] - self._num_skip
        if (self.num_calls - 1) % self._interval == 0:
            self._kept = hidden[:, :num_deep].clone()
        assert self._kept is not None
        return torch.cat([self._kept, hidden[:, num_deep:]], dim=1), *arguments


@pytest.mark.parametrize(("kind", "sampler"), [(kind, "ddim") for kind in sorted(PIPELINES)] + [("sd15", "dpmpp_2m")])
def test_latents_are_those_of_a_plain_loop_over_the_unet_of_diffusers(
    kind: str, sampler: str, make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    request = image_request(kind, sampler, seed=4, num_steps=8, cache_interval=3)
    pipeline = load_pipeline.__wrapped__(PIPELINES[kind], tiny_model(kind))
    exact = pipeline_latents(pipeline, request, kind)
    plain = PlainDeepCache(pipeline.unet, 3)
    reference = pipeline_latents(pipeline, request, kind)
    engine = make_engine(kind)
    [result] = engine.generate(request)
    assert result.latents is not None
    assert plain.num_calls == 8
    assert np.abs(result.latents.array - reference).max() < TOLERANCE
    assert np.abs(exact - reference).max() > 3 * TOLERANCE, "the cache would not be seen to matter"
    assert calls_of(engine) == {FULL: 2 * 3, SHALLOW: 2 * 5}
    assert result.num_evaluations == 16
    assert result.cache_interval == 3


def company() -> list[GenerationRequest]:
    """Return requests that share nothing but their size."""
    return [
        image_request("sd15", "ddim", seed=1, num_steps=7, cache_interval=3),
        image_request("sd15", "heun", seed=2, num_steps=4, cache_interval=3, prompt="cat"),
        image_request("sd15", "euler_a", seed=3, num_steps=6, cache_interval=2, guidance_scale=1.0),
        image_request("sd15", "dpmpp_2m", seed=4, num_steps=8, cache_interval=3, guidance_interval=(0.3, 0.7)),
        image_request("sd15", "unipc", seed=5, num_steps=5),
        image_request("sd15", "pc", seed=6, num_steps=3, cache_interval=5, prompt="dog on the cat"),
        image_request("sd15", "ddim", seed=7, num_steps=6, cache_interval=2, init_image=init_image(), strength=0.6),
        image_request(
            "sd15", "lcm", seed=8, num_steps=4, cache_interval=2, init_image=init_image(), mask_image=mask_image()
        ),
    ]


def init_image() -> Picture:
    return Picture.from_array(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def mask_image() -> Picture:
    mask = np.zeros((64, 64), dtype=np.uint8)
    mask[16:48, 8:40] = 255
    return Picture.from_array(mask)


def painted_by_seed(events: list[Event]) -> dict[int, tuple[bytes, bytes]]:
    return {event.result.seed: content(event.result) for event in events if isinstance(event, ImageFinished)}


def test_bytes_depend_neither_on_the_company_nor_on_the_order_of_arrival(make_engine: MakeEngine) -> None:
    alone = make_engine(max_rows=16)
    expected = {request.seed: content(alone.generate(request)[0]) for request in company()}
    for order in ((0, 1, 2, 3, 4, 5, 6, 7), (7, 3, 5, 1, 0, 6, 4, 2)):
        engine = make_engine(max_rows=16)
        events: list[Event] = []
        for place in order:
            engine.submit(company()[place])
            for _ in range(1 + place % 2):
                events += engine.tick()
        events += engine.events()
        assert painted_by_seed(events) == expected
        assert any({call.is_shallow for call in tick.calls} == {FULL, SHALLOW} for tick in engine.trace)


def test_a_tick_makes_one_full_and_one_shallow_call(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=False, max_rows=16)
    for seed in range(3):
        engine.submit(image_request("sd15", "ddim", seed=seed, num_steps=9, cache_interval=3))
        for _ in ("prepared", "a step"):
            engine.tick()
    list(engine.events())
    together = [tick for tick in engine.trace if tick.num_rows == 6]
    assert together
    for tick in together:
        assert [(call.is_shallow, len(call.rows)) for call in tick.calls] == [(FULL, 2), (SHALLOW, 4)]


def test_an_interval_of_one_is_off_to_the_byte(make_engine: MakeEngine) -> None:
    engine = make_engine()
    [off] = engine.generate(image_request("sd15", "dpmpp_2m", seed=9, num_steps=5))
    [result] = engine.generate(image_request("sd15", "dpmpp_2m", seed=9, num_steps=5, cache_interval=1))
    [cached_result] = engine.generate(image_request("sd15", "dpmpp_2m", seed=9, num_steps=5, cache_interval=2))
    assert content(off) == content(result) != content(cached_result)


@pytest.mark.parametrize("kind", ["sd15", "sd2", "sdxl", "inpaint9", "embedded"])
def test_on_its_own_features_a_shallow_call_gives_what_the_full_one_gave(kind: str, make_engine: MakeEngine) -> None:
    from diffserve.runtime.unet.random_rows import random_inputs

    unet = make_engine(kind).model.unet
    assert unet.shallow is not None
    inputs = random_inputs(make_engine(kind).model, (64, 72, 20), 3)
    with unet.shallow.keeping() as cached_features:
        full = unet.predict(**inputs)
    assert torch.equal(unet.predict(features=cached_features[0], **inputs), full)
    assert cached_features[0].shape == (3, unet.shallow.num_channels, 8, 9)
    assert 0.0 < unet.shallow.share < 1.0


def test_rows_are_full_by_the_images_own_count_and_where_there_are_no_features() -> None:
    always, never = np.ones(8, dtype=np.bool_), np.zeros(8, dtype=np.bool_)
    assert full_rows(always, 3).tolist() == [True, False, False, True, False, False, True, False]
    assert full_rows(never, 1).all()
    late = np.arange(8) >= 4
    assert np.flatnonzero(full_rows(late, 3)).tolist() == [0, 3, 4, 6]
    assert np.flatnonzero(full_rows(~late, 3)).tolist() == [0, 3, 6]
    assert np.flatnonzero(full_rows(always, 1000)).tolist() == [0]


def test_shallow_rows_cost_less_and_make_calls_of_their_own() -> None:
    sim = Simulation(row_cap=4)
    sim.admission = admission(msgspec.structs.replace(INFO, shallow_share=0.25))
    live = sim.submit(num_steps=6, cache_interval=3)
    assert live.tasks[0].cost_left == 2 * (2 + 4 * 0.25)
    sim.tick()
    assert [sim.tick()[0].cost for _ in range(2)] == [2.0, 0.5]
    for _ in range(3):
        sim.submit(num_steps=6, cache_interval=3)
    totals = []
    while sim.scheduler.has_work:
        rows = Counter[bool]()
        full = {task: task.is_full_now for task in sim.scheduler.in_flight if task.group is not None}
        for task in sim.tick()[0].rows:
            rows[full[task]] += 2
        assert max(rows.values(), default=0) <= 4
        totals.append(rows.total())
    assert max(totals) > 4, "whole and shallow rows do not take each other's room"


def test_a_unet_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cache_interval is 3; the UNet of sim cannot be split") as refused:
        admission().admit(request(cache_interval=3), 0.0)
    assert refused.value.param == "cache_interval"
    for value in (0, -1, 10**9):
        with pytest.raises(InvalidRequest, match=f"cache_interval is {value}; it must lie between 1 and 1000"):
            request(cache_interval=value)


def test_a_unet_of_one_block_has_no_shallow_part() -> None:
    from diffusers import UNet2DConditionModel

    sizes = {"block_out_channels": (32,), "layers_per_block": 2, "cross_attention_dim": 32, "attention_head_dim": 8}
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    assert ShallowPart.find(UNet2DConditionModel(**sizes, **blocks)) is None


@pytest.mark.slow
def test_memory_that_runs_out_once_costs_no_byte(make_engine: MakeEngine) -> None:
    def pair() -> list[GenerationRequest]:
        return [image_request("sd15", "euler_a", seed=seed, num_steps=4, cache_interval=3) for seed in (1, 2)]

    make_engine(max_rows=16).generate(pair())
    expected = list(map(content, make_engine(max_rows=16).generate(pair())))
    engine = make_engine(max_rows=16)
    with Shortage() as calm:
        engine.generate(pair())
    for when in range(1, calm.num_operations, max(1, calm.num_operations // 12)):
        engine = make_engine(max_rows=16)
        with Shortage(when):
            results = engine.generate(pair())
        assert list(map(content, results)) == expected, f"operation {when}"


def test_a_cancelled_image_leaves_no_features(make_engine: MakeEngine) -> None:
    def make_request() -> GenerationRequest:
        return image_request("sd15", "ddim", seed=1, num_steps=9, cache_interval=3)

    engine = make_engine()
    request_id = engine.submit(make_request())
    for _ in range(3):
        engine.tick()
    [task] = engine.scheduler.in_flight
    assert set(task.loaded_state.features) == {(0, 0), (UNCOND, 0)}
    engine.cancel(request_id)
    engine.tick()
    assert task.state is None
    [again], [fresh] = engine.generate(make_request()), make_engine().generate(make_request())
    assert content(again) == content(fresh)
