"""Structured answers with the ``openai`` helpers: results match the schema whatever the model would say."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from diffserve.client import ChatMessage, Client
from tests.engine.text.test_json import Loose, Plain, Tree
from tests.service.server import RunningServer
from tests.service.test_chat import joined, says

pytestmark = pytest.mark.slow


class Closed(BaseModel):
    """A schema without additional properties, which random weights would keep adding."""

    model_config = ConfigDict(extra="forbid")


class Cat(Closed):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(Closed):
    kind: Literal["dog"]
    name: Annotated[str, Field(max_length=6)]


class Scene(Closed):
    title: Annotated[str, Field(max_length=12)]
    animals: Annotated[list[Annotated[Cat | Dog, Field(discriminator="kind")]], Field(min_length=1, max_length=2)]
    at_night: bool
    mood: Literal["calm", "wild"] | None


SCENE: Any = {"type": "json_schema", "json_schema": {"name": "scene", "schema": Scene.model_json_schema()}}


def test_openai_helper_parses_the_answer_without_affecting_other_requests(text_client: OpenAI) -> None:
    free = text_client.chat.completions.create(model="talker", messages=says("a fox"), temperature=0)
    for temperature, n in ((0.0, 1), (1.3, 3)):
        parsed = text_client.chat.completions.parse(
            model="talker", messages=says("a fox"), response_format=Scene, temperature=temperature, n=n, seed=7
        )
        assert [choice.finish_reason for choice in parsed.choices] == ["stop"] * n
        assert all(isinstance(choice.message.parsed, Scene) for choice in parsed.choices)
    again = text_client.chat.completions.create(model="talker", messages=says("a fox"), temperature=0)
    assert again.choices[0].message.content == free.choices[0].message.content


@pytest.mark.parametrize("kind", [Plain, Loose, Tree])
def test_openai_helpers_parse_plain_models(text_client: OpenAI, kind: type[BaseModel]) -> None:
    for temperature in (0.0, 1.5):
        parsed = text_client.chat.completions.parse(
            model="talker", messages=says("a fox"), response_format=kind, temperature=temperature, seed=3
        )
        assert isinstance(parsed.choices[0].message.parsed, kind)
        answer = text_client.responses.parse(
            model="talker",
            input="a fox",
            text_format=kind,
            temperature=temperature,
            max_output_tokens=400,
            extra_body={"seed": 3},  # a random tree may be longer than 400 tokens
        )
        assert isinstance(answer.output_parsed, kind)
    of_object: Any = {
        "type": "json_object",
        "schema": kind.model_json_schema(),
    }  # the format of instructor's JSON_SCHEMA mode
    chat = text_client.chat.completions.create(model="talker", messages=says("a fox"), response_format=of_object)
    kind.model_validate_json(chat.choices[0].message.content or "")
    any_object = text_client.chat.completions.create(
        model="talker", messages=says("a fox"), response_format={"type": "json_object"}, temperature=2, seed=1
    )
    assert any_object.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(any_object.choices[0].message.content or ""), dict)


def test_streams_logprobs_and_completions_follow_the_schema(text_client: OpenAI) -> None:
    with text_client.chat.completions.stream(
        model="talker", messages=says("a fox"), response_format=Scene, temperature=0, logprobs=True, top_logprobs=2
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion().choices[0]
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert isinstance(answer.message.parsed, Scene)
    assert answer.logprobs is not None
    assert "".join(token.token for token in answer.logprobs.content or ()) == answer.message.content
    chunks = list(
        text_client.chat.completions.create(
            model="talker", messages=says("a sign"), response_format=SCENE, temperature=1.5, seed=3, stream=True
        )
    )
    Scene.model_validate_json(joined(chunks))
    text = text_client.completions.create(
        model="talker", prompt="a fox", max_tokens=300, temperature=1, seed=2, extra_body={"response_format": SCENE}
    )
    Scene.model_validate_json(text.choices[0].text)


def test_truncated_answers_are_marked_and_json_object_accepts_any_object(
    text_client: OpenAI, text_server: RunningServer
) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        text_client.chat.completions.parse(
            model="talker", messages=says("a fox"), response_format=Scene, max_completion_tokens=5
        )
    with Client(text_server.url) as client:
        messages = [ChatMessage(role="user", content="a fox")]
        answer = client.chat(
            messages, temperature=0.0, response_format={"type": "json_object"}, max_completion_tokens=64
        )
        plain = client.chat(messages, temperature=0.0, response_format={"type": "text"})
    choice = answer.choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    assert plain.text == "a red fox, deep snow, moonlight"


def test_hostile_schemas_do_not_delay_other_requests(text_client: OpenAI, text_server: RunningServer) -> None:
    stalls = text_server.num_stalls()
    wide = {"anyOf": [{"type": "array", "items": {"type": ["integer", "string"]}} for _ in range(300)]}
    for number in range(40):  # more than the cache holds
        wide["title"] = str(number)  # type: ignore[assignment]
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": wide}}
        text_client.chat.completions.create(
            model="talker",
            messages=says("a fox"),
            response_format=schema,
            max_completion_tokens=2,
        )
    large = {"allOf": [{"anyOf": [{"const": i + j} for j in range(30)]} for i in range(60)]}
    refused = {"type": "json_schema", "json_schema": {"name": "x", "schema": large}}
    with pytest.raises(openai.BadRequestError, match="large"):
        text_client.chat.completions.create(model="talker", messages=says("a"), response_format=refused)
    assert text_server.num_stalls() == stalls
