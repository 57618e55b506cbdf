"""Tests of both clients against a real server."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from diffserve.api.errors import InvalidRequest, ModelNotFound
from diffserve.client import (
    AsyncClient,
    ChatMessage,
    Client,
    CompletedImage,
    PartialImage,
    Progress,
    RequestCancelled,
    RewriteDelta,
    Rewrites,
)
from diffserve.media.images import decode_image, read_infotext
from tests.service.server import SOON_S, RunningServer, wait_for
from tests.service.talker import FOX, NAME, SCRIPT

pytestmark = pytest.mark.slow


@pytest.fixture
def client(text_server: RunningServer) -> Iterator[Client]:
    with Client(text_server.url) as client:
        yield client


def test_generate_returns_images_of_the_http_api(client: Client, text_server: RunningServer, tmp_path: Path) -> None:
    images = client.generate("a red fox", seed=5, num_inference_steps=3, n=2, size="96x80", sampler="euler")
    assert [image.seed for image in images.images] == [5, 6]
    assert (images.size, images.sampler, images.num_inference_steps, images.model) == ("96x80", "euler", 3, "sd15")
    assert images.usage.num_evaluations == 2 * 2 * 3
    assert "resized" in images.warnings[0]
    plain = text_server.paint("a red fox", seed=5, num_steps=3, n=2, size="96x80", sampler="euler").json()
    assert [image.file for image in images.images] == [base64.b64decode(entry["b64_json"]) for entry in plain["data"]]
    images.images[0].save(tmp_path / "fox.png")
    text = read_infotext((tmp_path / "fox.png").read_bytes())
    assert text is not None
    assert "Seed: 5" in text


def test_images_report_the_stored_image_that_they_started_from(client: Client) -> None:
    [first] = client.generate("a cat", seed=5, num_inference_steps=4, similarity_threshold=1.0).images
    assert (first.similarity, first.skipped_steps) == (None, 0)
    with client.generate_stream("a cat", seed=6, num_inference_steps=4, similarity_threshold=0.9) as stream:
        [completed] = [event for event in stream if isinstance(event, CompletedImage)]
    assert (completed.similarity_threshold, completed.similarity, completed.image.skipped_steps) == (0.9, 1.0, 2)
    assert completed.usage.num_evaluations == 2 * 2
    text = read_infotext(completed.file)
    assert text is not None
    assert "Similarity: 1, Skipped steps: 2" in text


def test_a_stream_has_progress_previews_and_the_image(client: Client) -> None:
    with client.generate_stream("a red fox", seed=5, num_inference_steps=8, partial_images=3) as stream:
        events = list(stream)
    first, last = events[0], events[-1]
    assert isinstance(first, Progress)
    assert (first.id, first.queue_position, first.seed) == (stream.request_id, 0, 5)
    partials = [event for event in events if isinstance(event, PartialImage)]
    assert [(event.partial_image_index, event.step) for event in partials] == [(0, 2), (1, 4), (2, 6)]
    assert all(decode_image(event.file).data for event in partials)
    assert isinstance(last, CompletedImage)
    image = client.generate("a red fox", seed=5, num_inference_steps=8).images[0]
    assert replace(last.image, timings=image.timings, history_id=image.history_id) == image


def test_a_stream_has_one_event_per_completed_image(client: Client) -> None:
    with client.generate_stream("a red fox", seed=5, num_inference_steps=2, n=3) as stream:
        completed = [event for event in stream if isinstance(event, CompletedImage)]
    assert sorted((event.image_index, event.seed) for event in completed) == [(0, 5), (1, 6), (2, 7)]


def test_leaving_a_stream_cancels_the_request(client: Client, text_server: RunningServer) -> None:
    with client.generate_stream("a red fox", num_inference_steps=1000, sampler="ddim", n=2) as stream:
        for event in stream:
            if isinstance(event, Progress) and event.step:
                break
        assert text_server.num_requests() == 1
    assert list(stream) == []
    wait_for(lambda: text_server.num_requests() == 0, SOON_S, "the cancellation")


def test_a_stream_can_be_closed_from_another_thread(client: Client, text_server: RunningServer) -> None:
    stream = client.generate_stream("a red fox", num_inference_steps=1000, sampler="ddim", n=2)
    next(stream)
    events: list[object] = []
    reader = threading.Thread(target=lambda: events.extend(stream))
    reader.start()
    wait_for(lambda: len(events) > 2, SOON_S, "some events")
    stream.close()
    reader.join(SOON_S)
    assert not reader.is_alive()
    wait_for(lambda: text_server.num_requests() == 0, SOON_S, "the cancellation")


def test_a_request_is_cancelled_by_its_id(client: Client) -> None:
    stream = client.generate_stream("a red fox", num_inference_steps=1000, sampler="ddim")
    next(stream)
    assert client.cancel(stream.request_id)
    with pytest.raises(RequestCancelled, match="cancelled by its id"):
        list(stream)
    assert not client.cancel(stream.request_id)
    assert not client.cancel("img-1")


def test_rewrite_returns_prompts_or_a_fallback(client: Client) -> None:
    answer = client.rewrite("something with a fox", style="tags")
    [entry] = answer.prompts
    assert (entry.prompt, entry.revised_prompt, entry.fallback) == ("something with a fox", FOX, None)
    assert (answer.model, answer.style) == (NAME, "tags")
    [fallback] = client.rewrite("unsure").prompts
    assert (fallback.revised_prompt, fallback.fallback) == (None, "unsure")
    assert fallback.warning is not None


def test_a_rewrite_stream_ends_with_the_complete_result(client: Client) -> None:
    with client.rewrite_stream("a fox", n=2, seed=3) as stream:
        *deltas, last = stream
    assert "".join(event.text for event in deltas if isinstance(event, RewriteDelta) and event.index == 0) == FOX
    assert isinstance(last, Rewrites)
    assert last.prompts == client.rewrite("a fox", n=2, seed=3).prompts


def test_generate_can_rewrite_the_prompt_first(client: Client) -> None:
    images = client.generate("with a fox", num_inference_steps=1, prompt_rewriter={"style": "tags"})
    assert images.images[0].revised_prompt == FOX


def test_chat_answers_at_once_and_as_a_stream(client: Client) -> None:
    answer = client.chat("a fox", temperature=0)
    assert (answer.text, answer.choices[0].finish_reason) == (FOX, "stop")
    turns = [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="either")]
    assert {choice.message.content for choice in client.chat(turns, n=8, seed=1).choices} <= set(SCRIPT["either"])
    with client.chat_stream("a fox", temperature=0) as stream:
        deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == FOX
    assert [delta.finish_reason for delta in deltas][-1] == "stop"


def test_models_are_listed(client: Client) -> None:
    assert [model.id for model in client.models()][:2] == ["sd15", NAME]
    assert client.is_ready()


def test_errors_have_the_servers_message(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="num_inference_steps is 0") as caught:
        client.generate("a fox", num_inference_steps=0)
    assert (caught.value.param, caught.value.code) == ("num_inference_steps", "invalid_value")
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        client.generate_stream(" ")
    with pytest.raises(ModelNotFound, match='"nope"'):
        client.chat("a fox", model="nope")
    with pytest.raises(InvalidRequest, match="rococo"):
        client.rewrite_stream("a fox", style="rococo")


def test_the_async_client_runs_requests_concurrently(text_server: RunningServer) -> None:
    async def use() -> None:
        async with AsyncClient(text_server.url) as client:
            assert await client.is_ready()
            images, rewrites, chat, models = await asyncio.gather(
                client.generate("a red fox", seed=5, num_inference_steps=2),
                client.rewrite("a fox"),
                client.chat("a fox", temperature=0),
                client.models(),
            )
            assert rewrites.prompts[0].revised_prompt == chat.text == FOX
            assert models[0].id == images.model == "sd15"
            async with client.generate_stream("a red fox", seed=5, num_inference_steps=2) as image_stream:
                events = [event async for event in image_stream]
            assert isinstance(events[-1], CompletedImage)
            assert events[-1].file == images.images[0].file
            async with client.rewrite_stream("a fox") as rewrite_stream:
                assert [type(event) async for event in rewrite_stream][-1] is Rewrites
            async with client.chat_stream("a fox", temperature=0) as chat_stream:
                assert "".join([delta.text async for delta in chat_stream]) == FOX

    asyncio.run(use())


def test_the_async_client_cancels_requests(text_server: RunningServer) -> None:
    async def use() -> None:
        async with AsyncClient(text_server.url) as client:
            async with client.generate_stream("a red fox", num_inference_steps=1000, sampler="ddim") as image_stream:
                async for event in image_stream:
                    if isinstance(event, Progress) and event.step:
                        break
            async with client.generate_stream("a red fox", num_inference_steps=1000, sampler="ddim") as image_stream:
                assert await client.cancel(image_stream.request_id)
                with pytest.raises(RequestCancelled):
                    _ = [event async for event in image_stream]
            assert not await client.cancel(image_stream.request_id)
            with pytest.raises(InvalidRequest, match="num_inference_steps is 0"):
                async with client.generate_stream("a red fox", num_inference_steps=0):
                    pass

    asyncio.run(use())
    wait_for(lambda: text_server.num_requests() == 0, SOON_S, "the cancellation")
