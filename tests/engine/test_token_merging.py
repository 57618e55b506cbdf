"""Token merging as a request asks for it: calls of its own, bytes that no company changes, work that is less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffserve.engine import Engine
from diffserve.errors import InvalidRequest
from diffserve.runtime.dry_run import dry_run
from diffserve.runtime.unet.random_rows import random_inputs
from diffserve.types import Event, GenerationRequest
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import asked
from tests.engine.test_deep_cache import content, painted_by_seed
from tests.engine.test_dry_tick import _undigested, open_engine

__all__ = ["_undigested"]


def company() -> list[GenerationRequest]:
    """Requests that share nothing but their size."""
    return [
        asked("sd15", "ddim", 1, num_steps=6, token_merging=0.5),
        asked("sd15", "heun", 2, num_steps=3, token_merging=0.25, prompt="cat"),
        asked("sd15", "euler_a", 3, num_steps=5, token_merging=0.5, guidance_scale=1.0),
        asked("sd15", "dpmpp_2m", 4, num_steps=6, token_merging=0.5, cache_interval=2),
        asked("sd15", "ddim", 1, num_steps=6, client="plain"),
    ]


def test_bytes_depend_neither_on_the_company_nor_on_the_order_of_arrival(make_engine: MakeEngine) -> None:
    alone = make_engine(max_rows=16)
    expected = {one.seed: content(alone.generate(one)[0]) for one in company()[:4]}
    engine = make_engine(max_rows=16)
    events: list[Event] = []
    for place in (3, 1, 0, 2):
        engine.submit(company()[place])
        events += engine.tick()
    events += engine.events()
    assert painted_by_seed(events) == expected


def test_merging_is_told_changes_the_picture_and_leaves_no_trace(make_engine: MakeEngine) -> None:
    engine = make_engine()
    merged, *_, plain = company()
    [before], [other], [after] = (engine.generate(one) for one in (plain, merged, company()[-1]))
    assert content(before) == content(after) != content(other)
    assert (before.token_merging, other.token_merging) == (0.0, 0.5)
    for value in (-0.05, 0.51, 0.8, float("nan")):
        with pytest.raises(InvalidRequest, match=f"token_merging is {value}; give 0, which is off, to 0.75"):
            asked("sd15", "ddim", 1, token_merging=value)


def work_of_a_row(engine: Engine, merged_share: float) -> float:
    width_px, height_px = engine.info.good_sizes[0]
    model = engine.model
    inputs = random_inputs(model, (height_px, width_px, model.text.window_tokens), 1)
    with torch.inference_mode():
        told = engine.runners.conditioner.of_embeddings(inputs.pop("contexts").to(model.dtype))
    return dry_run(lambda: model.unet.predict(contexts=told, merged_share=merged_share, **inputs)).flops


@pytest.mark.slow
def test_fewer_tokens_are_a_tenth_less_work_at_the_size_of_stable_diffusion(tmp_path: Path) -> None:
    engine = open_engine("sd15-random", tmp_path)
    plain, half, most = (work_of_a_row(engine, share) for share in (0.0, 0.5, 0.75))
    assert half / plain < 0.92
    assert most / plain < 0.9
