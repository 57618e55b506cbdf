"""Images, texts and rewritten prompts from one loop and one pool, each with the same result as alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.rewrite_types import RewriteFinished, RewriteRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import ChatMessage, TextAccepted, TextDelta, TextFinished, TextRequest
from diffserve.api.types import Accepted, Cancelled, DiffusionParams, Finished, GenerationRequest, ImageFinished
from diffserve.engine.combined_engine import CombinedEngine
from tests.engine.combined.conftest import SAYS, MakeStudio

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
HELLO = (ChatMessage(role="user", content="hello"),)


def picture(prompt: str = "a red fox", *, num_steps: int = 2, seed: int = 1, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt,
        seed=seed,
        width_px=64,
        height_px=64,
        diffusion=DiffusionParams(num_steps=num_steps, sampler="ddim"),
        **fields,
    )


def text(**fields: Any) -> TextRequest:
    return TextRequest(messages=HELLO, params=GREEDY, **fields)


def of(events: Sequence[Any], kind: type[T], request_id: str | None = None) -> list[T]:
    return [event for event in events if isinstance(event, kind) and request_id in (None, event.request_id)]  # type: ignore[attr-defined]


def painted(studio: CombinedEngine, request: GenerationRequest) -> ImageFinished:
    studio.submit(request)
    (event,) = of(list(studio.events()), ImageFinished, request.request_id)
    return event


def test_everything_at_once_gives_what_each_gives_alone(make_studio: MakeStudio) -> None:
    studio = make_studio()
    alone = painted(studio, picture(num_steps=6)).result.picture
    requests = picture(num_steps=6), text(), RewriteRequest(wish="something cosy")
    studio.submit(requests[0])
    studio.submit(requests[1])
    studio.submit(requests[2])
    assert studio.num_live == 3
    events = list(studio.events())
    assert of(events, ImageFinished)[0].result.picture == alone
    assert of(events, TextFinished)[0].text == SAYS
    assert of(events, RewriteFinished)[0].rewrites[0].prompt == SAYS
    names = {event.request_id for event in events}
    assert names == {request.request_id for request in requests}, "what the rewriter asks is nobody else's news"


def test_every_event_of_a_request_comes_once_and_in_order(make_studio: MakeStudio) -> None:
    studio = make_studio()
    request = text()
    studio.submit(request)
    events = list(studio.events())
    assert [type(event) for event in events] == [TextAccepted, *[TextDelta] * (len(SAYS) + 1), TextFinished]
    assert "".join(event.text for event in of(events, TextDelta)) == SAYS


def test_all_tenants_have_their_pages_in_one_pool(make_studio: MakeStudio) -> None:
    studio = make_studio()
    studio.submit(picture())
    studio.submit(text())
    list(studio.events())
    assert studio.pool is studio.engine.pool
    assert studio.pool is not None
    tenants = studio.pool.stats().tenants
    assert {name.partition(":")[0] for name in tenants} == {"unet", "text1", "llm"}
    assert all(tenant.opened for tenant in tenants.values())


def test_salts_keep_texts_apart_in_the_pool(make_studio: MakeStudio) -> None:
    studio = make_studio()
    long = "x" * 40
    results = []
    for salt in (b"", b"one key", b"one key", b"another key"):
        studio.submit(TextRequest(prompt=long, params=GREEDY, cache_salt=salt))
        results.append(of(list(studio.events()), TextFinished)[0].usage.cached_tokens)
    assert results == [0, 0, 32, 0]


def test_cancelled_requests_of_every_kind_are_reported_and_leave_nothing(make_studio: MakeStudio) -> None:
    studio = make_studio()
    requests = picture(num_steps=50), text(), RewriteRequest(wish="something cosy")
    studio.submit(requests[0])
    studio.submit(requests[1])
    studio.submit(requests[2])
    for _ in range(3):
        studio.tick()
    assert [studio.cancel(request.request_id) for request in requests] == [True] * 3
    events = list(studio.events())
    assert {event.request_id for event in of(events, Cancelled)} == {request.request_id for request in requests}
    assert not of(events, Finished)
    assert not any(studio.cancel(request.request_id) for request in requests)
    assert not studio.cancel("img-nobody")


def test_a_request_id_in_use_is_refused_whoever_uses_it(make_studio: MakeStudio) -> None:
    studio = make_studio()
    studio.submit(picture(request_id="mine"))
    with pytest.raises(InvalidRequest, match="'mine' is already in use"):
        studio.submit(text(request_id="mine"))
    with pytest.raises(InvalidRequest, match="'mine' is already in use"):
        studio.submit(RewriteRequest(wish="x", request_id="mine"))
    events = list(studio.events())
    assert len(of(events, Finished, "mine")) == 1
    studio.submit(text(request_id="mine"))
    assert len(of(list(studio.events()), TextFinished, "mine")) == 1


def test_a_refused_request_is_not_live(make_studio: MakeStudio) -> None:
    studio = make_studio()
    with pytest.raises(InvalidRequest, match="multiple of"):
        studio.submit(GenerationRequest(prompt="a fox", width_px=63, height_px=64))
    with pytest.raises(InvalidRequest, match="context"):
        studio.submit(TextRequest(token_ids=(1,) * 5000))
    assert studio.num_live == 0
    assert not studio.has_work


def test_texts_without_a_language_model_are_refused_with_the_way_out(make_studio: MakeStudio) -> None:
    studio = make_studio(has_texts=False)
    with pytest.raises(InvalidRequest, match=r"\[text\] model") as of_text:
        studio.submit(text())
    with pytest.raises(InvalidRequest, match=r"\[text\] model") as of_wish:
        studio.submit(RewriteRequest(wish="x"))
    assert of_text.value.param == of_wish.value.param == "model"
    assert studio.text_info is None
    assert len(of([painted(studio, picture())], ImageFinished)) == 1


def test_wishes_for_a_model_that_only_continues_texts_are_refused_with_the_way_out(make_studio: MakeStudio) -> None:
    full_studio = make_studio()
    studio = CombinedEngine(full_studio.engine, full_studio.texts)
    with pytest.raises(InvalidRequest, match="'talker' has no chat template"):
        studio.submit(RewriteRequest(wish="x"))
    studio.submit(text())
    assert len(of(list(studio.events()), TextFinished)) == 1


def test_accepted_says_the_seed_and_the_place_in_the_queue(make_studio: MakeStudio) -> None:
    studio = make_studio()
    studio.submit(picture(seed=11))
    studio.submit(picture(seed=12))
    accepted = of(list(studio.events()), Accepted)
    assert [(event.seed, event.queue_position) for event in accepted] == [(11, 0), (12, 1)]
