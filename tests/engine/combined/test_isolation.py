"""What happens to one side does not end the other: ticks that raise, and pages that the other side holds."""

from __future__ import annotations

from typing import Any

import pytest

from diffserve.api.rewrite_types import RewriteFinished, RewriteRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextFinished, TextRequest
from diffserve.api.types import DiffusionParams, Failed, Finished, GenerationRequest, ImageFinished, RewriteOptions
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.engine.rewrite_queue import FAILED
from diffserve.runtime import DiffusionModel
from diffserve.runtime.language import LanguageModel
from tests.engine.combined.conftest import MakeStudio


def picture(**fields: Any) -> GenerationRequest:
    params = DiffusionParams(num_steps=3, sampler="ddim")
    return GenerationRequest(prompt="a red fox", seed=1, width_px=64, height_px=64, diffusion=params, **fields)


def text(max_tokens: int = 30, prompt: str = "x", **fields: Any) -> TextRequest:
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=max_tokens, min_tokens=max_tokens)
    return TextRequest(prompt=prompt, params=params, deltas=False, **fields)


def kinds(events: list[Any]) -> dict[str, str]:
    """How each request ended."""
    last = (Finished, TextFinished, RewriteFinished, Failed)
    return {event.request_id: type(event).__name__ for event in events if isinstance(event, last)}


def break_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Make the next call of ``owner.name`` raise."""
    original = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        raise ArithmeticError("a mistake of ours")

    monkeypatch.setattr(owner, name, broken)


def start(make_studio: MakeStudio) -> CombinedEngine:
    studio = make_studio()
    studio.submit(picture(request_id="picture"))
    studio.submit(text(request_id="text"))
    studio.submit(RewriteRequest(wish="something cosy", request_id="rewrite"))
    studio.submit(picture(request_id="wish", rewriting=RewriteOptions()))
    return studio


@pytest.mark.parametrize("place", ["plan", "apply"])
def test_a_tick_of_the_texts_that_raises_costs_the_texts_only(
    place: str, make_studio: MakeStudio, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio = start(make_studio)
    assert studio.texts is not None
    events = [event for _ in range(3) for event in studio.tick()]
    break_once(monkeypatch, studio.texts.scheduler, place)
    events += list(studio.events())
    assert kinds(events) == {"picture": "Finished", "wish": "Finished", "text": "Failed", "rewrite": "Failed"}
    (painted,) = [event for event in events if isinstance(event, ImageFinished) and event.request_id == "wish"]
    assert painted.result.warnings == (FAILED,)
    failed = [event for event in events if isinstance(event, Failed)]
    assert {event.code for event in failed} == {"internal_error"}
    assert len(failed) == 2
    studio.submit(RewriteRequest(wish="something cosy", request_id="again"))
    assert kinds(list(studio.events())) == {"again": "RewriteFinished"}


@pytest.mark.parametrize("place", ["plan", "apply"])
def test_a_tick_of_the_images_that_raises_costs_the_images_only(
    place: str, make_studio: MakeStudio, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio = start(make_studio)
    break_once(monkeypatch, studio.engine.scheduler, place)
    events = list(studio.events())
    ended = kinds(events)
    assert ended.pop("wish") in ("Finished", "Failed")  # it may not have been with the engine yet
    assert ended == {"picture": "Failed", "text": "TextFinished", "rewrite": "RewriteFinished"}
    studio.submit(picture(request_id="again"))
    assert kinds(list(studio.events())) == {"again": "Finished"}


def test_a_network_that_fails_costs_its_own_requests_only(
    make_studio: MakeStudio, painter: DiffusionModel, talker: LanguageModel
) -> None:
    for network, lost_ids in ((painter.unet.network, {"picture", "wish"}), (talker.network, {"text", "rewrite"})):
        studio = start(make_studio)
        hook = network.register_forward_pre_hook(_fail)
        try:
            ended = kinds(list(studio.events()))
        finally:
            hook.remove()
        assert {name for name, kind in ended.items() if kind == "Failed"} == lost_ids


def tight_bytes(studio: CombinedEngine, *, spare_pages: int) -> int:
    """Return the size of a pool that holds one guided image and ``spare_pages`` more."""
    pool, text = studio.pool, studio.engine.model.text
    assert pool is not None
    unet, encoder = sorted(pool.stats().tenants, reverse=True)[:2]
    pages = 2 * pool.num_pages_for(unet, text.window_tokens) + pool.num_pages_for(encoder, text.window_tokens)
    return pool.page_bytes * (pages + spare_pages)


def test_an_image_that_waits_for_pages_is_let_in_before_texts_that_came_later(make_studio: MakeStudio) -> None:
    studio = make_studio(pool_bytes=tight_bytes(make_studio(), spare_pages=3))
    studio.submit(text(100, prompt="a" * 60, request_id="first"))
    studio.tick()
    studio.submit(picture(request_id="picture"))
    for index in range(6):
        studio.submit(text(60, prompt=str(index) * 60, request_id=f"later-{index}"))
    order = [event.request_id for event in studio.events() if isinstance(event, Finished | TextFinished)]
    assert set(order[:2]) == {"first", "picture"}
    assert len(order) == 8


def _fail(*_: Any) -> None:
    raise ArithmeticError("no")
