"""The semantic cache: pictures that begin from the latents of a similar prompt, for those who ask for it."""

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
from diffserve.engine.image.latent_cache import SKIPS, CachedLatents, LatentCache, skip_of
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import asked, load_pipeline, pipeline_latents
from tests.engine.test_deep_cache import TOLERANCE, content, init_image, painted_by_seed

ROOM = 1 << 24
ALL = 1e-6
"""A threshold that every prompt passes."""


def wanted(prompt: str = "cat", sampler: str = "ddim", seed: int = 5, **fields: Any) -> GenerationRequest:
    return asked("sd15", sampler, seed, **{"prompt": prompt, "similarity_threshold": ALL, **fields})


def told(result: ImageResult) -> tuple[float | None, int, int]:
    return result.similarity, result.skipped_steps, result.num_evaluations


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m"])
def test_a_picture_begins_from_kept_latents_as_image_to_image_of_diffusers_does(
    sampler: str, make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    engine = make_engine(latent_cache_bytes=ROOM)
    [first] = engine.generate(wanted(sampler="euler_a"))
    assert first.latents is not None
    again = wanted(sampler=sampler, seed=6)
    [ours] = engine.generate(again)
    assert told(ours) == (1.0, 5, 10)
    pipeline = load_pipeline("StableDiffusionImg2ImgPipeline", tiny_model("sd15"))
    image = torch.from_numpy(first.latents.array.copy())[None]
    theirs = pipeline_latents(pipeline, again, "sd15", image=image, strength=0.5)
    assert ours.latents is not None
    assert np.abs(ours.latents.array - theirs).max() < TOLERANCE


def test_who_does_not_ask_is_painted_from_noise_and_kept_for_nobody(make_engine: MakeEngine) -> None:
    plain = wanted(similarity_threshold=None)
    [expected] = make_engine().generate(plain)
    engine = make_engine(latent_cache_bytes=ROOM)
    [alone] = engine.generate(plain)
    assert len(engine.runners.kept) == 0
    [asking] = engine.generate(wanted())
    assert len(engine.runners.kept) == 1
    [later] = engine.generate(plain)
    assert {content(one) for one in (alone, asking, later)} == {content(expected)}
    assert {told(one) for one in (alone, asking, later)} == {(None, 0, 20)}


def test_latents_are_found_by_likeness_and_only_among_those_painted_alike(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(latent_cache_bytes=ROOM)
    engine.generate(wanted("cat"))
    other_ways = {"num_steps": 1}, {"guidance_scale": 30.0}, {"cache_interval": 2}
    for other in ({"width_px": 72, "height_px": 72}, {"negative_prompt": "rain"}, *other_ways):
        assert told(engine.generate(wanted("cat", **other))[0])[:2] == (None, 0)
    text = engine.model.text
    cosine = round(float(text.embedding("cat") @ text.embedding("dog on the cat")), 4)
    assert 0.0 < cosine < 1.0
    [similar] = engine.generate(wanted("dog on the cat"))
    assert told(similar)[:2] == (cosine, 10 * SKIPS[skip_of(cosine, ALL)])
    assert len(engine.runners.kept) == 6, "what began from another's latents is kept for nobody"
    assert told(engine.generate(wanted("dog on the cat", similarity_threshold=1.0))[0])[:2] == (None, 0)


def test_bytes_depend_on_what_is_kept_and_not_on_the_company(make_engine: MakeEngine) -> None:
    company = [
        wanted("cat", seed=11),
        wanted("cat", "heun", seed=12, num_steps=4, guidance_scale=1.0),
        wanted("cat", "euler_a", seed=13, num_steps=6, cache_interval=2),
        wanted("dog", "dpmpp_2m", seed=14, similarity_threshold=None),
    ]
    alone = make_engine(latent_cache_bytes=ROOM)
    alone.generate(wanted("cat"))
    expected = {one.seed: content(alone.generate(one)[0]) for one in company}
    engine = make_engine(latent_cache_bytes=ROOM, max_rows=16)
    engine.generate(wanted("cat"))
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
    engine.generate(wanted())
    [begun], [known] = (engine.generate(wanted(seed=6)) for _ in range(2))
    assert known.cached == "hit"
    assert told(known) == (*told(begun)[:2], 0) == (1.0, 5, 0)


def test_a_guidance_interval_is_of_the_whole_way(make_engine: MakeEngine) -> None:
    engine = make_engine(latent_cache_bytes=ROOM)
    engine.generate(wanted(guidance_interval=(0.3, 0.7)))
    [begun] = engine.generate(wanted(guidance_interval=(0.3, 0.7), seed=6))
    assert told(begun) == (1.0, 5, 5 + 2)


def test_who_cannot_begin_from_others_is_told_so(make_engine: MakeEngine) -> None:
    for engine, request, why in (
        (make_engine(), wanted(similarity_threshold=0.9), "similarity_threshold is 0.9; no latents are kept here"),
        (make_engine(latent_cache_bytes=ROOM), wanted(init_image=init_image()), "for pictures from text alone"),
    ):
        with pytest.raises(InvalidRequest, match=why) as refused:
            engine.generate(request)
        assert refused.value.param == "similarity_threshold"
    for value in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(InvalidRequest, match=r"similarity_threshold is .*; it must be above 0 and at most 1"):
            wanted(similarity_threshold=value)


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
    def kept(*embedding: float) -> CachedLatents:
        return CachedLatents(np.array(embedding, np.float32), np.full((4, 2, 2), embedding[0], np.float32))

    one = kept(1.0, 0.0).num_bytes
    cache = LatentCache(2 * one)
    cache.put("kin", "cat", kept(1.0, 0.0))
    cache.put("kin", "dog", kept(0.0, 1.0))
    cache.put("kin", "cat", kept(0.5, 0.5))
    assert cache.nearest("other", kept(1.0, 0.0).embedding, ALL) is None
    found = cache.nearest("kin", kept(1.0, 0.0).embedding, 0.5)
    assert found is not None
    assert (found.similarity, found.latents[0, 0, 0]) == (1.0, 1.0)
    cache.put("kin", "fox", kept(0.6, 0.8))
    assert (len(cache), cache.num_bytes) == (2, 2 * one)
    stats = cache.stats
    assert (stats.num_hits, stats.num_misses, stats.num_evicted, stats.num_bytes) == (1, 1, 1, 2 * one)
    nearest = cache.nearest("kin", kept(0.0, 1.0).embedding, 0.5)
    assert nearest is not None
    assert nearest.similarity == pytest.approx(0.8), "the fox; the dog has gone"
    tiny = LatentCache(one - 1)
    tiny.put("kin", "cat", kept(1.0, 0.0))
    assert (len(tiny), tiny.num_bytes) == (0, 0)


def test_long_texts_take_no_room_and_many_kept_pictures_are_searched_in_order() -> None:
    def kept(angle: float) -> CachedLatents:
        return CachedLatents(
            np.array([np.cos(angle), np.sin(angle)], np.float32), np.full((1, 1, 1), angle, np.float32)
        )

    cache = LatentCache(100 * kept(0.0).num_bytes)
    tracemalloc.start()
    for number in range(300):
        text = f"{number} {' ' * 30_000}"
        cache.put((8, 8, text[-30_000:]), text, kept(number / 200))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 100 * 2_000, "the texts stay out"
    kin = (8, 8, " " * 30_000)
    for number in range(200, 300):  # the last hundred are there, each found among the others that were put before it
        found = cache.nearest(kin, kept(number / 200).embedding, 0.5)
        assert found is not None
        assert abs(found.latents[0, 0, 0] - number / 200) < 0.02
    assert len(cache) == 100
    cache.put(kin, "again", kept(299 / 200))
    found = cache.nearest(kin, kept(299 / 200).embedding, 0.5)
    assert found is not None
    assert cache.nearest(kin, -kept(1.2).embedding, ALL) is None, "nobody is like its opposite"
