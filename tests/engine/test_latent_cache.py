"""Semantic cache: requests that allow it start from the latents of a similar prompt."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Event, GenerationRequest, ImageResult
from diffserve.engine.image.caches import SKIPS, CachedLatents, LatentCache, skip_of
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request, load_pipeline, pipeline_latents
from tests.engine.test_deep_cache import TOLERANCE, content, init_image, painted_by_seed

ROOM = 1 << 24
ALL = 1e-6
"""A threshold that every prompt passes."""


def make_request(prompt: str = "cat", sampler: str = "ddim", seed: int = 5, **fields: Any) -> GenerationRequest:
    return image_request("sd15", sampler, seed, **{"prompt": prompt, "similarity_threshold": ALL, **fields})


def cache_fields(result: ImageResult) -> tuple[float | None, int, int]:
    return result.similarity, result.skipped_steps, result.num_evaluations


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m"])
def test_a_picture_begins_from_kept_latents_as_image_to_image_of_diffusers_does(
    sampler: str, make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    engine = make_engine(latent_cache_bytes=ROOM)
    [first] = engine.generate(make_request(sampler="euler_a"))
    assert first.latents is not None
    again = make_request(sampler=sampler, seed=6)
    [result] = engine.generate(again)
    assert cache_fields(result) == (1.0, 5, 10)
    pipeline = load_pipeline("StableDiffusionImg2ImgPipeline", tiny_model("sd15"))
    image = torch.from_numpy(first.latents.array.copy())[None]
    reference = pipeline_latents(pipeline, again, "sd15", image=image, strength=0.5)
    assert result.latents is not None
    assert np.abs(result.latents.array - reference).max() < TOLERANCE


def test_who_does_not_ask_is_painted_from_noise_and_kept_for_nobody(make_engine: MakeEngine) -> None:
    plain = make_request(similarity_threshold=None)
    [expected] = make_engine().generate(plain)
    engine = make_engine(latent_cache_bytes=ROOM)
    [alone] = engine.generate(plain)
    assert len(engine.runners.latent_cache) == 0
    [asking] = engine.generate(make_request())
    assert len(engine.runners.latent_cache) == 1
    [later] = engine.generate(plain)
    assert {content(result) for result in (alone, asking, later)} == {content(expected)}
    assert {cache_fields(result) for result in (alone, asking, later)} == {(None, 0, 20)}


def test_latents_are_found_by_likeness_and_only_among_those_painted_alike(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(latent_cache_bytes=ROOM)
    engine.generate(make_request("cat"))
    other_ways = {"num_steps": 1}, {"guidance_scale": 30.0}, {"cache_interval": 2}
    for other in ({"width_px": 72, "height_px": 72}, {"negative_prompt": "rain"}, *other_ways):
        assert cache_fields(engine.generate(make_request("cat", **other))[0])[:2] == (None, 0)
    text = engine.model.text
    cosine = round(float(text.embedding("cat") @ text.embedding("dog on the cat")), 4)
    assert 0.0 < cosine < 1.0
    [similar] = engine.generate(make_request("dog on the cat"))
    assert cache_fields(similar)[:2] == (cosine, 10 * SKIPS[skip_of(cosine, ALL)])
    assert len(engine.runners.latent_cache) == 6, "what began from another's latents is kept for nobody"
    assert cache_fields(engine.generate(make_request("dog on the cat", similarity_threshold=1.0))[0])[:2] == (None, 0)


def test_bytes_depend_on_what_is_kept_and_not_on_the_company(make_engine: MakeEngine) -> None:
    company = [
        make_request("cat", seed=11),
        make_request("cat", "heun", seed=12, num_steps=4, guidance_scale=1.0),
        make_request("cat", "euler_a", seed=13, num_steps=6, cache_interval=2),
        make_request("dog", "dpmpp_2m", seed=14, similarity_threshold=None),
    ]
    alone = make_engine(latent_cache_bytes=ROOM)
    alone.generate(make_request("cat"))
    expected = {request.seed: content(alone.generate(request)[0]) for request in company}
    engine = make_engine(latent_cache_bytes=ROOM, max_rows=16)
    engine.generate(make_request("cat"))
    events: list[Event] = []
    for place in (3, 1, 0, 2):
        engine.submit(company[place])
        events += engine.tick()
    events += engine.events()
    assert painted_by_seed(events) == expected
    [repeated] = engine.generate(replace(company[0], request_id="again"))
    assert content(repeated) == expected[11]


def test_a_known_picture_still_says_what_it_began_from(make_engine: MakeEngine) -> None:
    engine = make_engine(latent_cache_bytes=ROOM, result_cache_bytes=ROOM)
    engine.generate(make_request())
    [first_result], [cached_result] = (engine.generate(make_request(seed=6)) for _ in range(2))
    assert cached_result.cached == "hit"
    assert cache_fields(cached_result) == (*cache_fields(first_result)[:2], 0) == (1.0, 5, 0)


def test_a_guidance_interval_is_of_the_whole_way(make_engine: MakeEngine) -> None:
    engine = make_engine(latent_cache_bytes=ROOM)
    engine.generate(make_request(guidance_interval=(0.3, 0.7)))
    [first_result] = engine.generate(make_request(guidance_interval=(0.3, 0.7), seed=6))
    assert cache_fields(first_result) == (1.0, 5, 5 + 2)


def test_a_request_that_cannot_use_cached_latents_is_refused_with_the_reason(make_engine: MakeEngine) -> None:
    for engine, request, why in (
        (
            make_engine(),
            make_request(similarity_threshold=0.9),
            "similarity_threshold is 0.9; this server has no latent cache",
        ),
        (make_engine(latent_cache_bytes=ROOM), make_request(init_image=init_image()), "only for text-to-image"),
    ):
        with pytest.raises(InvalidRequest, match=why) as refused:
            engine.generate(request)
        assert refused.value.param == "similarity_threshold"
    for value in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(InvalidRequest, match=r"similarity_threshold is .*; it must be above 0 and at most 1"):
            make_request(similarity_threshold=value)


def test_steps_left_out_grow_with_the_similarity() -> None:
    assert [skip_of(similarity, 0.9) for similarity in (0.9, 0.9199, 0.93, 0.95, 0.97, 0.99, 1.0)] == [
        0,
        0,
        1,
        2,
        3,
        4,
        4,
    ]
    assert skip_of(1.0, 1.0) == len(SKIPS) - 1


def test_the_cache_is_bounded_and_drops_what_served_nobody_the_longest() -> None:
    def make_entry(*embedding: float) -> CachedLatents:
        return CachedLatents(np.array(embedding, np.float32), np.full((4, 2, 2), embedding[0], np.float32))

    entry_bytes = make_entry(1.0, 0.0).num_bytes
    cache = LatentCache(2 * entry_bytes)
    cache.put_latents("kin", "cat", make_entry(1.0, 0.0))
    cache.put_latents("kin", "dog", make_entry(0.0, 1.0))
    cache.put_latents("kin", "cat", make_entry(0.5, 0.5))
    assert cache.nearest("other", make_entry(1.0, 0.0).embedding, ALL) is None
    entry = cache.nearest("kin", make_entry(1.0, 0.0).embedding, 0.5)
    assert entry is not None
    assert (entry.similarity, entry.latents[0, 0, 0]) == (1.0, 1.0)
    cache.put_latents("kin", "fox", make_entry(0.6, 0.8))
    assert (len(cache), cache.currsize) == (2, 2 * entry_bytes)
    stats = cache.stats
    assert (stats.num_hits, stats.num_misses, stats.num_evicted, stats.num_bytes) == (1, 1, 1, 2 * entry_bytes)
    nearest = cache.nearest("kin", make_entry(0.0, 1.0).embedding, 0.5)
    assert nearest is not None
    assert nearest.similarity == pytest.approx(0.8), "the fox; the dog has gone"
    tiny = LatentCache(entry_bytes - 1)
    tiny.put_latents("kin", "cat", make_entry(1.0, 0.0))
    assert (len(tiny), tiny.currsize) == (0, 0)


def test_long_texts_take_no_room_and_many_kept_pictures_are_searched_in_order() -> None:
    def make_entry(angle: float) -> CachedLatents:
        return CachedLatents(
            np.array([np.cos(angle), np.sin(angle)], np.float32), np.full((1, 1, 1), angle, np.float32)
        )

    cache = LatentCache(100 * make_entry(0.0).num_bytes)
    tracemalloc.start()
    for number in range(300):
        text = f"{number} {' ' * 30_000}"
        cache.put_latents((8, 8, text[-30_000:]), text, make_entry(number / 200))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 100 * 2_000, "the texts stay out"
    kin = (8, 8, " " * 30_000)
    for number in range(200, 300):  # the last hundred are there, each found among the others that were put before it
        entry = cache.nearest(kin, make_entry(number / 200).embedding, 0.5)
        assert entry is not None
        assert abs(entry.latents[0, 0, 0] - number / 200) < 0.02
    assert len(cache) == 100
    cache.put_latents(kin, "again", make_entry(299 / 200))
    entry = cache.nearest(kin, make_entry(299 / 200).embedding, 0.5)
    assert entry is not None
    assert cache.nearest(kin, -make_entry(1.2).embedding, ALL) is None, "nobody is like its opposite"
