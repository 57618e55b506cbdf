"""Every answer and every stream event has exactly the fields of OpenAI's types, and documented ones of this server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import (
    Batch,
    Completion,
    CreateEmbeddingResponse,
    FileDeleted,
    FileObject,
    ImageEditStreamEvent,
    ImageGenStreamEvent,
    ImagesResponse,
    Model,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItem, ConversationItemList
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent

from diffserve.api.errors import DiffserveError, EngineUnavailable, InvalidRequest, ModerationBlocked, QueueFull
from diffserve.service.responses.response_objects import ResponseEvents, call_error, head_of
from diffserve.service.responses.schemas import ResponseBody
from tests.service.openai_types import problems_of
from tests.service.server import SOON_S, RunningServer, wait_for
from tests.service.test_batches import begin, line, send, until_over
from tests.service.test_edits import file_of, picture

pytestmark = pytest.mark.slow

FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}
HOW: dict[str, Any] = {"size": "64x64", "num_inference_steps": 2, "seed": 7}
TOOL: dict[str, Any] = {"type": "image_generation", **HOW}
SAYS: list[dict[str, Any]] = [{"role": "user", "content": "a fox"}]
PICTURE = base64.b64encode(file_of(picture(64, 64))).decode()
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"model": "talker", "input": "a fox", "temperature": 0},
    "settings": {
        **{"model": "talker", "input": "a fox", "instructions": "be brief", "metadata": {"a": "b"}, "top_p": 0.5},
        **{"safety_identifier": "me", "prompt_cache_key": "key", "max_tool_calls": 3, "user": "me"},
        **{"service_tier": "flex", "tool_choice": "none", "tools": [TOOL], "reasoning": {"effort": "low"}},
    },
    "incomplete": {"model": "talker", "input": "a fox", "max_output_tokens": 2},
    "logprobs": {"model": "talker", "input": "either", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "schema": {"model": "talker", "input": "a fox", "text": {"format": FORMAT}},
    "picture": {"model": "gpt-5", "input": "a red fox", "tools": [TOOL]},
    "previews": {
        **{"model": "gpt-5", "input": "a red fox", "tool_choice": {"type": "image_generation"}},
        "tools": [
            TOOL | {"partial_images": 1, "num_inference_steps": 6, "n": 2, "quality": "low", "action": "generate"}
        ],
    },
    "edited": {
        "model": "gpt-5",
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "in snow"},
                    {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"},
                ],
            }
        ],
        "tools": [TOOL | {"output_format": "jpeg", "output_compression": 90, "input_fidelity": "low"}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "image_generation"}]},
    },
}
CHATS: dict[str, dict[str, Any]] = {
    "text": {"model": "talker", "messages": SAYS},
    "several": {"model": "talker", "messages": SAYS, "n": 2, "logprobs": True, "top_logprobs": 2},
    "picture": {"model": "sd15", "messages": SAYS, "modalities": ["image", "text"], **HOW},
}


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the data of each event of a stream."""
    assert answer.status_code == 200, answer.text[:500]
    for part in answer.text.split("\n"):
        if part.startswith("data: ") and part != "data: [DONE]":
            yield json.loads(part.removeprefix("data: "))


def assert_exact(answer: httpx.Response | dict[str, Any], kind: Any) -> dict[str, Any]:
    """Check an answer against an OpenAI type and return it."""
    if isinstance(answer, httpx.Response):
        assert answer.status_code == 200, answer.text[:500]
    read: dict[str, Any] = answer.json() if isinstance(answer, httpx.Response) else answer
    problems = problems_of(read, kind)
    assert not problems, "\n".join(problems)
    return read


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_has_the_fields_of_openais_type(text_server: RunningServer, name: str) -> None:
    response = assert_exact(text_server.client.post("/v1/responses", json=RESPONSES[name]), Response)
    assert response["status"] == ("incomplete" if name == "incomplete" else "completed")
    assert (response["completed_at"] is None) == (response["status"] != "completed")
    for field in ("safety_identifier", "prompt_cache_key", "max_tool_calls", "user"):
        assert response[field] == RESPONSES[name].get(field)
    assert text_server.client.get(f"/v1/responses/{response['id']}").json() == response
    assert_exact(text_server.client.get(f"/v1/responses/{response['id']}/input_items"), ResponseItemList)


@pytest.mark.parametrize("name", RESPONSES)
def test_events_of_a_response_have_the_fields_of_openais_types(text_server: RunningServer, name: str) -> None:
    events = list(events_of(text_server.client.post("/v1/responses", json=RESPONSES[name] | {"stream": True})))
    for event in events:
        assert_exact(event, ResponseStreamEvent)
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"].startswith("response.")


def test_a_background_response_has_the_fields_of_openais_types(text_server: RunningServer) -> None:
    client, body = text_server.client, RESPONSES["picture"] | {"background": True}
    response = assert_exact(client.post("/v1/responses", json=body), Response)
    assert (response["status"], response["completed_at"]) == ("in_progress", None)

    def look() -> Any:
        later = assert_exact(client.get(f"/v1/responses/{response['id']}"), Response)
        return later if later["status"] != "in_progress" else None

    assert wait_for(look, SOON_S, "the response")["status"] == "completed"
    long = body | {"tools": [TOOL | {"num_inference_steps": 900}], "stream": True}
    with client.stream("POST", "/v1/responses", json=long) as stream:
        lines = stream.iter_lines()
        first = next(json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        assert_exact(client.post(f"/v1/responses/{first['response']['id']}/cancel"), Response)
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    for event in events:
        assert_exact(event, ResponseStreamEvent)
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DiffserveError("x"), "server_error"),
        (EngineUnavailable("x"), "server_error"),
        (QueueFull("x"), "rate_limit_exceeded"),
        (InvalidRequest("x", param="input"), "invalid_prompt"),
        (ModerationBlocked("x"), "image_content_policy_violation"),
    ],
)
def test_a_failed_response_has_an_error_code_of_openai(error: DiffserveError, code: str) -> None:
    head = head_of(ResponseBody(input="a fox"), "resp_1", 1, "talker")
    picture = {"id": "ig_1", "type": "image_generation_call", "status": "failed", "result": None, "action": "generate"}
    output = [picture | {"error": call_error(error.code, error.message)}]
    event = json.loads(ResponseEvents(head).failed(error, output).decode().partition("data: ")[2])
    answer = assert_exact(event, ResponseStreamEvent)["response"]["error"]
    assert (answer["code"], answer["type"]) == (code, error.code)


@pytest.mark.parametrize("name", CHATS)
def test_chats_have_the_fields_of_openais_types(text_server: RunningServer, name: str) -> None:
    answer = assert_exact(text_server.client.post("/v1/chat/completions", json=CHATS[name]), ChatCompletion)
    assert [choice["message"]["annotations"] for choice in answer["choices"]] == [[]] * CHATS[name].get("n", 1)
    options = {} if name == "picture" else {"stream_options": {"include_usage": True}}
    stream = text_server.client.post("/v1/chat/completions", json=CHATS[name] | {"stream": True} | options)
    for event in events_of(stream):
        assert_exact(event, ChatCompletionChunk)


def test_completions_and_embeddings_have_the_fields_of_openais_types(text_server: RunningServer) -> None:
    client = text_server.client
    for fields in ({}, {"logprobs": 2, "n": 2}):
        body = {"model": "talker", "prompt": "a fox", **fields}
        assert_exact(client.post("/v1/completions", json=body), Completion)
        for event in events_of(client.post("/v1/completions", json=body | {"stream": True})):
            for choice in event["choices"]:  # null before the end of a text, which the type does not allow
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            assert_exact(event, Completion)
    assert_exact(client.post("/v1/embeddings", json={"model": "sd15", "input": "a fox"}), CreateEmbeddingResponse)


def test_models_have_the_fields_of_openais_type(text_server: RunningServer) -> None:
    models = text_server.client.get("/v1/models").json()
    assert {"object", "data"} <= set(models)
    for entry in models["data"]:
        assert_exact(entry, Model)
    assert_exact(text_server.client.get("/v1/models/talker"), Model)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("generations", {}, ImageGenStreamEvent),
        ("generations", {"n": 2, "safety_identifier": "me"}, ImageGenStreamEvent),
        ("edits", {"image": PICTURE}, ImageEditStreamEvent),
        ("variations", {"image": PICTURE}, ImageEditStreamEvent),
    ],
)
def test_images_have_the_fields_of_openais_types(
    text_server: RunningServer, path: str, body: dict[str, Any], kind: Any
) -> None:
    request = {"prompt": "a red fox", **HOW, "num_inference_steps": 6, **body}
    assert_exact(text_server.client.post(f"/v1/images/{path}", json=request), ImagesResponse)
    stream = text_server.client.post(f"/v1/images/{path}", json=request | {"stream": True, "partial_images": 1})
    events = list(events_of(stream))
    assert {event["type"].rpartition(".")[2] for event in events} == {"progress", "partial_image", "completed"}
    for event in events:
        if not event["type"].endswith(".progress"):  # an event of this server, which the client ignores
            assert_exact(event, kind)


def test_conversations_have_the_fields_of_openais_types(text_server: RunningServer) -> None:
    client = text_server.client
    body = {"items": SAYS + RESPONSES["edited"]["input"], "metadata": {"for": "a test"}}
    conversation = assert_exact(client.post("/v1/conversations", json=body), Conversation)
    place = f"/v1/conversations/{conversation['id']}"
    for name in ("text", "picture"):
        answer = client.post("/v1/responses", json=RESPONSES[name] | {"conversation": conversation["id"]})
        assert assert_exact(answer, Response)["conversation"] == {"id": conversation["id"]}
    assert assert_exact(client.get(place), Conversation) == conversation
    items = assert_exact(client.get(f"{place}/items"), ConversationItemList)
    assert len(items["data"]) == 6
    changed = assert_exact(client.post(place, json={"metadata": {"for": "another"}}), Conversation)
    assert changed == conversation | {"metadata": {"for": "another"}}
    added = assert_exact(client.post(f"{place}/items", json={"items": SAYS}), ConversationItemList)
    item = f"{place}/items/{added['data'][0]['id']}"
    assert assert_exact(client.get(item), ConversationItem) == added["data"][0]
    assert assert_exact(client.delete(item), Conversation) == changed
    assert client.get(item).status_code == 404
    assert client.get(f"{place}/items").json() == items
    assert_exact(client.delete(place), ConversationDeletedResource)


def test_files_and_batches_have_the_fields_of_openais_types(
    text_server: RunningServer, text_client: openai.OpenAI
) -> None:
    client = text_server.client
    uploaded = client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"{no json"}).json()
    assert_exact(uploaded, FileObject)
    for file in (uploaded["id"], send(text_client, line("one"))):
        batch = begin(text_client, file)
        assert_exact(client.get(f"/v1/batches/{batch}"), Batch)
        until_over(text_client, batch)
        assert_exact(client.get(f"/v1/batches/{batch}"), Batch)
    assert_exact(client.delete(f"/v1/files/{uploaded['id']}"), FileDeleted)
