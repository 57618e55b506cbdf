"""Requests that are interrupted: they end at the next step with the denoised estimate, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from diffserve.api.types import (
    TERMINAL,
    Cancelled,
    Event,
    Finished,
    GenerationRequest,
    ImageFinished,
    ImageResult,
    Picture,
    Preview,
    Progress,
)
from diffserve.engine import Engine
from diffserve.media.images import stretch
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request

STEPS = 8


def request(seed: int = 1, sampler: str = "ddim", **fields: object) -> GenerationRequest:
    return image_request("sd15", sampler, seed, num_steps=STEPS, prompt="a cat", **fields)


def run(engine: Engine, requests: Sequence[GenerationRequest], interrupted: str = "", after: int = 0) -> list[Event]:
    """Paint ``requests`` and interrupt one of them once ``after`` steps of it are done."""
    open_ids = {engine.submit(order) for order in requests}
    events: list[Event] = []
    while open_ids:
        for event in engine.tick():
            events.append(event)
            if isinstance(event, TERMINAL):
                open_ids.discard(event.request_id)
            if isinstance(event, Progress) and (event.request_id, event.step_index) == (interrupted, after):
                assert engine.interrupt(interrupted)
    return events


def results_of(events: list[Event], request_id: str) -> list[ImageResult]:
    return [event.result for event in events if isinstance(event, ImageFinished) and event.request_id == request_id]


@pytest.mark.usefixtures("waits_for_device")
@pytest.mark.parametrize("sampler", ["ddim", "euler_a", "dpmpp_2m", "heun", "unipc"])
def test_interrupted_image_is_the_denoised_estimate_of_the_next_step(make_engine: MakeEngine, sampler: str) -> None:
    full_run = run(make_engine(), [request(sampler=sampler, preview_every=1)])
    previews = {event.step_index: event.picture for event in full_run if isinstance(event, Preview)}
    mine = request(sampler=sampler)
    events = run(make_engine(), [mine], mine.request_id, after=3)
    [result] = results_of(events, mine.request_id)
    small = stretch(result.picture, previews[4].width_px, previews[4].height_px).array.astype(np.float32)
    distance = {step: float(np.abs(small - preview.array).mean()) for step, preview in previews.items()}
    assert min(distance, key=distance.__getitem__) == 4
    [finished] = results_of(full_run, full_run[0].request_id)
    assert result.picture != finished.picture
    assert result.interrupted_after == 4
    assert "interrupted after 4 of 8 steps" in result.warnings[-1]
    assert result.num_evaluations < finished.num_evaluations
    assert isinstance(events[-1], Finished)


def test_image_that_is_interrupted_in_its_last_step_is_finished(make_engine: MakeEngine) -> None:
    [alone] = make_engine().generate([request()])
    mine = request()
    [result] = results_of(run(make_engine(), [mine], mine.request_id, after=STEPS - 1), mine.request_id)
    assert (result.picture, result.interrupted_after, result.warnings) == (alone.picture, 0, alone.warnings)


def test_neighbors_of_an_interrupted_request_keep_their_bytes(make_engine: MakeEngine) -> None:
    mine, other = request(1, num_images=2), request(9)
    [alone] = make_engine().generate([other])
    events = run(make_engine(max_rows=8), [mine, other], mine.request_id, after=2)
    assert [result.interrupted_after for result in results_of(events, mine.request_id)] == [3, 3]
    [neighbor] = results_of(events, other.request_id)
    assert (neighbor.picture, neighbor.interrupted_after) == (alone.picture, 0)


def test_images_that_wait_are_dropped(make_engine: MakeEngine) -> None:
    mine = request(1, num_images=4)
    events = run(make_engine(max_lanes=2, max_rows=4), [mine], mine.request_id, after=2)
    assert len(results_of(events, mine.request_id)) == 2
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.num_painted, last.num_failed) == (2, 0)


def test_request_without_a_step_is_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine(max_lanes=1)
    first, second = request(1), request(2)
    for order in (first, second):
        engine.submit(order)
    assert not engine.interrupt("unknown")
    assert engine.interrupt(second.request_id)
    events = [event for _ in range(STEPS + 4) for event in engine.tick()]
    assert Cancelled(request_id=second.request_id) in events
    [result] = results_of(events, first.request_id)
    assert result.interrupted_after == 0
    assert not engine.interrupt(first.request_id), "it is over"


def test_unfinished_picture_is_neither_cached_nor_given_to_equal_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(result_cache_bytes=1 << 24, latent_cache_bytes=1 << 20, max_rows=4)
    [alone] = make_engine().generate([request()])
    first = request()
    [unfinished] = results_of(run(engine, [first], first.request_id, after=2), first.request_id)
    [again] = engine.generate([request()])
    assert unfinished.picture != again.picture
    assert (again.picture, again.cached, again.similarity) == (alone.picture, None, None)


def test_image_that_an_equal_request_waits_for_is_finished(make_engine: MakeEngine) -> None:
    engine = make_engine(result_cache_bytes=1 << 24, max_rows=4)
    [alone] = make_engine().generate([request()])
    first, second = request(), request()
    events = run(engine, [first, second], first.request_id, after=2)
    assert not results_of(events, first.request_id)
    assert Cancelled(request_id=first.request_id) in events
    [result] = results_of(events, second.request_id)
    assert (result.picture, result.interrupted_after) == (alone.picture, 0)


def test_interrupted_inpainting_keeps_what_is_not_masked(make_engine: MakeEngine) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    mask = np.zeros((64, 64), np.uint8)
    mask[:, :32] = 255
    mine = request(init_image=Picture.from_array(pixels), mask_image=Picture.from_array(mask), strength=1.0)
    [result] = results_of(run(make_engine(), [mine], mine.request_id, after=2), mine.request_id)
    assert np.array_equal(result.picture.array[:, 32:], pixels[:, 32:])
    assert result.interrupted_after == 3
