"""The public face: three lines in a notebook, many threads, a waiting room with a door."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diffserve import DiffserveError, Engine, GenerationRequest
from diffserve.api.errors import DeadlineUnreachable, InvalidRequest, ModelNotFound, QueueFull
from diffserve.api.types import (
    TERMINAL,
    Accepted,
    DiffusionParams,
    Finished,
    ImageFinished,
    ImageResult,
    Preview,
    Progress,
)
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request


def test_three_lines_paint_a_picture(tiny_model: Callable[[str], Path]) -> None:
    engine = Engine.from_pretrained(tiny_model("sd15"))
    image = engine.generate("a red fox")[0].image
    assert image.size == (64, 64)


def test_weights_and_pages_are_on_the_chosen_device(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate(image_request("sd15", "ddim", seed=1, num_steps=1))
    tensors = [*engine.model.unet.network.parameters(), *engine.model.vae.network.parameters()]
    assert engine.pool is not None
    assert {tensor.device.type for tensor in (*tensors, engine.pool.arena.data)} == {torch.device(DEVICE).type}


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, diffserve, diffserve.engine, diffserve.engine.image.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelNotFound, match="/no/such/model"):
        Engine.from_pretrained("/no/such/model")


def test_results_come_in_the_order_of_the_requests(make_engine: MakeEngine) -> None:
    engine = make_engine()
    requests = [
        image_request("sd15", "ddim", seed=1, num_steps=6, num_images=2),
        image_request("sd15", "euler", seed=5, num_steps=1),
    ]
    results = engine.generate(requests)
    assert [(result.request_id, result.image_index, result.seed) for result in results] == [
        (requests[0].request_id, 0, 1),
        (requests[0].request_id, 1, 2),
        (requests[1].request_id, 0, 5),
    ]


def test_a_result_tells_how_it_was_made(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = image_request("sd15", "DPM++ 2M Karras", seed=3, num_steps=4, guidance_interval=(0.0, 0.5), eta=0.5)
    [result] = engine.generate(request)
    assert (result.sampler, result.sigma_schedule, result.num_steps) == ("dpmpp_2m", "karras", 4)
    assert (result.num_evaluations, result.guidance_scale) == (6, 5.0)
    assert (result.model, result.model_digest) == (engine.info.model_id, engine.info.digest)
    assert "eta 0.5 was ignored, because dpmpp_2m does not use it" in result.warnings[0]
    timings = result.timings
    assert timings.denoise_s == pytest.approx(4 * timings.step_s)
    assert min(timings.queue_s, timings.encode_s) >= 0.0
    assert min(timings.denoise_s, timings.decode_s) > 0.0


@pytest.mark.usefixtures("waits_for_device")
def test_a_stream_tells_the_story_in_order(make_engine: MakeEngine) -> None:
    request = image_request("sd15", "euler_a", seed=3, num_steps=5, preview_every=2)
    events = list(make_engine().stream(request))
    story = [Accepted, Progress, Progress, Preview, Progress, Progress, Preview, Progress, ImageFinished, Finished]
    assert [type(event) for event in events] == story
    assert isinstance(events[0], Accepted)
    assert (events[0].seed, events[0].queue_position) == (3, 0)
    left = [event.seconds_left for event in events if isinstance(event, Progress)]
    assert all(seconds is not None and seconds >= 0.0 for seconds in left)
    previews = [event.picture for event in events if isinstance(event, Preview)]
    assert previews[0] != previews[1]


def test_latents_come_only_when_asked_for(make_engine: MakeEngine) -> None:
    engine = make_engine()
    [without] = engine.generate(image_request("sd15", "ddim", seed=1, num_steps=1, return_latents=False))
    [with_them] = engine.generate(image_request("sd15", "ddim", seed=1, num_steps=1))
    assert without.latents is None
    assert with_them.latents is not None
    assert with_them.latents.shape == (4, 8, 8)


def test_an_error_of_the_negative_prompt_names_it(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequest, match="the negative prompt needs more than 32 chunks") as caught:
        make_engine().generate(image_request("sd15", "ddim", 1, guidance_scale=3.0, negative_prompt="cat " * 2500))
    assert caught.value.param == "negative_prompt"


def test_a_long_prompt_waits_for_its_own_kind(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=16)
    long = image_request("sd15", "ddim", seed=1, num_steps=3, prompt="cat " * 90)
    short = image_request("sd15", "ddim", seed=2, num_steps=3)
    expected = engine.generate(short)
    results = engine.generate([long, image_request("sd15", "ddim", seed=2, num_steps=3)])
    assert {group.num_tokens for group in engine.buckets} == {77, 154}
    assert all(len(set(tick.request_ids)) <= 1 for tick in engine.trace)
    assert results[1].picture == expected[0].picture


def test_sizes_are_painted_side_by_side(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sizes = [(64, 64), (96, 64), (64, 96)]
    requests = [
        image_request("sd15", "ddim", seed=1, num_steps=2, width_px=width, height_px=height) for width, height in sizes
    ]
    results = engine.generate(requests)
    assert [(result.picture.width_px, result.picture.height_px) for result in results] == sizes


def test_a_full_waiting_room_says_when_to_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting=2)
    for seed in range(2):
        engine.submit(image_request("sd15", "ddim", seed=seed, num_steps=1))
    with pytest.raises(QueueFull, match="2 requests are waiting") as full:
        engine.submit(image_request("sd15", "ddim", seed=9, num_steps=1))
    assert full.value.retry_after_s >= 1.0
    assert sum(isinstance(event, ImageFinished) for event in engine.events()) == 2


def test_a_list_longer_than_the_waiting_room_is_painted_all_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting=2)
    requests = [image_request("sd15", "ddim", seed=seed, num_steps=1) for seed in range(5)]
    assert [result.seed for result in engine.generate(requests)] == [0, 1, 2, 3, 4]


def test_a_bad_request_in_a_list_paints_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="size is 60x64; each side must lie"):
        engine.generate([image_request("sd15", "ddim", seed=1), image_request("sd15", "ddim", seed=1, width_px=60)])
    assert not engine.has_work


def test_one_id_is_painted_once_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = image_request("sd15", "ddim", seed=1, num_steps=1)
    engine.submit(request)
    with pytest.raises(InvalidRequest, match="already in use"):
        engine.submit(request)
    list(engine.events())
    assert len(engine.generate(request)) == 1


def test_an_idle_tick_is_harmless(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.tick() == []
    assert not engine.has_work


def test_a_prompt_beyond_measure_fails_with_its_field(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequest, match="shorten it") as refused:
        make_engine().generate(image_request("sd15", "ddim", seed=1, prompt="x " * 5000))
    assert refused.value.param == "prompt"


def test_threads_share_calls_and_each_gets_its_own_images(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=16)
    results: dict[int, list[ImageResult]] = {}

    def paint(seed: int) -> None:
        results[seed] = engine.generate(image_request("sd15", "ddim", seed=seed, num_steps=8))

    threads = [threading.Thread(target=paint, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert {seed: [result.seed for result in seed_results] for seed, seed_results in results.items()} == {
        n: [n] for n in range(4)
    }
    assert engine.tick() == []


def test_a_cancelled_generate_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = image_request("sd15", "ddim", seed=1, num_steps=500)
    canceller = threading.Timer(0.3, engine.cancel, [request.request_id])
    canceller.start()
    with pytest.raises(DiffserveError, match="was cancelled"):
        engine.generate(request)
    canceller.join(timeout=10)


@pytest.mark.parametrize("seed", range(2))
def test_a_random_walk_of_submit_tick_and_cancel_leaks_nothing(seed: int, make_engine: MakeEngine) -> None:
    walk = random.Random(seed)
    engine = make_engine(max_lanes=3, max_rows=5, max_decodes_per_tick=1)
    ends: dict[str, int] = {}
    for _ in range(60):
        action = walk.random()
        if action < 0.25:
            params = DiffusionParams(
                num_steps=walk.randint(1, 5),
                sampler=walk.choice(["ddim", "euler_a", "heun", "dpmpp_2m"]),
                guidance_scale=walk.choice([1.0, 4.0]),
            )
            request = GenerationRequest(
                prompt=walk.choice(["cat", "dog", "fox"]),
                num_images=walk.randint(1, 2),
                diffusion=params,
                deadline_s=walk.choice([None, 0.02]),
            )
            with contextlib.suppress(DeadlineUnreachable):
                ends[engine.submit(request)] = 0
        elif action < 0.35 and ends:
            engine.cancel(walk.choice(list(ends)))
        else:
            for event in engine.tick():
                ends[event.request_id] += isinstance(event, TERMINAL)
        engine.check_integrity()
    for event in engine.events():
        ends[event.request_id] += isinstance(event, TERMINAL)
    assert set(ends.values()) == {1}
