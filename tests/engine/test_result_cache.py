"""The exact result cache: one painting for equal requests, and every request its own events."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from diffserve.api.engine_stats import CacheStats
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.tensor_values import Encodings
from diffserve.api.types import (
    Cancelled,
    DiffusionParams,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    ImageFinished,
    Picture,
    Preview,
    Progress,
    RewriteOptions,
)
from diffserve.engine.image.caches import IGNORED_FIELDS, CachedImage, ResultCache, key_of
from diffserve.models.controlnets import Control
from diffserve.models.loras import Lora
from diffserve.models.references import Reference
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request
from tests.engine.simulated_scheduler import INFO

ROOM = 1 << 24
PICTURE = Picture.from_array(np.zeros((8, 8, 3), dtype=np.uint8))
OTHER: dict[str, object] = {
    "prompt": "another", "negative_prompt": "rain", "width_px": 72, "height_px": 72, "num_images": 3, "best_of": 4,
    "seed": 9, "switch_at": 0.5,
    "diffusion": DiffusionParams(controlnets=(Control("edges"),), references=(Reference("plus"),)),
    "control_images": (replace(PICTURE, data=b"\x02" * 192),),
    "reference_images": (replace(PICTURE, data=b"\x03" * 192),),
    "init_image": replace(PICTURE, data=b"\x01" * 192),
    "mask_image": Picture.from_array(np.zeros((8, 8), dtype=np.uint8)), "preview_every": 2, "return_latents": True,
    "rewriting": RewriteOptions(), "deadline_s": 5.0, "refuses_late": False,
    "priority": "batch", "share": 2.0, "client": "b",
    "request_id": "another", "model": "another", "encodings": Encodings(base={}),
    "sampler": "heun", "num_steps": 7, "spacing": "trailing", "sigma_schedule": "karras", "eta": 0.5,
    "guidance_scale": 2.0, "guidance_interval": (0.1, 0.5), "cache_interval": 3, "strength": 0.5,
    "token_merging": 0.5, "sigma_min": 0.1, "sigma_max": 9.0, "similarity_threshold": 0.9, "noise_source": "device",
    "variation_seed": 4, "variation_strength": 0.5,
    "loras": (Lora("ink"),), "clip_skip": 2, "guidance_rescale": 0.5,
    "image_prompts": ("another",), "template": "{a|b}", "capture_every_s": 2.0, "resume_from": b"state",
    "micro_conditioning": MicroConditioning(crop=(1, 2)), "controlnets": (Control("edges", 0.5),),
    "references": (Reference("plus", 0.5),),
    "hires_px": (96, 96), "hires_scale": 1.5, "hires_size": "96x96", "hires_strength": 0.5, "hires_steps": 3,
    "hires_upscaler": "nearest", "hires_sampler": "heun", "hires_schedule": "karras", "hires_prompt": "a",
    "hires_negative_prompt": "a", "tile_size": 64, "tile_overlap": 8, "outpaint": "0,0,8,0",
}  # fmt: skip
"""Another value for every field of a request and of its ``DiffusionParams``."""


def plain() -> GenerationRequest:
    return GenerationRequest(
        prompt="a fox",
        seed=1,
        init_image=PICTURE,
        diffusion=DiffusionParams(
            sampler="ddim", num_steps=3, controlnets=(Control("edges"),), references=(Reference("plus"),)
        ),
        control_images=(PICTURE,),
        reference_images=(PICTURE,),
    )


def key(request: GenerationRequest) -> bytes:
    assert request.seed is not None
    return key_of(request, (request.seed, request.diffusion.variation_seed), INFO)


@pytest.mark.parametrize("name", GenerationRequest.__struct_fields__)
def test_every_field_of_a_request_changes_the_key_but_those_that_change_no_picture(name: str) -> None:
    changed = replace(plain(), **{name: OTHER[name]})
    assert (key(changed) == key(plain())) is (name in IGNORED_FIELDS)


@pytest.mark.parametrize("name", DiffusionParams.__struct_fields__)
def test_every_parameter_changes_the_key(name: str) -> None:
    changed = replace(plain(), diffusion=replace(plain().diffusion, **{name: OTHER[name]}))
    assert key(changed) != key(plain())


@pytest.mark.parametrize("name", ["digest", "device", "dtype"])
def test_another_model_or_precision_has_other_keys(name: str) -> None:
    assert key_of(plain(), (1, None), msgspec.structs.replace(INFO, **{name: "another"})) != key(plain())


def test_another_file_of_an_adapters_name_has_another_key() -> None:
    assert key_of(plain(), (1, None), INFO, b"another") != key(plain())


def make_request(**fields: object) -> GenerationRequest:
    return image_request("sd15", "euler_a", **{"seed": 5, "num_steps": 4, **fields})  # type: ignore[arg-type]


def results(events: list[Event]) -> dict[str, list[ImageFinished]]:
    by_id: dict[str, list[ImageFinished]] = {}
    for event in events:
        if isinstance(event, ImageFinished):
            by_id.setdefault(event.request_id, []).append(event)
    return by_id


def num_rows(engine: object) -> int:
    return sum(tick.num_rows for tick in engine.trace)  # type: ignore[attr-defined]


def test_without_the_option_everybody_is_painted_for(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, other = engine.generate([make_request(), make_request()])
    assert (first.cached, other.cached) == (None, None)
    assert num_rows(engine) == 2 * 8
    assert engine.stats().results == CacheStats()


def test_equal_requests_in_flight_share_a_painting_and_a_later_one_finds_it(make_engine: MakeEngine) -> None:
    engine = make_engine(result_cache_bytes=ROOM)
    first = engine.submit(make_request())
    events = [*engine.tick(), *engine.tick()]
    second = engine.submit(make_request(preview_every=2, client="b"))
    events += engine.events()
    third = engine.submit(make_request())
    events += engine.events()
    painted = {request_id: events_of_request[0].result for request_id, events_of_request in results(events).items()}
    assert [painted[name].cached for name in (first, second, third)] == [None, "shared", "hit"]
    assert [painted[name].num_evaluations for name in (first, second, third)] == [8, 0, 0]
    assert len({painted[name].picture.data for name in (first, second, third)}) == 1
    assert len({painted[name].latents for name in (first, second, third)}) == 1
    assert num_rows(engine) == 8
    kinds = {name: [type(event) for event in events if event.request_id == name] for name in (first, second)}
    assert Preview in kinds[second]
    assert Preview not in kinds[first]
    assert kinds[second].count(Progress) == kinds[first].count(Progress) - 1
    assert [name[-1] for name in kinds.values()] == [Finished, Finished]
    stats = engine.stats().results
    assert (stats.num_hits, stats.num_shared, stats.num_misses, stats.num_evicted) == (1, 1, 1, 0)
    assert stats.num_bytes > len(painted[first].picture.data)


def test_a_picture_of_several_is_found_by_its_own_seed(make_engine: MakeEngine) -> None:
    engine = make_engine(result_cache_bytes=ROOM)
    [alone] = engine.generate(make_request(seed=6))
    several = engine.generate(make_request(num_images=3))
    assert [result.cached for result in several] == [None, "hit", None]
    assert several[1].picture == alone.picture


def test_without_a_seed_nothing_is_found(make_engine: MakeEngine) -> None:
    engine = make_engine(result_cache_bytes=ROOM)
    drawn = [engine.generate(replace(make_request(), seed=None, request_id=f"r{place}"))[0] for place in range(2)]
    assert [result.cached for result in drawn] == [None, None]
    assert engine.generate(make_request(seed=drawn[0].seed))[0].cached is None


@pytest.mark.parametrize("num_ticks", [0, 1, 3])
@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_the_painting_goes_on_for_whoever_still_waits(make_engine: MakeEngine, num_ticks: int, leaver: int) -> None:
    [expected] = make_engine().generate(make_request())
    engine = make_engine(result_cache_bytes=ROOM)
    names = [engine.submit(make_request(client=client)) for client in ("a", "b", "c")]
    engine.submit(make_request(seed=77, client="d"))
    events: list[Event] = []
    for _ in range(num_ticks):
        events += engine.tick()
    assert engine.cancel(names[leaver])
    engine.check_integrity()
    events += engine.events()
    last = {event.request_id: type(event) for event in events}
    assert last[names[leaver]] is Cancelled
    stayed = [name for place, name in enumerate(names) if place != leaver]
    results_by_id = results(events)
    assert [last[name] for name in stayed] == [Finished, Finished]
    assert all(results_by_id[name][0].result.picture == expected.picture for name in stayed)
    assert names[leaver] not in results_by_id
    assert num_rows(engine) == 2 * 8


def test_a_painting_ends_when_all_have_gone(make_engine: MakeEngine) -> None:
    engine = make_engine(result_cache_bytes=ROOM)
    names = [engine.submit(make_request(num_steps=50)) for _ in range(3)]
    for _ in range(4):
        engine.tick()
    assert all(engine.cancel(name) for name in names)
    assert [type(event) for event in engine.events()] == [Cancelled] * 3
    assert num_rows(engine) < 12
    assert engine.generate(make_request(num_steps=50))[0].cached is None


def test_a_cancellation_while_a_tick_runs_moves_the_painting_on(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = make_engine().generate(make_request())
    engine = make_engine(result_cache_bytes=ROOM)
    first, second = engine.submit(make_request(client="a")), engine.submit(make_request(client="b"))
    events = [*engine.tick(), *engine.tick()]
    run = engine.runners.run
    monkeypatch.setattr(engine.runners, "run", lambda plan: (run(plan), engine.cancel(first))[0])
    events += engine.events()
    [painted] = results(events)[second]
    assert painted.result.picture == expected.picture
    assert painted.result.num_evaluations == 8


def test_what_goes_wrong_goes_wrong_for_all_who_share_and_is_not_kept(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(result_cache_bytes=ROOM)
    with monkeypatch.context() as broken:
        broken.setattr(engine.model.vae, "decode_later", lambda *_: 1 / 0)
        for _ in range(2):
            engine.submit(make_request())
        events = list(engine.events())
    assert sum(isinstance(event, Failed) for event in events) == 2
    assert engine.generate(make_request())[0].cached is None


def test_a_deadline_is_of_one_request_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(result_cache_bytes=ROOM)
    now_s = [0.0]
    engine.clock = lambda: now_s[0]
    hasty, patient = engine.submit(make_request(deadline_s=1.0)), engine.submit(make_request())
    events = [*engine.tick(), *engine.tick()]
    now_s[0] = 2.0
    events += engine.events()
    last = {event.request_id: type(event) for event in events}
    assert (last[hasty], last[patient]) == (Failed, Finished)


def test_the_cache_is_bounded_and_drops_what_nobody_asked_for_the_longest() -> None:
    cache, image = ResultCache(250), CachedImage(np.zeros((5, 7, 3), dtype=np.uint8), None)
    for name in (b"a", b"b"):
        cache.put(name, image)
    assert cache.get(b"a") is image
    cache.put(b"c", image)
    assert [cache.get(name) is image for name in (b"a", b"b", b"c")] == [True, False, True]
    assert (cache.currsize, cache.num_evicted) == (210, 1)
    cache.put(b"d", CachedImage(np.zeros((10, 10, 3), dtype=np.uint8), None))
    assert cache.get(b"d") is None
