"""The Responses API over a real socket with the ``openai`` client: texts, conversations, images as a tool."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.client import AsyncClient, Client, Embeddings, PaintedPicture, Response, ResponseDelta, ResponseEnd
from diffserve.service.http.errors import HttpError
from diffserve.service.responses.response_plan import plan_image, plan_text
from diffserve.service.responses.response_store import EventLog, ResponseStore, StoredResponse
from diffserve.service.responses.schemas import ResponseBody, Tool
from diffserve.service.responses.turns import Turn, items_of, page_of, read_turns
from diffserve.settings.layers import load_settings
from diffserve.store import Database, Keys
from tests.service import talker
from tests.service.server import GENERATIONS, SOON_S, RunningServer, error_of, files_of, running_server, wait_for
from tests.service.talker import FOX, SCRIPT
from tests.service.test_capabilities import LANGUAGE

RESPONSES = "/v1/responses"
HOW: dict[str, Any] = {"size": "64x64", "num_inference_steps": 3, "seed": 7}
TOOL: dict[str, Any] = {"type": "image_generation", **HOW}
ASKED: dict[str, Any] = {"model": "talker", "input": "a fox", "temperature": 0}
PAINTED: dict[str, Any] = {"model": "gpt-5", "input": "a red fox", "tools": [TOOL]}
MESSAGE = [
    *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    *["response.output_text.delta"] * len(SCRIPT["fox"]),
    *("response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"),
]


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream after checking their types and that they are numbered in order."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition("\n")
        if not block.startswith(":"):
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def test_urgency_reaches_texts_and_images() -> None:
    config = load_settings(env={}).serve
    body = ResponseBody(input="a fox", service_tier="flex", deadline_s=9.0, tools=[Tool(type="image_generation")])
    turns = read_turns(body.input, lambda _: None)
    text = plan_text(body, turns, turns, LANGUAGE, config, "txt-1")
    assert (text.priority, text.deadline_s) == ("batch", 9.0)
    picture = plan_image(body, body.tools[0], turns, "a fox", None, is_stream=False) if body.tools else None
    assert picture is not None
    assert picture.urgency(600.0) == {"priority": "batch", "deadline_s": 9.0}
    assert ResponseBody(input="a fox").urgency(600.0) == {"priority": "interactive", "deadline_s": 600.0}


@pytest.mark.slow
def test_a_response_equals_a_chat_completion(text_client: OpenAI) -> None:
    answer = text_client.responses.create(**ASKED, instructions="be brief", metadata={"a": "b"})
    chat = text_client.chat.completions.create(
        model="talker",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "a fox"}],
        temperature=0,
    )
    assert answer.output_text == chat.choices[0].message.content == FOX
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.object, answer.model, answer.metadata) == ("response", "talker", {"a": "b"})
    assert (answer.temperature, answer.tools, answer.tool_choice) == (0.0, [], "auto")
    [message] = answer.output
    assert (message.type, message.status, message.id[:4]) == ("message", "completed", "msg_")
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.total_tokens == chat.usage.total_tokens
    assert answer.usage.input_tokens_details.cached_tokens >= 0


@pytest.mark.slow
def test_a_stream_has_openai_events(text_client: OpenAI, text_server: RunningServer) -> None:
    events = events_of(text_server.client.post(RESPONSES, json={**ASKED, "stream": True}).text)
    assert [event["type"] for event in events] == MESSAGE
    assert [event["delta"] for event in events if "delta" in event] == list(SCRIPT["fox"])
    assert events[-1]["response"]["output"][0] == events[-2]["item"]
    with text_client.responses.stream(**ASKED) as stream:
        assert [event.type for event in stream] == MESSAGE
        assert stream.get_final_response().output_text == FOX


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_text_that_is_too_long_is_incomplete(text_server: RunningServer, is_stream: bool) -> None:
    response = text_server.client.post(RESPONSES, json={**ASKED, "max_output_tokens": 2, "stream": is_stream})
    answer = events_of(response.text)[-1]["response"] if is_stream else response.json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["content"][0]["text"] == "a red fox, deep snow"
    assert not is_stream or events_of(response.text)[-1]["type"] == "response.incomplete"


@pytest.mark.slow
def test_logprobs_are_returned_on_request(text_client: OpenAI) -> None:
    answer = text_client.responses.create(
        model="talker", input="either", temperature=0, top_logprobs=3, include=["message.output_text.logprobs"]
    )
    [part] = answer.output[0].content
    [token] = part.logprobs
    assert (token.token, len(token.top_logprobs)) == ("a boat", 3)


@pytest.mark.slow
def test_a_conversation_continues_by_its_id_and_by_its_items(text_client: OpenAI) -> None:
    first = text_client.responses.create(**ASKED)
    nonce = uuid.uuid4().hex
    answers = [
        text_client.responses.create(
            model="talker", input=f"{nonce} umlaut", temperature=0, previous_response_id=first.id
        ),
        text_client.responses.create(
            model="talker",
            input=[
                {"role": "user", "content": "a fox"},
                *(item.to_dict() for item in first.output),
                {"role": "user", "content": [{"type": "input_text", "text": f"{nonce} umlaut"}]},
            ],
            temperature=0,
        ),
        text_client.responses.create(
            model="talker",
            input=[
                {"role": "user", "content": "a fox"},
                {"type": "item_reference", "id": first.output[0].id},
                {"role": "user", "content": f"{nonce} umlaut"},
            ],
            temperature=0,
        ),
    ]
    assert {answer.output_text for answer in answers} == {"ein Bär \N{FOX FACE}"}
    used = {answer.usage.input_tokens for answer in answers if answer.usage}
    assert len(used) == 1, "each of them is the same conversation"
    assert first.usage is not None
    assert used.pop() > first.usage.input_tokens
    assert answers[0].previous_response_id == first.id


@pytest.mark.slow
def test_a_conversation_object_records_texts_and_images(text_client: OpenAI) -> None:
    first_items: list[Any] = [{"role": "user", "content": "a fox"}, {"role": "assistant", "content": "yes"}]
    conversation = text_client.conversations.create(metadata={"for": "a test"}, items=first_items)
    assert text_client.conversations.retrieve(conversation.id) == conversation
    assert conversation.metadata == {"for": "a test"}
    changed = text_client.conversations.update(conversation.id, metadata={"for": "another"})
    assert text_client.conversations.retrieve(conversation.id) == changed
    assert (changed.id, changed.metadata) == (conversation.id, {"for": "another"})
    added = text_client.conversations.items.create(conversation.id, items=first_items[:1]).data[0]
    assert text_client.conversations.items.retrieve(added.id, conversation_id=conversation.id) == added
    text_client.conversations.items.delete(added.id, conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError, match="there is no item"):
        text_client.conversations.items.retrieve(added.id, conversation_id=conversation.id)
    with pytest.raises(openai.BadRequestError, match="metadata is missing"):
        text_client.conversations.update(conversation.id, metadata=openai.omit)
    answer = text_client.responses.create(model="talker", input="umlaut", temperature=0, conversation=conversation.id)
    by_hand = [*first_items, {"role": "user", "content": "umlaut"}]
    expected = text_client.responses.create(model="talker", input=by_hand, temperature=0)
    assert answer.conversation is not None
    assert (answer.conversation.id, answer.output_text) == (conversation.id, expected.output_text)
    assert answer.usage is not None
    assert expected.usage is not None
    assert answer.usage.input_tokens == expected.usage.input_tokens, "it goes on with what is there"
    with text_client.responses.stream(
        model="gpt-5", input="an owl", tools=[TOOL], conversation=conversation.id
    ) as stream:
        painted = stream.get_final_response()
    items = list(text_client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [getattr(item, "role", "painted") for item in items] == ["user", "assistant"] * 2 + ["user", "painted"]
    assert [items[-3].id, items[-1].id] == [answer.output[0].id, painted.output[0].id]
    text_client.responses.delete(answer.id)
    assert len(list(text_client.conversations.items.list(conversation.id))) == 6, "those stay that were said"
    both: Any = {"previous_response_id": painted.id, "conversation": {"id": conversation.id}}
    with pytest.raises(openai.BadRequestError, match="give one of them"):
        text_client.responses.create(**ASKED, **both)
    assert text_client.conversations.delete(conversation.id).deleted
    for gone in (text_client.conversations.retrieve, text_client.conversations.delete):
        with pytest.raises(openai.NotFoundError, match="there is no conversation") as caught:
            gone(conversation.id)
        assert caught.value.code == "conversation_not_found"
    with pytest.raises(openai.NotFoundError):
        text_client.responses.create(**ASKED, conversation=conversation.id)
    with pytest.raises(openai.BadRequestError, match=r"items\[0\].role is missing"):
        text_client.conversations.create(items=[{"type": "message", "content": "x"}])


@pytest.mark.slow
def test_stored_responses_can_be_retrieved_and_deleted(text_client: OpenAI) -> None:
    response = text_client.responses.create(**ASKED)
    with text_client.responses.stream(**ASKED) as stream:
        streamed = stream.get_final_response()
    assert text_client.responses.retrieve(response.id).to_dict() == response.to_dict()
    assert text_client.responses.retrieve(streamed.id).output_text == streamed.output_text == FOX
    items = text_client.responses.input_items.list(response.id).data
    assert [item.content[0].text for item in items] == ["a fox"]
    text_client.responses.delete(response.id)
    passing = text_client.responses.create(**ASKED, store=False)
    for gone in (response.id, passing.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="stored in memory") as caught:
            text_client.responses.retrieve(gone)
        assert caught.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError):
            text_client.responses.delete(gone)
        with pytest.raises(openai.BadRequestError) as refused:
            text_client.responses.create(**ASKED, previous_response_id=gone)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


@pytest.mark.slow
def test_background_responses_finish_unattended_and_can_be_cancelled(client: OpenAI, server: RunningServer) -> None:
    waited = client.responses.create(**PAINTED)
    background = client.responses.create(**PAINTED, background=True)
    assert (background.status, background.background, background.output) == ("in_progress", True, [])

    def over(response_id: str) -> Any:
        retrieved = client.responses.retrieve(response_id)
        return None if retrieved.status == "in_progress" else retrieved

    finished = wait_for(lambda: over(background.id), SOON_S, "the response in the background")
    assert (finished.status, finished.output[0].result) == ("completed", waited.output[0].result)
    assert client.responses.cancel(finished.id).status == "completed", "what is over stays as it is"
    with pytest.raises(openai.BadRequestError, match="only a background response"):
        client.responses.cancel(waited.id)

    long = PAINTED | {"tools": [TOOL | {"num_inference_steps": 1000}], "background": True}
    cancelled, deleted = client.responses.create(**long), client.responses.create(**long)
    server.wait_for_requests(2)
    with pytest.raises(openai.BadRequestError, match="is not finished"):
        client.responses.create(**PAINTED, previous_response_id=cancelled.id)
    assert client.responses.cancel(cancelled.id).status == "cancelled"
    assert client.responses.retrieve(cancelled.id).error is None
    server.wait_for_requests(1)
    client.responses.delete(deleted.id)
    server.wait_until_idle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)


@pytest.mark.slow
def test_a_background_stream_continues_without_its_client_and_can_be_resumed(
    client: OpenAI, text_client: OpenAI, server: RunningServer
) -> None:
    def dumped(events: Any) -> list[Any]:
        return [(event.sequence_number, event.type) for event in events]

    slow = PAINTED | {"tools": [TOOL | {"num_inference_steps": 60, "partial_images": 2}]}
    for who, fields in ((client, slow), (text_client, ASKED)):
        all_events = dumped(who.responses.create(**fields, stream=True))
        with who.responses.create(**fields, stream=True, background=True) as stream:
            first = next(stream)
            assert first.type == "response.created"
            name = first.response.id
        remaining = list(who.responses.retrieve(name, stream=True, starting_after=0))
        assert [(0, first.type), *dumped(remaining)] == all_events
        [last] = remaining[-1:]
        assert last.type == "response.completed"
        assert last.response == who.responses.retrieve(name)
        assert dumped(who.responses.retrieve(name, stream=True)) == all_events, "and when it is over"
        with who.responses.stream(response_id=name, starting_after=1) as again:
            assert dumped(again)[-1] == all_events[-1]
            assert again.get_final_response().output[0].id == last.response.output[0].id
        number = all_events[-2][0]
        assert dumped(who.responses.retrieve(name, stream=True, starting_after=number)) == all_events[-1:]
        assert not list(who.responses.retrieve(name, stream=True, starting_after=number + 1))

    plain = text_client.responses.create(**ASKED)
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        text_client.responses.retrieve(plain.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="whole number"):
        client.responses.retrieve(client.responses.create(**PAINTED).id, stream=True, starting_after=-1)

    with pytest.raises(openai.BadRequestError, match="add stream=true"):
        text_client.responses.retrieve(plain.id, starting_after=1)

    long = PAINTED | {"tools": [TOOL | {"num_inference_steps": 1000}]}
    with client.responses.create(**long, stream=True, background=True) as stream:
        events = iter(stream)
        name = next(events).response.id
        server.wait_for_requests(1)
        assert client.responses.cancel(name).status == "cancelled"
        assert [event.type for event in events][-1] == "response.incomplete"
    server.wait_until_idle()
    late: Any = list(client.responses.retrieve(name, stream=True))[-1]
    assert (late.type, late.response.status) == ("response.incomplete", "cancelled")


@pytest.mark.slow
def test_a_repeated_background_stream_follows_the_same_work(client: OpenAI, server: RunningServer) -> None:
    fields = PAINTED | {"tools": [TOOL | {"num_inference_steps": 300}], "extra_headers": {"Idempotency-Key": "lasting"}}

    def begin(**changed: Any) -> Any:
        return client.responses.create(**{**fields, **changed}, stream=True, background=True)

    num_cancelled = server.num_ended("cancelled")
    with begin() as stream:
        first = next(iter(stream))
    work = first.response.id.removeprefix("resp_")
    assert server.client.post(f"{GENERATIONS}/img-{work}/cancel").status_code == 404, "it is its owner's"
    again = list(begin())
    assert (again[0], again[-1].type) == (first, "response.completed")
    assert list(begin()) == again, "and when it is over"
    with pytest.raises(openai.UnprocessableEntityError):
        begin(input="a boat")
    assert server.num_ended("cancelled") == num_cancelled


def test_every_follower_receives_the_events_from_its_position() -> None:
    async def story() -> None:
        record = EventLog()
        record.add(b"data: 0\n\ndata: 1\n\n")

        async def all_from(place: int) -> list[bytes]:
            return [event async for event in record.follow(place)]

        following = [asyncio.create_task(all_from(place)) for place in (0, 1, 3, 9)]
        await asyncio.sleep(0)
        record.add(b"data: 2\n\n")
        await asyncio.sleep(0)
        record.add(b"data: 3\n\n")
        record.close()
        messages = [f"data: {number}\n\n".encode() for number in range(4)]
        assert await asyncio.gather(*following) == [messages, messages[1:], messages[3:], []]
        assert await all_from(2) == messages[2:]
        assert record.num_bytes == sum(map(len, messages))

    asyncio.run(story())


def test_events_are_stored_within_the_limits_of_responses() -> None:
    store = ResponseStore(max_bytes=100)
    store.put("a", StoredResponse("", b"x" * 40, ()))
    store.note_events("a", (b"y" * 30, b"z" * 30))
    assert store.get("a", "").events
    store.put("b", StoredResponse("", b"x" * 40, ()))
    assert not store.has("a", ""), "what its events take counts"
    store.note_events("b", (b"y" * 61,))
    assert not store.get("b", "").events
    store.note_events("c", ())
    assert not store.has("c", "")


def test_unfinished_responses_are_evicted_last() -> None:
    store = ResponseStore(max_responses=3, max_bytes=100)
    store.put("made", StoredResponse("", b"x", (), work="work"))
    for name in "abc":
        store.put(name, StoredResponse("", b"x" * 60, ()))
    assert (store.holds_work("made"), store.has("b", ""), store.has("c", "")) == (True, False, True)
    for name in "def":
        store.put(name, StoredResponse("", b"x", (), work=name))
    assert (store.has("c", ""), store.holds_work("made"), store.holds_work("f")) == (False, False, True), (
        "within bounds"
    )


@pytest.mark.slow
def test_the_image_tool_gives_the_same_image_as_the_image_endpoint(client: OpenAI, server: RunningServer) -> None:
    [alone] = files_of(server.client.post(GENERATIONS, json={"prompt": "a red fox", **HOW}))
    for choice in ("auto", "required", {"type": "image_generation"}):
        answer = client.responses.create(**PAINTED, tool_choice=choice)
        [call] = answer.output
        assert call.type == "image_generation_call"
        assert base64.b64decode(call.result or "") == alone
        assert (call.status, call.action, call.revised_prompt) == ("completed", "generate", "a red fox")
        assert (call.output_format, call.size, call.background) == ("png", "64x64", "opaque")
        assert call.model_extra is not None
        assert (call.model_extra["seed"], call.model_extra["num_inference_steps"]) == (7, 3)
    assert answer.model == "sd15", "what painted, whatever the language model was called"
    assert answer.tool_usage is not None
    assert answer.tool_usage.image_gen.output_tokens == 64
    assert answer.usage is not None
    assert answer.usage.total_tokens == 0
    assert client.responses.retrieve(answer.id).output[0].result == call.result


@pytest.mark.slow
def test_images_are_streamed_with_partial_images(client: OpenAI) -> None:
    tool = TOOL | {"partial_images": 2, "output_format": "webp", "n": 2, "num_inference_steps": 6}
    call = "response.image_generation_call"
    events = list(client.responses.create(**PAINTED | {"tools": [tool]}, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[2:6] == ["response.output_item.added", f"{call}.in_progress"] * 2
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for index in range(2):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        names = [event.type.removeprefix(f"{call}.").removeprefix("response.") for event in mine]
        assert names[:3] == ["output_item.added", "in_progress", "generating"]
        assert names[-2:] == ["completed", "output_item.done"]
        parts = [event for event in mine if event.type == f"{call}.partial_image"]
        assert [event.partial_image_index for event in parts] == [0, 1]
        assert all(base64.b64decode(event.partial_image_b64)[8:12] == b"WEBP" for event in parts)
    response = events[-1].response
    files = [base64.b64decode(item.result) for item in response.output]
    assert len(set(files)) == 2
    alone = client.responses.create(**PAINTED | {"tools": [tool | {"partial_images": 0, "n": 1}]})
    assert base64.b64decode(alone.output[0].result or "") == files[0]


@pytest.mark.slow
def test_generation_starts_from_an_image_in_the_conversation(client: OpenAI, server: RunningServer) -> None:
    first = client.responses.create(**PAINTED)
    picture = first.output[0].result or ""
    body: dict[str, Any] = {"prompt": "in snow", "image": picture, **HOW}
    [edited] = files_of(server.client.post("/v1/images/edits", json=body))
    words = {"type": "input_text", "text": "in snow"}
    sent = {
        "role": "user",
        "content": [words, {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"}],
    }
    call = {"type": "image_generation_call", "id": first.output[0].id}
    ways: list[dict[str, Any]] = [
        {"input": [sent]},
        {"input": [{"role": "user", "content": "in snow"}, call]},
        {"input": [call | {"result": picture}, {"role": "user", "content": "in snow"}]},
    ]
    body["prompt"] = "a red fox, in snow"
    [merged] = files_of(server.client.post("/v1/images/edits", json=body))
    later = client.responses.create(model="gpt-5", tools=[TOOL], input="in snow", previous_response_id=first.id)
    assert base64.b64decode(getattr(later.output[0], "result", "")) == merged, "from the earlier prompt and picture"
    for way in ways:
        [item] = client.responses.create(model="gpt-5", tools=[TOOL], **way).output
        assert (item.type, base64.b64decode(item.result or ""), item.action) == (
            "image_generation_call", edited, "edit",
        )  # fmt: skip
    again = client.responses.create(
        model="gpt-5",
        input="a red fox",
        previous_response_id=first.id,
        tools=[TOOL | {"action": "generate"}],
    )
    assert again.output[0].result == picture
    masked = TOOL | {"input_image_mask": {"image_url": data_url(_half_mask())}, "input_fidelity": "high"}
    [edit_call] = client.responses.create(model="gpt-5", input=[sent], tools=[masked]).output
    assert base64.b64decode(edit_call.result or "") not in (edited, base64.b64decode(picture))


def _half_mask() -> bytes:
    from io import BytesIO

    from PIL import Image

    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 64, 32))
    file = BytesIO()
    mask.save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow
def test_tool_choice_decides_if_there_is_a_language_model(text_client: OpenAI) -> None:
    answer = text_client.responses.create(**ASKED, tools=[TOOL], tool_choice="none")
    assert answer.output_text == FOX
    painted = text_client.responses.create(**ASKED, tools=[TOOL])
    assert painted.output[0].type == "image_generation_call"
    wish = TOOL | {"prompt_rewriter": "force"}
    fields = {"model": "talker", "input": "a fox", "tools": [wish], "instructions": "be brief"}
    rewritten = text_client.responses.create(**fields)
    assert rewritten.output[0].revised_prompt == FOX
    assert rewritten.model_extra is not None
    assert "instructions have no effect on an image." in rewritten.model_extra["warnings"]
    after = text_client.responses.create(model="talker", input="umlaut", temperature=0, previous_response_id=painted.id)
    assert after.output_text == "ein Bär \N{FOX FACE}"


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("no-input", {"input": ...}, "input", "missing_required_parameter"),
    ("empty-input", {"input": ""}, "input", "empty_input"),
    ("no-items", {"input": []}, "input", "empty_array"),
    ("number", {"input": 7}, "input", "invalid_value"),
    ("odd-item", {"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].type", "invalid_value"),
    ("no-role", {"input": [{"content": "a"}]}, "input[0].role", "missing_required_parameter"),
    ("no-content", {"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ("odd-role", {"input": [{"role": "god", "content": "a"}]}, "input[0].role", "invalid_value"),
    ("odd-part", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type",
     "invalid_value"),
    ("no-text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text",
     "missing_required_parameter"),
    ("no-picture", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].image_url", "missing_required_parameter"),
    ("unknown-item", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "item_not_found"),
    ("no-item-id", {"input": [{"type": "image_generation_call"}]}, "input[0].id", "missing_required_parameter"),
    ("tool", {"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
    ("function", {"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools[0].type",
     "unsupported_value"),
    ("tool-twice", {"tools": [TOOL, TOOL]}, "tools", "invalid_value"),
    ("choice", {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "unsupported_value"),
    ("choice-without", {"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ("steps", {"tools": [TOOL | {"num_inference_steps": 0}]}, "tools[0].num_inference_steps", "invalid_value"),
    ("too-many-steps", {"tools": [TOOL | {"num_inference_steps": 1000, "eta": 2}]}, "tools[0].eta", "invalid_value"),
    ("beyond-training", {"tools": [TOOL | {"num_inference_steps": 1000, "clip_skip": 99}]}, "tools[0].clip_skip",
     "invalid_value"),
    ("size", {"tools": [TOOL | {"size": "0x0"}]}, "tools[0].size", "invalid_size"),
    ("format", {"tools": [TOOL | {"output_format": "gif"}]}, "tools[0].output_format", "invalid_value"),
    ("parts", {"tools": [TOOL | {"partial_images": 4}]}, "tools[0].partial_images", "invalid_value"),
    ("painter", {"tools": [TOOL | {"model": "nope"}]}, "tools[0].model", "model_not_found"),
    ("twice-said", {"tools": [TOOL | {"prompt": "a"}]}, "tools[0].prompt", "unsupported_parameter"),
    ("edit-nothing", {"tools": [TOOL | {"action": "edit"}]}, "input", "invalid_value"),
    ("mask-nothing", {"tools": [TOOL | {"input_image_mask": {"image_url": "data:,"}}]}, "tools[0].input_image_mask",
     "invalid_value"),
    ("nothing-to-paint", {"tools": [TOOL], "input": [{"role": "assistant", "content": "a"}]}, "input",
     "invalid_value"),
    ("address", {"tools": [TOOL], "input": [{"role": "user", "content": [
        {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "http://localhost/a.png"}]}]},
     "tools[0].images[0].image_url", "url_not_allowed"),
    ("no-image", {"tools": [TOOL], "input": [{"role": "user", "content": [
        {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]},
     "input", "invalid_image"),
    ("seen", {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]},
     "input", "unsupported_value"),
    ("schema", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}},
     "text.format.schema", "invalid_json_schema"),
    ("hot-beside-a-tool", {"tools": [TOOL], "temperature": 101}, "temperature", "invalid_value"),
    ("who", {"tools": [TOOL], "user": 5}, "user", "invalid_value"),
    ("reasoning", {"reasoning": 5}, "reasoning", "invalid_value"),
    ("tokens", {"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ("heat", {"temperature": -1}, "temperature", "invalid_value"),
    ("top_p", {"top_p": 1.5}, "top_p", "invalid_value"),
    ("background-unkept", {"background": True, "store": False}, "store", "invalid_value"),
    ("conversation", {"conversation": {"id": ""}}, "conversation.id", "empty_id"),
    ("template", {"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
    ("messages", {"messages": [{"role": "user", "content": "a"}]}, "messages", "unsupported_parameter"),
    ("metadata", {"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
    ("long", {"input": "a" * 3000}, "input", "context_length_exceeded"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "param", "code"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_invalid_input_is_reported(text_server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    body = {
        name: value
        for name, value in (ASKED | {"stream": param.startswith("tools")} | fields).items()
        if value is not ...
    }
    response = text_server.client.post(
        RESPONSES, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    error = error_of(response)
    assert response.status_code == (404 if code == "model_not_found" else 400), error
    assert (error["param"], error["code"]) == (param, code), error


@pytest.mark.slow
def test_a_server_without_a_language_model_names_the_option(server: RunningServer) -> None:
    response = server.client.post(RESPONSES, json={"input": "a fox"})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert "[text] model" in error_of(response)["message"]


@pytest.mark.slow
def test_a_disconnect_ends_generation_and_responses_can_be_cancelled_by_id(server: RunningServer) -> None:
    long = PAINTED | {"stream": True, "tools": [TOOL | {"num_inference_steps": 900, "n": 8, "progress": True}]}
    with httpx.stream("POST", f"{server.url}{RESPONSES}", json=long, timeout=SOON_S) as stream:
        lines = stream.iter_lines()  # a dropped iterator would close the connection
        assert next(lines) == "event: response.created"
        wait_for(server.num_requests, SOON_S, "the picture in the engine")
    wait_for(lambda: server.num_requests() == 0, SOON_S, "the cancellation")
    with httpx.stream("POST", f"{server.url}{RESPONSES}", json=long, timeout=SOON_S) as stream:
        lines = stream.iter_lines()
        next(lines)
        request_id = stream.headers["x-request-id"]
        assert server.client.post(f"{GENERATIONS}/{request_id}/cancel").status_code == 200
        assert '"code":"cancelled"' in "".join(lines)


@pytest.fixture(scope="module")
def keyed(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, list[OpenAI]]]:
    """Run a separate server that requires keys, and yield two clients with different keys."""
    workspace = tmp_path_factory.mktemp("keyed")
    keys = Keys(Database(workspace / "data"))
    texts = [keys.add(name, ["generate"])[0] for name in ("mine", "theirs")]
    with running_server(tiny_model("sd15"), workspace, env=talker.save(workspace)) as server:
        server.wait_until_ready()
        yield server, [OpenAI(base_url=f"{server.url}/v1", api_key=text, max_retries=0) for text in texts]


@pytest.mark.slow
def test_responses_of_another_key_are_not_found(keyed: tuple[RunningServer, list[OpenAI]]) -> None:
    _, (mine, other_client) = keyed
    text_response, painted = mine.responses.create(**ASKED), mine.responses.create(**PAINTED)
    assert mine.responses.retrieve(text_response.id).id == text_response.id
    with pytest.raises(openai.NotFoundError):
        other_client.responses.retrieve(text_response.id)
    with pytest.raises(openai.NotFoundError):
        other_client.responses.input_items.list(text_response.id)
    with pytest.raises(openai.NotFoundError):
        other_client.responses.delete(text_response.id)
    talk = mine.conversations.create()
    with pytest.raises(openai.NotFoundError):
        other_client.conversations.items.list(talk.id)
    with pytest.raises(openai.NotFoundError):
        other_client.responses.create(**ASKED, conversation=talk.id)
    with pytest.raises(openai.BadRequestError):
        other_client.responses.create(**ASKED, previous_response_id=text_response.id)
    call: Any = {"type": "image_generation_call", "id": painted.output[0].id}
    with pytest.raises(openai.BadRequestError, match="which is not stored"):
        other_client.responses.create(model="gpt-5", input=[call], tools=[TOOL])
    mine.responses.delete(text_response.id)


@pytest.mark.slow
def test_an_image_lost_midway_ends_in_response_failed(keyed: tuple[RunningServer, list[OpenAI]]) -> None:
    server, (client, _) = keyed
    events: list[Any] = []

    def watch() -> None:
        for event in client.responses.create(
            model="gpt-5", input="a red fox", tools=[TOOL | {"num_inference_steps": 500}], stream=True
        ):
            events.append(event)
            if event.type == "response.image_generation_call.generating":
                server.engine.kill()

    with pytest.raises(openai.APIError, match="stopped before this was finished"):
        watch()
    assert events[-1].type == "response.failed"
    error = events[-1].response.error
    assert (error.code, error.type) == ("server_error", "engine_unavailable")
    assert events[-1].response.output[0].status == "failed"
    server.wait_until_ready()


@pytest.mark.slow
def test_the_diffserve_client_creates_responses(text_server: RunningServer) -> None:
    with Client(text_server.url) as client:
        first = client.respond("a fox", temperature=0, store=True)
        assert (first.text, first.pictures, first.status) == (FOX, [], "completed")
        [item] = client.respond("in snow", previous_response_id=first.id, tools=[TOOL]).output
        assert isinstance(item, PaintedPicture)
        assert (item.action, item.status, item.seed) == ("generate", "completed", 7)
        *deltas, end = client.respond_stream([{"role": "user", "content": "a fox"}], temperature=0)
        assert [delta.text for delta in deltas if isinstance(delta, ResponseDelta)] == list(SCRIPT["fox"])
        assert isinstance(end, ResponseEnd)
        assert end.response.text == FOX
        assert client.response(first.id) == first
        assert (client.forget_response(first.id), client.forget_response(first.id)) == (True, False)
        with pytest.raises(DiffserveError, match="stored in memory"):
            client.response(first.id)

    async def all_at_once() -> tuple[Response, Embeddings]:
        async with AsyncClient(text_server.url) as other:
            return await asyncio.gather(other.respond("a fox", temperature=0), other.embed("a fox"))

    answers, embedded = asyncio.run(all_at_once())
    assert (answers.text, len(embedded.vectors)) == (FOX, 1)


def test_stored_responses_are_bounded_and_separate_per_owner() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10_000)

    def put(name: str, num_chars: int, owner: str = "me") -> bool:
        turns = (Turn("assistant", "a" * num_chars, id=f"msg_{name}"),)
        return store.put(name, StoredResponse(owner, b"{}", turns))

    def there(name: str, owner: str = "me") -> bool:
        try:
            return store.get(name, owner).owner == owner
        except HttpError:
            return False

    assert put("a", 1000)
    assert put("b", 1000, "they")
    assert [there("a"), there("a", "they"), there("b", "they"), there("b")] == [True, False, True, False]
    assert (store.finder("me")("msg_b"), store.finder("they")("msg_b")) == (
        None,
        Turn("assistant", "a" * 1000, id="msg_b"),
    )
    with pytest.raises(InvalidRequest, match="stored in memory"):
        store.previous("b", "me")
    assert put("c", 10)
    assert put("d", 10)
    assert [there(name) for name in "acd"] == [False, True, True], "the oldest goes where there are too many"
    assert put("e", 8000)
    assert [there(name) for name in "cde"] == [False, True, True]
    assert put("f", 5000)
    assert [there(name) for name in "cdef"] == [False, False, False, True], "and where they are too large"
    assert not put("g", 10010)
    assert there("f")
    store.remove("f", "me")
    assert not there("f")
    assert put("theirs", 1000, "they")
    for name in "hijklm":
        assert put(name, 3000)
    assert there("theirs", "they"), "nobody drives out what others keep"
    assert there("m")


def test_input_items_are_listed_in_pages() -> None:
    turns = (Turn("user", "a", ("data:,",)), Turn("assistant", "", ("AAAA",), "ig_1"), Turn("user", "b", id="msg_1"))
    items = items_of(turns, "0")
    assert [item["id"] for item in items] == ["in_000", "ig_1", "msg_1"]
    assert [item["type"] for item in items] == ["message", "image_generation_call", "message"]
    assert [part["type"] for part in items[0]["content"]] == ["input_text", "input_image"]
    pages = [
        ({}, ["msg_1", "ig_1", "in_000"], False),
        ({"limit": "2"}, ["msg_1", "ig_1"], True),
        ({"order": "asc", "limit": "1"}, ["in_000"], True),
        ({"order": "asc", "after": "ig_1"}, ["msg_1"], False),
        ({"after": "in_000"}, [], False),
    ]
    for query, names, has_more in pages:
        page = page_of(items, query)
        assert ([item["id"] for item in page["data"]], page["has_more"]) == (names, has_more)
    for wrong in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "nobody"}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            page_of(items, wrong)
