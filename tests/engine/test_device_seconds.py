"""Device seconds: every tick is shared out among those whose work it was, and no second is lost or charged twice."""

from __future__ import annotations

from typing import Any

import pytest

from diffserve.api.types import DiffusionParams, GenerationRequest, ImageFinished, ImageResult
from diffserve.engine.records import shares
from tests.engine.conftest import MakeEngine


def make_request(seed: int, num_steps: int, guidance_scale: float = 1.0, **fields: Any) -> GenerationRequest:
    params = DiffusionParams(num_steps=num_steps, guidance_scale=guidance_scale)
    return GenerationRequest(prompt="a fox", seed=seed, diffusion=params, **fields)


def test_shares_add_up() -> None:
    assert shares(6.0, {"a": 1.0, "b": 2.0}) == {"a": 2.0, "b": 4.0}
    assert shares(6.0, {"a": 0.0, "b": 0.0}) == {"a": 3.0, "b": 3.0}
    assert shares(6.0, {}) == {}


def test_what_is_charged_adds_up_to_the_time_in_which_the_engine_was_busy(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=6)
    engine.warm_up()  # a GPU takes seconds for its first decode
    results = engine.generate(
        [make_request(1, 6, 5.0), make_request(2, 6), make_request(3, 2, num_images=2), make_request(4, 3, 5.0)]
    )
    busy_s = engine.stats().busy_s
    total_s = sum(result.device_s for result in results)
    assert total_s == pytest.approx(busy_s - engine._owed_s, rel=1e-9)
    assert engine._owed_s == pytest.approx(0.0, abs=busy_s / 10)  # the events of the last tick
    guided, plain, *pair, _ = results
    assert guided.device_s > plain.device_s > max(result.device_s for result in pair) > 0.0
    separate_results = engine.generate(make_request(2, 6))
    assert separate_results[0].cached is None or separate_results[0].device_s == 0.0


def test_who_came_to_nothing_is_charged_too_and_best_of_tells_of_those_it_did_not_keep(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first_id = engine.submit(make_request(1, 50))
    second_id = engine.submit(make_request(2, 4))
    results: list[ImageResult] = []
    while not results:
        results += [event.result for event in engine.tick() if isinstance(event, ImageFinished)]
    task = engine.scheduler.live[first_id].tasks[0]
    charged_s = task.clock.device_s + results[0].device_s
    assert results[0].request_id == second_id
    assert charged_s == pytest.approx(engine.stats().busy_s - engine._owed_s, rel=1e-9)
    assert task.clock.device_s > 0.0
    engine.cancel(first_id)
    assert list(engine.events())
