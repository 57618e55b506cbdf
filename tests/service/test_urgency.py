"""Priorities and deadlines of requests: parsing, refusals and messages."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack

import msgspec
import pytest

from diffserve.api import ipc
from diffserve.api.errors import DeadlineUnreachable, InvalidRequest, QueueFull
from diffserve.api.types import Accepted, Progress
from diffserve.client.errors import ErrorObject, error_of
from diffserve.media.images import encode_image
from diffserve.service.a1111.conversion import convert_body
from diffserve.service.a1111.jobs import PolledJob
from diffserve.service.a1111.schemas import Txt2ImgBody
from diffserve.service.admission import Backlog
from diffserve.service.engine.connection import refusal_in
from diffserve.service.http.bodies import parse
from diffserve.service.http.errors import reply_to
from diffserve.service.images.plan import plan_images
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.metrics import Metrics
from diffserve.service.texts.embeddings import EmbeddingBody, plan_embedding
from diffserve.service.texts.rewrites import plan_rewrite
from diffserve.service.texts.schemas import ChatBody, RewriteBody
from diffserve.settings.layers import load_settings
from tests.engine.simulated_scheduler import INFO

CONFIG = load_settings(env={}).serve


@pytest.mark.parametrize(
    ("fields", "priority", "deadline_s"),
    [
        ({}, "interactive", CONFIG.request_timeout_s),
        ({"priority": "batch", "deadline_s": 2.5}, "batch", 2.5),
        ({"service_tier": "flex"}, "batch", CONFIG.request_timeout_s),
        ({"service_tier": "default", "deadline_s": 1e5}, "interactive", CONFIG.request_timeout_s),
        ({"service_tier": "flex", "priority": "interactive"}, "interactive", CONFIG.request_timeout_s),
    ],
)
def test_image_chat_and_rewrite_bodies_have_priority_and_deadline(
    fields: dict[str, object], priority: str, deadline_s: float
) -> None:
    image = parse(GenerateBody, msgspec.json.encode({"prompt": "a fox"} | fields))
    planned = plan_images(image, INFO, CONFIG, "img-1", client="key/a", share=2.0).request
    assert (planned.priority, planned.deadline_s, planned.client, planned.share) == (priority, deadline_s, "key/a", 2.0)
    chat = parse(ChatBody, msgspec.json.encode({"messages": [{"role": "user", "content": "hello"}]} | fields))
    assert chat.urgency(CONFIG.request_timeout_s) == {"priority": priority, "deadline_s": deadline_s}
    wish = parse(RewriteBody, msgspec.json.encode({"prompt": "a fox"} | fields))
    rewrite = plan_rewrite(wish, CONFIG, "img-1", client="key/a").request
    assert (rewrite.priority, rewrite.deadline_s, rewrite.client) == (priority, deadline_s, "key/a")
    texts = plan_embedding(
        parse(EmbeddingBody, msgspec.json.encode({"input": "a fox"} | fields)), INFO, CONFIG, "img-1"
    )
    assert (texts.request.priority, texts.request.deadline_s) == (priority, deadline_s)
    _, response = convert_body(
        parse(Txt2ImgBody, msgspec.json.encode({"prompt": "a fox", "priority": "batch", "deadline_s": 2})), {}, []
    )
    assert response.urgency(9.0) == {"priority": "batch", "deadline_s": 2.0}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"priority": "urgent"}, "priority"), ({"deadline_s": 0}, "deadline_s"), ({"deadline_s": "2"}, "deadline_s")],
)
def test_an_invalid_priority_or_deadline_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(GenerateBody, msgspec.json.encode({"prompt": "a fox"} | fields))
    assert refused.value.param == param


@pytest.mark.parametrize(("least_s", "header"), [(1.0, "Retry-After"), (5.0, "x-should-retry")])
def test_an_unreachable_deadline_reports_the_expected_time_and_retry_after(least_s: float, header: str) -> None:
    """Follow the error from the engine's process to the HTTP answer and the client's exception."""
    error = DeadlineUnreachable.of(2.0, 6.5, least_s)
    report = ipc.Rejected(
        request_id="img-1",
        code=error.code,
        message=error.message,
        param=error.param,
        retry_after_s=error.retry_after_s,
        predicted_s=error.predicted_s,
    )
    reply = reply_to(refusal_in(report))
    assert (reply.status, header in reply.headers) == (429, True)
    assert reply.headers.get("Retry-After", "5") == "5"
    error_body = msgspec.json.decode(reply.body)["error"]
    assert (error_body["code"], error_body["param"], error_body["predicted_s"]) == (
        "deadline_unreachable",
        "deadline_s",
        6.5,
    )
    assert error_body["message"].startswith("deadline_s is 2, but this request would take about 6.5 s; ")
    back = error_of(msgspec.convert(error_body, ErrorObject), reply.headers)
    assert isinstance(back, DeadlineUnreachable)
    assert (back.predicted_s, back.retry_after_s) == (6.5, error.retry_after_s)


def test_batch_work_does_not_use_the_queue_places_of_interactive_work() -> None:
    clock = itertools.count().__next__
    backlog = Backlog("image", 16, 10.0, Metrics(), clock)
    entries = [backlog.entered("one", 5.0, priority="batch") for _ in range(16)]
    with ExitStack() as stack:
        refused = 0
        for place in entries:
            try:
                stack.enter_context(place)
            except QueueFull:
                refused += 1
        assert 4 <= refused <= 8
        backlog.check("one")
        backlog.pace.did(10.0)
        assert backlog.wait_s("one") == 0.0
        assert (backlog.wait_s("one", "batch") or 0.0) > 0.0


def test_embeddings_past_their_deadline_are_refused_with_the_expected_time() -> None:
    now_s = 0.0
    backlog = Backlog("embedding", 16, 100.0, Metrics(), lambda: now_s)
    backlog.check_deadline(1000.0, 0.1)  # the pace is not known yet
    with backlog.entered("one", 40.0, priority="batch"), backlog.entered("two", 4.0) as ticket:
        now_s = 2.0
        backlog.pace.did(4.0)  # two per second
        ticket.advance(0, 0.0)
        backlog.check_deadline(8.0, 6.5)
        with pytest.raises(DeadlineUnreachable, match=r"would take about 6\.0 s; try again") as caught:
            backlog.check_deadline(8.0, 5.0)
        assert caught.value.retry_after_s == pytest.approx(1.0, abs=0.1)
        with pytest.raises(DeadlineUnreachable, match=r"about 10\.0 s"):
            backlog.check_deadline(8.0, 6.5, "batch")
        with pytest.raises(DeadlineUnreachable, match="request less work"):
            backlog.check_deadline(8.0, 3.0)


def test_a_polled_job_reports_the_time_until_its_last_image() -> None:
    asyncio.run(_poll())


async def _poll() -> None:
    job = PolledJob("one", "task", num_images=2, write=encode_image)
    assert job.seconds_left == 0.0
    job.watch(Accepted(request_id="a", seed=1, num_images=2, queue_position=0, seconds_left=8.0))
    assert job.seconds_left == pytest.approx(8.0, abs=0.5)
    far = Progress(request_id="a", image_index=0, step_index=1, num_steps=4, seconds_left=2.0, request_seconds_left=6.0)
    job.watch(far)
    assert job.seconds_left == pytest.approx(6.0, abs=0.5)
    job.watch(msgspec.structs.replace(far, request_seconds_left=3.0))
    assert job.seconds_left == pytest.approx(3.0, abs=0.5)
