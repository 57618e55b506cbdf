"""One page budget: requests are admitted if they fit and wait otherwise, and every exit returns the pages."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffserve.api.errors import ConfigError, DeadlineUnreachable, InvalidRequest
from diffserve.api.types import TERMINAL, Failed, GenerationRequest, ImageFailed, ImageFinished, ImageResult
from diffserve.engine import Engine
from diffserve.engine.image import policy
from diffserve.runtime.kv import KVSpec, LayerSpec, PagePlan, PagePool
from diffserve.runtime.text.conditioning import image_specs, wanted_bytes
from tests.device import DEVICE, tolerance
from tests.engine.conftest import STRANGER, MakeEngine
from tests.engine.pipelines import image_request

SIXTEEN = "cat " * 15


def pool_bytes(model: Any, num_windows: int) -> int:
    """Return the size of a pool for this many different windows, with one of them being encoded."""
    specs = image_specs(model, is_exact=True)
    return wanted_bytes([specs], (), model.text.window_tokens, num_windows=num_windows)


def held_pages(engine: Engine) -> int:
    assert engine.page_stats is not None
    return engine.page_stats.held_pages


def quick(seed: int = 1, kind: str = "sd15", **fields: Any) -> GenerationRequest:
    return image_request(kind, "ddim", seed=seed, **{"num_steps": 2, **fields})


def content(results: list[ImageResult]) -> list[tuple[bytes, bytes]]:
    return [(result.latents.data, result.picture.data) for result in results if result.latents is not None]


@pytest.mark.parametrize("kind", ["sd15", "sd2", "sdxl", "inpaint9"])
def test_paged_and_plain_paint_the_same_latents(make_engine: MakeEngine, kind: str) -> None:
    def requests() -> list[GenerationRequest]:
        texts = [("the red fox", "cat"), ("a (dog:1.3) BREAK a cat", ""), ("cat", "")]
        return [quick(seed, kind, prompt=prompt, negative_prompt=no) for seed, (prompt, no) in enumerate(texts)]

    paged = make_engine(kind).generate(requests())
    plain_engine = make_engine(kind, cross_attention="plain")
    plain = plain_engine.generate(requests())
    assert plain_engine.page_stats is None
    for result, other in zip(paged, plain, strict=True):
        assert result.latents is not None
        assert other.latents is not None
        assert abs(result.latents.array - other.latents.array).max() < tolerance(1e-4)


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_an_images_bytes_do_not_depend_on_what_was_painted_before(make_engine: MakeEngine, kind: str) -> None:
    def image() -> GenerationRequest:
        return quick(7, kind, prompt=SIXTEEN + "the red fox", negative_prompt=SIXTEEN + "dog")

    alone = content(make_engine(kind).generate(image()))
    engine = make_engine(kind)
    engine.generate([quick(1, kind, prompt=SIXTEEN + "cat"), quick(2, kind, prompt=SIXTEEN + "the (red:1.2) fox")])
    neighbours = [quick(seed, kind, prompt=SIXTEEN + "the dog") for seed in range(3)]
    assert content(engine.generate([*neighbours, image()]))[3:] == alone
    assert engine.page_stats is not None
    found_tokens = {name: stats.found_tokens for name, stats in engine.page_stats.tenants.items()}
    assert min(found_tokens.values()) >= 16


def test_an_images_bytes_are_the_same_after_its_pages_were_evicted(make_engine: MakeEngine) -> None:
    alone = content(make_engine().generate(quick()))
    engine = make_engine(kv_pool_bytes=pool_bytes(make_engine().model, 2))
    for number in range(4):
        engine.generate(quick(prompt=f"{number} cats", negative_prompt=f"{number} dogs"))
        assert content(engine.generate(quick())) == alone
    assert engine.page_stats is not None
    assert sum(stats.evicted_pages for stats in engine.page_stats.tenants.values()) > 0


def test_the_negative_prompt_of_thirty_two_requests_is_stored_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_lanes=32, max_prepares_per_tick=32)
    requests = [quick(seed, prompt=f"{seed} cat", negative_prompt="red, the dog") for seed in range(32)]
    for request in requests:
        engine.submit(request)
    engine.tick()
    spec = image_specs(engine.model, is_exact=True).unet
    assert held_pages(engine) == 33 * PagePlan(spec, _page_bytes(engine)).num_pages(77)
    for request in requests:
        engine.cancel(request.request_id)
    engine.tick()
    assert held_pages(engine) == 0


def _page_bytes(engine: Engine) -> int:
    assert engine.page_stats is not None
    return engine.page_stats.page_bytes


def test_images_without_guidance_hold_no_pages_of_a_negative_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine()
    held_counts = []
    for scale in (1.0, 5.0):
        engine.submit(quick(prompt="cat", negative_prompt="dog", guidance_scale=scale))
        engine.tick()
        held_counts.append(held_pages(engine))
        list(engine.events())
    assert held_counts[1] == 2 * held_counts[0]


def test_who_does_not_fit_waits_until_somebody_leaves(make_engine: MakeEngine) -> None:
    alone = [content(make_engine().generate(quick(seed, prompt=f"{seed} cats")))[0] for seed in range(4)]
    engine = make_engine(max_rows=16, kv_pool_bytes=pool_bytes(make_engine().model, 3))
    results = engine.generate([quick(seed, prompt=f"{seed} cats") for seed in range(4)])
    assert content(results) == alone
    together = [len(set(tick.request_ids)) for tick in engine.trace]
    assert max(together) == 2  # two prompts and the negative prompt of both


def test_nobody_overtakes_the_one_who_waits_for_pages(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "AGEING_ROWS_PER_TICK", 1e6)
    engine = make_engine(kv_pool_bytes=pool_bytes(make_engine().model, 4))
    first = quick(1, num_steps=6, prompt="a cat", negative_prompt="a dog")
    wide = quick(2, prompt="a fox BREAK the cat BREAK the dog", guidance_scale=1.0)
    narrow = quick(3, prompt="a cat", negative_prompt="a dog")
    for request in (first, wide):
        engine.submit(request)
        engine.tick()
    engine.submit(narrow)
    painted = [event.request_id for event in engine.events() if isinstance(event, ImageFinished)]
    assert painted == [first.request_id, wide.request_id, narrow.request_id]


def test_texts_of_different_lengths_share_calls_only_where_no_bytes_are_promised(make_engine: MakeEngine) -> None:
    def requests() -> list[GenerationRequest]:
        return [quick(1, prompt="a cat BREAK a dog"), quick(2, prompt="the red fox")]

    exact, free = make_engine(max_rows=16), make_engine(max_rows=16, deterministic=False)
    expected, actual = exact.generate(requests()), free.generate(requests())
    assert max(len(set(tick.request_ids)) for tick in exact.trace) == 1
    assert max(len(set(call.rows)) for tick in free.trace for call in tick.calls) == 4
    for result, other in zip(actual, expected, strict=True):
        assert result.latents is not None
        assert other.latents is not None
        assert abs(result.latents.array - other.latents.array).max() < free.tolerance


def test_a_prompt_that_can_never_fit_is_refused_and_the_engine_lives_on(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_pool_bytes=pool_bytes(make_engine().model, 3))
    endless = quick(prompt=" BREAK ".join(f"{number} cats" for number in range(9)))
    with pytest.raises(InvalidRequest, match=r"take \d+ pages and the whole pool has 60: shorten them") as refused:
        engine.generate(endless)
    assert (refused.value.code, refused.value.param) == ("pool_too_small", "prompt")
    assert len(engine.generate(quick())) == 1


def test_a_pool_too_small_for_one_image_is_a_mistake_in_the_configuration(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"set engine\.kv_pool_bytes to that or more") as refused:
        make_engine(kv_pool_bytes=pool_bytes(make_engine().model, 1))
    assert refused.value.param == "kv_pool_bytes"
    with pytest.raises(ConfigError, match="one page takes"):
        make_engine(kv_pool_bytes=100)
    with pytest.raises(ConfigError, match="kv_pool_bytes is 0"):
        make_engine(kv_pool_bytes=0)


def test_what_was_gathered_for_images_goes_with_them(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_rows=8)
    stacks = engine.runners.caller._stacks
    for seed, num_steps in enumerate((2, 4, 6)):
        engine.submit(quick(seed, num_steps=num_steps))
    counts = []
    for _ in engine.events():
        counts.append(len(stacks))
        assert {row.task.state is None for rows in stacks for row in rows} <= {False}
    assert max(counts) > 0
    assert counts[-1] == 0

    monkeypatch.setattr("diffserve.engine.image.unet_calls.STACK_BYTES_KEPT", 1)
    for seed in range(3):
        engine.submit(quick(seed, num_steps=3, width_px=64 + 32 * (seed % 2)))
    for _ in engine.events():
        assert len(stacks) <= 1


def fail(engine: Engine, request: GenerationRequest) -> None:
    def choke(*_: object) -> None:
        raise RuntimeError("the device choked")

    handle = engine.model.unet.network.register_forward_pre_hook(choke)
    events = list(engine.events())
    handle.remove()
    assert any(isinstance(event, ImageFailed) for event in events)


def cancel(engine: Engine, request: GenerationRequest) -> None:
    engine.cancel(request.request_id)
    engine.tick()


def finish(engine: Engine, request: GenerationRequest) -> None:
    assert sum(isinstance(event, ImageFinished) for event in engine.events()) == 2


@pytest.mark.parametrize("way_out", [finish, fail, cancel])
def test_every_way_out_gives_the_pages_back(
    make_engine: MakeEngine, way_out: Callable[[Engine, GenerationRequest], None]
) -> None:
    engine = make_engine()
    request = quick(num_images=2)
    engine.submit(request)
    engine.tick()
    assert held_pages(engine) > 0
    way_out(engine, request)
    assert held_pages(engine) == 0
    engine.check_integrity()


def test_a_deadline_gives_the_pages_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm_up()
    engine.submit(quick(num_steps=1000, deadline_s=0.3))
    engine.tick()
    assert held_pages(engine) > 0
    assert [event.code for event in engine.events() if isinstance(event, Failed)] == ["deadline_exceeded"]
    assert held_pages(engine) == 0


def test_a_newcomer_that_fails_after_its_pages_were_made_gives_them_back(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    with monkeypatch.context() as broken:
        broken.setattr("diffserve.engine.image.preparer.Preparer._draw", None)
        engine.submit(quick())
        assert any(isinstance(event, Failed) for event in engine.events())
    assert held_pages(engine) == 0
    engine.check_integrity()


def test_a_pool_made_outside_is_shared_with_strangers(make_engine: MakeEngine) -> None:
    model = make_engine().model
    stranger = KVSpec(STRANGER, (LayerSpec(2, 8),), torch.float32)
    specs = [*image_specs(model, is_exact=True), stranger]
    pool = PagePool.for_specs(pool_bytes(model, 4), specs, device=model.device)
    engine = make_engine(pool=pool)
    table, _ = pool.open(STRANGER, reserve=16 * (pool.num_available - 5))
    engine.submit(quick())
    for _ in range(3):
        assert not any(isinstance(event, ImageFinished | Failed) for event in engine.tick())
    assert engine.scheduler.slots.num_free == engine.config.max_lanes
    pool.close(table)
    assert sum(isinstance(event, ImageFinished) for event in engine.events()) == 1
    assert engine.page_stats is not None
    assert len(engine.page_stats.tenants) == 3


def test_a_pool_on_another_device_is_refused(make_engine: MakeEngine) -> None:
    specs = list(image_specs(make_engine().model, is_exact=True))
    pool = PagePool.for_specs(pool_bytes(make_engine().model, 2), specs, device="meta")
    with pytest.raises(ConfigError, match=f"the page pool is on meta, the model on {DEVICE}"):
        make_engine(pool=pool)


def test_pages_of_other_weights_or_precision_or_mode_are_never_found(make_engine: MakeEngine) -> None:
    model = make_engine().model
    exact, free = (image_specs(model, is_exact=is_exact) for is_exact in (True, False))
    assert len({spec.digest for specs in (exact, free) for spec in specs}) == 4
    assert not {spec.tenant for spec in exact} & {spec.tenant for spec in free}
    other = make_engine("inpaint9").model
    assert image_specs(other, is_exact=True).unet.model_digest != exact.unet.model_digest


@pytest.mark.parametrize("seed", range(2))
def test_a_random_walk_over_few_pages_leaks_nothing(seed: int, make_engine: MakeEngine) -> None:
    walk = random.Random(seed)
    engine = make_engine(kv_pool_bytes=pool_bytes(make_engine().model, 5), max_lanes=4, max_rows=5)
    texts = ["cat", "a dog", "(a fox:1.2)", "a cat BREAK a dog", SIXTEEN + "fox", SIXTEEN + "dog", "the red fox"]
    ends: dict[str, int] = {}
    for _ in range(60):
        action = walk.random()
        if action < 0.3:
            request = quick(
                walk.randrange(99),
                prompt=walk.choice(texts),
                negative_prompt=walk.choice(["", *texts]),
                num_steps=walk.randint(1, 4),
                guidance_scale=walk.choice([1.0, 4.0]),
                num_images=walk.randint(1, 2),
                deadline_s=walk.choice([None, None, 0.02]),
            )
            with contextlib.suppress(DeadlineUnreachable):  # too many are before it
                ends[engine.submit(request)] = 0
        elif action < 0.4 and ends:
            engine.cancel(walk.choice(list(ends)))
        else:
            for event in engine.tick():
                ends[event.request_id] += isinstance(event, TERMINAL)
        engine.check_integrity()
    for event in engine.events():
        ends[event.request_id] += isinstance(event, TERMINAL)
    assert set(ends.values()) == {1}
