"""The clients against a real server, plain and for asyncio."""

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


def test_it_paints(client: Client, text_server: RunningServer, tmp_path: Path) -> None:
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


def test_it_is_told_what_a_picture_began_from(client: Client) -> None:
    [first] = client.generate("a cat", seed=5, num_inference_steps=4, similarity_threshold=1.0).images
    assert (first.similarity, first.skipped_steps) == (None, 0)
    with client.generate_stream("a cat", seed=6, num_inference_steps=4, similarity_threshold=0.9) as stream:
        [begun] = [event for event in stream if isinstance(event, CompletedImage)]
    assert (begun.similarity_threshold, begun.similarity, begun.image.skipped_steps) == (0.9, 1.0, 2)
    assert begun.usage.num_evaluations == 2 * 2
    text = read_infotext(begun.file)
    assert text is not None
    assert "Similarity: 1, Skipped steps: 2" in text


def test_it_watches_a_picture_become(client: Client) -> None:
    with client.generate_stream("a red fox", seed=5, num_inference_steps=8, partial_images=3) as stream:
        events = list(stream)
    first, last = events[0], events[-1]
    assert isinstance(first, Progress)
    assert (first.id, first.queue_position, first.seed) == (stream.request_id, 0, 5)
    partials = [event for event in events if isinstance(event, PartialImage)]
    assert [(event.partial_image_index, event.step) for event in partials] == [(0, 2), (1, 4), (2, 6)]
    assert all(decode_image(event.file).data for event in partials)
    assert isinstance(last, CompletedImage)
    again = client.generate("a red fox", seed=5, num_inference_steps=8).images[0]
    assert replace(last.image, timings=again.timings, history_id=again.history_id) == again


def test_several_pictures_come_one_by_one(client: Client) -> None:
    with client.generate_stream("a red fox", seed=5, num_inference_steps=2, n=3) as stream:
        completed = [event for event in stream if isinstance(event, CompletedImage)]
    assert sorted((event.image_index, event.seed) for event in completed) == [(0, 5), (1, 6), (2, 7)]


def test_leaving_a_stream_ends_the_work(client: Client, text_server: RunningServer) -> None:
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
    seen: list[object] = []
    watching = threading.Thread(target=lambda: seen.extend(stream))
    watching.start()
    wait_for(lambda: len(seen) > 2, SOON_S, "some events")
    stream.close()
    watching.join(SOON_S)
    assert not watching.is_alive()
    wait_for(lambda: text_server.num_requests() == 0, SOON_S, "the cancellation")


def test_a_request_is_cancelled_by_its_id(client: Client) -> None:
    stream = client.generate_stream("a red fox", num_inference_steps=1000, sampler="ddim")
    next(stream)
    assert client.cancel(stream.request_id)
    with pytest.raises(RequestCancelled, match="cancelled by its id"):
        list(stream)
    assert not client.cancel(stream.request_id)
    assert not client.cancel("img-1")


def test_it_rewrites(client: Client) -> None:
    answer = client.rewrite("something with a fox", style="tags")
    [entry] = answer.prompts
    assert (entry.prompt, entry.revised_prompt, entry.fallback) == ("something with a fox", FOX, None)
    assert (answer.model, answer.style) == (NAME, "tags")
    [doubtful] = client.rewrite("unsure").prompts
    assert (doubtful.revised_prompt, doubtful.fallback) == (None, "unsure")
    assert doubtful.warning is not None


def test_it_watches_a_prompt_become(client: Client) -> None:
    with client.rewrite_stream("a fox", n=2, seed=3) as stream:
        *deltas, last = stream
    assert "".join(event.text for event in deltas if isinstance(event, RewriteDelta) and event.index == 0) == FOX
    assert isinstance(last, Rewrites)
    assert last.prompts == client.rewrite("a fox", n=2, seed=3).prompts


def test_a_wish_is_rewritten_before_it_is_painted(client: Client) -> None:
    images = client.generate("with a fox", num_inference_steps=1, prompt_rewriter={"style": "tags"})
    assert images.images[0].revised_prompt == FOX


def test_it_talks(client: Client) -> None:
    answer = client.chat("a fox", temperature=0)
    assert (answer.text, answer.choices[0].finish_reason) == (FOX, "stop")
    turns = [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="either")]
    assert {choice.message.content for choice in client.chat(turns, n=8, seed=1).choices} <= set(SCRIPT["either"])
    with client.chat_stream("a fox", temperature=0) as stream:
        deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == FOX
    assert [delta.finish_reason for delta in deltas][-1] == "stop"


def test_it_lists_models(client: Client) -> None:
    assert [model.id for model in client.models()][:2] == ["sd15", NAME]
    assert client.is_ready()


def test_errors_say_the_servers_sentence(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="num_inference_steps is 0") as caught:
        client.generate("a fox", num_inference_steps=0)
    assert (caught.value.param, caught.value.code) == ("num_inference_steps", "invalid_value")
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        client.generate_stream(" ")
    with pytest.raises(ModelNotFound, match='"nope"'):
        client.chat("a fox", model="nope")
    with pytest.raises(InvalidRequest, match="rococo"):
        client.rewrite_stream("a fox", style="rococo")


def test_asyncio_has_it_all_at_once(text_server: RunningServer) -> None:
    async def ask() -> None:
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
            async with client.generate_stream("a red fox", seed=5, num_inference_steps=2) as painting:
                events = [event async for event in painting]
            assert isinstance(events[-1], CompletedImage)
            assert events[-1].file == images.images[0].file
            async with client.rewrite_stream("a fox") as rewriting:
                assert [type(event) async for event in rewriting][-1] is Rewrites
            async with client.chat_stream("a fox", temperature=0) as talking:
                assert "".join([delta.text async for delta in talking]) == FOX

    asyncio.run(ask())


def test_asyncio_leaves_and_cancels_too(text_server: RunningServer) -> None:
    async def ask() -> None:
        async with AsyncClient(text_server.url) as client:
            async with client.generate_stream("a red fox", num_inference_steps=1000, sampler="ddim") as painting:
                async for event in painting:
                    if isinstance(event, Progress) and event.step:
                        break
            async with client.generate_stream("a red fox", num_inference_steps=1000, sampler="ddim") as painting:
                assert await client.cancel(painting.request_id)
                with pytest.raises(RequestCancelled):
                    _ = [event async for event in painting]
            assert not await client.cancel(painting.request_id)
            with pytest.raises(InvalidRequest, match="num_inference_steps is 0"):
                async with client.generate_stream("a red fox", num_inference_steps=0):
                    pass

    asyncio.run(ask())
    wait_for(lambda: text_server.num_requests() == 0, SOON_S, "the cancellation")
